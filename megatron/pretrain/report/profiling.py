# SPDX-License-Identifier: Apache-2.0
"""Profiles of some steps: traces of collectives, storage and units, and torch.profiler's."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist

from megatron.fsdp import trace
from megatron.fsdp.trace.recorder import Recorder
from megatron.pretrain.report.collective_times import CollectiveTimes
from megatron.pretrain.report.decorations import Decorations
from megatron.pretrain.report.terminal import complain


def profile_directory(args: argparse.Namespace) -> str:
    """Return the directory that the files of ``--profile`` are written to."""
    return args.tensorboard_dir or "profile"


@contextmanager
def profiling(
    args: argparse.Namespace, say: Callable[[str], None], times: CollectiveTimes | None = None
) -> Iterator[Callable[[], None]]:
    """Profile steps as ``--profile`` and the flags beside it say. Leaving early ends the profile.

    All ranks record, so that they can be compared if a collective fails; the ranks of
    ``--profile-ranks`` write files.

    Args:
        args: of the run.
        say: prints a line for the user.
        times: of collectives, which are taken from the profile while there is one.

    Yields:
        A function to call after every step.
    """
    num_steps = 0
    decorations = Decorations(complain)  # any rank may be one that writes
    with ExitStack() as profile:

        def follow() -> None:
            if args.profile and num_steps == args.profile_step_end:
                profile.close()
            if args.profile and num_steps == args.profile_step_start:
                directory = profile_directory(args)
                say(f"profiling steps {num_steps} to {args.profile_step_end - 1}: see {directory}")
                if not (args.use_megatron_fsdp or args.use_pytorch_profiler):
                    say(
                        "profiling: only --use-megatron-fsdp is traced; --use-pytorch-profiler"
                        " shows this run"
                    )
                counted: list[Recorder] = []
                if times is not None:
                    counted = profile.enter_context(times.left_to_profile())
                record = trace.record(directory, ranks=args.profile_ranks)
                written = decorations.guard_end(f"{directory}/rank{dist.get_rank()}.json", record)
                counted.append(profile.enter_context(written))
                if args.use_pytorch_profiler and dist.get_rank() in args.profile_ranks:
                    write = torch.profiler.tensorboard_trace_handler(directory)
                    by_torch = torch.profiler.profile(on_trace_ready=write)
                    profile.enter_context(decorations.guard_end(f"{directory} (torch)", by_torch))

        def step_is_over() -> None:
            nonlocal num_steps
            num_steps += 1
            follow()

        follow()
        yield step_is_over
