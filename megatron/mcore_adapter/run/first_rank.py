# SPDX-License-Identifier: Apache-2.0
"""Decisions of the first rank: it looks at the file system, and the others follow."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from megatron.checkpoint.core.listing import listed
from megatron.fsdp.engine.collectives import agree
from megatron.mcore_adapter.run.errors import RunError

SECONDS_UNTIL_VISIBLE = 10.0
"""Time in which a shared file system shows every rank what the first one sees."""

Log = Callable[[str], None]
"""Prints one line for the user, on the first rank."""

Result = TypeVar("Result")


def on_first_rank(action: Callable[[], Result]) -> Result:
    """Run `action` on rank 0 and return its result, or raise its error, on every rank."""
    if not dist.is_initialized():
        return action()
    outcome: list[Result | Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [action()]
        except (ValueError, OSError, RunError) as error:
            outcome = [error]
        except Exception as error:
            # The other ranks wait, whatever went wrong. Not every error can be pickled.
            outcome = [RunError(f"{type(error).__name__}: {error}")]
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return cast(Result, outcome[0])


def wait_until_visible(path: Path) -> None:
    """Wait until this rank sees the files of a directory that the first rank sees; a collective.

    Raises:
        ValueError: on every rank, naming the ranks that do not see it.
    """

    def names_here() -> list[str]:
        return sorted(file.name for file in path.iterdir())

    names = on_first_rank(names_here)
    deadline = time.monotonic() + SECONDS_UNTIL_VISIBLE

    def unseen() -> list[str]:
        absent = []
        for name in names:
            if not (path / name).exists():
                absent.append(name)
        return absent

    while unseen() and time.monotonic() < deadline:
        time.sleep(0.1)
    rank = dist.get_rank()
    problems = agree([f"rank {rank} does not see {path / name}" for name in unseen()])
    if problems:
        raise ValueError(listed("all ranks must read the same file system", problems))
