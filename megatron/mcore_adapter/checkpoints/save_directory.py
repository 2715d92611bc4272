# SPDX-License-Identifier: Apache-2.0
"""The directory that a run saves in: its lock, checks at the start, and cleanups.

[Note: record locks] Two runs in one directory would mix their checkpoints. The lock is one of
POSIX's record locks (``fcntl.lockf``). Unlike those of ``flock``, it belongs to a process and not
to an open file. So no forked child (a worker of the data loader, a compiler) keeps it when the run
has died, and it works between nodes on more network file systems. The drawback: closing any
descriptor of the file releases it, so no other code of this process may open the file.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from megatron.checkpoint.core.listing import some
from megatron.checkpoint.store import directory, durable, stores
from megatron.checkpoint.store.url_staging import is_current
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
from megatron.mcore_adapter.run.first_rank import Log, on_first_rank
from megatron.mcore_adapter.run.report_files import HISTORY

REPLACED = "replaced_{}"
"""Name, with a number, of the directory of checkpoints from which a run does not resume."""

LOCK = ".save_lock"
"""Name of the lock file in a directory of checkpoints."""
WAIT_SECONDS = 30.0
"""Time to wait for the lock: when a job is restarted, its old process may still be ending."""
_POLL_SECONDS = 0.5
_TAKEN = (errno.EACCES, errno.EAGAIN)
"""Errors of a lock that another process has."""
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
"""Errors of a file system without record locks."""


@contextmanager
def reserved(args: argparse.Namespace, log: Log) -> Iterator[None]:
    """Check the directory ``args.save`` and keep other runs out of it; a collective.

    The first rank locks it as long as the context lasts, and removes the remains of killed saves. A
    URL cannot be locked; its local copies are removed at the end of the context.

    Raises:
        ValueError: on every rank, if it cannot be written to, or has checkpoints that the run would
            overwrite.
        RunError: on every rank, if another run uses it.
    """
    is_at_url = bool(args.save) and stores.is_staged(args.save)
    with ExitStack() as stack:
        for path in (args.save, args.load, args.pretrained_checkpoint):
            if path:
                stack.callback(stores.drop, Path(path))
        if is_at_url:
            agree([])  # a barrier: every rank has the names at the URL in its staged directory
        if args.save:
            on_first_rank(lambda: _reserve(args, log, stack))
        yield
        if is_at_url and not args.skip_train:
            on_first_rank(lambda: url_saves.upload_report_files(args.save))


def _reserve(
    args: argparse.Namespace,
    log: Log,
    stack: ExitStack,
) -> None:
    """Check, lock and tidy ``args.save`` on one rank.

    Args:
        args: arguments of the run.
        log: prints a line.
        stack: takes the exits of the locks.
    """
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
    with ExitStack() as locks:  # released here if something fails
        if store is None:
            locks.enter_context(locked(root, log))
        else:
            store.tidy()
            url_saves.fetch_report_files(root)
        _check_non_persistent(args)
        if args.non_persistent_global_ckpt_dir:
            locks.enter_context(locked(Path(args.non_persistent_global_ckpt_dir), log))
        has_others = False
        if not is_own(args):
            has_tracker = (root / directory.TRACKER).exists()
            has_others = has_tracker or bool(directory.iterations(root))
        if has_others:
            refuse_overwriting(args, find_source(args, lambda line: None, {}))
        for path in (root, root / NON_PERSISTENT, args.non_persistent_global_ckpt_dir):
            if path and Path(path).is_dir():
                directory.tidy(path)
        stack.push(locks.pop_all())


def _check_non_persistent(args: argparse.Namespace) -> None:
    """Check the directory of the non-persistent checkpoint, in which each save replaces the others.

    Raises:
        ValueError: the directory is one that another flag names, cannot be written to, or has a
            checkpoint that the run would overwrite.
    """
    flag = "--non-persistent-global-ckpt-dir"
    given = args.non_persistent_global_ckpt_dir
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
    present = directory.iterations(root)
    may_replace = is_own(args) or args.overwrite
    if present and args.non_persistent_save_interval and not may_replace:
        raise ValueError(
            f"{root} has {_name_of(present[0])} already, which this run would overwrite: name"
            " another directory, or --overwrite moves it aside"
        )


def _name_of(iteration: int) -> str:
    """Return the name of the directory of an iteration."""
    return directory.iteration_directory("", iteration).name


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
        ValueError: with the names of the checkpoints, and the flags that avoid it.
    """
    if not args.save or args.skip_train or args.overwrite:
        return
    is_at_url = stores.is_staged(args.save)
    resumes = continues(args, source)
    if resumes and (args.ckpt_step is None or not is_at_url):
        return
    begin = 0
    if source is not None and not source.weights_only:
        begin = int(source.iteration)
    overwritten = _overwritten(args, source, begin, resumes)
    if not overwritten:
        return
    fixes = f"--load {args.save} without --finetune continues there, another --save keeps both"
    if resumes:
        fixes = "without --ckpt-step it continues from the newest, another --save keeps both"
    elif not is_at_url:
        fixes += ", --overwrite moves what is there into a directory in it"
    raise ValueError(
        f"--save {args.save} has {some(overwritten)} already, and this run, which begins at"
        f" iteration {begin}, would overwrite it: {fixes}"
    )


