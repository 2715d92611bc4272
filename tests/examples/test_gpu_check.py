# SPDX-License-Identifier: Apache-2.0
"""The command of a first day on GPUs: what it reports, refuses and, rehearsed on CPUs, runs."""

import json
import re
import signal
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks.comparison.model import Workload
from tests.gpu import check
from tests.gpu.planned_step import kind_of, print_beside_plan, row_of
from tests.gpu.profiled_step import covered_share
from tests.gpu.steps import STEPS, SUSPECTED, TORCHRUN, Step
from tests.gpu.suspected import (
    MEASUREMENTS,
    Measurement,
    measured,
    of_priorities,
    share_of_copies,
)
from tests.gpu.training import ON_EVERY_STREAM, TRAININGS, suits
from tests.support.cuda_model.scenarios import SCENARIOS
from tests.support.fsdp.reference import Ranks
from tests.support.rank_pool import run_ranks


def row_of_a_step() -> dict[str, Any]:
    """Job: return the row of a step that has taken a tenth of a second."""
    workload = Workload(2, 128, 64, 1, 512, "bfloat16", 1, recompute=False)
    return row_of(workload, "h100", seconds=0.1, num_bytes=0)


def test_a_measured_step_is_printed_beside_its_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {"NVIDIA H200": "h200", "NVIDIA GB200": "gb200", "NVIDIA A100-SXM4-80GB": "a100"}
    assert {name: kind_of(name) for name in kinds} == kinds
    (row, _) = run_ranks(2, row_of_a_step)
    path = tmp_path / "measured_run.jsonl"
    path.write_text(json.dumps(row))
    print_beside_plan(path)
    assert re.match(r"figure: a step takes 100.0 ms, planned \d+\.\d ", capsys.readouterr().out)
    path.write_text(json.dumps({**row, "hardware": {"kind": "CPU", "gpus_per_node": 2}}))
    print_beside_plan(path)
    assert "not planned: no machine with GPUs of kind cpu" in capsys.readouterr().out


def results_in(folder: Path) -> dict[str, str]:
    """Return the result of every step in a report's table."""
    table, _, _ = (folder / "report.md").read_text().partition("\n## ")
    rows = re.findall(r"^\| (.+?) \| (\w+).* \| \d+ \|", table, re.M)
    return dict(rows)


def shell(name: str, command: str, **fields: Any) -> Step:
    """Return a step of one shell command."""
    return Step(name, f"sh -c '{command}'", **fields)


def steps_of_shell(monkeypatch: pytest.MonkeyPatch, **commands: str) -> None:
    """Replace the table by steps of one shell command each."""
    steps = [shell(name, text, figures="loss") for name, text in commands.items()]
    monkeypatch.setattr(check, "STEPS", (*steps, Step("absent", "x", needs=("no.such.module",))))


@pytest.mark.exhaustive
def test_a_failing_step_is_reported_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps_of_shell(
        monkeypatch, bad="echo why; exit 3", good="echo loss 1.5; echo more", slow="sleep 60"
    )
    arguments = ["--rehearse", "--folder", str(tmp_path), "--timeout", "10"]
    result = CliRunner().invoke(check.main, arguments)
    assert result.exit_code == 1, result.output
    expected = {"bad": "failed", "good": "passed", "slow": "failed", "absent": "skipped"}
    assert results_in(tmp_path) == expected
    report = (tmp_path / "report.md").read_text()
    assert "exit code 3" in report and "\nwhy\n" in report
    assert "\nloss 1.5\n" in report and "\nmore\n" not in report
    assert "not over after 10 s" in report and "not installed: no.such.module" in report
    assert "nothing ran on a GPU" in report
    only = CliRunner().invoke(check.main, [*arguments, "--only", "good"])
    assert only.exit_code == 0 and results_in(tmp_path) == {"good": "passed"}


def test_an_interrupted_step_leaves_a_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps_of_shell(monkeypatch, first="kill -INT $PPID; sleep 60", second="true")
    # Shells and pytest's workers let the processes that they start ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = CliRunner().invoke(check.main, ["--rehearse", "--folder", str(tmp_path)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130, result.output
    expected = {"first": "interrupted", "second": "not", "absent": "not"}
    assert results_in(tmp_path) == expected


OUTPUTS = {
    1: "echo figure: 80% of what can overlap does",
    2: "echo iteration 8 \\| lm loss: 6.5 \\| lr: 1",
    3: "echo figure: none; exit 1",
    4: "echo figure: none; echo not measured: needs two GPUs",
    5: "exit 1",
    6: "sleep 60",
}
"""What steps print that settle the faults of these numbers."""


