# SPDX-License-Identifier: Apache-2.0
"""The log of each rank in a file, with --log-dir: what it prints and logs.

The first rank prints on the terminal too. Of other ranks the terminal gets errors of the run only.
"""

from __future__ import annotations

import io
import logging
import os
import shlex
import socket
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO, cast

from megatron.pretrain.ranks import environment_rank
from megatron.pretrain.report import terminal
from megatron.pretrain.report.decorations import Decorations

FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class RankLog:
    """The log of this rank, for as long as the ``with`` block lasts; nothing without --log-dir.

    Runs that use the same directory add to its files.

    Args:
        log_dir: the directory, made if missing, or None.

    Raises:
        OSError: on entering, if the file cannot be written.
    """

    def __init__(self, log_dir: str | None):
        name = f"rank{environment_rank()}.log"
        self._path = Path(log_dir, name).absolute() if log_dir else None
        self._restore = ExitStack()

    def __enter__(self) -> RankLog:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            opened = self._path.open("a", buffering=1)
            self._restore.callback(_close, opened)
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            print(
                f"---- {when}, process {os.getpid()} on {socket.gethostname()}:"
                f" {shlex.join(sys.argv)}",
                file=opened,
            )
            file = cast(TextIO, LogFile(opened, self._path))
            self._add_logging(file)
            self._divert(file)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore.close()

    def _add_logging(self, file: TextIO) -> None:
        """Send messages of Python's logging to the file, of other ranks nowhere else."""
        root = logging.getLogger()
        self._restore.callback(setattr, root, "handlers", root.handlers)
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter(FORM))
        root.handlers = [*(root.handlers if environment_rank() == 0 else ()), handler]

    def _divert(self, file: TextIO) -> None:
        """Send what is printed to the file: of the first rank too, of others alone."""
        streams = sys.stdout, sys.stderr
        self._restore.callback(_set_streams, *streams)
        if environment_rank() == 0:
            _set_streams(both(streams[0], file), both(streams[1], file))
            return
        # Libraries in C++, such as NCCL, write to the descriptors.
        errors = self._restore.enter_context(os.fdopen(os.dup(2), "w", buffering=1))
        for descriptor in (1, 2):
            saved = os.dup(descriptor)
            self._restore.callback(os.close, saved)
            self._restore.callback(os.dup2, saved, descriptor)
            os.dup2(file.fileno(), descriptor)
        _set_streams(file, file)
        self._restore.callback(terminal.set_errors, None)
        terminal.set_errors(both(errors, file))


def _close(file: TextIO) -> None:
    with suppress(OSError):  # a full disk
        file.close()


def _set_streams(output: TextIO, errors: TextIO) -> None:
    sys.stdout, sys.stderr = output, errors


def both(stream: TextIO, file: TextIO) -> TextIO:
    """Return a stream that writes to both; streams of `io` have no base class in `typing`."""
    return cast(TextIO, Both(stream, file))


class LogFile(io.TextIOBase):
    """A file without which a run goes on; that it cannot be written is said once.

    Args:
        file: is written to.
        path: of the file, for the message.
    """

    def __init__(self, file: TextIO, path: Path):
        super().__init__()
        self._file, self._path = file, path
        self._decorations = Decorations(terminal.complain)

    def write(self, text: str) -> int:
        """Write to the file if that is possible."""
        with self._decorations.guard(str(self._path)):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the file if that is possible."""
        with self._decorations.guard(str(self._path)):
            self._file.flush()

    def fileno(self) -> int:
        """Return the descriptor of the file."""
        return self._file.fileno()


class Both(io.TextIOBase):
    """A text stream that writes to two: a terminal, by whose width lines are broken, and a file."""

    def __init__(self, stream: TextIO, file: TextIO):
        super().__init__()
        self._stream, self._file = stream, file

    def write(self, text: str) -> int:
        """Write to both, but a progress bar, which draws over itself, to the terminal alone."""
        if "\r" not in text:
            self._file.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        """Flush both."""
        self._file.flush()
        self._stream.flush()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has it writable
        """Encoding of the terminal, by which progress bars choose their characters."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """Return True if there is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the terminal."""
        return self._stream.fileno()
