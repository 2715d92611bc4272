# SPDX-License-Identifier: Apache-2.0
"""The directory that a run saves in: what must be so before it starts, and what it puts right."""

from __future__ import annotations

import argparse
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

from megatron.checkpoint.core.listing import listed, some
from megatron.checkpoint.store import directory, stores
from megatron.fsdp.engine.collectives import agree
from megatron.pretrain.checkpoints import abandoned_checkpoints, save_lease, url_saves
from megatron.pretrain.checkpoints.checkpoint_source import (
    NON_PERSISTENT,
    CheckpointSource,
    Say,
    continues,
    continues_in,
    find_source,
    non_persistent_root,
)
from megatron.pretrain.checkpoints.local_checkpoint import LOCAL, part_root
from megatron.pretrain.checkpoints.run_identity import name_run, run_in
from megatron.pretrain.checkpoints.save_lock import locked
from megatron.pretrain.first_rank import on_first_rank


@contextmanager
def reserved(args: argparse.Namespace, say: Say) -> Iterator[None]:
    """Check the directory ``args.save`` and keep other runs out of it; a collective.

    The first rank locks it as long as the context lasts, and with it the local checkpoints of this
    directory, which every rank checks. What killed saves have left is removed.
    A URL has no lock, but a lease. Its local copies are removed at the end of the context.

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
            if not args.skip_train:
                if args.non_persistent_ckpt_type == LOCAL:
                    _reserve_local(args)
                on_first_rank(lambda: _name_run(args))
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
            if not store.is_of_process:
                failing.enter_context(save_lease.leased(root, say))
                store.refresh()  # another run may have saved and ended since names were listed
            store.tidy()
            url_saves.fetch_beside(root)
        is_own = _is_own(args)
        _check_non_persistent(args, is_own)
        if args.non_persistent_global_ckpt_dir:
            failing.enter_context(locked(Path(args.non_persistent_global_ckpt_dir), say))
        if not is_own and (directory.iterations(root) or (root / directory.TRACKER).exists()):
            refuse_overwriting(args, find_source(args, lambda line: None, {}))
        _tidy(args, root, is_own)
        stack.push(failing.pop_all())


def _tidy(args: argparse.Namespace, root: Path, is_own: bool) -> None:
    """Remove what killed runs have left, and note what this run gives up.

    Args:
        args: of the run.
        root: its --save directory.
        is_own: the run continues there.
    """
    others = [root / NON_PERSISTENT]
    if args.non_persistent_global_ckpt_dir:
        others.append(Path(args.non_persistent_global_ckpt_dir))
    for path in (root, *others):
        if path.is_dir():
            directory.tidy(path)
    first = _first_given_up(args)
    is_local = args.non_persistent_ckpt_type == LOCAL
    abandoned_checkpoints.settle(root, others, is_local and is_own and first is None)
    if first is not None:
        is_used = args.non_persistent_save_interval and args.non_persistent_ckpt_type != LOCAL
        abandoned_checkpoints.give_up(root, others if is_used else others[:1], first)


def _first_given_up(args: argparse.Namespace) -> int | None:
    """Return the iteration from which on the run gives up what is there; None: it gives up none."""
    if not args.overwrite:
        return None
    if not _is_own(args):
        return 0
    return None if args.ckpt_step is None else args.ckpt_step + 1


def _is_own(args: argparse.Namespace) -> bool:
    """Return True if the run continues in its --save directory."""
    if not args.load or args.finetune:
        return False
    return Path(args.load).resolve() == Path(args.save).resolve()


def _reserve_local(args: argparse.Namespace) -> None:
    """Check the directory of this rank's parts of local checkpoints, and tidy it; a collective.

    Raises:
        ValueError: on every rank, if a rank cannot write there, or has parts that the run would
            overwrite.
    """
    root, problem = part_root(args, args.save), None
    try:
        _check_writable("--non-persistent-local-ckpt-dir", args.non_persistent_local_ckpt_dir)
        there = directory.iterations(root)
        if there and not _is_own(args) and not args.overwrite:
            problem = (
                f"{directory.iteration_directory(root, there[0])} belongs to --save {args.save},"
                f" and this run would overwrite it: --load {args.save} without --finetune continues"
                " there, --overwrite gives up what is there"
            )
        elif root.is_dir():
            directory.tidy(root)
    except (ValueError, OSError) as error:
        problem = str(error)
    problems = agree([f"rank {dist.get_rank()}: {problem}"] if problem else [])
    if problems:
        raise ValueError(listed("local checkpoints cannot be saved", problems))


def _name_run(args: argparse.Namespace) -> None:
    """Give the run an identifier if it has local checkpoints, or the directory had some."""
    run, goes_on = run_in(args.save), _is_own(args) and _first_given_up(args) is None
    if (run and goes_on) or not (run or args.non_persistent_ckpt_type == LOCAL):
        return
    abandoned = abandoned_checkpoints.Abandoned.read(args.save)
    # With the identifier of the list, a start after a kill knows that it is this run's.
    name_run(args.save, uuid.uuid4().hex if abandoned is None else abandoned.identifier)


def settle_local(
    args: argparse.Namespace, newest_local: Callable[[], CheckpointSource | None]
) -> None:
    """Choose between checkpoints of two runs after a kill of one with --overwrite; a collective.

    They are those of that run if every rank has a sound part of its first one, which is local.

    Args:
        args: of this run, which may continue one of them.
        newest_local: returns the newest sound local checkpoint; a collective.
    """
    if not args.save or args.skip_train or args.non_persistent_ckpt_type != LOCAL:
        return
    if not _is_own(args) or _first_given_up(args) is not None:
        return
    if on_first_rank(lambda: abandoned_checkpoints.Abandoned.read(args.save)) is None:
        return
    is_there = newest_local() is not None
    end = abandoned_checkpoints.succeed if is_there else abandoned_checkpoints.keep
    on_first_rank(lambda: end(args.save))


def _check_non_persistent(args: argparse.Namespace, is_own: bool) -> None:
    """Check the directory of the non-persistent checkpoint, in which every save deletes the rest.

    Args:
        args: of the run.
        is_own: the run continues in its --save directory.

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
    there = directory.iterations(non_persistent_root(args, args.save))
    is_used = args.non_persistent_save_interval and args.non_persistent_ckpt_type != LOCAL
    if there and is_used and not (is_own or args.overwrite):
        raise ValueError(
            f"{non_persistent_root(args, args.save)} has"
            f" {directory.iteration_directory('', there[0]).name} already, which this run would"
            " overwrite: name another directory, or --overwrite gives up what is there"
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
        args: of the run. Nothing is refused without ``save``, and with ``overwrite``.
        source: the checkpoint that it loads; None if it starts from scratch.

    Raises:
        ValueError: names the checkpoints and the ways out.
    """
    if not args.save or args.skip_train or args.overwrite or continues(args, source):
        return
    begin = 0 if source is None or source.weights_only else int(source.iteration)
    # With --save-retain-interval a save deletes earlier ones too.
    first = 0 if args.save_retain_interval else begin
    later = [number for number in directory.iterations(args.save) if number > first]
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
        store = stores.store_of(args.save)
        if store is not None:
            store.write_tracker(source.iteration)
