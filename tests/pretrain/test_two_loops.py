# SPDX-License-Identifier: Apache-2.0
"""Rows of the table of both training loops, on the newest release."""

import re
from pathlib import Path

import pytest

from benchmarks.soak.loop_table import COLUMNS, RESULTS, ROWS, with_cell
from tests.support import megatron_release
from tests.support.megatron_release import RELEASES

NEWEST = RELEASES[-1]
EQUAL = ("sigterm", "slurm", "async", "other-loop", "for-other-loop", "torch-dist-own")
"""Starts that go on with the losses of the run that has saved."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", EQUAL)
def test_megatron_lms_loop_goes_on_with_the_same_losses(name: str, tmp_path: Path) -> None:
    megatron_release.require(NEWEST)
    cell = ROWS[name].check(COLUMNS[NEWEST], tmp_path)
    assert re.match(r"0($| \()", cell), cell


@pytest.mark.exhaustive
def test_no_flip_in_a_checkpoint_of_the_other_loop_is_loaded(tmp_path: Path) -> None:
    megatron_release.require(NEWEST)
    assert ROWS["flips"].check(COLUMNS[NEWEST], tmp_path) == "20 refused"


def test_a_cell_is_added_to_the_table_of_results() -> None:
    table = RESULTS.read_text()
    written = with_cell(table, ROWS["kills"], "0.18.2", "none")
    (row,) = (
        line for line in written.splitlines() if line.startswith(f"| {ROWS['kills'].title} |")
    )
    assert row.split("|")[4].strip() == "none"
    assert with_cell(written, ROWS["kills"], "0.18.2", "none") == written
