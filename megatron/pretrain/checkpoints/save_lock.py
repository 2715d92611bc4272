# SPDX-License-Identifier: Apache-2.0
"""The lock of a directory that a run saves in: two runs at once would mix their checkpoints.

The lock is one of POSIX's record locks (``fcntl.lockf``). Unlike those of ``flock``, it belongs to
a process and not to an open file. So no child that was forked (a worker of the data loader, a
compiler) keeps it when the run has died, and it holds between nodes on more network file systems.
In return, closing any descriptor of the file releases it: nothing else of this process may open
the file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.checkpoint.store import durable
from megatron.pretrain.errors import RunError

LOCK = ".save_lock"

WAIT_SECONDS = 30.0
"""Time that another run has to end: of a job that was restarted, the old process may still be
dying."""

_POLL_SECONDS = 0.5
_TAKEN = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


@contextmanager
def locked(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Lock a directory, which is made if need be, as long as the context lasts.

    Afterwards the lock file is removed, and so is an empty directory that was made.

    Raises:
        RunError: another run has it still after :data:`WAIT_SECONDS`; the message names that run.
    """
    made = _make_directories(folder)
    try:
        descriptor = _acquire(folder, say)
    except BaseException:
        _remove_empty(made)
        raise
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):  # first, so that no other run can lock what is removed
                os.unlink(folder / LOCK)
            os.close(descriptor)
        _remove_empty(made)


def _make_directories(folder: Path) -> list[Path]:
    """Make a directory with its parents and return those that are new, the lowest first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        with suppress(OSError):  # a directory above that may not be read
            durable.sync_directory(path.parent)
    return missing


def _remove_empty(folders: list[Path]) -> None:
    with suppress(OSError):  # one has content
        for folder in folders:
            folder.rmdir()


def _acquire(folder: Path, say: Callable[[str], None]) -> int | None:
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
            raise in_use(f"{folder}", holder, "in one directory")
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
    holder = described(os.getpid(), socket.gethostname(), now(), job_of_this_run())
    with suppress(OSError):  # a full disk; the lock holds without it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)


# ---- the holder of a lock, or of a lease


def in_use(save: str, holder: str, where: str) -> RunError:
    """Return the error of a run that finds another one.

    Args:
        save: the directory or URL.
        holder: describes the other run.
        where: the two would be.
    """
    return RunError(
        f"--save {save} is in use by {holder}: two runs {where} would mix their checkpoints;"
        " end that run, or choose another --save"
    )


def described(process: int, host: str, since: str, job: str) -> str:
    """Return the words for a run; it may have no job."""
    words = f"process {process} on {host}, started {since}"
    return f"{words}, job {job}" if job else words


def job_of_this_run() -> str:
    """Return the identifier of the batch job or of torchrun's job; empty without one."""
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID") or ""
    return "" if job == "none" else job


def now() -> str:
    """Return the time for a message."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z")
