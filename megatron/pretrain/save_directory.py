# SPDX-License-Identifier: Apache-2.0
"""The directory that a run saves in: what must be so before it starts, and what it puts right."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatron.checkpoint.core import directory
from megatron.checkpoint.core.listing import some
from megatron.pretrain.checkpoint_source import CheckpointSource, Say, continues_in, find_source
from megatron.pretrain.first_rank import on_first_rank
from megatron.pretrain.save_lock import locked


@contextmanager
def reserved(args: argparse.Namespace, say: Say) -> Iterator[None]:
    """Check the directory ``args.save`` and keep other runs out of it; a collective.

    The first rank locks it as long as the context lasts. What killed saves have left is removed.

    Raises:
        ValueError, RunError: on every rank, if it cannot be written to, has checkpoints that the
            run would overwrite, or is in use by another run.
    """
    with ExitStack() as stack:
        if args.save:
            on_first_rank(lambda: _reserve(args, say, stack))
        yield


def _reserve(args: argparse.Namespace, say: Say, stack: ExitStack) -> None:
    root = Path(args.save).absolute()
    _check_writable(args.save, root)
    if args.skip_train:
        return
    with ExitStack() as failing:
        failing.enter_context(locked(root, say))
        is_own = args.load and Path(args.load).resolve() == root.resolve() and not args.finetune
        if not is_own and (directory.iterations(root) or (root / directory.TRACKER).exists()):
            refuse_overwriting(args, find_source(args, lambda line: None, {}))
        directory.tidy(root)
        stack.push(failing.pop_all())


def _check_writable(save: str, root: Path) -> None:
    nearest = next(path for path in (root, *root.parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"--save {save}: {nearest} is a file, not a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"--save {save}: no permission to write in {nearest}")


def refuse_overwriting(args: argparse.Namespace, source: CheckpointSource | None) -> None:
    """Refuse a run that would overwrite checkpoints which it does not continue.

    Args:
        args: of the run. Nothing is refused without ``save``, and with ``overwrite``.
        source: the checkpoint that it loads; None if it starts from scratch.

    Raises:
        ValueError: names the checkpoints and the ways out.
    """
    if not args.save or args.skip_train or args.overwrite or continues_in(args.save, source):
        return
    begin = 0 if source is None or source.weights_only else int(source.iteration)
    later = [number for number in directory.iterations(args.save) if number > begin]
    there = [directory.iteration_directory("", number).name for number in reversed(later)]
    tracker = Path(args.save) / directory.TRACKER
    is_of_source = source is not None and source.path.parent.resolve() == tracker.parent.resolve()
    if not there and begin == 0 and tracker.exists() and not is_of_source:
        there = [tracker.name]
    if there:
        raise ValueError(
            f"--save {args.save} has {some(there)} already, and this run, which begins at iteration"
            f" {begin}, would overwrite it: --load {args.save} without --finetune continues there,"
            " another --save keeps both, --overwrite gives up what is there"
        )


def settle(args: argparse.Namespace, source: CheckpointSource) -> None:
    """Let the tracker file of the directory that a run continues name what it has loaded.

    A damaged checkpoint that was passed over must not be named any longer. Called on one rank.
    """
    if args.skip_train or not source.is_newest or not continues_in(args.save, source):
        return
    try:
        tracked = directory.read_tracker(args.save)
    except ValueError:
        tracked = None
    if tracked != source.iteration:
        directory.write_tracker(args.save, source.iteration)
