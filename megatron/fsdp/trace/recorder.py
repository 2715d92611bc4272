# SPDX-License-Identifier: Apache-2.0
"""The recorder of this rank's collectives, flat storage and units, and ranges for torch.profiler.

[Note: recorded times] Times are of the host. A collective begins when it is launched. On CPU it
ends when :meth:`~megatron.fsdp.engine.device.Pending.wait` returns, which may be later than its
last byte. On CUDA it ends when it is enqueued: device times are what torch.profiler is for.

[Note: microbatches] The microbatch of an entry is the number of forwards, or of backward passes,
that this rank has begun since the last step of the optimizer, counted from 0. Forwards in
evaluation count too, and so does every model chunk of a pipeline stage.

Nothing is recorded until :func:`start`. Until then every call from the engine ends after one or two
tests of module attributes, and the store of one, ``position``.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType

import torch
import torch.distributed as dist
from torch.autograd import profiler

from megatron.fsdp.engine.device import Collective, Work, in_backward

FORWARD, BACKWARD, STEP = "forward", "backward", "step"
"""Phases: a forward of any unit, a backward pass, and everything around the optimizer's step."""

COMPUTE, GATHER, REDUCE, OTHER, STORAGE = "compute", "gather", "reduce", "other", "storage"
"""Tracks: ranges of host work and of units; three kinds of collectives; flat buffers."""

NOTHING: AbstractContextManager[None] = nullcontext()


class CollectiveError(RuntimeError):
    """A collective that failed while it was recorded; the message has the last ones of this rank.

    The cause is torch's error.
    """


@dataclass(slots=True)
class TraceEntry:
    """One collective, range, allocation or release.

    Attributes:
        track: what it is; one of the tracks above.
        name: the operation, such as ``all_gather``, or the work, such as ``unshard``.
        unit: name of the unit; empty if it belongs to none.
        phase: in which it began.
        microbatch: see [Note: microbatches]; None in the phase ``step``.
        begin: in seconds since the epoch; see [Note: recorded times].
        end: None until it is over.
        ranks: of the process group, for a collective.
        number: of a collective among those of the same ranks since the start, from 0.
        num_bytes: of the whole operand, such as the result of an all-gather, or of the storage; of
            all operands, where a collective has several.
        dtype: of the operand, such as ``bfloat16``, or ``bfloat16+float32`` of several.
    """

    track: str
    name: str
    unit: str
    phase: str
    microbatch: int | None
    begin: float
    end: float | None = None
    ranks: tuple[int, ...] = ()
    number: int = 0
    num_bytes: int = 0
    dtype: str = ""

    @property
    def is_collective(self) -> bool:
        """True if several ranks took part."""
        return self.track in (GATHER, REDUCE, OTHER)

    def __str__(self) -> str:
        text = (
            f"{self.name} {self.number} of ranks {list(self.ranks)}: {self.num_bytes} bytes"
            f" {self.dtype}, {self.unit or 'no unit'}, {self.phase}"
        )
        return text if self.microbatch is None else f"{text}, microbatch {self.microbatch}"


