# SPDX-License-Identifier: Apache-2.0
"""Memory slots: memory at fixed addresses, in which flat buffers take turns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.fsdp.backends.slot_memory import NcclMemory, first_line
from megatron.fsdp.config.memory import Memory
from megatron.fsdp.engine import observe
from megatron.fsdp.engine.buffer import FlatBuffer, Storage
from megatron.fsdp.engine.collectives import agree

_logger = logging.getLogger(__name__)

# [Note: memory slots] Without slots, the storage of a flat buffer is allocated before each use and
# freed afterwards, so its address may change. With slots the first step runs like that and is
# watched: buffers that are allocated at the same time must not share a slot. After the step every
# buffer gets a slot, larger buffers first: the first slot that is large enough and has no user that
# it overlaps with. From then on a buffer occupies its slot instead of allocating storage. Example:
# layers a to d of equal size, of which one is prefetched while another computes.
#
#     allocated at the same time    a b, b c, c d     in forward, and again in backward
#     slots                         0 for a and c, 1 for b and d
#
# A buffer that is used for the first time in a later step has storage of its own until its end.

AllocateSlots = Callable[[Sequence[int]], list[torch.Tensor]]  # bytes to ``uint8`` tensors


@dataclass(eq=False)
class MemorySlot:
    """Memory that several buffers use, one at a time."""

    num_bytes: int
    memory: torch.Tensor | None = None  # None if there was too little: users have their own storage


class MemorySlots(Storage):
    """The slots of gathered weights, or those of local gradients. See [Note: memory slots].

    Args:
        contents: of the buffers, for messages.
        can_move: True if a buffer may leave its slot in the middle of a step. Gathered weights
            cannot, because autograd refers to their addresses between forward and backward.
        policy: the settings.
        allocate: allocates the memory of new slots.
    """

    is_assigned_ahead = True

    def __init__(
        self,
        contents: str,
        can_move: bool,
        policy: Memory,
        allocate: AllocateSlots,
    ):
        self.holds_addresses = policy.holds_addresses
        self._contents = contents
        self._can_move = can_move
        self._policy = policy
        self._allocate = allocate
        self._slots: list[MemorySlot] = []
        self._assigned: list[FlatBuffer] = []  # buffers that got a slot in the last assignment
        self._slot_of: dict[FlatBuffer, MemorySlot] = {}
        self._allocated: set[FlatBuffer] = set()
        # Buffers in the order of their first use, each with those in use at the same time.
        self._overlaps: dict[FlatBuffer, set[FlatBuffer]] = {}

    @property
    def sizes(self) -> list[int]:
        """Bytes of every slot."""
        return [slot.num_bytes for slot in self._slots]

    # ---- use

    def allocate(self, buffer: FlatBuffer) -> None:
        """Let a buffer occupy its slot, or allocate storage of its own if it has none."""
        self.occupy(buffer)
        if self._has_own_storage(buffer):
            super().allocate(buffer)

    def free(self, buffer: FlatBuffer) -> None:
        """Let a buffer leave its slot to others, or free the storage of its own."""
        if self._has_own_storage(buffer):
            super().free(buffer)
        self.vacate(buffer)

    def abandon(self, buffer: FlatBuffer) -> None:
        """Give up a buffer's own storage; the memory of slots is never freed."""
        if self._has_own_storage(buffer):
            super().abandon(buffer)
        self.vacate(buffer)

    def blocker(self, buffer: FlatBuffer) -> FlatBuffer | None:
        """Return the other buffer that occupies the slot of this one."""
        slot = self._slot_of.get(buffer)
        if slot is None:
            return None
        for other in self._allocated:
            if other is not buffer and self._slot_of.get(other) is slot:
                return other
        return None

    def _has_own_storage(self, buffer: FlatBuffer) -> bool:
        slot = self._slot_of.get(buffer)
        return slot is None or slot.memory is None

    def occupy(self, buffer: FlatBuffer) -> None:
        """Record that a buffer is allocated from now on, in its slot if it has one.

        Raises:
            RuntimeError: if another buffer occupies the slot, and this one must not move.
        """
        # A buffer that may move has storage of its own until the next assignment.
        overlaps = self._overlaps.setdefault(buffer, set())
        for other in self._allocated:
            overlaps.add(other)
            self._overlaps[other].add(buffer)
        occupant = self.blocker(buffer)
        if occupant is not None:
            if self.holds_addresses or not self._can_move:
                raise RuntimeError(
                    f"{buffer.name} and {occupant.name} are in use at the same time for the first"
                    " time since the first step. They share a memory slot, whose address is fixed:"
                    " let the first step use units as all later ones do, or train without"
                    " fsdp_double_buffer (nccl_ub and cuda_graph_mode imply it)"
                )
            del self._slot_of[buffer]
            buffer.move(None)
        self._allocated.add(buffer)

    adopt = occupy  # a new buffer is allocated

    def vacate(self, buffer: FlatBuffer) -> None:
        """Record that a buffer is no longer allocated."""
        self._allocated.discard(buffer)

    def discard(self, buffer: FlatBuffer) -> None:
        """Forget a buffer that is not used any more."""
        self.vacate(buffer)
        self._overlaps.pop(buffer, None)
        for others in self._overlaps.values():
            others.discard(buffer)
        self._slot_of.pop(buffer, None)

    # ---- assignment

    @property
    def is_complete(self) -> bool:
        """True if every buffer that was used so far has a slot."""
        return self._overlaps.keys() <= self._slot_of.keys()

    def assign(self) -> str | None:
        """Give a slot to each buffer that has none; return an error message if memory ran out."""
        # Buffers in use keep the storage of their own until the next assignment.
        self._assigned = []
        for buffer in self._overlaps:
            if buffer not in self._slot_of and not buffer.is_allocated:
                self._assigned.append(buffer)
        num_before = len(self._slots)
        largest_first = sorted(self._assigned, key=lambda buffer: -buffer.num_bytes)
        for buffer in largest_first:
            self._slot_of[buffer] = self._slot_for(buffer)
        new_slots = self._slots[num_before:]
        problem = self._allocate_memory(new_slots)
        for buffer in self._assigned:
            memory = self._slot_of[buffer].memory
            if memory is not None:
                buffer.move(memory)
        is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
        if new_slots and not problem and is_first_rank:
            _logger.info("memory slots of %s: %s", self._contents, self._sizes_as_text())
        return problem

    def withdraw(self) -> None:
        """Undo the last assignment, where memory ran out on some rank: it is tried again later."""
        for buffer in self._assigned:
            slot = self._slot_of.pop(buffer)
            if slot.memory is not None:
                buffer.move(None)
        self._assigned = []
        used = set(self._slot_of.values())
        slots = self._slots
        self._slots = []
        for slot in slots:
            if slot in used:
                self._slots.append(slot)
            elif slot.memory is not None:
                observe.storage("release", slot.memory)

    def _slot_for(self, buffer: FlatBuffer) -> MemorySlot:
        """Return the first slot that ``buffer`` fits in; add one if all are taken."""
        taken = {self._slot_of.get(other) for other in self._overlaps[buffer]}
        for slot in self._slots:
            if buffer.num_bytes <= slot.num_bytes and slot not in taken:
                return slot
        num_bytes = buffer.num_bytes
        if self._policy.equal_sizes:
            num_bytes = max(other.num_bytes for other in self._overlaps)
        self._slots.append(MemorySlot(num_bytes))
        return self._slots[-1]

    def _allocate_memory(self, slots: list[MemorySlot]) -> str | None:
        """Allocate the memory of new slots; return an error message if there is too little."""
        try:
            memory = self._allocate([slot.num_bytes for slot in slots])
        except RuntimeError as error:  # torch raises it on CPU, and a subclass of it on CUDA
            reason = first_line(error)
            sizes = self._sizes_as_text()
            problem = f"the memory slots of {self._contents} cannot be allocated: {sizes}"
            remedy = f"{problem} ({reason}). Shard over more ranks or into smaller units"
            if self.holds_addresses:  # storage of their own is freed and allocated again
                return f"{remedy}; cuda_graph_mode needs the fixed addresses of slots"
            if self._policy.registers and not self._policy.registers_locally:
                return f"{remedy}; nccl_ub registers windows, for which all ranks need slots"
            if not self._policy.allows_own_storage:
                return (
                    f"{remedy}; fsdp_db_use_persist_buf_on_alloc_fail=True trains with separate"
                    " storage for the buffers that have no slot"
                )
            _logger.warning("%s (%s); their buffers have separate storage", problem, reason)
            return None
        for slot, tensor in zip(slots, memory, strict=True):
            slot.memory = tensor
            observe.storage("allocate", tensor)
        return None

    def _sizes_as_text(self) -> str:
        sizes = ", ".join(f"{size:,}" for size in self.sizes)
        return f"{len(self._slots)} of {sizes} bytes, {sum(self.sizes):,} in all"


