# SPDX-License-Identifier: Apache-2.0
"""The directory that a run saves in: what must be so before it starts, and what it puts right."""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatron.checkpoint.core.listing import some
from megatron.checkpoint.store import directory, durable, stores
from megatron.fsdp.engine.collectives import agree
from megatron.pretrain.checkpoints import url_saves
from megatron.pretrain.checkpoints.checkpoint_source import (
    NON_PERSISTENT,
    CheckpointSource,
    Say,
    continues,
    continues_in,
    find_source,
    is_own,
    non_persistent_root,
)
from megatron.pretrain.checkpoints.save_lock import locked
from megatron.pretrain.first_rank import on_first_rank
from megatron.pretrain.report.loss_history import HISTORY

REPLACED = "replaced_{}"
"""Name of the directory, with a number, of checkpoints that a run does not go on from."""


@contextmanager
def reserved(args: argparse.Namespace, say: Say) -> Iterator[None]:
    """Check the directory ``args.save`` and keep other runs out of it; a collective.

    The first rank locks it as long as the context lasts, and removes what killed saves have left. A
    URL cannot be locked. Its local copies are removed at the end of the context.

    Raises:
        ValueError, RunError: on every rank, if it cannot be written to, has checkpoints that the
            run would overwrite, or is in use by another run.
    """
    is_at_url = bool(args.save) and stores.is_staged(args.save)
    with ExitStack() as stack:
        for path in (args.save, args.load, args.pretrained_checkpoint):
            if path:
                stack.callback(stores.drop, Path(path))
        if is_at_url:
            agree([])  # every rank has given the staged directory the names at the URL
        if args.save:
            on_first_rank(lambda: _reserve(args, say, stack))
        yield
        if is_at_url and not args.skip_train:
            on_first_rank(lambda: url_saves.upload_beside(args.save))


def _reserve(args: argparse.Namespace, say: Say, stack: ExitStack) -> None:
    root = Path(args.save).absolute()
    store = stores.store_of(root)
    if store is not None:
        try:
            store.check_writable()
        except ValueError as error:
            raise ValueError(f"--save {error}") from error
    _check_writable("--save", args.save)
    if args.skip_train:
        return
    if (root / directory.TRACKER).is_dir():
        raise ValueError(
            f"--save {args.save}: {directory.TRACKER} is a directory there, and is to be the file"
            " that names the newest checkpoint: remove it"
        )
    with ExitStack() as failing:
        if store is None:
            failing.enter_context(locked(root, say))
        else:
            store.tidy()
            url_saves.fetch_beside(root)
        _check_non_persistent(args)
        if args.non_persistent_global_ckpt_dir:
            failing.enter_context(locked(Path(args.non_persistent_global_ckpt_dir), say))
        if not is_own(args) and (directory.iterations(root) or (root / directory.TRACKER).exists()):
            refuse_overwriting(args, find_source(args, lambda line: None, {}))
        for path in (root, root / NON_PERSISTENT, args.non_persistent_global_ckpt_dir):
            if path and Path(path).is_dir():
                directory.tidy(path)
        stack.push(failing.pop_all())


def _check_non_persistent(args: argparse.Namespace) -> None:
    """Check the directory of the non-persistent checkpoint, in which every save deletes the rest.

    Raises:
        ValueError: it is another directory of this run, cannot be written to, or has a checkpoint
            that the run would overwrite.
    """
    flag, given = "--non-persistent-global-ckpt-dir", args.non_persistent_global_ckpt_dir
    if given:
        _check_writable(flag, given)
        for name in ("save", "load", "pretrained_checkpoint"):
            other = getattr(args, name)
            if other and Path(given).resolve() == Path(other).resolve():
                raise ValueError(
                    f"{flag} {given} is the directory of --{name.replace('_', '-')}: name another"
                    " one, in which every save replaces the one before"
                )
    root = non_persistent_root(args, args.save)
    there = directory.iterations(root)
    if there and args.non_persistent_save_interval and not (is_own(args) or args.overwrite):
        raise ValueError(
            f"{root} has {directory.iteration_directory('', there[0]).name} already, which this run"
            " would overwrite: name another directory, or --overwrite moves it aside"
        )


