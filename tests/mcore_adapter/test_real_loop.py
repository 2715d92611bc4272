# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own loop of newer releases trains with the drop-in as with its DDP.

The table of `real_loop.py` has further rows.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mcore_adapter.releases.test_tested import checkout
from tests.support import megatron_release
from tests.support.mcore_adapter.real_loop import (
    MODEL,
    RESULTS,
    ROOT,
    compare,
    is_equal,
    with_cells,
)

NEWEST = megatron_release.RELEASES[-1]


Results = dict[str, tuple[float, float] | str]
ROWS = [
    *("default", "zero0", "zero1", "double-buffer", "evaluation", "vpp", "cp", "hybrid-model"),
    *("resume", "resume-ep", "resume-vpp-bf16", "resume-hybrid-model", "fp8", "fp8-ep", "fp4"),
    "resume-precision-aware",
]
ROWS_ON_MODEL = ["evaluation", "zero1", "resume", "fp8", "vpp", "ep"]
CAPTURED = ["captured", "captured-zero1"]


@pytest.fixture(scope="module")
def newest() -> Results:
    """Rows on the newest release, in one process: importing its loop takes as long as a row."""
    megatron_release.require(NEWEST)
    return compare(ROWS, NEWEST)


@pytest.fixture(scope="module")
def on_model() -> Results:
    """Rows of the newest release on the model of a CUDA device, in one process too."""
    megatron_release.require(NEWEST)
    return compare([*ROWS_ON_MODEL, *CAPTURED], NEWEST, "on-model")


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", ROWS)
def test_the_newest_release_trains_and_resumes_like_its_ddp(newest: Results, row: str) -> None:
    assert is_equal(newest[row]), newest[row]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "release, rows",
    [
        ("0.17.1", ["zero0", "resume-vpp", "ep", "resume-tp-pp"]),
        ("0.18.2", ["zero0", "hybrid-optim", "cp", "bf16", "resume"]),
    ],
)
def test_older_releases_train_and_resume_like_their_ddp(release: str, rows: list[str]) -> None:
    megatron_release.require(release)
    results = compare(rows, release)
    assert all(map(is_equal, results.values())), results


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", ROWS_ON_MODEL)
def test_no_use_of_memory_is_out_of_order_on_the_model_of_a_cuda_device(
    on_model: Results, newest: Results, row: str
) -> None:
    assert is_equal(on_model[row]), on_model[row]
    if row in ROWS:
        assert on_model[row] == newest[row]  # bit by bit


@pytest.mark.exhaustive
def test_captured_iterations_have_the_bits_of_a_run_without_graphs(on_model: Results) -> None:
    assert {row: on_model[row] for row in CAPTURED} == dict.fromkeys(CAPTURED, (0, 0))


@pytest.mark.exhaustive
def test_a_wait_that_is_left_out_is_reported() -> None:
    megatron_release.require(NEWEST)
    results = compare(["default"], NEWEST, "on-model", "compute never waits")
    assert "used on two streams that nothing orders" in str(results["default"])


def start(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m megatron.mcore_adapter` on one rank."""
    return subprocess.run(
        [sys.executable, "-m", "megatron.mcore_adapter", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        text=True,
        capture_output=True,
    )


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


def test_a_wheel_before_a_checkout_of_another_release_is_named_with_it(tmp_path: Path) -> None:
    wheel = checkout(tmp_path / "lib" / "site-packages", "0.16.1")
    newer = checkout(tmp_path / "checkout", "0.19.0", loop=True)
    path = os.pathsep.join(map(str, (ROOT, wheel, newer)))
    done = subprocess.run(
        [sys.executable, "-c", "import megatron.mcore_adapter.drop_in"],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        text=True,
        capture_output=True,
    )
    line = done.stderr.splitlines()[-1]
    assert str(wheel / "megatron" / "core" / "package_info.py") in line
    assert str(newer / "megatron" / "training" / "__init__.py") in line


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
