# SPDX-License-Identifier: Apache-2.0
"""The wrapped module: called without the wrapper, and casts at its units."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from megatron.fsdp.config.settings import ComputePrecision
from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron.fsdp.engine.collectives import agree
from megatron.fsdp.engine.policy import MixedPrecisionPolicy
from megatron.fsdp.engine.unit import Unit
from megatron.fsdp.module.shown_parameters import WatchedParameters

# A function that ``to``, ``half`` and so on call with every tensor.
Conversion = Callable[[torch.Tensor], torch.Tensor]
# By this attribute transformers knows modules whose ranks must run all layers together.
GENERATES_TOGETHER = "_is_fsdp_managed_module"


def refuse_ddp(model: nn.Module) -> NoReturn:
    """Refuse torch's DistributedDataParallel around a sharded model.

    It reads this attribute before it communicates. A release that does not read it fails in its
    first broadcast, with an error about shapes.
    """
    raise RuntimeError(
        "DistributedDataParallel around a sharded model would reduce its gradients twice: leave it"
        " out, the model averages them over the ranks of its mesh; for replicas of shards give an"
        " outer axis (dp_outer_dim)"
    )


def prepare_wrapped_module(
    module: nn.Module,
    gathers_layers: bool,
    state_dict: Callable[[], dict[str, Any]],
    check_conversion: Callable[[Conversion], object],
) -> None:
    """Prepare a module for code that calls it without the wrapper: to save, convert or generate.

    Args:
        module: the wrapped module, whose weights are sharded.
        gathers_layers: True if generation gathers weights, for which all ranks must run together.
        state_dict: returns that of the wrapper.
        check_conversion: raises an error for a conversion of weights that cannot be done.
    """
    save = getattr(type(module), "save_pretrained", None)
    if callable(save):
        bound_save = save.__get__(module)
        vars(module)["save_pretrained"] = _saving_whole_weights(bound_save, state_dict)
    for inner in module.modules():
        if gathers_layers and callable(getattr(inner, "generate", None)):
            setattr(inner, GENERATES_TOGETHER, True)
        if isinstance(inner._parameters, WatchedParameters):
            vars(inner)["_apply"] = _converting_buffers(inner, check_conversion)


def _converting_buffers(
    module: nn.Module,
    check_conversion: Callable[[Conversion], object],
) -> Callable[..., nn.Module]:
    """Return an ``_apply`` that converts buffers, but no weights, which are in flat buffers."""

    def apply(fn: Conversion, recurse: bool = True) -> nn.Module:
        check_conversion(fn)
        if recurse:
            for child in module.children():
                child._apply(fn)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
        return module

    return apply


def _saving_whole_weights(
    save: Callable[..., Any],
    state_dict: Callable[[], dict[str, Any]],
) -> Callable[..., None]:
    @wraps(save)
    def save_pretrained(*args: Any, **kwargs: Any) -> None:
        """Gather all weights on the CPU of the first rank, and save there; call it on all ranks."""
        if kwargs.get("state_dict") is not None:  # gathered by the caller, who may be rank 0 alone
            if dist.get_rank() == 0:
                save(*args, **kwargs)
            return
        kwargs["state_dict"] = gather_on_first_rank(state_dict())
        problems: list[str] = []
        if dist.get_rank() == 0:
            try:
                save(*args, **kwargs)
            except Exception as error:  # of any library: the other ranks must not wait
                problems = [f"save_pretrained failed on rank 0: {type(error).__name__}: {error}"]
        problems = agree(problems)
        if problems:
            raise RuntimeError(problems[0])

    return save_pretrained


def gather_on_first_rank(state: dict[str, Any]) -> dict[str, Any]:
    """Gather a wrapper's state dict on the CPU of the first rank, under the module's own names."""
    # The other ranks, which get an empty dict, have one whole tensor at a time.
    gathered: dict[str, Any] = {}
    is_first = dist.get_rank() == 0
    values: dict[int, Any] = {}  # keys: parts of DTensors, which tied weights share
    for name, value in state.items():
        key = id(getattr(value, "part", None) or value)
        if key not in values:
            if isinstance(value, DTensor):
                value = full_tensor(value)
            if isinstance(value, torch.Tensor):
                value = value.detach().cpu()
            values[key] = None
            if is_first:
                values[key] = value
        if is_first:
            gathered[name.removeprefix("module.")] = values[key]
    return gathered


def cast_at_units(units: Iterable[Unit], precision: MixedPrecisionPolicy) -> set[int]:
    """Cast floating-point inputs of units, and outputs of the model; return the ids of hooks."""
    # FSDP2 has one policy for each unit, here there is one for the model, whose output it casts.
    # The modules that FSDP2 would be applied to are the root and the units that the user named.

    def cast_inputs(
        module: nn.Module,
        args: Any,
        kwargs: Any,
    ) -> Any:
        return _cast(args, input_dtype), _cast(kwargs, input_dtype)

    def cast_outputs(
        module: nn.Module,
        args: Any,
        output: Any,
    ) -> Any:
        return _cast(output, output_dtype)

    if not isinstance(precision, ComputePrecision):
        return set()
    input_dtype = precision.param_dtype
    output_dtype = precision.output_dtype
    modules = []
    for unit in units:
        if unit.module is not None and unit.casts_inputs:
            modules.append(unit.module)
    handles = set()
    if precision.cast_forward_inputs and input_dtype is not None:
        for module in modules:
            handle = module.register_forward_pre_hook(cast_inputs, with_kwargs=True)
            handles.add(handle.id)
    if output_dtype is not None:
        handle = modules[0].register_forward_hook(cast_outputs)
        handles.add(handle.id)
    return handles


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.to(dtype)

    return tree_map_only(torch.Tensor, cast, values)