def _check_writable(flag: str, save: str) -> None:
    root = Path(save).absolute()
    nearest = next(path for path in (root, *root.parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"{flag} {save}: {nearest} is a file, not a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{flag} {save}: no permission to write in {nearest}")


def refuse_overwriting(args: argparse.Namespace, source: CheckpointSource | None) -> None:
    """Refuse a run that would overwrite checkpoints which it does not continue.

    Args:
        args: arguments of the run. Nothing is refused without ``save``, and with ``overwrite``.
        source: checkpoint that it loads; None if it starts from scratch.

    Raises:
        ValueError: names the checkpoints and the ways out.
    """
    if not args.save or args.skip_train or args.overwrite:
        return
    goes_on = continues(args, source)
    if goes_on and not (args.ckpt_step is not None and stores.is_staged(args.save)):
        return
    begin = 0 if source is None or source.weights_only else int(source.iteration)
    # With --save-retain-interval a save deletes earlier ones too.
    first = 0 if args.save_retain_interval and not goes_on else begin
    later = [number for number in directory.iterations(args.save) if number > first]
    there = [directory.iteration_directory("", number).name for number in reversed(later)]
    tracker = Path(args.save) / directory.TRACKER
    is_of_source = source is not None and source.path.parent.resolve() == tracker.parent.resolve()
    if not there and begin == 0 and tracker.exists() and not is_of_source:
        there = [tracker.name]
    if not there:
        return
    ways = f"--load {args.save} without --finetune continues there, another --save keeps both"
    if goes_on:
        ways = "without --ckpt-step it goes on from the newest, another --save keeps both"
    elif not stores.is_staged(args.save):
        ways += ", --overwrite moves what is there into a directory in it"
    raise ValueError(
        f"--save {args.save} has {some(there)} already, and this run, which begins at iteration"
        f" {begin}, would overwrite it: {ways}"
    )


# ---- when the run has loaded its checkpoint


def settle(args: argparse.Namespace, source: CheckpointSource | None) -> list[str]:
    """Let the directory of a run name what it has loaded, and have no checkpoint of another run.

    The tracker file must no longer name a damaged checkpoint that was passed over. What comes after
    ``--ckpt-step``, and with ``--overwrite`` everything, is moved into a new directory: nothing of
    it must ever be loaded as a checkpoint of this run. Called on one rank.

    Returns:
        Lines that tell what was moved.
    """
    if not args.save or args.skip_train:
        return []
    if source is not None and continues_in(args.save, source):
        _track(args.save, source.iteration)
    if args.overwrite and not is_own(args):
        after = -1
    elif is_own(args) and args.ckpt_step is not None:
        after = args.ckpt_step
    else:
        return []
    roots = [Path(args.save), Path(args.save) / NON_PERSISTENT]
    if args.non_persistent_global_ckpt_dir and args.non_persistent_save_interval:
        roots.append(Path(args.non_persistent_global_ckpt_dir))
    moved = [_move_aside(root, after) for root in roots]
    return [line for line in moved if line]


def _track(save: str, iteration: int | str) -> None:
    """Name an iteration in the tracker file, unless it does."""
    try:
        tracked = directory.read_tracker(save)
    except ValueError:
        tracked = None
    if tracked != iteration:
        directory.write_tracker(save, iteration)
        store = stores.store_of(save)
        if store is not None:
            store.write_tracker(iteration)


def _move_aside(root: Path, after: int) -> str:
    """Move the checkpoints of a directory after an iteration into a new directory in it.

    With them goes a copy of the history of losses; and the tracker file, unless an earlier one
    stays. A kill leaves the newest of those that were not moved yet to be loaded.

    Returns:
        The line that tells it; empty if nothing was there.
    """
    there = directory.iterations(root)
    names = [directory.iteration_directory("", number).name for number in there if number > after]
    if len(names) == len(there):
        names[1:1] = [directory.RELEASE, directory.TRACKER]
    names = [name for name in reversed(names) if (root / name).exists()]  # the newest is the last
    if not names:
        return ""
    numbered = (root / REPLACED.format(number) for number in itertools.count(1))
    aside = next(path for path in numbered if not path.exists())
    aside.mkdir()
    if (root / HISTORY).is_file():
        shutil.copy(root / HISTORY, aside)
    for name in names:
        durable.rename(root / name, aside / name)
        durable.sync_directory(root)
    return f"moved {some(names)} of {root} into {aside.name}"
