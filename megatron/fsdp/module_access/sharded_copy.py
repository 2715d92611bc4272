# SPDX-License-Identifier: Apache-2.0
"""Deep copies of sharded models, for averages of weights and teachers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron.fsdp.dtensor.sharded_param import ShardedParam
from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron.fsdp.settings import Settings
from megatron.fsdp.warnings_once import IS_COMPUTE


def copied_module(
    module: nn.Module,
    sharded_params: dict[nn.Parameter, ShardedParam],
    settings: Settings,
    memo: dict[int, Any],
) -> tuple[nn.Module, Settings]:
    """Return a deep copy of a module that is not sharded, with hooks, and settings to shard it."""
    for compute, sharded_param in sharded_params.items():
        whole = full_tensor(sharded_param.parameter).to(compute.dtype).view(compute.shape)
        parameter = nn.Parameter(whole, requires_grad=sharded_param.group.requires_grad)
        vars(parameter).update(vars(compute))
        delattr(parameter, IS_COMPUTE)
        memo[id(compute)] = memo[id(sharded_param.parameter)] = parameter
    copied = copy.deepcopy(module, memo)
    units = [memo.get(id(unit), unit) for unit in settings.units or ()]
    return copied, replace(settings, units=units, initialisation=None)


def remove_hooks(original: nn.Module, copied: nn.Module, handles: set[int]) -> None:
    """Remove the hooks with these ids from a deep copy of a module, which has copied them too."""
    for source, target in zip(original.modules(), copied.modules()):
        for name, hooks in vars(source).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                for number in handles.intersection(hooks):
                    del vars(target)[name][number]
        vars(target).pop("_apply", None)


@torch.no_grad()
def copy_main_weights(sources: Sequence[ShardedParam], targets: Sequence[ShardedParam]) -> None:
    """Copy main weights, which may have more bits than the module's, and what is frozen now."""
    for source, target in zip(sources, targets, strict=True):
        target.parameter.requires_grad_(source.parameter.requires_grad)
        target.parameter._local_tensor.copy_(source.parameter._local_tensor)
    for group in dict.fromkeys(target.group for target in targets):
        group.install_main_weights()
