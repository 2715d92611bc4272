# SPDX-License-Identifier: Apache-2.0
"""A line of the product that is made wrong."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class BrokenLine:
    """One line that is made wrong.

    Args:
        name: a few words for the break.
        file: path in the repository.
        line: text that stands in the file exactly once.
        broken: text that takes its place.
        tests: arguments of pytest that select the tests most likely to notice.
    """

    name: str
    file: str
    line: str
    broken: str
    tests: str

    def apply(self, root: Path) -> None:
        """Break the line in the copy at ``root``.

        Raises:
            ValueError: the line does not stand in the file exactly once.
        """
        path = root / self.file
        text = path.read_text()
        if text.count(self.line) != 1:
            times = text.count(self.line)
            raise ValueError(
                f"{self.name}: expects the line once in {self.file}, not {times} times"
            )
        path.write_text(text.replace(self.line, self.broken))

    def undo(self, root: Path) -> None:
        """Restore the file in the copy at ``root``."""
        shutil.copy(REPOSITORY / self.file, root / self.file)
