# SPDX-License-Identifier: Apache-2.0
"""Parts of an output that can be written one by one, in any order, by any process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Progress = Callable[[int], None]
"""Called with the number of bytes that were done since the last call."""


@dataclass(frozen=True)
class Part:
    """One part of the output of a conversion.

    Attributes:
        name: unlike that of any other part, the same in every run of the same conversion, and fit
            for a file name.
        num_bytes: of tensors that it writes, which it reports while it does.
        write: writes the part into a directory, reports its progress, and returns what the end of
            the conversion needs to know of it, in a form that JSON has.
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
        """Write what needs all parts to be there; called on one rank.

        Args:
            staging: the directory.
            results: what the parts returned, by name.
        """