class Recorder:
    """Entries of this rank, in the order in which they began.

    Args:
        keep: keep this many of the last entries; None: keep all.

    Attributes:
        entries: the recorded entries.
        explain: returns the message of the error for a collective that failed, given torch's error.
    """

    def __init__(self, keep: int | None = None):
        self.entries: deque[TraceEntry] = deque(maxlen=keep)
        self.explain: Callable[[TraceEntry, Exception], str] = _explain_alone
        self._num_passes = {FORWARD: 0, BACKWARD: 0}
        self._num_collectives: Counter[tuple[int, ...]] = Counter()
        self._ranks: dict[dist.ProcessGroup | None, tuple[int, ...]] = {}
        self._offset = time.time() - time.perf_counter()
        self._backward: TraceEntry | None = None

    @property
    def collectives(self) -> list[TraceEntry]:
        """The recorded collectives."""
        # Copied first, because another thread may ask while entries are added.
        return [entry for entry in list(self.entries) if entry.is_collective]

    def now(self) -> float:
        """Return the time in seconds since the epoch, from a clock that never goes back."""
        return self._offset + time.perf_counter()

    def begin(
        self, track: str, name: str, unit: str, operands: Sequence[torch.Tensor] = ()
    ) -> TraceEntry:
        """Add an entry that begins now."""
        phase = current_phase()
        passes = self._num_passes.get(phase)
        entry = TraceEntry(
            track,
            name,
            unit,
            phase,
            None if passes is None else max(passes - 1, 0),
            self.now(),
        )
        entry.num_bytes = sum(each.numel() * each.element_size() for each in operands)
        dtypes = [str(each.dtype).removeprefix("torch.") for each in operands]
        entry.dtype = "+".join(dict.fromkeys(dtypes))
        self.entries.append(entry)
        return entry

    def begin_collective(
        self,
        track: str,
        name: str,
        unit: str,
        operands: Sequence[torch.Tensor],
        group: dist.ProcessGroup | None,
    ) -> TraceEntry:
        """Add a collective over the ranks of ``group`` that begins now."""
        entry = self.begin(track, name, unit, operands)
        if group not in self._ranks:
            self._ranks[group] = tuple(dist.get_process_group_ranks(group))
        entry.ranks = self._ranks[group]
        entry.number = self._num_collectives[entry.ranks]
        self._num_collectives[entry.ranks] += 1
        return entry

    def begin_pass(self, phase: str) -> None:
        """Count a forward of a root, or a backward pass."""
        self._num_passes[phase] += 1

    def begin_step(self) -> None:
        """Count microbatches from 0 again."""
        self._num_passes = dict.fromkeys(self._num_passes, 0)

    def begin_backward(self, unit: str) -> None:
        """Record that a unit is in backward, until the next unit is or the pass ends."""
        self.end_backward()
        self._backward = self.begin(COMPUTE, BACKWARD, unit)

    def end_backward(self) -> None:
        """Record that no unit is in backward any more."""
        if self._backward is not None:
            self._backward.end = self.now()
            self._backward = None


position = ("", "")
"""The work that this rank has begun last, and its unit: for messages about ranks that hang.

It is stored whether anything is recorded or not, and another thread reads it."""

_recorder: Recorder | None = None
_forwards: dict[Hashable, _Range] = {}  # the calls of units under way
_units: list[str] = []  # of the ranges under way, innermost last


def start(recorder: Recorder) -> None:
    """Record everything from now on.

    Raises:
        RuntimeError: if a recorder has been started before and not stopped.
    """
    global _recorder
    if _recorder is not None:
        raise RuntimeError("a trace is being recorded already: only one can be at a time")
    _recorder = recorder


def stop() -> None:
    """Stop recording."""
    global _recorder
    _recorder = None


def current_phase() -> str:
    """Return the phase in which the engine is."""
    if in_backward():
        return BACKWARD
    return FORWARD if _forwards else STEP


def last_lines(recorder: Recorder, count: int = 20) -> str:
    """Return a line for each of the last collectives, the latest last."""
    lines = []
    for entry in recorder.collectives[-count:]:
        state = "" if entry.end is not None else " (not over)"
        lines.append(f"  {entry}{state}")
    return "\n".join(lines)


def _explain_alone(entry: TraceEntry, error: Exception) -> str:
    return f"failed: {entry}: {error}"


# ---- ranges of host work


class _Range(AbstractContextManager[None]):
    """Work for a unit, on the host: an entry of the recorder and a range of torch.profiler."""

    def __init__(self, unit: str, work: str):
        self._unit = unit
        self._work = work
        self._entry: TraceEntry | None = None
        self._profiled: profiler.record_function | None = None

    def __enter__(self) -> None:
        _units.append(self._unit)
        if profiler._is_profiler_enabled:
            name = f"FSDP::{self._work} ({self._unit}, {current_phase()})"
            self._profiled = profiler.record_function(name)
            self._profiled.__enter__()
        if _recorder is not None:
            self._entry = _recorder.begin(COMPUTE, self._work, self._unit)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _units.pop()
        if self._profiled is not None:
            self._profiled.__exit__(kind, error, traceback)
        if self._entry is not None and _recorder is not None:
            self._entry.end = _recorder.now()


