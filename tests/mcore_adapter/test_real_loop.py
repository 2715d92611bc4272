# SPDX-License-Identifier: Apache-2.0
"""The program that starts Megatron-LM's own loop, and the table of its results.

`tests/pretrain/test_releases.py` has rows of the table.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.parity.real_loop import (
    MODEL,
    RESULTS,
    ROOT,
    with_cells,
)


def start(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m megatron.mcore_adapter` on one rank."""
    return subprocess.run(
        [sys.executable, "-m", "megatron.mcore_adapter", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        text=True,
        capture_output=True,
    )


@pytest.mark.exhaustive
def test_contradictions_end_the_program_with_one_line(tmp_path: Path) -> None:
    program = tmp_path / "pretrain_gpt.py"
    program.touch()
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    (tmp_path / "megatron" / "training" / "__init__.py").touch()
    done = start(str(program), *MODEL.split(), "--use-megatron-fsdp", "--ckpt-format", "torch_dist")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "megatron.mcore_adapter: --ckpt-format torch_dist with --use-megatron-fsdp"
    )


def test_a_run_adds_its_cells_to_the_table_of_results() -> None:
    table = RESULTS.read_text()
    before, _, _ = table.partition("| row |")
    written = with_cells(table, "0.18.2", {"zero0": (0, 2.5e-7)})
    assert written.startswith(before) and "| zero0 | 2 | " in written
    row = next(line for line in written.splitlines() if line.startswith("| zero0 |"))
    assert row.split("|")[4].strip() == "0 / 2.5e-07"
    (was,) = (line for line in table.splitlines() if line.startswith("| zero0 |"))
    assert row.split("|")[5] == was.split("|")[5]
    assert with_cells(written, "0.18.2", {}) == written
    assert "| fails |" in with_cells(written, "0.18.2", {"zero0": "the end of a log"})


@pytest.mark.parametrize("words", [[], ["--help"], ["absent.py"]], ids=["none", "help", "absent"])
def test_a_command_without_a_program_says_how_to_use_it(words: list[str]) -> None:
    done = start(*words)
    assert done.returncode == 2
    assert "-m megatron.mcore_adapter PROGRAM.py" in done.stderr
