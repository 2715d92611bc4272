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
from megatron.mcore_adapter.core_optimizers import make_optimizer_state
from megatron.mcore_adapter.data_parallel import FullyShardedDataParallel
from megatron.mcore_adapter.megatron_lm.loop_state_dicts import join_virtual_stages
from megatron.mcore_adapter.precision_aware import unscaled_moments

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

    Args:
        optimizer: over models of this project; for others the original is called.
        model_sharded_state_dict: the loop's state dict, in which virtual stages are joined in
            place.
        is_loading: ignored here: all state exists, so Megatron-Core needs no step to create it.
        sharding_type: as in Megatron-Core.
        metadata: as in Megatron-Core.
    """
    if model_sharded_state_dict is None:
        model_sharded_state_dict = {}
    is_ours = _is_over_our_models(optimizer)
    if is_ours:
        join_virtual_stages(model_sharded_state_dict, optimizer.model_chunks)
        make_optimizer_state(optimizer)
        is_loading = False
    with unscaled_moments(optimizer):
        content = _original_sharded_state_dict(
            optimizer, model_sharded_state_dict, is_loading, sharding_type, metadata
        )
        if not is_ours:
            return content
        return _for_checkpoint(optimizer, content)


def _for_checkpoint(optimizer: DistributedOptimizer, content: dict[str, Any]) -> dict[str, Any]:
    """Make the result of Megatron-Core's ``sharded_state_dict`` ready for torch's checkpoint."""
    parameters = _parameters(optimizer)
    state = {}
    for name, slots in content["state"].items():
        sharded = sharded_param_of(parameters[name])
        state[name] = dict(slots)
        for slot, value in slots.items():
            if isinstance(value, DTensor):
                state[name][slot] = sharded.checkpoint_tensor(value)
    content["state"] = state
    # Parameters of a group share one dict, in which a load would leave no trace of a difference
    # between them.
    settings = content["param_to_group_meta"]
    content["param_to_group_meta"] = {name: dict(settings[name]) for name in settings}
    if optimizer.grad_scaler is not None:
        content["grad_scaler"] = optimizer.grad_scaler.state_dict()
    return content


@functools.wraps(_original_load_state_dict)
def load_state_dict(optimizer: DistributedOptimizer, state_dict: dict[str, Any]) -> None:
    """Load the result of ``sharded_state_dict`` after a checkpoint was loaded into it.

    If parameters, shapes or groups do not fit, only tensors that were read in place change.
    """
    if not _is_over_our_models(optimizer) or "param_to_group_meta" not in state_dict:
        _original_load_state_dict(optimizer, state_dict)
        return
    parameters = _parameters(optimizer)
    unknown = sorted(state_dict["state"].keys() - parameters.keys())
    if unknown:
        raise ValueError(f"the optimizer has no parameters of these names: {some(unknown)}")
    saved = state_dict["param_to_group_meta"]
    settings = []
    for group in optimizer.param_groups:
        settings.append(_settings(optimizer, group, saved))
    make_optimizer_state(optimizer)
    with unscaled_moments(optimizer, is_load=True):
        for name, slots in state_dict["state"].items():
            parameter = parameters[name]
            live_slots = optimizer.optimizer.state[parameter]
            _load_slots(live_slots, slots, sharded_param_of(parameter))
    for group, settings_of_file in zip(optimizer.param_groups, settings):
        group.update(settings_of_file)
    if optimizer.grad_scaler is not None and "grad_scaler" in state_dict:
        optimizer.grad_scaler.load_state_dict(state_dict["grad_scaler"])
    for chunk in optimizer.model_chunks:
        # The weights of virtual stages were read in place, and the loop then loads no model.
        for group in chunk.module.groups:
            group.mark_main_weights_changed()


def _settings(
    optimizer: DistributedOptimizer,
    group: dict[str, Any],
    saved: Mapping[str, Settings],
) -> Settings:
    """Return the settings on which all parameters of a group that are in the file agree."""
    names = []
    for parameter in group["params"]:
        names.append(optimizer._param_name(parameter))
    settings, first, different = settings_of_group(names, saved)
    if different:
        raise ValueError(
            f"the checkpoint has other param groups than this run: {first} and {some(different)}"
            " are in one group here, and differ there (--no-load-optim loads weights only)"
        )
    return settings


@torch.no_grad()
def _load_slots(
    live_slots: dict[str, Any],
    slots: Mapping[str, Any],
    sharded: ShardedParam,
) -> None:
    """Copy values of a checkpoint into the state of a parameter; what is no tensor is replaced."""
    for slot, value in slots.items():
        live = live_slots.get(slot)
        if isinstance(live, DTensor):
            live._local_tensor.copy_(sharded.local_shard(value))
        elif isinstance(live, torch.Tensor):
            live.copy_(value)
        else:
            live_slots[slot] = value


def _is_over_our_models(optimizer: DistributedOptimizer) -> bool:
    return all(isinstance(chunk, FullyShardedDataParallel) for chunk in optimizer.model_chunks)


def _parameters(optimizer: DistributedOptimizer) -> dict[str, nn.Parameter]:
    """Return the parameters by the names that the optimizer gives them in state dicts."""
    parameters: dict[str, nn.Parameter] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameters[optimizer._param_name(parameter)] = parameter
    return parameters
