# SPDX-License-Identifier: Apache-2.0
"""Profiles of some steps, and records of GPU memory."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron.fsdp.trace import record as trace
from megatron.pretrain.ranks import complain
from megatron.pretrain.report.run_files import Decorations

MAX_ALLOCATIONS = 100_000
"""Allocations and releases that --record-memory-history keeps, the last ones."""


def profile_directory(args: argparse.Namespace) -> str:
    """Return the directory that the files of ``--profile`` are written to."""
    return args.tensorboard_dir or "profile"


@contextmanager
def profiling(args: argparse.Namespace, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Profile steps as ``--profile`` and the flags beside it say. Leaving early ends the profile.

    All ranks record, so that they can be compared if a collective fails; the ranks of
    ``--profile-ranks`` write files.

    Args:
        args: arguments of the run.
        say: prints a line for the user.

    Yields:
        A function to call after every step.
    """
    num_steps = 0
    with ExitStack() as profile:

        def follow() -> None:
            if args.profile and num_steps == args.profile_step_end:
                profile.close()
            if args.profile and num_steps == args.profile_step_start:
                say(
                    f"profiling steps {num_steps} to {args.profile_step_end - 1}: see"
                    f" {profile_directory(args)}"
                )
                if not (args.use_megatron_fsdp or args.use_pytorch_profiler):
                    say(
                        "profiling: only --use-megatron-fsdp is traced; --use-pytorch-profiler"
                        " shows this run"
                    )
                _start(args, profile)

        def step_is_over() -> None:
            nonlocal num_steps
            num_steps += 1
            follow()

        follow()
        yield step_is_over


def _start(args: argparse.Namespace, profile: ExitStack) -> None:
    """Start the profiles; they end with the stack, and a file that cannot be written is told."""
    decorations = Decorations(complain)  # any rank may be one that writes
    directory, rank = profile_directory(args), dist.get_rank()

    def enter(name: str, context: AbstractContextManager[Any]) -> None:
        context.__enter__()

        def leave(*error: Any) -> None:
            with decorations.guard(name):
                context.__exit__(*error)

        profile.push(leave)

    enter(f"{directory}/rank{rank}.json", trace.record(directory, ranks=args.profile_ranks))
    if args.use_pytorch_profiler and rank in args.profile_ranks:
        write = torch.profiler.tensorboard_trace_handler(directory)
        enter(f"{directory} (torch)", torch.profiler.profile(on_trace_ready=write))


class MemoryRecord:
    """The record of GPU allocations with --record-memory-history; the first rank writes it.

    Args:
        args: arguments of the run.
        decorations: the guard around the file.
    """

    def __init__(self, args: argparse.Namespace, decorations: Decorations):
        self._is_on, self._path = args.record_memory_history, args.memory_snapshot_path
        self._decorations = decorations

    # torch has no public names for these three, which it documents as they are.

    def start(self) -> None:
        """Begin to record, before the first step."""
        if self._is_on:
            torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)

    def write(self) -> None:
        """Write the last allocations, after an interval of the log."""
        if self._is_on and dist.get_rank() == 0:
            with self._decorations.guard(self._path, Exception):
                torch.cuda.memory._dump_snapshot(self._path)

    def end(self) -> None:
        """End recording."""
        if self._is_on:
            torch.cuda.memory._record_memory_history(enabled=None)