@pytest.mark.parametrize("is_rehearsed", [False, True], ids=["on_gpus", "rehearsed"])
def test_suspected_faults_pass_or_fail_by_number_and_no_rehearsal_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_rehearsed: bool
) -> None:
    def step_of(fault: int) -> Step:
        pattern = "lm loss" if fault == 2 else "^figure: "
        limit = 1.0 if fault == 6 else inf  # it hangs
        return shell(f"fault {fault}", OUTPUTS[fault], figures=pattern, fault=fault, limit=limit)

    steps = [shell("other", "true"), *map(step_of, OUTPUTS)]
    monkeypatch.setattr(check, "STEPS", steps)
    monkeypatch.setattr(check, "refuse_unusable", lambda ranks: None)
    options = ["--rehearse"] * is_rehearsed
    arguments = [*options, "--ranks", "1", "--folder", str(tmp_path), "--only", check.ALL_FAULTS]
    result = CliRunner().invoke(check.main, arguments)
    assert result.exit_code == 1, result.output
    report = (tmp_path / "report.md").read_text()
    table = report.partition("\n## Suspected faults\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[3:] if line]
    passed = "not measured: needs a GPU" if is_rehearsed else "pass"
    assert rows == [
        ["1", SUSPECTED[1], passed, "80% of what can overlap does"],
        ["2", SUSPECTED[2], passed, "lm loss: 6.5"],
        ["3", SUSPECTED[3], "fail: exit code 1", "none"],
        ["4", SUSPECTED[4], "not measured: needs two GPUs", "none"],
        ["5", SUSPECTED[5], "fail: exit code 1", "none"],
        ["6", SUSPECTED[6], "fail: not over after 1 s", "none"],
    ]
    assert "other" not in results_in(tmp_path)


def test_every_suspected_fault_has_a_step() -> None:
    assert [step.fault for step in STEPS if step.fault is not None] == [*range(1, 11)]
    assert MEASUREMENTS.keys() | {2} == SUSPECTED.keys()  # 2 is a run of pretrain_gpt.py


def measure_all() -> list[Measurement]:
    """Job: make the measurements as far as CPU ranks can."""
    return [measured(fault) for fault in MEASUREMENTS]


def test_measurements_run_on_cpu_ranks_and_settle_nothing_there(ranks: Ranks) -> None:
    for found in ranks(2, measure_all):
        for fault, (is_right, figure, reason) in zip(MEASUREMENTS, found, strict=True):
            assert (is_right, reason) == (None, "needs a GPU"), (fault, figure)
            assert figure.endswith("on CPU ranks"), (fault, figure)


def event(category: str, name: str, begin: float, length: float, **arguments: int) -> Any:
    """Return an event of a trace."""
    return {"cat": category, "name": name, "ts": begin, "dur": length, "args": arguments}


def test_copies_that_wait_for_compute_overlap_nothing() -> None:
    compute = [event("kernel", "gemm", 0, 10), event("kernel", "ncclDevKernel_AllGather", 10, 10)]
    arriving = event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 10, 4)
    inside = event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 10)
    assert share_of_copies([*compute, arriving, inside]) == 0.0
    leaving = event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 2, 4)
    assert share_of_copies([*compute, arriving, leaving]) == 0.5
    assert share_of_copies([*compute, inside]) is None


def test_kernels_of_nccl_go_first_where_their_priorities_are_less() -> None:
    compute = event("kernel", "gemm", 0, 1, priority=0)
    gather = event("kernel", "ncclDevKernel_AllGather", 0, 1, priority=-5)
    assert of_priorities([compute, gather]).is_right is True
    assert of_priorities([compute, {**gather, "args": {"priority": 0}}]).is_right is False
    assert of_priorities([compute, {**gather, "args": {}}]).is_right is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_gpus_is_told_to_rehearse(tmp_path: Path) -> None:
    result = CliRunner().invoke(check.main, ["--folder", str(tmp_path)])
    assert result.exit_code == 1 and not any(tmp_path.iterdir())
    assert "finds no CUDA device" in result.output and "--rehearse" in result.output


@pytest.mark.parametrize(
    ("found", "has_nccl", "message"),
    [(2, True, "--ranks 4 with 2 GPUs: give 1 to 2"), (4, False, "was built without NCCL")],
)
def test_what_a_machine_lacks_is_said(
    monkeypatch: pytest.MonkeyPatch, found: int, has_nccl: bool, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: has_nccl)
    result = CliRunner().invoke(check.main, ["--ranks", "4"])
    assert result.exit_code == 1
    assert message in result.output and "--rehearse" in result.output


def test_the_trainings_of_the_sanitizer_have_programs_on_the_model() -> None:
    assert set(ON_EVERY_STREAM) <= TRAININGS.keys() & SCENARIOS.keys()
    assert suits("hybrid level1", 2) and not suits("hybrid level1", 3) and suits("level3", 1)


def test_the_covered_share_of_communication_counts_no_time_twice() -> None:
    def kernel(name: str, begin: float, length: float) -> dict[str, object]:
        return {"cat": "kernel", "name": name, "ts": begin, "dur": length}

    sums = [kernel("ncclDevKernel_AllGather", 0, 10), kernel("ncclDevKernel_ReduceScatter", 5, 15)]
    compute = [kernel("gemm", 15, 10), kernel("add", 16, 2), {"cat": "cpu_op", "name": "nccl:x"}]
    assert covered_share([*sums, *compute]) == 0.25
    assert covered_share(compute) is None


def with_warm_ranks(step: Step) -> Step:
    """Return a step that starts ranks by the torchrun in the path; `tests` has the real one."""
    words = step.command.removeprefix(f"{TORCHRUN} ")
    if words == step.command:
        return step
    return replace(step, command=f"torchrun --standalone --nproc_per_node {{ranks}} {words}")


@pytest.mark.exhaustive
def test_every_step_is_rehearsed_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: dict[str, str]
) -> None:
    monkeypatch.setattr(check, "STEPS", [*map(with_warm_ranks, STEPS)])
    for name, value in commands.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(check.main, ["--rehearse", "--folder", str(tmp_path)])
    report = (tmp_path / "report.md").read_text()
    assert result.exit_code == 0, report
    expected = {}
    for step in STEPS:
        expected[step.name] = "skipped" if step.cannot_rehearse else "passed"
        if step.fault is not None:
            expected[step.name] = "not"  # measured
    assert results_in(tmp_path) == expected
    for step in STEPS:
        section = report.partition(f"\n## {step.name}: ")[2].partition("\n## ")[0]
        quoted = section.partition("```text\n")[2]
        assert step.cannot_rehearse or re.search(step.figures, quoted, re.M), section
    assert (tmp_path / "trace.json").stat().st_size > 1000
