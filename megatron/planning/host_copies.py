# SPDX-License-Identifier: Apache-2.0
"""Copies of shards between the device and the host, in a simulated step.

[Note: copies] The engine gives copies to the device and those to the host a stream each. Main
weights are copied before each all-gather that casts them, so twice for each microbatch at level 3
and once a step elsewhere. Reduced gradients are copied after each reduction; all but the first of a
step are added to the sum on the device, which is copied there and back. The host waits for all
copies before it reads gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from megatron.fsdp import ShardedModule
from megatron.fsdp.backends.host_memory import TO_DEVICE, TO_HOST
from megatron.fsdp.engine.buffer import RunningSum
from megatron.fsdp.engine.device import Pending
from megatron.planning.machine import Cluster
from megatron.planning.simulation import Simulator


def follow_copies(simulator: Simulator, model: ShardedModule, machine: Cluster) -> None:
    """Let a simulator spend the time of the copies of a sharded model; see [Note: copies]."""
    away = [group for group in model.groups if group.memory.is_offloaded]
    for group in away:
        total = group.gradients._grad_sum
        vars(total)["buffer_for"] = partial(_held_buffer, simulator, total.buffer_for)
    for memory in {group.memory for group in away}:
        sums = [group.gradients._grad_sum for group in away if group.memory is memory]
        copies = SimulatedCopies(simulator, machine, sums)
        vars(memory).update(use=copies.use, add=copies.add, wait=copies.wait)


class SimulatedCopies:
    """The copies of a memory whose tensors are on the meta device, as is what is copied."""

    def __init__(self, simulator: Simulator, machine: Cluster, sums: Sequence[RunningSum]):
        self._simulator = simulator
        self._machine = machine
        self._sums = sums  # of reduced gradients, which come from the device
        self._last_added: tuple[Pending, torch.Tensor] | None = None

    def _copy(self, stream_name: str, tensor: torch.Tensor) -> Pending:
        num_bytes = tensor.numel() * tensor.element_size()
        return self._simulator.copy(stream_name, num_bytes, self._machine.copy_seconds(num_bytes))

    def use(self, tensor: torch.Tensor, function: Callable[[torch.Tensor], None]) -> Pending:
        """Copy main weights to the device, where the copy lives until it is cast."""
        num_bytes = tensor.numel() * tensor.element_size()
        self._simulator.change_memory(num_bytes)
        function(tensor)
        pending = self._copy(TO_DEVICE, tensor)
        self._simulator.change_memory(-num_bytes)
        return pending

    def add(self, total: torch.Tensor, addend: torch.Tensor, is_first: bool) -> None:
        """Copy gradients to the host; their memory is free when compute has waited for that."""
        if not any(total is each.tensor() for each in self._sums):
            return  # the host adds, or casts, what is there already
        if self._last_added is not None:
            self._last_added[0].wait()
        if not is_first:
            self._simulator.change_memory(total.nbytes)
            self._copy(TO_HOST, total)
            self._simulator.change_memory(-total.nbytes)
        self._last_added = self._copy(TO_HOST, total), addend

    def wait(self) -> None:
        """Let compute wait for all copies, as the host does."""
        for stream_name in (TO_DEVICE, TO_HOST):
            self._simulator.wait_for_stream(stream_name)
        self._last_added = None


def _held_buffer(
    simulator: Simulator, buffer_for: Callable[[torch.dtype], torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Return the device's tensor for a reduction, whose bytes count until it is copied."""
    buffer = buffer_for(dtype)
    simulator.hold(buffer)
    return buffer
