# SPDX-License-Identifier: Apache-2.0
"""Every block and every command of the pages is run, or named here with the reason why not."""

from pathlib import Path

import pytest

from tests.examples.blocks import DOCS, python_of
from tests.examples.operations_table import rows_of, wrong_rows
from tests.examples.page_programs import PROGRAMS, run_page
from tests.rank_pool import run_ranks


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: Path(page).stem)
def test_the_python_blocks_of_a_page_run_as_one_program(page: str, tmp_path: Path) -> None:
    blocks = [block.code for block in python_of(page)]
    assert len(blocks) == len(PROGRAMS[page].checks), "give every block a check"
    run_ranks(2, run_page, page, blocks, str(tmp_path))


def test_operations_on_parameters_do_what_the_table_says() -> None:
    rows = rows_of((DOCS / "working_with_a_sharded_model.md").read_text())
    assert len(rows) == 7 and all(operations for operations, _, _ in rows)
    for found in run_ranks(2, wrong_rows, rows):
        assert not found, "\n".join(found)
