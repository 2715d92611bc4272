# SPDX-License-Identifier: Apache-2.0
"""Casts of inputs of units and of the output of the model, which FSDP2's precision policy has."""

# FSDP2 has one policy for each unit. There is one for the model here, so the output is that of the
# model: a layer that follows a unit computes in the dtype of its weights.

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from megatron.fsdp.engine.policy import MixedPrecisionPolicy
from megatron.fsdp.engine.unit import Unit
from megatron.fsdp.settings import ComputePrecision


def cast_at_units(units: Iterable[Unit], precision: MixedPrecisionPolicy) -> set[int]:
    """Cast floating-point inputs of units, and outputs of the model; return the ids of hooks.

    Only the root, which comes first, and units that the user named are modules that FSDP2 would be
    applied to, and have their inputs cast.
    """

    def cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast(args, input_dtype), _cast(kwargs, input_dtype)

    def cast_outputs(module: nn.Module, args: Any, output: Any) -> Any:
        return _cast(output, output_dtype)

    if not isinstance(precision, ComputePrecision):
        return set()
    input_dtype = precision.param_dtype if precision.cast_forward_inputs else None
    output_dtype = precision.output_dtype
    modules = [unit.module for unit in units if unit.module is not None and not unit.is_automatic]
    handles = set()
    for module in modules if input_dtype is not None else ():
        handles.add(module.register_forward_pre_hook(cast_inputs, with_kwargs=True).id)
    if output_dtype is not None:
        handles.add(modules[0].register_forward_hook(cast_outputs).id)
    return handles


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, cast, values)
