# SPDX-License-Identifier: Apache-2.0
"""The recorder: an observer that keeps this rank's collectives, flat storage and work on units."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.fsdp.engine import observe
from megatron.fsdp.engine.observe import BACKWARD, FORWARD, Group, Observer, Operands

# Tracks in addition to the kinds of collectives.
COMPUTE = "compute"
STORAGE = "storage"


# [Note: recorded times] Times are of the host. A collective begins when it is launched, and ends on
# CPU when `Pending.wait` returns, on CUDA when it is enqueued: torch.profiler has device times.
#
# [Note: microbatches] This is the number, from 0, of forwards or of backward passes on this rank
# since the last optimizer step. Forwards in evaluation and of every model chunk count.


@dataclass(slots=True)
class TraceEntry:
    """One collective, range, allocation or release."""

    track: str  # a kind of collectives, or one of the tracks above
    name: str  # name of the operation, such as all_gather, or of the work, such as unshard
    unit: str  # name of the unit; empty if it belongs to none
    phase: str  # phase in which it began
    microbatch: int | None  # [Note: microbatches]; None in the phase "step"
    begin: float  # seconds since the epoch; [Note: recorded times]
    end: float | None = None  # None until it is over
    ranks: tuple[int, ...] = ()  # ranks of the process group, for a collective
    number: int = 0  # number of a collective among those of the same ranks, from 0
    num_bytes: int = 0  # bytes of the whole operands (the result of an all-gather), or of storage
    dtype: str = ""  # dtype of the operands, such as bfloat16, or bfloat16+float32 of several

    @property
    def is_collective(self) -> bool:
        """True if several ranks took part."""
        return self.track in (observe.GATHER, observe.REDUCE, observe.OTHER)

    def __str__(self) -> str:
        text = (
            f"{self.name} {self.number} of ranks {list(self.ranks)}: {self.num_bytes} bytes"
            f" {self.dtype}, {self.unit or 'no unit'}, {self.phase}"
        )
        if self.microbatch is not None:
            text += f", microbatch {self.microbatch}"
        return text


class Recorder(Observer):
    """The entries of this rank, about 200 bytes each, in the order in which they began."""

    def __init__(self) -> None:
        self.entries: list[TraceEntry] = []
        self._num_passes = {FORWARD: 0, BACKWARD: 0}
        self._num_collectives: Counter[tuple[int, ...]] = Counter()
        self._ranks: dict[Group, tuple[int, ...]] = {}
        self._offset = time.time() - time.perf_counter()
        self._backward: TraceEntry | None = None
        self._units: list[str] = []  # the units of the work under way, innermost last

    @property
    def collectives(self) -> list[TraceEntry]:
        """The recorded collectives."""
        # Copied first, because another thread may ask while entries are added.
        return [entry for entry in list(self.entries) if entry.is_collective]

    def now(self) -> float:
        """Return the time in seconds since the epoch, from a clock that never goes back."""
        return self._offset + time.perf_counter()

    def add(
        self,
        track: str,
        name: str,
        unit: str | None = None,
        operands: Operands = (),
    ) -> TraceEntry:
        """Add an entry that begins now.

        Args:
            track: a kind of collectives, or a track of this file.
            name: the operation or the work.
            unit: the unit's name; None for the unit of the innermost work under way.
            operands: tensors whose bytes and dtypes are recorded.
        """
        phase = observe.current_phase()
        microbatch = None
        if phase in self._num_passes:
            microbatch = max(self._num_passes[phase] - 1, 0)
        if unit is None:
            unit = self._units[-1] if self._units else ""
        dtypes: dict[str, None] = {}  # dtypes in order, each one once
        num_bytes = 0
        for operand in operands:
            num_bytes += operand.numel() * operand.element_size()
            dtypes[str(operand.dtype).removeprefix("torch.")] = None
        entry = TraceEntry(
            track=track,
            name=name,
            unit=unit,
            phase=phase,
            microbatch=microbatch,
            begin=self.now(),
            num_bytes=num_bytes,
            dtype="+".join(dtypes),
        )
        self.entries.append(entry)
        return entry

    # ---- calls of the engine

    def begin_pass(self, phase: str) -> None:
        """Count a forward of a root, or a backward pass."""
        self._num_passes[phase] += 1

    def begin_step(self) -> None:
        """Count microbatches from 0 again."""
        self._num_passes = dict.fromkeys(self._num_passes, 0)

    def begin_work(self, unit: str, work: str) -> TraceEntry:
        """Add work on a unit."""
        self._units.append(unit)
        return self.add(COMPUTE, work, unit)

    def end_work(self, begun: TraceEntry) -> None:
        """Record the end of work on a unit."""
        self._units.pop()
        begun.end = self.now()

    def begin_unit_backward(self, unit: str) -> None:
        """Add the backward of a unit, which ends with that of the next one or with the pass."""
        self.end_backward_pass()
        self._backward = self.add(COMPUTE, BACKWARD, unit)

    def end_backward_pass(self) -> None:
        """Record the end of the last unit's backward."""
        if self._backward is not None:
            self._backward.end = self.now()
            self._backward = None

    def storage(self, action: str, tensor: torch.Tensor) -> None:
        """Add an allocation or a release of flat storage."""
        entry = self.add(STORAGE, action, operands=(tensor,))
        entry.end = entry.begin

    def begin_collective(
        self,
        kind: str,
        name: str,
        operands: Operands,
        group: Group,
    ) -> TraceEntry:
        """Add a collective.

        Args:
            kind: its track.
            name: the operation.
            operands: whole tensors, such as the result of an all-gather.
            group: the process group.
        """
        entry = self.add(kind, name, operands=operands)
        if group not in self._ranks:
            self._ranks[group] = tuple(dist.get_process_group_ranks(group))
        entry.ranks = self._ranks[group]
        entry.number = self._num_collectives[entry.ranks]
        self._num_collectives[entry.ranks] += 1
        return entry

    def end_collective(self, begun: TraceEntry) -> None:
        """Record the end of a collective."""
        begun.end = self.now()
