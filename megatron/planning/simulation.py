# SPDX-License-Identifier: Apache-2.0
"""The simulation of a training step of one rank, driven by the engine itself.

[Note: the simulation] The model is on the meta device, and its process groups pretend: both exist
in torch. The engine shards it as it shards any model, so its units, layouts, schedule, prefetching
and recorder are those of a run. Only two things are replaced. The forward of a unit's module uses
all of its parameters and computes nothing (``skeleton.py``), but the clock of the compute stream
advances by its seconds. And a collective, which a stream of the engine would run, occupies the
stream of that name for its seconds: it begins when the stream is free and compute has reached it,
and compute waits for its end where the engine waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from megatron.fsdp import ShardedModule
from megatron.fsdp.engine import observe
from megatron.fsdp.engine.device import Collective, Pending
from megatron.fsdp.engine.observe import OTHER
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.trace.recorder import COMPUTE, STORAGE, Recorder, TraceEntry

CollectiveSeconds = Callable[[TraceEntry], float]
"""Returns the seconds of a recorded collective."""

HOST = "host"
"""The streams of copies between the device and the host, as one row of a picture."""


@dataclass(frozen=True)
class Interval:
    """Work on a stream.

    Attributes:
        stream: ``compute``, ``gather``, ``reduce`` or ``host``.
        name: of the work.
        unit: name of its unit.
        begin: in seconds.
        end: in seconds.
    """

    stream: str
    name: str
    unit: str
    begin: float
    end: float


class Copy(NamedTuple):
    """A copy of a shard between the device and the host."""

    launched: float  # in seconds of the step
    num_bytes: int
    seconds: float


@dataclass
class StepResult:
    """A simulated step, between two steps of the optimizer.

    Attributes:
        entries: everything that the engine's recorder has recorded.
        intervals: what the streams have done.
        memory: (seconds, bytes) after every change.
        backward_ends: seconds at which the backward passes have ended.
        copies: between the device and the host.
        seconds: from its begin to its end, where gathers for the next step may have started.
    """

    entries: list[TraceEntry] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    backward_ends: list[float] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def collectives(self) -> list[TraceEntry]:
        """The collectives, in the order in which they were started."""
        return [entry for entry in self.entries if entry.is_collective]

    @property
    def peak_bytes(self) -> int:
        """The most bytes at any time."""
        return max(num_bytes for _, num_bytes in self.memory)

    @property
    def compute_seconds(self) -> float:
        """Seconds in which compute was busy."""
        seconds = 0.0
        for interval in self.intervals:
            if interval.stream == COMPUTE:
                seconds += interval.end - interval.begin
        return seconds

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which compute waited for communication, and for copies to the host."""
        return self.seconds - self.compute_seconds


def _no_seconds(entry: TraceEntry) -> float:
    return 0.0


