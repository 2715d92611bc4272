# SPDX-License-Identifier: Apache-2.0
"""Reasons to stop a run before its last iteration: signals and a time limit."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

INTERRUPTED = 2.0**16
"""The vote of a rank that was sent SIGINT: more than all other votes together."""


@dataclass
class StopRequest:
    """A request to stop, by this rank and as agreed between all ranks."""

    exit_duration_in_mins: int | None = None
    """Minutes after which this rank asks to stop; None for no limit."""
    started: float = field(default_factory=time.monotonic)
    """Start of the run, in seconds of ``time.monotonic``."""
    terminated: bool = False
    """This rank was sent SIGTERM."""
    interrupted_here: bool = False
    """This rank was sent SIGINT."""
    agreed: bool = False
    """Some rank asked to stop in the last step, and every rank knows it."""
    interrupted: bool = False
    """Some rank was sent SIGINT, and every rank knows it: nothing more is saved."""
    _before: dict[int, Any] = field(default_factory=dict)
    """Handlers of signals before this object watched them."""

    def watch_sigterm(self) -> None:
        """Take SIGTERM, which batch systems send before they end a job, as a request to stop."""
        self._watch(signal.SIGTERM, "terminated")

    def watch_sigint(self) -> None:
        """Take SIGINT, which Ctrl-C sends, as a request to stop without saving."""
        self._watch(signal.SIGINT, "interrupted_here")

    def _watch(self, number: int, field: str) -> None:
        def request(number: int, frame: FrameType | None) -> None:
            setattr(self, field, True)

        self._before.setdefault(number, signal.signal(number, request))

    def forget_signals(self) -> None:
        """Restore the handlers of before: nothing reads the requests any more.

        SIGTERM is kept until the program ends where the run stops because of a request: ranks get
        the signal at different times, and it may not interrupt the work after the loop.
        """
        if self.terminated or self.agreed:
            self._before.pop(signal.SIGTERM, None)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @property
    def vote(self) -> float:
        """This rank's term of a sum over all ranks, which is 0 if no rank has a reason to stop."""
        if self.interrupted_here:
            return INTERRUPTED
        if self.terminated or not self.exit_duration_in_mins:
            return float(self.terminated)
        return float(time.monotonic() - self.started > self.exit_duration_in_mins * 60)

    def count(self, votes: float) -> None:
        """Store the result of a vote, given the sum over all ranks."""
        self.agreed = votes > 0
        self.interrupted = votes >= INTERRUPTED
