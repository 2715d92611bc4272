# SPDX-License-Identifier: Apache-2.0
"""The update of offloaded segments in blocks, on the host or on the device."""

# [Note: blocks] An element-wise update of a segment is that of its blocks. While one is updated,
# the next one is read or copied to the device, and the one before is written or copied back.
#
#     in        | block 0 | block 1 | block 2 |
#     update              | block 0 | block 1 | block 2 |
#     out                           | block 0 | block 1 | block 2 |
#
# Each block counts the step once, in a copy of the segment's counter.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from megatron.fsdp.backends.host_memory import TO_DEVICE, TO_HOST, HostMemory
from megatron.fsdp.config.offload import Offload
from megatron.fsdp.engine.device import CpuStreams, Pending, Streams
from megatron.fsdp.optimizer.flat_segments import Segment, State
from megatron.fsdp.optimizer.optimizer_state import (
    GroupSettings,
    OptimizerClass,
    Params,
    elementwise_class,
    has_counters_on_device,
)

# Of the weights of a block, which has as many of gradients and of each moment.
BLOCK_BYTES = 1 << 24

Entries = dict[str, torch.Tensor]  # of the state of one tensor
Step = Callable[[Params, State], None]


def refuse_state_in_files(
    kind: OptimizerClass,
    offload: Offload | None,
) -> None:
    """Raise ``NotImplementedError`` where optimizer state would not lie in the files of offload."""
    if offload is None or offload.folder is None:
        return
    if elementwise_class(kind) is None:
        raise NotImplementedError(
            f"{kind.__name__} keeps its state in memory of its own, not in files: use an"
            " element-wise optimizer of torch, or Memory.offload='host'"
        )


def update_segments(
    step: Step,
    flat: Sequence[Sequence[Segment]],
    state: State,
    param_groups: Sequence[GroupSettings],
) -> None:
    """Update the segments of each param group: together on the device, offloaded ones in blocks.

    Args:
        step: updates flat tensors, given those of each param group, and their state.
        flat: the segments of each param group, with their gradients.
        state: the state of the segments' weights, by weight; updated in place.
        param_groups: the settings of the groups.
    """
    on_device = []
    offloaded = []
    for number, segments in enumerate(flat):
        weights = []
        for segment in segments:
            weight = segment.weight
            memory = segment.members[0].sharded_param.group.memory
            if not isinstance(memory, HostMemory):
                weights.append(weight)
                continue
            flat_tensor = Flat(
                number=number,
                weight=weight,
                entries=state[weight],
                memory=memory,
            )
            offloaded.append(flat_tensor)
        on_device.append(weights)
    if any(on_device):
        step(on_device, state)
    if offloaded:
        counters_on_device = [has_counters_on_device(group) for group in param_groups]
        BlockUpdate(step, counters_on_device).run(offloaded)


