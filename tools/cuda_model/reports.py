# SPDX-License-Identifier: Apache-2.0
"""Reports of the model: what went wrong, the accesses concerned, and where they were launched."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from unittest.mock import patch

import torch
from torch.cuda import _sanitizer
from torch.cuda._sanitizer import Access

RACE = "race"
EARLY_RELEASE = "released before the last use"
RELEASED = "use of released memory"
UNAWAITED = "nobody waits for a collective"
HOST_READ = "host read without synchronisation"
HOST_WRITE = "host write without synchronisation"
NCCL_RULE = "NCCL rule"
ORDER = "order of collectives"
DEADLOCK = "deadlock"
CAPTURE = "rule of graph capture"
POOL = "rule of memory pools"

SHOWN_FRAMES = 6
MODEL = f"{Path(__file__).parent}/"
_COMMAND_LINE = f"{MODEL}__main__.py"
_TORCH = f"{Path(torch.__file__).parent}/"
_HIDDEN = (_TORCH, "/contextlib.py", "/multiprocessing/", "<frozen runpy>", MODEL)


@dataclass(frozen=True)
class Finding:
    """One use of memory, or of a collective, that CUDA or NCCL do not order or allow.

    Args:
        kind: one of the constants above.
        text: what happened, with both accesses.
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def name_of(code: CodeType) -> str:
    """Return the name of a function, with its class since Python 3.11."""
    return str(getattr(code, "co_qualname", code.co_name))


class CallStack:
    """The place of an access: functions and lines, from the innermost one; written out late.

    Torch's sanitizer would look every file up for every operator.
    """

    def __init__(self, frame: FrameType | None):
        self.places: list[tuple[CodeType, int]] = []
        while frame is not None:
            self.places.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back

    def reverse(self) -> None:
        """Do nothing: torch's sanitizer reverses the stacks that it has extracted."""

    def format(self) -> str:
        """Return the last places that are neither torch's nor the model's, outermost first."""
        shown = []
        for code, line in self.places:
            if code.co_filename == _COMMAND_LINE:
                break  # who has called it is none of the program's
            if not any(part in code.co_filename for part in _HIDDEN):
                shown.append((code, line))
        lines = []
        for code, line in reversed(shown[:SHOWN_FRAMES]):
            text = linecache.getline(code.co_filename, line).strip()
            place = f"{Path(code.co_filename).name}:{line} in {name_of(code)}"
            lines.append(f"  {place}: {text}\n")
        return "".join(lines)


def cheap_stacks() -> AbstractContextManager[object]:
    """Let torch's sanitizer keep :class:`CallStack` for each access, while the context lasts."""
    summary = SimpleNamespace(extract=lambda stack, lookup_lines: stack)
    stacks = SimpleNamespace(StackSummary=summary, walk_stack=CallStack)
    return patch.object(_sanitizer, "traceback", stacks)


def told(access: Access, streams: dict[int, str]) -> str:
    """Return one access in words: operator, stream, stack."""
    stream = streams.get(access.stream, f"stream {access.stream}")
    return f"{access.operator} on {stream}, {access.type}\n{access.stack_trace.format()}"


def told_together(what: str, accesses: Sequence[Access], streams: dict[int, str]) -> str:
    """Return what happened to a block, and the accesses concerned, in words."""
    return "\n".join([what, *(told(access, streams) for access in accesses)])