class EngineSlots:
    """The slots of gathered weights, and those of local gradients.

    Args:
        policy: the settings.
        allocate: allocates the memory of new slots.
        nccl: registers that memory; None: it is not registered.
    """

    def __init__(
        self,
        policy: Memory,
        allocate: AllocateSlots,
        nccl: NcclMemory | None = None,
    ):
        self.weights = MemorySlots("gathered weights", False, policy, allocate)
        self.gradients = MemorySlots("local gradients", True, policy, allocate)
        self._nccl = nccl

    @property
    def sizes(self) -> dict[str, list[int]]:
        """Bytes of every slot."""
        return {"weights": self.weights.sizes, "gradients": self.gradients.sizes}

    @property
    def is_complete(self) -> bool:
        """True if every buffer that was used so far has a slot."""
        return self.weights.is_complete and self.gradients.is_complete

    def assign(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Give a slot to each buffer that has none, and register new slots; a collective.

        Raises:
            RuntimeError: with the problems of all ranks of the groups, the same on each.
        """
        own_problems = []
        for slots in (self.weights, self.gradients):
            problem = slots.assign()
            if problem is not None:
                own_problems.append(problem)
        problems = agree(own_problems, groups)  # windows are registered by all ranks together
        if self._nccl and not problems:
            problems = agree(self._nccl.register(), groups)
        if problems:
            self.weights.withdraw()
            self.gradients.withdraw()
            if self._nccl:
                self._nccl.withdraw()
            raise RuntimeError("\n".join(problems))
