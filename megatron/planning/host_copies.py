# SPDX-License-Identifier: Apache-2.0
"""Copies of shards between the device and the host, in a simulated step.

[Note: copies] The engine gives copies to the device and those to the host a stream each. Main
weights are copied before each all-gather that casts them, so twice for each microbatch at level 3
and once a step elsewhere. Reduced gradients are copied after each reduction; all but the first of a
step are added to the sum on the device, which is copied there and back. The host waits for all
copies before it reads gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from megatron.fsdp import ShardedModule
from megatron.fsdp.backends.host_memory import TO_DEVICE, TO_HOST
from megatron.fsdp.engine.buffer import RunningSum, ShardMemory
from megatron.fsdp.engine.device import Pending
from megatron.planning.machine import Cluster
from megatron.planning.simulation import Simulator

BufferFor = Callable[[torch.dtype], torch.Tensor]
"""Returns the device's tensor for a reduction of a dtype."""


def follow_copies(
    simulator: Simulator,
    model: ShardedModule,
    machine: Cluster,
) -> None:
    """Let a simulator spend the time of the copies of a sharded model; see [Note: copies]."""
    sums_of: dict[ShardMemory, list[RunningSum]] = defaultdict(list)
    for group in model.groups:
        if group.memory.is_offloaded:
            total = group.gradients._grad_sum
            vars(total)["buffer_for"] = _held_buffers(simulator, total.buffer_for)
            sums_of[group.memory].append(total)
    for memory, sums in sums_of.items():
        copies = SimulatedCopies(simulator, machine, sums)
        vars(memory).update(
            use=copies.use,
            add=copies.add,
            wait=copies.wait,
        )


class SimulatedCopies:
    """The copies of a memory whose tensors are on the meta device, as is what is copied."""

    def __init__(
        self,
        simulator: Simulator,
        machine: Cluster,
        sums: Sequence[RunningSum],
    ):
        self._simulator = simulator
        self._machine = machine
        self._sums = sums  # of reduced gradients, which come from the device
        self._last_added: tuple[Pending, torch.Tensor] | None = None

    def _copy(self, stream_name: str, tensor: torch.Tensor) -> Pending:
        seconds = self._machine.copy_seconds(tensor.nbytes)
        return self._simulator.copy(stream_name, tensor.nbytes, seconds)

    def use(self, tensor: torch.Tensor, function: Callable[[torch.Tensor], None]) -> Pending:
        """Copy main weights to the device, where the copy lives until it is cast."""
        self._simulator.change_memory(tensor.nbytes)
        function(tensor)
        pending = self._copy(TO_DEVICE, tensor)
        self._simulator.change_memory(-tensor.nbytes)
        return pending

    def add(
        self,
        total: torch.Tensor,
        addend: torch.Tensor,
        is_first: bool,
    ) -> None:
        """Copy gradients to the host; their memory is free when compute has waited for that.

        Args:
            total: the sum of gradients on the host.
            addend: what is added.
            is_first: it is the first addend of a step.
        """
        if not self._comes_from_device(total):
            return  # the host adds, or casts, what is there already
        if self._last_added is not None:
            self._last_added[0].wait()
        if not is_first:
            self._simulator.change_memory(total.nbytes)
            self._copy(TO_HOST, total)
            self._simulator.change_memory(-total.nbytes)
        self._last_added = self._copy(TO_HOST, total), addend

    def _comes_from_device(self, total: torch.Tensor) -> bool:
        return any(total is running_sum.tensor() for running_sum in self._sums)

    def wait(self) -> None:
        """Let compute wait for all copies, as the host does."""
        for stream_name in (TO_DEVICE, TO_HOST):
            self._simulator.wait_for_stream(stream_name)
        self._last_added = None


def _held_buffers(simulator: Simulator, buffer_for: BufferFor) -> BufferFor:
    """Return the function for the device's tensors of reductions, which count until copied."""

    def held_buffer(dtype: torch.dtype) -> torch.Tensor:
        buffer = buffer_for(dtype)
        simulator.hold(buffer)
        return buffer

    return held_buffer
