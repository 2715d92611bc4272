# SPDX-License-Identifier: Apache-2.0
"""Costs of test files are measured, kept in a table, and held to a budget."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.costs import (
    MARGIN,
    ROOT,
    SHARED,
    FileCost,
    Usage,
    over_budget,
    read_table,
    reference_seconds,
    table_of,
    with_figures,
)
from tests.support.rank_pool import RankFailure, run_ranks

COST = FileCost(cases=3, default_cases=2, seconds=1.5, processor_seconds=2.0, references=40.0)


def test_the_table_has_the_files_that_are_here() -> None:
    assert [file for file in read_table() if not (ROOT / file).is_file()] == []


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = {"tests/test_a.py": vars(COST), "tests/fsdp/test_b.py": {**vars(COST), "references": 7}}
    path = tmp_path / "costs.md"
    path.write_text(table_of({"date": "2026-11-28", "seconds": 60.0, "files": rows}))
    assert read_table(path) == {"tests/test_a.py": 40.0, "tests/fsdp/test_b.py": 7.0}


@pytest.mark.parametrize("in_table", [None, 40.0])
def test_a_file_over_its_budget_is_told(in_table: float | None) -> None:
    budget = MARGIN * (in_table or 0.0) + SHARED
    assert over_budget("tests/test_a.py", budget, in_table) is None
    assert over_budget("tests/gpu/test_a.py", budget + 1, in_table) is None
    problem = over_budget("tests/test_a.py", budget + 1, in_table)
    assert problem is not None and f"its budget is {budget:.0f}" in problem


CONFTEST = """
from tests.support import costs

costs.SHARED = 0.0


def pytest_configure(config):
    config.pluginmanager.register(costs.CostPlugin({"test_busy.py": 0.0, "test_idle.py": 1e9}))
"""
BUSY = """
def test_first():
    sum(range(3_000_000))


def test_last():
    pass
"""


@pytest.mark.exhaustive
def test_the_last_test_of_a_file_over_its_budget_fails(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in ("busy", "idle"):
        (tmp_path / f"test_{name}.py").write_text(BUSY)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR ")]
    assert done.returncode == 1 and "4 passed, 1 error" in done.stdout, done.stdout
    (error,) = errors
    assert error.startswith("ERROR test_busy.py::test_last - Failed: test_busy.py costs")


def start_a_busy_child_and_fail() -> None:
    program = """
import time
while time.process_time() < 1:
    pass
print(flush=True)
time.sleep(600)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None and not child.stdout.readline().strip()
    raise RuntimeError("ranks are killed with their children")


def test_the_time_of_a_child_stays_when_its_rank_is_killed() -> None:
    before = Usage.now()
    with pytest.raises(RankFailure):
        run_ranks(1, start_a_busy_child_and_fail)
    assert Usage.now().processor_seconds - before.processor_seconds >= 1


def test_the_reference_costs_processor_time() -> None:
    assert reference_seconds() > 0.005


def test_figures_are_written_with_their_dates() -> None:
    text = "`make test` takes 9.0 minutes on two idle cores (2026-01-01); "
    text += "`.ci/run` takes 71.0 minutes on two idle cores (2026-01-01)."
    written = with_figures(text, {"seconds": 345.0, "date": "2026-11-28"}, 1770.0, "2026-11-29")
    assert "`make test` takes 5.8 minutes on two idle cores (2026-11-28)" in written
    assert "`.ci/run` takes 29.5 minutes on two idle cores (2026-11-29)" in written
    with pytest.raises(ValueError, match="expects one line with '`make test` takes', not 0"):
        with_figures("", {"seconds": 345.0, "date": "2026-11-28"}, 1770.0, "2026-11-29")


def test_the_figures_have_their_place_in_contributing() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    with_figures(text, {"seconds": 1.0, "date": "2026-11-28"}, 1.0, "2026-11-28")
