# SPDX-License-Identifier: Apache-2.0
"""The table of `tests/support/broken_lines.py` fits the code."""

import pytest

from tests.support.broken_lines import BROKEN_LINES, REPOSITORY, BrokenLine


def test_there_are_at_least_twenty_breaks_with_names_of_their_own() -> None:
    names = [each.name for each in BROKEN_LINES]
    assert len(names) >= 20 and len(set(names)) == len(names)


@pytest.mark.parametrize("each", BROKEN_LINES, ids=lambda each: each.name.replace(" ", "_"))
def test_a_broken_line_stands_once_in_its_file_and_leaves_it_valid(each: BrokenLine) -> None:
    text = (REPOSITORY / each.file).read_text()
    assert text.count(each.line) == 1 and each.line != each.broken
    compile(text.replace(each.line, each.broken), each.file, "exec")
    for selection in each.tests.split():
        assert (REPOSITORY / selection.split("::")[0]).exists()
