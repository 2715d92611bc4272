# SPDX-License-Identifier: Apache-2.0
"""Reasons to stop a run before its last iteration: a signal and a time limit."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from types import FrameType


@dataclass
class StopRequest:
    """A request to stop: what this rank asks for, and what all ranks have agreed on."""

    exit_duration_in_mins: int | None = None
    """Minutes after which this rank asks to stop; None for no limit."""
    started: float = field(default_factory=time.monotonic)
    """Start of the run, in seconds of ``time.monotonic``."""
    terminated: bool = False
    """This rank was sent SIGTERM."""
    agreed: bool = False
    """Some rank asked to stop in the last step, and every rank knows it."""

    def watch_sigterm(self) -> None:
        """Take SIGTERM, which batch systems send before they end a job, as a request to stop."""

        def request(number: int, frame: FrameType | None) -> None:
            self.terminated = True

        signal.signal(signal.SIGTERM, request)

    @property
    def asked_here(self) -> bool:
        """True if this rank has a reason to stop, which others may not have."""
        if self.terminated or not self.exit_duration_in_mins:
            return self.terminated
        return time.monotonic() - self.started > self.exit_duration_in_mins * 60
