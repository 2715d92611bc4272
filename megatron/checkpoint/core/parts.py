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
        name: unique among the parts, the same in every run of the same conversion, and valid as a
            file name.
        num_bytes: of the tensors that it writes, as reported to the progress.
        write: writes the part into a directory, reports its progress, and returns a JSON value for
            :meth:`Target.finish`.
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
