# SPDX-License-Identifier: Apache-2.0
"""The directory that a run saves in: its lock, what must be so at the start, what is put right.

[Note: record locks] Two runs in one directory would mix their checkpoints. The lock is one of
POSIX's record locks (``fcntl.lockf``). Unlike those of ``flock``, it belongs to a process and not
to an open file. So no child that was forked (a worker of the data loader, a compiler) keeps it when
the run has died, and it holds between nodes on more network file systems. In return, closing any
descriptor of the file releases it: nothing else of this process may open the file.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import itertools
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from megatron.checkpoint.core.listing import some
from megatron.checkpoint.store import directory, durable, stores
from megatron.fsdp.engine.collectives import agree
from megatron.mcore_adapter.checkpoints import url_saves
from megatron.mcore_adapter.checkpoints.checkpoint_source import (
    NON_PERSISTENT,
    CheckpointSource,
    continues,
    continues_in,
    find_source,
    is_own,
    non_persistent_root,
)
from megatron.mcore_adapter.run.errors import RunError
from megatron.mcore_adapter.run.files_beside import HISTORY
from megatron.mcore_adapter.run.first_rank import Say, on_first_rank

REPLACED = "replaced_{}"
"""Name of the directory, with a number, of checkpoints that a run does not go on from."""

LOCK = ".save_lock"
WAIT_SECONDS = 30.0
"""Time that another run has to end: of a job that was restarted, the old process may still be
dying."""
_POLL_SECONDS = 0.5
_TAKEN = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


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
    follow(args.save, source)
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


def follow(save: str, source: CheckpointSource | None) -> None:
    """Let the tracker file name what a run has loaded from its directory of checkpoints.

    It must no longer name a damaged checkpoint that was passed over. Called on one rank.
    """
    if source is not None and continues_in(save, source):
        _track(save, source.iteration)


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


# ---- the lock


@contextmanager
def locked(folder: Path, say: Say) -> Iterator[None]:
    """Lock a directory, which is made if need be, as long as the context lasts.

    See [Note: record locks]. Afterwards the lock file is removed, and so is an empty directory that
    was made.

    Raises:
        RunError: another run has it still after :data:`WAIT_SECONDS`; the message names that run.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = None
    try:
        for path in made:
            with suppress(OSError):  # a directory above that may not be read
                durable.sync_directory(path.parent)
        descriptor = _acquire(folder, say)
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):  # first, so that no other run can lock what is removed
                os.unlink(folder / LOCK)
            os.close(descriptor)
        with suppress(OSError):  # one has content
            for path in made:
                path.rmdir()


@contextmanager
def locked_and_tidy(folder: Path, say: Say) -> Iterator[None]:
    """Lock a directory as :func:`locked` does, and remove what killed saves have left in it."""
    with locked(folder, say):
        directory.tidy(folder)
        yield


def _acquire(folder: Path, say: Say) -> int | None:
    """Wait for the lock and return its descriptor, None where the file system has no locks."""
    deadline = time.monotonic() + WAIT_SECONDS
    is_told = False
    while True:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace") or "another run"
            os.close(descriptor)
            if error.errno in _UNSUPPORTED:
                say(f"--save {folder} cannot be locked, do not start two runs in it: {error}")
                return None
            if error.errno not in _TAKEN:
                raise
        else:
            if _is_current(descriptor, folder / LOCK):
                _sign(descriptor)
                return descriptor
            os.close(descriptor)  # its holder has removed it in the meantime
            continue
        if time.monotonic() >= deadline:
            raise RunError(
                f"--save {folder} is in use by {holder}: two runs in one directory would mix their"
                " checkpoints; end that run, or choose another --save"
            )
        if not is_told:
            is_told = True
            say(f"--save {folder} is in use by {holder}: waiting {WAIT_SECONDS:.0f} s for its end")
        time.sleep(_POLL_SECONDS)


def _is_current(descriptor: int, path: Path) -> bool:
    """Return True if the open file is the one that others find under its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    """Write into the lock file who has it, for the message of a run that is refused."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    holder = f"process {os.getpid()} on {socket.gethostname()}, started {since}"
    job = os.environ.get("SLURM_JOB_ID")
    with suppress(OSError):  # a full disk; the lock holds without it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (f"{holder}, job {job}" if job else holder).encode(), 0)
