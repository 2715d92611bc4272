# SPDX-License-Identifier: Apache-2.0
"""Pieces of an output that can be written one by one, in any order, by any process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Progress = Callable[[int], None]
"""Called with the number of bytes that were done since the last call."""


@dataclass(frozen=True)
class Part:
    """One piece of what a conversion writes.

    Attributes:
        name: of the piece, unlike that of any other; the same in every run of the same conversion,
            and fit for a file name.
        num_bytes: of tensors that it writes, which is what it reports while it goes.
        write: writes it into a directory, reports its progress, and returns what the end of the
            conversion has to know of it, as JSON can hold it.
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
        """Write what needs all parts to be there. ``results`` are what they returned, by name.

        Called on one rank.
        """
