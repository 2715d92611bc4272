# SPDX-License-Identifier: Apache-2.0
"""State of Megatron-Core's DistributedOptimizer in Megatron-LM's loop, over models of this project.

Both functions replace a method of the optimizer's class, and call that for other models.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer import DistributedOptimizer
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.checkpoint.core.listing import some
from megatron.fsdp.dtensor.sharded_param import ShardedParam, sharded_param_of
from megatron.mcore_adapter.checkpoint_entries import Settings, settings_of_group
from megatron.mcore_adapter.core_optimizers import make_optimizer_state, unscaled_moments
from megatron.mcore_adapter.data_parallel import FullyShardedDataParallel
from megatron.mcore_adapter.megatron_lm.loop_state_dicts import join_virtual_stages

_original_sharded_state_dict = DistributedOptimizer.sharded_state_dict
_original_load_state_dict = DistributedOptimizer.load_state_dict


@functools.wraps(_original_sharded_state_dict)
def sharded_state_dict(
    optimizer: DistributedOptimizer,
    model_sharded_state_dict: dict[str, Any] | None = None,
    is_loading: bool = False,
    sharding_type: str | None = None,
    metadata: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return Megatron-Core's state dict with all state and the loss scaler.

    ``model_sharded_state_dict`` is the loop's state dict, in which virtual stages are joined.
    """
    is_ours = _is_over_our_models(optimizer)
    whole = {} if model_sharded_state_dict is None else model_sharded_state_dict
    if is_ours:
        join_virtual_stages(whole, optimizer.model_chunks)
        make_optimizer_state(optimizer)
        # Megatron-Core would take a step to create state, but all state exists already.
        is_loading = False
    with unscaled_moments(optimizer):
        content = _original_sharded_state_dict(
            optimizer, whole, is_loading, sharding_type, metadata
        )
        return _for_checkpoint(optimizer, content) if is_ours else content


def _for_checkpoint(optimizer: DistributedOptimizer, content: dict[str, Any]) -> dict[str, Any]:
    """Make the result of Megatron-Core's ``sharded_state_dict`` ready for torch's checkpoint."""
    parameters = _parameters(optimizer)
    state = {}
    for name, slots in content["state"].items():
        sharded = sharded_param_of(parameters[name])
        state[name] = {slot: _checkpoint_value(sharded, value) for slot, value in slots.items()}
    content["state"] = state
    # Parameters of a group share one dict, in which a load would leave no trace of a difference
    # between them.
    content["param_to_group_meta"] = {
        name: dict(settings) for name, settings in content["param_to_group_meta"].items()
    }
    if optimizer.grad_scaler is not None:
        content["grad_scaler"] = optimizer.grad_scaler.state_dict()
    return content


def _checkpoint_value(sharded: ShardedParam, value: Any) -> Any:
    return sharded.checkpoint_tensor(value) if isinstance(value, DTensor) else value


@functools.wraps(_original_load_state_dict)
def load_state_dict(optimizer: DistributedOptimizer, state_dict: dict[str, Any]) -> None:
    """Load the result of ``sharded_state_dict`` after a checkpoint was loaded into it.

    If parameters, shapes or groups do not fit, only tensors that were read in place change.
    """
    if not _is_over_our_models(optimizer) or "param_to_group_meta" not in state_dict:
        _original_load_state_dict(optimizer, state_dict)
        return
    parameters = _parameters(optimizer)
    unknown = sorted(name for name in state_dict["state"] if name not in parameters)
    if unknown:
        raise ValueError(f"the optimizer has no parameters of these names: {some(unknown)}")
    saved = state_dict["param_to_group_meta"]
    settings = [_settings(optimizer, group, saved) for group in optimizer.param_groups]
    make_optimizer_state(optimizer)
    with unscaled_moments(optimizer, is_load=True):
        for name, slots in state_dict["state"].items():
            own = optimizer.optimizer.state[parameters[name]]
            _load_slots(own, slots, sharded_param_of(parameters[name]))
    for group, settings_of_file in zip(optimizer.param_groups, settings):
        group.update(settings_of_file)
    if optimizer.grad_scaler is not None and "grad_scaler" in state_dict:
        optimizer.grad_scaler.load_state_dict(state_dict["grad_scaler"])
    for chunk in optimizer.model_chunks:
        # The weights of virtual stages were read in place, and the loop then loads no model.
        for group in chunk.module.groups:
            group.install_main_weights()


def _settings(
    optimizer: DistributedOptimizer, group: dict[str, Any], saved: Mapping[str, Settings]
) -> Settings:
    """Return the settings on which all parameters of a group that are in the file agree."""
    names = map(optimizer._param_name, group["params"])
    settings, first, different = settings_of_group(names, saved)
    if different:
        raise ValueError(
            f"the checkpoint has other param groups than this run: {first} and {some(different)}"
            " are in one group here, and differ there (--no-load-optim loads weights only)"
        )
    return settings


@torch.no_grad()
def _load_slots(own: dict[str, Any], slots: Mapping[str, Any], sharded: ShardedParam) -> None:
    for slot, value in slots.items():
        live = own.get(slot)
        if isinstance(live, DTensor):
            live._local_tensor.copy_(sharded.local_shard(value))
        elif isinstance(live, torch.Tensor):
            live.copy_(value)
        else:
            own[slot] = value


def _is_over_our_models(optimizer: DistributedOptimizer) -> bool:
    return all(isinstance(chunk, FullyShardedDataParallel) for chunk in optimizer.model_chunks)


def _parameters(optimizer: DistributedOptimizer) -> dict[str, nn.Parameter]:
    """Return the parameters by the names that the optimizer gives them in state dicts."""
    parameters: dict[str, nn.Parameter] = {}
    for group in optimizer.param_groups:
        parameters |= {optimizer._param_name(each): each for each in group["params"]}
    return parameters
