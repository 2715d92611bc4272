# SPDX-License-Identifier: Apache-2.0
"""Changes of files that outlast a loss of power: written, and then on the disk.

Errors of reading and writing name the file.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""Errors of file systems that cannot, and need not, write out a directory."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let errors of reading, writing and fsync, which have no name of a file, name this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextmanager
def standard_output() -> Iterator[None]:
    """Let errors of printing name standard output, to which nothing is printed afterwards.

    The end of the process would print what is left, and fail without a word of what it was.
    """
    try:
        with naming(Path("standard output")):
            yield
    except OSError:
        with suppress(OSError, ValueError):  # one that is no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def file_at(path: Path) -> Path:
    """Return a path to read or append to, whatever it is, but for what would be waited for.

    Pipes that the shell has opened for this process, ``<(command)`` and ``/dev/stdin``, are taken.

    Raises:
        OSError: for another pipe, a socket or a device.
    """
    if str(path).startswith(("/dev/fd/", "/dev/stdin")):
        return path
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "a file is expected, but this is a pipe or a device", str(path))
    return path


@contextmanager
def opened(path: Path, buffering: int = -1) -> Iterator[Any]:
    """Open a file for reading, with or without a buffer; errors name it."""
    with naming(path), open(path, "rb", buffering=buffering) as file:
        yield file


@contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing. The disk has it after the context; errors name it."""
    with naming(path), open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Wait until the disk has the content of a file."""
    with naming(path), open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the disk has the names in a directory: new, renamed and removed ones."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(path):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Give a file or directory another name in the same directory, durably."""
    os.replace(source, target)
    sync_directory(target.parent)


def temporary_of(path: Path) -> Path:
    """Return the name under which a file is written before it replaces ``path``."""
    return path.with_name(f".{path.name}.tmp")


def write_text(path: Path, text: str) -> None:
    """Write a text as :func:`write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, or replace one, so that it has the old or the new content at any time."""
    temporary = temporary_of(path)
    with written(temporary) as file:
        file.write(content)
    rename(temporary, path)
