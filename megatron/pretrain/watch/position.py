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

from megatron.fsdp.trace import recorder

ENGINE = os.path.join("megatron", "fsdp", "")
COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
WORKS = ("shard", "broadcast", "unshard", "wait for unshard", "reduce", "wait for reduce")
"""Work of the engine that communicates."""
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
    work, unit = recorder.position
    communicates = work in WORKS and ENGINE in _place(frames)[0].f_code.co_filename
    return _position(frames, unit if communicates else "")


def of_error(error: BaseException) -> Position:
    """Return the position at which an error, or its first cause, was raised.

    The engine has done other work since, when the exception left its forward or backward. What has
    a unit is the group of parameters, or its gradients, whose collective has failed.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    frames = list(traceback.walk_tb(error.__traceback__))[::-1]
    inside = [frame for frame, _ in frames if ENGINE in frame.f_code.co_filename]
    owners = [frame.f_locals.get("self") for frame in inside]
    units = [getattr(owner, "unit_name", getattr(owner, "_unit_name", "")) for owner in owners]
    return _position(frames, next(filter(None, units), ""))


def _position(frames: list[tuple[FrameType, int]], unit: str) -> Position:
    """Return the position that a stack shows, innermost frame first.

    ``unit`` is the unit whose collective it is in, empty if it is in none of the engine's.
    """
    name, last_unit = recorder.position
    work = f"{name} of unit {last_unit!r}" if name else ""
    frame, line = _place(frames)
    filename = frame.f_code.co_filename
    place = f"{os.sep.join(filename.split(os.sep)[-2:])}:{line} in {frame.f_code.co_name}"
    calls = [
        frame.f_code.co_name
        for frame, _ in frames
        if frame.f_code.co_filename.endswith(COLLECTIVES)
    ]
    collective = ""
    if unit:
        collective = f"a collective of unit {unit!r}"
    elif calls:
        collective = f"{calls[-1]} at {place}"
    # Code of Megatron stays at a line only to wait, for a peer or for the device.
    elif filename.startswith(tuple(megatron.__path__)) and phase != READING:
        collective = f"a wait at {place}"
    return Position(collective, place, work)


def _place(frames: list[tuple[FrameType, int]]) -> tuple[FrameType, int]:
    """Return the innermost frame outside of torch, with its line."""
    return next((pair for pair in frames if not _is_of_torch(pair[0])), frames[0])


def _is_of_torch(frame: FrameType) -> bool:
    """Return True for files of torch and of Python, which are not what a user looks for."""
    filename = frame.f_code.co_filename
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
