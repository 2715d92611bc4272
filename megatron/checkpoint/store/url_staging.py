# SPDX-License-Identifier: Apache-2.0
"""Local directories in which the checkpoints at URLs are staged.

Nothing else is recorded about such a directory: its name is the quoted URL, and the directory
above, the room, belongs to this program: the ranks of one node, whose parent process is the same.
A room lives as long as a process that uses it. The last one removes it, and after a kill the next
program on the node does.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, unquote

BASE_VARIABLE = "MEGATRON_URL_CACHE_DIR"
"""Environment variable that names another place for rooms than the directory of temporary files."""

_LONGEST_NAME = 240
"""Bytes of a file name, without the prefix that staging directories have."""

_TOKEN = ".token"
"""Name of the file that identifies a directory."""

_rooms: dict[Path, int] = {}
"""Rooms that this process uses -> descriptor of the lock file."""


def _base() -> Path:
    above = os.path.realpath(os.environ.get(BASE_VARIABLE) or tempfile.gettempdir())
    return Path(above, f"megatron_urls_{os.getuid()}")


def staged_directory(url: str) -> Path:
    """Return the local directory for the checkpoints at a URL, and enter its room.

    Raises:
        ValueError: if the URL is too long, or the room cannot be made.
    """
    name = quote(url, safe="")
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"{url}: the URL is too long, its quoted form has {len(name)} characters")
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    process = os.getppid()
    if is_alone:
        process = os.getpid()
    room = _base() / f"{socket.gethostname()}_{process}_{attempt}"
    try:
        _enter(room)
    except OSError as error:
        raise ValueError(
            f"{url}: no directory for its local copy ({BASE_VARIABLE} names another place than"
            f" {_base().parent}): {error}"
        ) from error
    return room / name


def url_of(path: Path) -> tuple[str, Path] | None:
    """Return the URL whose checkpoints are staged at or above a path, and its staged directory."""
    if "%3A" not in str(path):  # without it, no directory of temporary files is looked for
        return None
    base = _base()
    if not path.is_relative_to(base):
        return None
    parts = path.relative_to(base).parts
    if len(parts) < 2 or "%3A" not in parts[1] or parts[1].startswith("."):
        return None
    return unquote(parts[1]), base.joinpath(*parts[:2])


def with_urls(text: str) -> str:
    """Replace the paths of staged directories in a message by their URLs."""
    if "%3A" not in text:
        return text
    pattern = rf"{re.escape(str(_base()))}/[^/\s]+/(?:\.writing_)?([\w.~%-]+)"
    return re.sub(pattern, lambda match: unquote(match[1]), text)


@contextmanager
def alone_in(room: Path) -> Iterator[None]:
    """Keep the other ranks of this node waiting: one of them downloads."""
    with open(room / ".downloading", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def directory_token(path: Path) -> str:
    """Return an identifier of a directory, which all who see this very directory get.

    Containers may have one hostname and one path, and each its own disk below.
    """
    file = path / _TOKEN
    with suppress(FileExistsError):
        path.mkdir(parents=True, exist_ok=True)
        unique = path / f"{_TOKEN}_{uuid.uuid4().hex}"
        unique.write_text(uuid.uuid4().hex)
        try:
            os.link(unique, file)  # which has its whole content at once
        finally:
            unique.unlink()
    return file.read_text()


# ---- rooms


def _enter(room: Path) -> None:
    if room in _rooms:
        room.mkdir(exist_ok=True)
        return
    base = room.parent
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    if base.stat().st_uid != os.getuid():
        raise PermissionError(f"{base} belongs to another user")
    for lock in base.glob(f"{socket.gethostname()}_*.lock"):  # a lock may hold on one node only
        _remove_if_unused(lock)
    lock = _lock_of(room)
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(lock, flags, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if is_current(descriptor, lock):
            break
        os.close(descriptor)  # its last user has removed it in the meantime
    _rooms[room] = descriptor
    room.mkdir(exist_ok=True)
    atexit.register(_leave, room, os.getpid())


def _leave(room: Path, process: int) -> None:
    descriptor = _rooms.pop(room, None)
    if descriptor is not None and process == os.getpid():
        os.close(descriptor)
        _remove_if_unused(_lock_of(room))


def _remove_if_unused(lock: Path) -> None:
    """Remove a room and its lock file unless a process uses it."""
    with suppress(OSError):
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_current(descriptor, lock):
                shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
                lock.unlink()
        finally:
            os.close(descriptor)


def _lock_of(room: Path) -> Path:
    return room.with_name(f"{room.name}.lock")


def is_current(descriptor: int, path: Path) -> bool:
    """Return True if the open file is still the one at its path."""
    try:
        locked_file = os.fstat(descriptor)
        file_now = os.stat(path)
        return os.path.samestat(locked_file, file_now)
    except FileNotFoundError:
        return False
