# SPDX-License-Identifier: Apache-2.0
"""Parts of an output, which any process writes in any order, and the progress of long work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from tqdm import tqdm

Progress = Callable[[int], None]
"""Called with the number of bytes that were done since the last call."""


@dataclass(frozen=True)
class Part:
    """One part of the output of a conversion.

    Attributes:
        name: unique among the parts, the same in every run of the same conversion, and valid as a
            file name without a dot at its beginning.
        num_bytes: number of bytes of the tensors that it writes, as reported to the progress.
        write: function that writes the part into a directory, waits until the disk has it, reports
            its progress, and returns a dict for :meth:`Target.finish`: with ``notes`` to the user,
            and with ``file``, the name and the digest of what it has written. The dict has values
            that :mod:`megatron.checkpoint.dcp.safe_pickle` reads.
    """

    name: str
    num_bytes: int
    write: Callable[[Path, Progress], Any]


class Target(Protocol):
    """An output directory of any format."""

    @property
    def parts(self) -> Sequence[Part]:
        """Parts that are written in any order, on any rank."""

    def finish(self, staging: Path, results: dict[str, Any]) -> None:
        """Write the files that depend on all parts; called on one rank after all are written.

        Args:
            staging: the directory.
            results: the results of the parts, by name.
        """


# ---- progress on stderr: a bar on a terminal, elsewhere a plain line now and then

LINE_SECONDS = 10.0
"""Plain lines are at least this far apart, and the first comes after this much work."""


@contextmanager
def progress_of(
    title: str,
    total: int,
    *,
    unit: str = "B",
    show: bool = True,
    stream: TextIO | None = None,
) -> Iterator[Progress]:
    """Show the progress of the work inside this context, by default on stderr.

    Args:
        title: the work, as a participle: ``converting``.
        total: the amount of work, in ``unit``.
        unit: ``B`` for bytes, which are shown as kB, MB and so on, or the plural of what is
            counted.
        show: whether anything is shown.
        stream: place where it is shown.

    Yields:
        The function that is called with each amount of work when it is done.
    """
    if not show:
        yield ignore_progress
        return
    if stream is None:
        stream = sys.stderr
    bar = terminal_bar(stream, desc=title, total=total, unit=unit, unit_scale=unit == "B")
    if bar is None:
        lines = ProgressLines(title, total, unit, stream, clock=time.monotonic)
        yield lines.advance
        return
    with bar:
        yield bar.update


def terminal_bar(stream: TextIO | None = None, **options: Any) -> tqdm | None:
    """Return a new bar of tqdm with these options if ``stream`` is a terminal, else None."""
    if stream is None:
        stream = sys.stderr
    if not stream.isatty():
        return None
    return tqdm(file=stream, **options)


class ProgressLines:
    """Plain lines about work that takes longer than ``LINE_SECONDS``, for logs and pipes.

    Args:
        title: the work, as a participle: ``converting``.
        total: amount of work; 0 if it is not known.
        unit: ``B`` for bytes, or the plural of what is counted.
        stream: text file that the lines are printed to.
        clock: function that returns the seconds since any fixed moment.
    """

    def __init__(
        self,
        title: str,
        total: int,
        unit: str,
        stream: TextIO,
        clock: Callable[[], float],
    ):
        self._title = title
        self._total = total
        self._unit = unit
        self._stream = stream
        self._clock = clock
        self._done = 0
        self._begin = self._last_line = clock()

    def advance(self, amount: int) -> None:
        """Count ``amount`` as done, and print a line if the last one is long enough ago."""
        self._done += amount
        now = self._clock()
        if now - self._last_line < LINE_SECONDS:
            return
        self._last_line = now
        print(self._line(now - self._begin), file=self._stream, flush=True)

    def _line(self, seconds: float) -> str:
        """Return ``converting: 25 %, 1.00GB of 4.00GB in 20 s``."""
        progress = self._amount(self._done)
        if self._total:
            percent = 100 * self._done // self._total
            progress = f"{percent} %, {progress} of {self._amount(self._total)}"
        return f"{self._title}: {progress} in {seconds:.0f} s"

    def _amount(self, amount: int) -> str:
        if self._unit != "B":
            return f"{amount} {self._unit}"
        return f"{tqdm.format_sizeof(amount)}B"


def ignore_progress(amount: int) -> None:
    """Do nothing: the default for callers that do not ask for progress."""
