# SPDX-License-Identifier: Apache-2.0
"""Break lines of the engine, the adapter and the converter, one at a time: `make test` must notice.

    python -m tests.broken_lines                  every break of `tests/broken_lines.json`
    python -m tests.broken_lines layout divisor   those whose names contain one of the words

Each break is made in a copy of the repository. The tests that are likely to notice run first, then,
where they pass, everything that `make test` runs. Printed is one line per break, with the first
test that failed. The exit code is 1 where a break went unnoticed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".json")
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info", ".*_cache")


@dataclass(frozen=True)
class BrokenLine:
    """One line that is made wrong.

    Args:
        name: of the break, a few words.
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


def broken_lines() -> list[BrokenLine]:
    """Read the table of breaks."""
    return [BrokenLine(**row) for row in json.loads(TABLE.read_text())]


def first_failure(root: Path, tests: str) -> str | None:
    """Run the tests of the copy until one fails; return its name, None where all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not exhaustive", *tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found.group(1) if found else f"pytest ended with {done.returncode}"


def main(words: list[str]) -> int:
    """Try every break whose name contains one of the words; all without words."""
    chosen = [each for each in broken_lines() if not words or any(w in each.name for w in words)]
    unnoticed = 0
    with tempfile.TemporaryDirectory(prefix="broken_lines_") as directory:
        root = Path(directory, "repository")
        shutil.copytree(REPOSITORY, root, ignore=LEFT_OUT)
        for each in chosen:
            each.apply(root)
            noticed = first_failure(root, each.tests) or first_failure(root, "")
            each.undo(root)
            unnoticed += noticed is None
            print(f"{each.name}: {noticed or 'NOT NOTICED'}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} broken lines were noticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
