# SPDX-License-Identifier: Apache-2.0
"""Loading of full tensors by ``load_state_dict`` of the wrapped module, or of a module in it.

torch would copy full tensors into DTensors, which it refuses, or put them in their place. So before
a module loads its own parameters, their values are copied into the shards, and the state dict gets
the sharded parameters instead, which torch then finds in place. Afterwards the new weights are
installed, as after an optimizer's step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron.fsdp.dtensor.sharded_param import is_linked, sharded_param_of
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.module_access.shown_parameters import WatchedParameters


def accept_full_tensors(module: nn.Module) -> set[int]:
    """Let ``load_state_dict`` of a sharded module and of the modules in it load full tensors.

    Values of a wrong shape are left to torch, which lists them. With ``assign=True`` values are
    copied too: weights remain views of flat buffers, in their own dtype.

    Args:
        module: the wrapped module, whose parameters are watched.

    Returns:
        Ids of the hooks on modules.
    """
    changed: dict[ParamGroup, None] = {}  # groups whose main weights are newer

    def load_own(
        each: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        for name, parameter in each._parameters.items():
            value = state_dict.get(prefix + name)
            if parameter is None or not is_linked(parameter) or not isinstance(value, torch.Tensor):
                continue
            sharded_param = sharded_param_of(parameter)
            shape = sharded_param.slice.shape
            if tuple(value.shape) not in (shape, shape or (1,)):
                continue
            try:
                sharded_param.load(value)
                changed[sharded_param.group] = None
            except ValueError as error:
                errors.append(str(error))
            state_dict[prefix + name] = parameter

    def install(each: nn.Module, incompatible_keys: Any) -> None:
        for group in changed:
            group.install_main_weights()
        changed.clear()

    handles: set[int] = set()
    # Functions, not methods: a copy of the module would copy the owner of a method too.
    for each in module.modules():
        if isinstance(each._parameters, WatchedParameters):
            before = each.register_load_state_dict_pre_hook(load_own)
            after = each.register_load_state_dict_post_hook(install)
            handles |= {before.id, after.id}
    return handles
