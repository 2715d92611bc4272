# SPDX-License-Identifier: Apache-2.0
"""The broken lines of `benchmarks/broken_lines` fit the code."""

from collections import Counter
from pathlib import Path

from benchmarks.broken_lines.broken_line import REPOSITORY
from benchmarks.broken_lines.drawn_lines import PARTS, drawn_lines
from benchmarks.broken_lines.table import BROKEN_LINES


def test_there_are_at_least_twenty_breaks_with_names_of_their_own() -> None:
    names = [line.name for line in BROKEN_LINES]
    assert len(names) >= 20 and len(set(names)) == len(names)


def test_a_broken_line_stands_once_in_its_file_and_leaves_it_valid() -> None:
    problems = []
    for line in BROKEN_LINES:
        text = (REPOSITORY / line.file).read_text()
        if text.count(line.line) != 1 or line.line == line.broken:
            problems.append(f"{line.name}: stands {text.count(line.line)} times in {line.file}")
        compile(text.replace(line.line, line.broken), line.file, "exec")
        for selection in line.tests.split():
            if not (REPOSITORY / selection.split("::")[0]).exists():
                problems.append(f"{line.name}: {selection} is not there")
    assert problems == []


def test_drawn_lines_are_as_many_of_each_part_and_change_one_line_each(tmp_path: Path) -> None:
    lines = drawn_lines(14, seed=1)
    assert Counter(line.name.partition(":")[0] for line in lines) == dict.fromkeys(PARTS, 2)
    for line in lines:
        copy = tmp_path / line.file
        copy.parent.mkdir(parents=True, exist_ok=True)
        original = (REPOSITORY / line.file).read_text()
        copy.write_text(original)
        line.apply(tmp_path)
        changed = [
            (old, new)
            for old, new in zip(original.splitlines(), copy.read_text().splitlines(), strict=True)
            if old != new
        ]
        assert len(changed) == 1
