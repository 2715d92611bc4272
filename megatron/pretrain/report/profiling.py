# SPDX-License-Identifier: Apache-2.0
"""Profiles of some steps: traces of collectives, storage and units, and torch.profiler's."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron.fsdp import trace
from megatron.mcore_adapter.run.environment import complain
from megatron.pretrain.report.run_files import Decorations


def profile_directory(args: argparse.Namespace) -> str:
    """Return the directory that the files of ``--profile`` are written to."""
    return args.tensorboard_dir or "profile"


@contextmanager
def profiling(args: argparse.Namespace, log: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Profile steps as ``--profile`` and its other flags ask. Leaving early ends the profile.

    All ranks record, so that they can be compared if a collective fails; the ranks of
    ``--profile-ranks`` write files.

    Args:
        args: arguments of the run.
        log: prints a line for the user.

    Yields:
        A function to call after every step.
    """
    num_steps = 0
    with ExitStack() as profile:

        def follow() -> None:
            if args.profile and num_steps == args.profile_step_end:
                profile.close()
            if args.profile and num_steps == args.profile_step_start:
                log(
                    f"profiling steps {num_steps} to {args.profile_step_end - 1}: see"
                    f" {profile_directory(args)}"
                )
                if not (args.use_megatron_fsdp or args.use_pytorch_profiler):
                    log(
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
    """Start the profiles, which end with the stack; a file that cannot be written is reported."""
    decorations = Decorations(complain)  # any rank may be one that writes
    directory = profile_directory(args)
    rank = dist.get_rank()

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
