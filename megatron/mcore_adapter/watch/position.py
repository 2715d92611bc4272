# SPDX-License-Identifier: Apache-2.0
"""The position of a rank: what its main thread does or waits for.

Another thread reads it: out of the stack that Python keeps anyway, the work that the engine has
begun last, and the phase that the loop notes. So training pays next to nothing for it.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import megatron.core
import torch

from megatron.fsdp.engine import observe

ENGINE = os.path.join("megatron", "fsdp", "")
COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
GATES = os.path.join("checkpoints", "entered_together.py")
WORKS = {
    "shard": "broadcast",
    "broadcast": "broadcast",
    "unshard": "all-gather",
    "wait for unshard": "all-gather",
    "reduce": "gradient reduction",
    "wait for reduce": "gradient reduction",
}
"""Work of the engine that communicates -> its collective."""
TORCH = os.path.dirname(torch.__file__)
STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]

READING, SAVING = "reading data", "saving"
phase = ""
"""The phase of the run, if it is one of the above."""


@contextmanager
def during(name: str) -> Iterator[None]:
    """Note a phase inside the context, on the main thread."""
    global phase
    before, phase = phase, name
    try:
        yield
    finally:
        phase = before


class LastWork(observe.Observer):
    """The work of the engine that began last; another thread reads it.

    Attributes:
        work: the work, and the unit that it is for.
        failed: the collective of a unit that has failed, and the error.
    """

    def __init__(self) -> None:
        self.work = ("", "")
        self.failed: tuple[str, BaseException | None] = ("", None)

    def begin_work(self, unit: str, work: str) -> None:
        """Note work on a unit."""
        self.work = (work, unit)

    def begin_backward(self, unit: str) -> None:
        """Note the backward of a unit."""
        self.work = (observe.BACKWARD, unit)

    def begin_collective(
        self, kind: str, name: str, operands: observe.Operands, group: observe.Group
    ) -> str:
        """Return the collective as messages name it; empty if it is of no unit."""
        return self.collective()

    def fail_collective(self, begun: str, error: Exception) -> None:
        """Note the collective that has failed."""
        self.failed = (begun, error)

    def collective(self) -> str:
        """Return the collective of the last work; empty if that does not communicate."""
        work, unit = self.work
        return f"the {WORKS[work]} of unit {unit!r}" if work in WORKS else ""


last_work = LastWork()
"""The observer of this process, which the watch adds to the engine's."""


@dataclass(frozen=True)
class Position:
    """A position of a rank.

    Attributes:
        collective: collective in which the rank is or for which it waits; empty if it is in none.
        place: file, line and function, the innermost outside of torch.
        work: work of the engine that began last, with its unit; empty before there is any.
    """

    collective: str
    place: str
    work: str


def current() -> Position:
    """Return the position of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = []
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    if not frames:  # Python ends the process
        return Position("", "the end of the program", "")
    is_inside = ENGINE in _place(frames)[0].f_code.co_filename
    return _position(frames, last_work.collective() if is_inside else "")


def of_error(error: BaseException) -> Position:
    """Return the position at which an error, or its first cause, was raised.

    The engine has done other work since, when the exception left its forward or backward.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    frames = list(traceback.walk_tb(error.__traceback__))[::-1]
    collective, failure = last_work.failed
    return _position(frames, collective if failure is error else "")


def _position(frames: list[tuple[FrameType, int]], collective: str) -> Position:
    """Return the position that a stack shows, innermost frame first.

    ``collective`` is the engine's collective that it is in, empty if it is in none.
    """
    name, unit = last_work.work
    work = f"{name} of unit {unit!r}" if name else ""
    frame, line = _place(frames)
    filename = frame.f_code.co_filename
    place = f"{os.sep.join(filename.split(os.sep)[-2:])}:{line} in {frame.f_code.co_name}"
    calls = [
        frame.f_code.co_name
        for frame, _ in frames
        if frame.f_code.co_filename.endswith(COLLECTIVES)
    ]
    # Code of Megatron stays at a line only to wait, for a peer or for the device.
    waits = filename.startswith(tuple(megatron.__path__)) and phase != READING
    if not collective and calls:
        collective = f"{calls[-1]} at {place}"
    elif not collective and waits:
        collective = f"a wait at {place}"
    return Position(collective, place, work)


def _place(frames: list[tuple[FrameType, int]]) -> tuple[FrameType, int]:
    """Return the innermost frame outside of torch, with its line."""
    return next((pair for pair in frames if not _is_of_torch(pair[0])), frames[0])


def _is_of_torch(frame: FrameType) -> bool:
    """Return True for files of torch and of Python, which are not what a user looks for.

    And for the gates before collectives of torch.
    """
    filename = frame.f_code.co_filename
    if filename.endswith(GATES):
        return True
    if "site-packages" in filename:
        return filename.startswith(TORCH)
    return filename.startswith((TORCH, STANDARD_LIBRARY, "<"))


def stacks() -> str:
    """Return the stacks of all threads of this process, for a file."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        text = "".join(traceback.format_stack(frame))
        parts.append(f"thread {names.get(ident, ident)}:\n{text}")
    return "\n".join(parts)
