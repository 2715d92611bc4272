# SPDX-License-Identifier: Apache-2.0
"""The table of `tests/support/broken_lines.py` fits the code."""

import pytest

from tests.support.broken_lines import BROKEN_LINES, REPOSITORY, BrokenLine


def test_there_are_at_least_twenty_breaks_with_names_of_their_own() -> None:
    names = [line.name for line in BROKEN_LINES]
    assert len(names) >= 20 and len(set(names)) == len(names)


@pytest.mark.parametrize("line", BROKEN_LINES, ids=lambda line: line.name.replace(" ", "_"))
def test_a_broken_line_stands_once_in_its_file_and_leaves_it_valid(line: BrokenLine) -> None:
    text = (REPOSITORY / line.file).read_text()
    assert text.count(line.line) == 1 and line.line != line.broken
    compile(text.replace(line.line, line.broken), line.file, "exec")
    for selection in line.tests.split():
        assert (REPOSITORY / selection.split("::")[0]).exists()
