# SPDX-License-Identifier: Apache-2.0
"""Copies of shards between the device and the host, in a simulated step.

[Note: copies] The engine puts the copies of a shard into the stream of compute, which waits for
them: main weights before each all-gather that casts them, so twice for each microbatch at level 3
and once a step elsewhere, and reduced gradients after each reduction. The first gradients of a step
are copied to the tensor that the optimizer reads. Later ones are added to it on the host, for which
the host, and so the device, waits. ``ShardMemory.release`` of the shard follows each copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from megatron.fsdp import ShardedModule
from megatron.planning.machine import Cluster
from megatron.planning.simulation import Simulator, StepResult

ADD_TRAFFIC = 3
"""Reads and writes of each byte of gradients that is added on the host."""


def follow_copies(simulator: Simulator, model: ShardedModule, machine: Cluster) -> None:
    """Let a simulator spend the time of the copies of a sharded model; see [Note: copies]."""
    away = [group for group in model.groups if group.memory.is_offloaded]
    weights = {group.main_shard.untyped_storage()._cdata for group in away}
    step_of: dict[int, StepResult] = {}  # the last one that has brought gradients, by storage

    def copied(shard: torch.Tensor) -> None:
        num_bytes = shard.numel() * shard.element_size()
        seconds = machine.copy_seconds(num_bytes)
        storage = shard.untyped_storage()._cdata
        is_weight = storage in weights
        if not is_weight:
            if step_of.get(storage) is simulator.step:
                seconds += machine.host_seconds(ADD_TRAFFIC * num_bytes)
            step_of[storage] = simulator.step
        simulator.copy(num_bytes, seconds, is_weight)

    for group in away:
        total = group.gradients._grad_sum
        vars(total)["buffer_for"] = partial(_held_buffer, simulator, total.buffer_for)
    for memory in {group.memory for group in away}:
        vars(memory)["release"] = copied


def _held_buffer(
    simulator: Simulator, buffer_for: Callable[[torch.dtype], torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Return the device's tensor for a reduction, whose bytes count until it is copied."""
    buffer = buffer_for(dtype)
    simulator.hold(buffer)
    return buffer
