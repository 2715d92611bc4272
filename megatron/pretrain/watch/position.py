# SPDX-License-Identifier: Apache-2.0
"""The position of a rank: the collective or the line of code that its main thread is in.

It is read from another thread, out of the stack that Python keeps anyway, so training pays nothing
for it. The engine adds the unit at which it worked last.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
import traceback
from dataclasses import dataclass
from types import FrameType

import torch

from megatron.fsdp.engine import observe

ENGINE = os.path.join("megatron", "fsdp", "engine", "")
COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
WAITS = (".wait(", ".item()", ".tolist()", "synchronize(")
"""Calls, as they are written, in which a thread waits for a collective or for the device."""
WORKS = {
    "shard": "broadcast",
    "broadcast": "broadcast",
    "unshard": "all-gather",
    "wait for unshard": "all-gather",
    "reduce": "gradient reduction",
    "wait for reduce": "gradient reduction",
}
"""Work of the engine that communicates -> its collective."""
METHODS = {
    "shard_parameter": "broadcast",
    "broadcast": "broadcast",
    "unshard": "all-gather",
    "wait_for_unshard": "all-gather",
    "reduce": "gradient reduction",
    "advance_reduce": "gradient reduction",
}
"""Methods of parameter groups and their gradients -> the collective in which they may fail."""
TORCH = os.path.dirname(torch.__file__)
STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]


class LastWork(observe.Observer):
    """The work of the engine that began last, and its unit; another thread reads it."""

    def __init__(self) -> None:
        self.position = ("", "")

    def begin_work(self, unit: str, work: str) -> None:
        """Note the work."""
        self.position = (work, unit)

    def begin_backward(self, unit: str) -> None:
        """Note the backward."""
        self.position = (observe.BACKWARD, unit)


last_work = LastWork()


@dataclass(frozen=True)
class Position:
    """A position of a rank.

    Attributes:
        collective: in which the rank is or for which it waits; empty if it is in none.
        place: file, line and function, the innermost outside of torch.
        work: of the engine that began last, with its unit; empty before there is any.
    """

    collective: str
    place: str
    work: str

    @property
    def key(self) -> str:
        """The part that changes when the rank gets on: the collective, or else the work."""
        return self.collective or self.work


def current() -> Position:
    """Return the position of the main thread."""
    return _position(_frames(_main_frame()))


def of_error(error: BaseException) -> Position:
    """Return the position at which an error, or its first cause, was raised.

    The engine has done other work since, when the exception left its forward or backward.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    position = _position(traceback.extract_tb(error.__traceback__)[::-1])
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        unit = getattr(owner, "unit_name", getattr(owner, "_unit_name", None))
        collective = METHODS.get(frame.f_code.co_name)
        if unit is not None and collective and ENGINE in frame.f_code.co_filename:
            return Position(f"the {collective} of unit {unit!r}", position.place, position.work)
    return position


def is_inside(filename: str) -> bool:
    """Return True if the main thread is in a function of a file, or in one that this has called."""
    return any(frame.filename == filename for frame in _frames(_main_frame()))


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _position(frames: list[traceback.FrameSummary]) -> Position:
    """Return the position that a stack shows, innermost frame first."""
    name, unit = last_work.position
    work = f"{name} of unit {unit!r}" if name else ""
    if not frames:
        return Position("", "unknown", work)
    place = next((frame for frame in frames if not _is_of_torch(frame.filename)), frames[0])
    return Position(_collective(frames, place), _shown(place), work)


def _frames(frame: FrameType | None) -> list[traceback.FrameSummary]:
    """Return the stack of a thread, innermost first, without reading the sources."""
    frames = []
    while frame is not None:
        code = frame.f_code
        frames.append(
            traceback.FrameSummary(
                code.co_filename, frame.f_lineno, code.co_name, lookup_line=False
            )
        )
        frame = frame.f_back
    return frames


def _collective(frames: list[traceback.FrameSummary], place: traceback.FrameSummary) -> str:
    """Return the collective that a stack is in; empty for none.

    Args:
        frames: the stack, innermost first.
        place: its innermost frame outside of torch.
    """
    innermost = frames[0]
    names = [frame.name for frame in frames if frame.filename.endswith(COLLECTIVES)]
    line = linecache.getline(innermost.filename, innermost.lineno or 0)
    if not names and (innermost is not place or not any(call in line for call in WAITS)):
        return ""
    work, unit = last_work.position
    if ENGINE in place.filename and work in WORKS:
        return f"the {WORKS[work]} of unit {unit!r}"
    return f"{names[-1]} at {_shown(place)}" if names else f"a wait at {_shown(place)}"


def _is_of_torch(filename: str) -> bool:
    """Return True for files of torch and of Python, which are not what a user looks for."""
    if "site-packages" in filename:
        return filename.startswith(TORCH)
    return filename.startswith((TORCH, STANDARD_LIBRARY, "<"))


def _shown(frame: traceback.FrameSummary) -> str:
    path = os.sep.join(frame.filename.split(os.sep)[-2:])
    return f"{path}:{frame.lineno} in {frame.name}"


def stacks() -> str:
    """Return the stacks of all threads of this process, for a file."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(
            f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame))
        )
    return "\n".join(parts)