def _overwritten(
    args: argparse.Namespace,
    source: CheckpointSource | None,
    begin: int,
    resumes: bool,
) -> list[str]:
    """Return the names of the files and directories that the saves of a run would replace.

    Args:
        args: arguments of the run.
        source: checkpoint that it loads; None if it starts from scratch.
        begin: iteration at which it begins.
        resumes: True if ``source`` is one of its own checkpoints.
    """
    first = begin
    if args.save_retain_interval and not resumes:
        first = 0  # saves delete earlier checkpoints too
    present = reversed(directory.iterations(args.save))
    names = [_name_of(iteration) for iteration in present if iteration > first]
    if names or begin > 0:
        return names
    root = Path(args.save)
    is_of_source = source is not None and source.path.parent.resolve() == root.resolve()
    if (root / directory.TRACKER).exists() and not is_of_source:
        return [directory.TRACKER]
    return []


# ---- after the run has loaded its checkpoint


def settle(args: argparse.Namespace, source: CheckpointSource | None) -> list[str]:
    """Clean the directory of a run after its load, on one rank.

    The tracker file is changed to name the loaded checkpoint, since it must no longer name a
    damaged one that was skipped. Checkpoints after ``--ckpt-step``, and with ``--overwrite`` all of
    another run, are moved into a new directory: none of them must ever be loaded as a checkpoint of
    this run.

    Args:
        args: arguments of the run.
        source: checkpoint that it has loaded; None if it starts from scratch.

    Returns:
        Lines that report the moved checkpoints.
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
    """Change the tracker file to name the checkpoint that a run has loaded from its directory.

    It must no longer name a damaged checkpoint that was skipped. Called on one rank.
    """
    if source is not None and continues_in(save, source):
        _track(save, source.iteration)


def _track(save: str, iteration: int | str) -> None:
    """Write an iteration to the tracker file, unless the file names it already."""
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

    The history of losses is copied there. If no checkpoint stays, the tracker file is moved too.
    The newest checkpoint is moved last, so that a killed move leaves it to be loaded.

    Returns:
        The line that reports it; empty if there was nothing to move.
    """
    present = directory.iterations(root)  # the newest first
    names = [_name_of(iteration) for iteration in present if iteration > after]
    if len(names) == len(present):
        names[1:1] = [directory.RELEASE, directory.TRACKER]
    names = [name for name in reversed(names) if (root / name).exists()]
    if not names:
        return ""
    number = 1
    while (root / REPLACED.format(number)).exists():
        number += 1
    aside = root / REPLACED.format(number)
    aside.mkdir()
    if (root / HISTORY).is_file():
        shutil.copy(root / HISTORY, aside)
    for name in names:
        durable.rename(root / name, aside / name)
        durable.sync_directory(root)
    return f"moved {some(names)} of {root} into {aside.name}"


# ---- the lock


@contextmanager
def locked(folder: Path, log: Log) -> Iterator[None]:
    """Lock a directory as long as the context lasts, and make it if it does not exist.

    See [Note: record locks]. Afterwards the lock file is removed, and so are directories that were
    made and are empty.

    Raises:
        RunError: another run has locked it, still after :data:`WAIT_SECONDS`; the message names
            that run.
    """
    made = []
    for path in (folder, *folder.parents):
        if not path.exists():
            made.append(path)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = None
    try:
        for path in made:
            with suppress(OSError):  # there may be no permission to open a directory above
                durable.sync_directory(path.parent)
        descriptor = _acquire(folder, log)
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):  # first, so that no other run can lock what is removed
                os.unlink(folder / LOCK)
            os.close(descriptor)
        with suppress(OSError):  # one is not empty
            for path in made:
                path.rmdir()


@contextmanager
def locked_and_tidy(folder: Path, log: Log) -> Iterator[None]:
    """Lock a directory as :func:`locked` does, and remove the remains of killed saves in it."""
    with locked(folder, log):
        directory.tidy(folder)
        yield


def _acquire(folder: Path, log: Log) -> int | None:
    """Wait for the lock and return its descriptor, None where the file system has no locks."""
    deadline = time.monotonic() + WAIT_SECONDS
    is_announced = False
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(folder / LOCK, flags, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            content = os.pread(descriptor, 1000, 0)
            holder = content.decode(errors="replace") or "another run"
            os.close(descriptor)
            if error.errno in _UNSUPPORTED:
                log(f"--save {folder} cannot be locked, do not start two runs in it: {error}")
                return None
            if error.errno not in _TAKEN:
                raise
        else:
            if is_current(descriptor, folder / LOCK):
                _sign(descriptor)
                return descriptor
            os.close(descriptor)  # the run that had locked the file has removed it meanwhile
            continue
        if time.monotonic() >= deadline:
            raise RunError(
                f"--save {folder} is in use by {holder}: two runs in one directory would mix their"
                " checkpoints; end that run, or choose another --save"
            )
        if not is_announced:
            is_announced = True
            log(f"--save {folder} is in use by {holder}: waiting {WAIT_SECONDS:.0f} s for its end")
        time.sleep(_POLL_SECONDS)


def _sign(descriptor: int) -> None:
    """Describe this process in the lock file, for the message of a run that is refused."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    holder = f"process {os.getpid()} on {socket.gethostname()}, started {since}"
    job = os.environ.get("SLURM_JOB_ID")
    if job:
        holder += f", job {job}"
    with suppress(OSError):  # a full disk; the lock is valid without it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