class Flat(NamedTuple):
    """A flat tensor to update, of one param group of the optimizer."""

    number: int  # number of the param group
    weight: torch.Tensor  # weight with its gradient
    entries: Entries
    memory: HostMemory

    def blocks(self) -> Iterator[Flat]:
        """Yield the blocks, which are views, with counters of their own."""
        gradient = self.weight.grad
        assert gradient is not None
        size = max(1, BLOCK_BYTES // self.weight.element_size())
        numel = max(1, self.weight.numel())  # also without elements, a block counts the step
        for start in range(0, numel, size):
            part = slice(start, start + size)
            weight = self.weight[part]
            weight.grad = gradient[part]
            entries = {}
            for name, value in self.entries.items():
                if value.ndim:
                    entries[name] = value[part]
                else:
                    entries[name] = value.clone()
            yield self._replace(weight=weight, entries=entries)

    def moments(self) -> list[torch.Tensor]:
        """List the state without the counters."""
        return [value for value in self.entries.values() if value.ndim]

    def tensors(self) -> list[torch.Tensor]:
        """List the tensors that the update reads: weight, gradient, moments, but no counters."""
        assert self.weight.grad is not None
        return [self.weight, self.weight.grad, *self.moments()]


class Transfer(NamedTuple):
    """A block on its way to where it is updated, or back."""

    block: Flat
    updated: Flat  # the copy on the device that is updated, or the block itself
    pending: Pending


class BlockUpdate:
    """The update of offloaded flat tensors; see [Note: blocks].

    Args:
        step: updates flat tensors, by param group, with their state.
        counters_on_device: for each param group, True if counters are where weights are updated,
            not on the host.
    """

    def __init__(self, step: Step, counters_on_device: Sequence[bool]):
        self._step = step
        self._counters_on_device = counters_on_device

    def run(self, flats: Sequence[Flat]) -> None:
        """Update all of ``flats``, and their state."""
        last_of: list[tuple[Flat, Flat]] = []  # each flat tensor with its last block
        blocks = self._blocks(flats, last_of)
        memory = flats[0].memory
        streams = memory.streams
        fetched: Transfer | None = self._fetch(next(blocks), streams)
        stored: Transfer | None = None  # its copies must live until the block is back
        while fetched is not None:
            current = fetched
            fetched = None
            following = next(blocks, None)
            if following is not None:
                fetched = self._fetch(following, streams)
            current.pending.wait()
            self._update(current.updated)
            self._finish(stored)
            stored = self._store(current.block, current.updated, streams)
        self._finish(stored)
        memory.wait()
        for flat, block in last_of:
            for name, value in flat.entries.items():
                if not value.ndim:
                    value.copy_(block.entries[name])

    @staticmethod
    def _blocks(
        flats: Sequence[Flat],
        last_of: list[tuple[Flat, Flat]],
    ) -> Iterator[Flat]:
        for flat in flats:
            for block in flat.blocks():
                yield block
            last_of.append((flat, block))

    def _fetch(self, block: Flat, streams: Streams) -> Transfer:
        """Begin to bring a block to where it is updated."""
        memory = block.memory
        tensors = block.tensors()
        for tensor in tensors:
            memory.prefetch(tensor)
        if not memory.on_device or isinstance(streams, CpuStreams):
            return Transfer(block, block, Pending())
        copies = []
        for tensor in tensors:
            copies.append(torch.empty_like(tensor, device=memory.device))
        pending = streams.launch(TO_DEVICE, lambda _: _copy(copies, tensors))
        weight, gradient, *moments = copies
        weight.grad = gradient
        entries = {}
        for name, value in block.entries.items():
            if value.ndim:
                entries[name] = moments.pop(0)
            else:
                entries[name] = self._counter(block, value)
        updated = block._replace(weight=weight, entries=entries)
        return Transfer(block, updated, pending)

    def _counter(self, block: Flat, value: torch.Tensor) -> torch.Tensor:
        if not self._counters_on_device[block.number]:
            return value
        # With a copy of it, the host would wait for the update of the previous block.
        count = value.item()
        return torch.full_like(value, count, device=block.memory.device)

    def _update(self, block: Flat) -> None:
        params: list[list[torch.Tensor]] = [[] for _ in self._counters_on_device]
        params[block.number].append(block.weight)
        state: State = defaultdict(dict)
        state[block.weight] = block.entries
        self._step(params, state)

    @staticmethod
    def _finish(transfer: Transfer | None) -> None:
        if transfer is None:
            return
        transfer.pending.wait()
        block = transfer.block
        for tensor in block.tensors():
            block.memory.release(tensor)

    def _store(
        self,
        block: Flat,
        updated: Flat,
        streams: Streams,
    ) -> Transfer:
        """Begin to bring a block back."""
        if updated is block:
            return Transfer(block, updated, Pending())
        for name, value in updated.entries.items():
            if not value.ndim:
                block.entries[name] = value
        targets = [block.weight, *block.moments()]
        sources = [updated.weight, *updated.moments()]
        pending = streams.launch(TO_HOST, lambda _: _copy(targets, sources))
        return Transfer(block, updated, pending)


def _copy(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
) -> None:
    for target, source in zip(targets, sources):
        target.copy_(source, non_blocking=True)