def named(unit: str, work: str) -> AbstractContextManager[None]:
    """Return a context for work on a unit; collectives and storage inside it are the unit's."""
    global position
    position = (work, unit)
    if _recorder is None and not profiler._is_profiler_enabled:
        return NOTHING
    return _Range(unit, work)


def begin_forward(call: Hashable, unit: str, is_root: bool) -> None:
    """Note that ``call``, a forward of ``unit``, begins."""
    global position
    position = (FORWARD, unit)
    if _recorder is None and not profiler._is_profiler_enabled:
        return
    if _recorder is not None and is_root and not in_backward():
        _recorder.begin_pass(FORWARD)
    _forwards[call] = _Range(unit, FORWARD)
    _forwards[call].__enter__()


def end_forward(call: Hashable) -> None:
    """Note that ``call`` has ended."""
    if _forwards:
        forward = _forwards.pop(call, None)
        if forward is not None:
            forward.__exit__(None, None, None)


def begin_backward(unit: str) -> None:
    """Note that the backward of a call of ``unit`` begins."""
    global position
    position = (BACKWARD, unit)
    if _recorder is not None:
        _recorder.begin_backward(unit)


def begin_backward_pass() -> None:
    """Note that a backward pass has reached a model."""
    if _recorder is not None:
        _recorder.begin_pass(BACKWARD)


def end_backward_pass() -> None:
    """Note that the backward pass is over."""
    if _recorder is not None:
        _recorder.end_backward()


def begin_step() -> None:
    """Note that the optimizer has made a step."""
    if _recorder is not None:
        _recorder.begin_step()


# ---- storage and collectives


def storage(name: str, tensor: torch.Tensor) -> None:
    """Note that the storage of a flat tensor is allocated or released."""
    if _recorder is not None:
        entry = _recorder.begin(STORAGE, name, _units[-1] if _units else "", (tensor,))
        entry.end = entry.begin


class _Observation(AbstractContextManager[None]):
    """A collective that is recorded. If it fails, the error tells the last ones of this rank."""

    def __init__(
        self,
        recorder: Recorder,
        track: str,
        name: str,
        operands: Sequence[torch.Tensor],
        group: dist.ProcessGroup | None,
    ):
        self._recorder = recorder
        unit = _units[-1] if _units else ""
        self.entry = recorder.begin_collective(track, name, unit, operands, group)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            raise CollectiveError(self._recorder.explain(self.entry, error)) from error
        self.entry.end = self._recorder.now()


class _ObservedWork:
    """A collective under way whose end is recorded."""

    def __init__(self, observation: _Observation, work: Work):
        self._observation = observation
        self._work = work

    def wait(self) -> None:
        """Wait for the collective to finish."""
        with self._observation:
            self._work.wait()


def observed(
    track: str,
    name: str,
    operands: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    collective: Collective,
) -> Collective:
    """Return ``collective``, recorded if a recorder has been started.

    Args:
        track: ``GATHER`` or ``REDUCE``.
        name: of the operation.
        operands: the whole tensors: the results of a gather, the operand of a reduction.
        group: of the collective; None: all ranks.
        collective: starts it.
    """
    recorder = _recorder
    if recorder is None:
        return collective

    def start_observed(asynchronous: bool) -> Work | None:
        observation = _Observation(recorder, track, name, operands, group)
        with observation:
            work = collective(asynchronous)
        if work is None:
            return None
        observation.entry.end = None  # it is over when somebody has waited for it
        return _ObservedWork(observation, work)

    return start_observed


def observing(
    name: str, operand: torch.Tensor | None, group: dist.ProcessGroup | None
) -> AbstractContextManager[None]:
    """Return a context for a synchronous collective, recorded if a recorder has been started."""
    if _recorder is None:
        return NOTHING
    operands = () if operand is None else (operand,)
    return _Observation(_recorder, OTHER, name, operands, group)