class Simulator(Recorder):
    """The recorder of a simulated rank, and the clocks of its streams.

    Args:
        collective_seconds: the duration of collectives; None: they take none.
        contention: part of compute that is lost while a collective is under way.

    Attributes:
        compute: the clock of the compute stream, in seconds.
        num_bytes: allocated now.
        step: the step that is simulated.
    """

    def __init__(
        self, collective_seconds: CollectiveSeconds | None = None, contention: float = 0.0
    ):
        super().__init__()
        self._contention = contention
        self.compute = 0.0
        self.num_bytes = 0
        self.step = StepResult()
        self._step_began = 0.0
        self._collective_seconds = collective_seconds or _no_seconds
        self._streams: dict[str, float] = {}
        self._current: str | None = None  # the stream that work is given; None: compute's
        self.parts: dict[int, float] = {}  # of flat buffers that stand for fewer bytes, by storage

    def now(self) -> float:
        """Return the clock of the compute stream."""
        return self.compute

    # ---- the engine's calls

    def add(
        self,
        track: str,
        name: str,
        unit: str | None = None,
        operands: Sequence[torch.Tensor] = (),
    ) -> TraceEntry:
        """Record, and count the bytes of flat storage."""
        entry = super().add(track, name, unit, operands)
        part = 0.0
        for operand in operands:
            storage = operand.untyped_storage()
            part = max(part, self.parts.get(storage._cdata, 1.0))
        if operands:
            entry.num_bytes = int(entry.num_bytes * part)
        if track == STORAGE and name == "allocate":
            self.change_memory(entry.num_bytes)
        elif track == STORAGE:
            self.change_memory(-entry.num_bytes)
        return entry

    def begin_collective(
        self,
        kind: str,
        name: str,
        operands: observe.Operands,
        group: observe.Group,
    ) -> TraceEntry:
        """Record; compute waits for what is not on a stream of its own."""
        entry = super().begin_collective(kind, name, operands, group)
        if kind == OTHER:
            self.compute += self._collective_seconds(entry)
        return entry

    def launch(
        self,
        stream_name: str,
        *collectives: Collective,
        after: Pending | None = None,
    ) -> Pending:
        """Run collectives one after another on a stream, as the engine's streams do."""
        self._streams[stream_name] = self._when_free(stream_name)
        self._current = stream_name
        try:
            if after is not None:
                after.wait()
            for collective in collectives:
                collective(False)
                entry = self.entries[-1]
                entry.begin = self._streams[stream_name]
                entry.end = entry.begin + self._collective_seconds(entry)
                self._streams[stream_name] = entry.end
                self._add(stream_name, entry.name, entry.unit, entry.begin, entry.end)
        finally:
            self._current = None
        return self._pending(self._streams[stream_name])

    def _when_free(self, stream_name: str) -> float:
        """Return the time at which a stream begins what it is given now."""
        free = self._streams.get(stream_name, 0.0)
        return max(free, self.compute)

    def _pending(self, end: float) -> Pending:
        """Return work that ends at a time."""
        return Pending(partial(self._wait_until, end))

    def _wait_until(self, end: float) -> None:
        """Let the current stream wait."""
        if self._current is None:
            self.compute = max(self.compute, end)
            return
        reached = self._streams[self._current]
        self._streams[self._current] = max(reached, end)

    # ---- the model's calls

    def spend(
        self,
        seconds: float,
        name: str,
        unit: str,
    ) -> None:
        """Let compute work for some seconds, and longer while collectives run.

        Args:
            seconds: that the work takes alone.
            name: of the work.
            unit: name of its unit.
        """
        busy = 0.0
        for end in self._streams.values():
            shared = min(end - self.compute, seconds)
            busy = max(busy, shared)
        begin = self.compute
        self.compute += seconds + self._contention * busy
        self._add(COMPUTE, name, unit, begin, self.compute)

    def change_memory(self, num_bytes: int) -> None:
        """Count bytes that are allocated, or released if negative."""
        self.num_bytes += num_bytes
        self.step.memory.append((self.elapsed, self.num_bytes))

    def hold(self, tensor: torch.Tensor) -> None:
        """Count the bytes of a tensor until it is gone."""
        num_bytes = tensor.nbytes
        self.change_memory(num_bytes)
        released = weakref.finalize(tensor, self.change_memory, -num_bytes)
        released.atexit = False

    def copy(
        self,
        stream_name: str,
        num_bytes: int,
        seconds: float,
    ) -> Pending:
        """Copy between the device and the host on a stream.

        Args:
            stream_name: of the direction.
            num_bytes: that are copied.
            seconds: that it takes.
        """
        begin = self._when_free(stream_name)
        end = begin + seconds
        self._streams[stream_name] = end
        self._add(HOST, stream_name, "", begin, end)
        self.step.copies.append(Copy(self.elapsed, num_bytes, seconds))
        return self._pending(end)

    def wait_for_stream(self, stream_name: str) -> None:
        """Let compute wait for everything that a stream was given."""
        self._wait_until(self._streams.get(stream_name, 0.0))

    def _add(
        self,
        stream: str,
        name: str,
        unit: str,
        begin: float,
        end: float,
    ) -> None:
        interval = Interval(
            stream=stream,
            name=name,
            unit=unit,
            begin=begin - self._step_began,
            end=end - self._step_began,
        )
        self.step.intervals.append(interval)

    # ---- steps

    @property
    def elapsed(self) -> float:
        """Seconds of compute since the step began."""
        return self.compute - self._step_began

    def begin_simulated_step(self) -> None:
        """Begin another step. Gathers for it may be under way; the streams continue."""
        self.entries.clear()
        self._step_began = self.compute
        self.step = StepResult(memory=[(0.0, self.num_bytes)])

    def end_simulated_step(self) -> StepResult:
        """Return the step."""
        self.step.entries = list(self.entries)
        self.step.seconds = self.elapsed
        return self.step


@contextmanager
def simulating(
    collective_seconds: CollectiveSeconds | None = None, contention: float = 0.0
) -> Iterator[Simulator]:
    """Record by a simulator inside the context, in which models are sharded and trained.

    Args:
        collective_seconds: the duration of collectives; None: they take none.
        contention: part of compute that is lost while a collective is under way.
    """
    simulator = Simulator(collective_seconds, contention)
    observe.add(simulator)
    try:
        yield simulator
    finally:
        observe.remove(simulator)


def attach(
    simulator: Simulator,
    model: ShardedModule,
    parts: Mapping[ParamGroup, float] | None = None,
) -> None:
    """Let the streams of a sharded model be those of a simulator, and count its weights.

    The recorder was started before the model was sharded, so flat buffers are counted already.

    Args:
        simulator: the clock and the memory.
        model: sharded on the meta device.
        parts: of the bytes of a group's weights that are gathered, where they are stored as codes.
    """
    parts = parts or {}
    for group in model.groups:
        storage = group.compute.flat.untyped_storage()
        part = parts.get(group, 1.0)
        simulator.parts[storage._cdata] = part
        simulator.change_memory(int((part - 1.0) * storage.nbytes()))
        group.communicator.streams = simulator  # type: ignore[assignment]  # it launches alike
        simulator.change_memory(shard_bytes(group))
    # Nothing on meta is NaN; where gradients are checked, ranks still exchange that.
    model._gradients._find_nonfinite = list  # type: ignore[method-assign]


def shard_bytes(group: ParamGroup) -> int:
    """Return the device's bytes of shards of weights that are not in the flat buffer of a group."""
    shards = [group.compute_shard]
    if not group.memory.is_offloaded:
        shards.append(group.main_shard)
    storages: dict[int, int] = {}
    for shard in shards:
        storages[shard.untyped_storage()._cdata] = shard.nbytes
    storages.pop(group.compute.flat.untyped_storage()._cdata, None)
    return sum(storages.values())
