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
