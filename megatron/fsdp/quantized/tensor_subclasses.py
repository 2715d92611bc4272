# SPDX-License-Identifier: Apache-2.0
"""Tensor subclasses: the tensors inside of them, and their attributes of a parameter."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def has_extension(tensor: torch.Tensor) -> bool:
    """Return True if the class of a tensor has both methods of the all-gather extension."""
    if not hasattr(tensor, "fsdp_pre_all_gather"):
        return False
    return hasattr(tensor, "fsdp_post_all_gather")


def is_of_transformer_engine(tensor: torch.Tensor) -> bool:
    """Return True for a quantized tensor of Transformer Engine, which is not imported."""
    package, _, _ = type(tensor).__module__.partition(".")
    return package == "transformer_engine"


def tensors_inside(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors inside of a subclass, without a graph; nothing for a plain tensor."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return {}
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name).detach() for name in names}


def has_values_inside(tensor: torch.Tensor) -> bool:
    """Return True if a subclass is around one tensor, of high precision, with its values."""
    inside = list(tensors_inside(tensor).values())
    if len(inside) != 1:
        return False
    (values,) = inside
    if values.shape != tensor.shape:
        return False
    return values.is_floating_point() and values.element_size() > 1


def users_attributes(parameter: nn.Parameter) -> dict[str, Any]:
    """Return the attributes of a parameter that are not those of its class."""
    tensor: Any = parameter
    known = {"_is_param"}
    if isinstance(tensor, DTensor):
        known |= {"_local_tensor", "_spec"}
    elif inside := tensors_inside(tensor):
        _, context = tensor.__tensor_flatten__()
        same = tensor.__tensor_unflatten__(
            inside,
            context,
            tensor.shape,
            tensor.stride(),
        )
        known.update(inside)
        known.update(vars(same))
    attributes = {}
    for name, value in vars(tensor).items():
        if name not in known:
            attributes[name] = value
    return attributes


def move(
    module: nn.Module,
    device: torch.device,
    ignored: Set[nn.Parameter],
) -> None:
    """Move a module to a device, in place.

    Args:
        module: its tensors on the meta device stay there.
        device: where its parameters and buffers are then.
        ignored: parameters of it that are neither moved nor read.
    """
    # torch drops the attributes of tensor subclasses.
    kept = {parameter: users_attributes(parameter) for parameter in module.parameters()}
    # Ignored parameters are taken out, since some, sharded by an earlier call, may not be read now.
    set_aside = []
    for inner in module.modules():
        parameters = inner._parameters
        if type(parameters) is not dict:
            continue
        for name, parameter in list(parameters.items()):
            if parameter is not None and parameter in ignored:
                set_aside.append((parameters, name, parameter))
                parameters[name] = None

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        return tensor.to(device)

    try:
        module._apply(moved)
    finally:
        for parameters, name, parameter in set_aside:
            parameters[name] = parameter
    for parameter, attributes in kept.items():
        vars(parameter).update(attributes)
