# SPDX-License-Identifier: Apache-2.0
"""The position of a rank: what its main thread does or waits for.

The thread of the watch derives it from the stack that Python keeps anyway, the work that the engine
began last, and the phase that the training loop sets. So it costs training next to nothing.
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
"""Part of the path of every file of the engine."""
COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
"""End of the path of torch's file of collectives."""
GATES = os.path.join("checkpoints", "entered_together.py")
"""End of the path of the gates, which wait before collectives of torch."""
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

READING = "reading data"
"""Phase of a run that waits for its data loader."""
SAVING = "saving"
"""Phase of a run that saves a checkpoint."""
phase = ""
"""The phase of this process, :data:`READING` or :data:`SAVING`; empty in any other."""


@contextmanager
def during(name: str) -> Iterator[None]:
    """Set the phase inside the context, on the main thread."""
    global phase
    before = phase
    phase = name
    try:
        yield
    finally:
        phase = before


class LastWork(observe.Observer):
    """The work of the engine that began last; the thread of the watch reads it.

    Attributes:
        work: the work and its unit; empty before there is any.
        failed: the last collective of a unit that has failed, and its error.
    """

    def __init__(self) -> None:
        self.work = ("", "")
        self.failed: tuple[str, BaseException | None] = ("", None)

    def begin_work(self, unit: str, work: str) -> None:
        """Record work on a unit."""
        self.work = (work, unit)

    def begin_unit_backward(self, unit: str) -> None:
        """Record the backward of a unit."""
        self.work = (observe.BACKWARD, unit)

    def begin_collective(
        self,
        kind: str,
        name: str,
        operands: observe.Operands,
        group: observe.Group,
    ) -> str:
        """Return the name in messages of the collective that begins.

        Args:
            kind: not used: the collective belongs to the last work.
            name: not used.
            operands: not used.
            group: not used.

        Returns:
            Empty if the last work does not communicate.
        """
        return self.collective()

    def fail_collective(self, begun: str, error: Exception) -> None:
        """Record that the collective ``begun`` has failed."""
        self.failed = (begun, error)

    def collective(self) -> str:
        """Return the collective of the last work; empty if that does not communicate."""
        work, unit = self.work
        if work not in WORKS:
            return ""
        return f"the {WORKS[work]} of unit {unit!r}"


last_work = LastWork()
"""The observer of this process, which the watch adds to the engine's."""


@dataclass(frozen=True)
class Position:
    """A position of a rank.

    Attributes:
        collective: collective in which the rank is or for which it waits; empty if it is in none.
        place: file, line and function of the innermost frame outside of torch.
        work: work of the engine that began last, with its unit; empty before there is any.
    """

    collective: str
    place: str
    work: str


def current() -> Position:
    """Return the position of the main thread."""
    main_thread = threading.main_thread()
    frame = sys._current_frames().get(main_thread.ident or 0)
    frames = []
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    if not frames:  # the interpreter is shutting down
        return Position("", "the end of the program", "")
    frame, _ = _place(frames)
    collective = ""
    if ENGINE in frame.f_code.co_filename:
        collective = last_work.collective()
    return _position(frames, collective)


def of_error(error: BaseException) -> Position:
    """Return the position at which an error, or its first cause, was raised.

    The engine has begun other work since, because the exception has left its forward or backward.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    frames = list(traceback.walk_tb(error.__traceback__))
    frames.reverse()  # innermost first
    collective, failure = last_work.failed
    if failure is not error:
        collective = ""
    return _position(frames, collective)


def _position(frames: list[tuple[FrameType, int]], collective: str) -> Position:
    """Return the position that a stack shows.

    Args:
        frames: frames of the stack with the lines that they are at, innermost first.
        collective: the engine's collective that the stack is in; empty if it is in none.
    """
    frame, line = _place(frames)
    filename = frame.f_code.co_filename
    short_name = os.sep.join(filename.split(os.sep)[-2:])
    place = f"{short_name}:{line} in {frame.f_code.co_name}"
    if not collective:
        function = _function_of_torch(frames)
        if function:
            collective = f"{function} at {place}"
        elif filename.startswith(tuple(megatron.__path__)) and phase != READING:
            # Code of Megatron stays at a line only to wait, for a peer or for the device.
            collective = f"a wait at {place}"
    work, unit = last_work.work
    if work:
        work = f"{work} of unit {unit!r}"
    return Position(collective, place, work)


def _function_of_torch(frames: list[tuple[FrameType, int]]) -> str:
    """Return the collective of torch that a stack has called; empty if it has called none."""
    function = ""
    for frame, _ in frames:
        if frame.f_code.co_filename.endswith(COLLECTIVES):
            function = frame.f_code.co_name  # the last one is the outermost call
    return function


def _place(frames: list[tuple[FrameType, int]]) -> tuple[FrameType, int]:
    """Return the innermost frame outside of torch, with its line."""
    for frame, line in frames:
        if not _is_of_torch(frame):
            return frame, line
    return frames[0]


def _is_of_torch(frame: FrameType) -> bool:
    """Return True for files of torch and Python, and for the gates before torch's collectives.

    Messages name none of them, since users look for the line of their own code that called them.
    """
    filename = frame.f_code.co_filename
    if filename.endswith(GATES):
        return True
    if "site-packages" in filename:
        return filename.startswith(TORCH)
    return filename.startswith((TORCH, STANDARD_LIBRARY, "<"))


def stacks() -> str:
    """Return the stacks of all threads of this process as text."""
    names = {}
    for thread in threading.enumerate():
        names[thread.ident] = thread.name
    parts = []
    for ident, frame in sys._current_frames().items():
        text = "".join(traceback.format_stack(frame))
        parts.append(f"thread {names.get(ident, ident)}:\n{text}")
    return "\n".join(parts)
