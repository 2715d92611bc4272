# SPDX-License-Identifier: Apache-2.0
"""The time that a rank spends in FSDP's collectives, from the recorder of the engine.

Times are of the host, see [Note: recorded times] in :mod:`megatron.fsdp.trace.recorder`: from the
launch of a collective until this rank has waited for it, what it computes meanwhile included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.timers import Timers

from megatron.fsdp.engine import observe
from megatron.fsdp.engine.observe import GATHER, REDUCE
from megatron.fsdp.trace.recorder import Recorder, TraceEntry

NAMES = ("fsdp-all-gather", "fsdp-reduce-scatter", "fsdp-all-reduce")
"""Timers, each of the operation of that name."""


class CollectiveTimes:
    """The sums of the times of all-gathers, reduce-scatters and all-reduces of this rank."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._open: list[TraceEntry] = []  # those under way when they were last counted
        self._seconds = dict.fromkeys(NAMES, 0.0)

    def start(self) -> None:
        """Begin to record."""
        self._recorder = Recorder()
        observe.add(self._recorder)

    def stop(self) -> None:
        """End recording."""
        if self._recorder is not None:
            self.count()
            observe.remove(self._recorder)
            self._recorder = None

    @contextmanager
    def left_to_profile(self) -> Iterator[list[Recorder]]:
        """Leave recording to a profile inside the context: there is one recorder at a time.

        Yields:
            A list to put the recorder of the profile into. Its entries are counted at the end.
        """
        was_recording = self._recorder is not None
        self.stop()
        profiles: list[Recorder] = []
        try:
            yield profiles
        finally:
            for profile in profiles:
                self._add(self._open + list(profile.entries))
            if was_recording:
                self.start()

    def count(self) -> None:
        """Add up what has ended, and forget it, so that entries do not pile up."""
        if self._recorder is not None:
            entries = self._open + list(self._recorder.entries)
            self._recorder.entries.clear()
            self._add(entries)

    def discard(self) -> None:
        """Forget what has been recorded since the last count: it is not part of an iteration."""
        if self._recorder is not None:
            self._recorder.entries.clear()

    def add_to(self, timers: Timers) -> None:
        """Add the times since the last call to the timers of :data:`NAMES`."""
        self.count()
        for name, seconds in self._seconds.items():
            timer = timers(name, log_level=2)
            timer.set_elapsed(timer.elapsed(reset=False) + seconds)
        self._seconds = dict.fromkeys(NAMES, 0.0)

    def _add(self, entries: list[TraceEntry]) -> None:
        self._open = []
        for entry in entries:
            if entry.track not in (GATHER, REDUCE):
                continue
            if entry.end is None:
                self._open.append(entry)
            else:
                self._seconds[f"fsdp-{entry.name.replace('_', '-')}"] += entry.end - entry.begin
