# SPDX-License-Identifier: Apache-2.0
"""Six published runs (published_runs.jsonl, with their sources) are planned as measured."""

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from click.testing import CliRunner

from megatron.planning.costs.gpu_kernels import FITTED
from megatron.planning.published.compared_runs import ComparedRun
from megatron.planning.published.comparison_report import report_lines
from megatron.planning.published.constant_fit import LIMITS, bound_of, fit, neutral
from megatron.planning.published.plan_run import (
    PlannedRun,
    formula_of,
    plan_run,
    simulated_seconds,
)
from megatron.planning.published.published_runs import PublishedRun, read_runs
from megatron.planning.published.run_flags import NotExpressibleError
from megatron.planning.published.run_machine import machine_of
from megatron.planning.published.run_software import mesh_of, sizes_of, software_of
from tests.support.rank_pool import run_ranks
from tools.plan import main

ROOT = Path(__file__).parents[2]
RUNS = Path(__file__).with_name("published_runs.jsonl")
ERROR_OF_SECONDS = 0.12
ERROR_OF_MEMORY = 0.12


def checked(words: list[str]) -> tuple[int, str, dict[str, tuple[float, float, bool]]]:
    """Return the exit code and the output of --check, and the plans; on a rank of the pool."""
    if dist.is_initialized():
        dist.destroy_process_group()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = CliRunner().invoke(main, words)
    plans = {}
    for run in read_runs(RUNS):
        plan = plan_run(run)
        plans[run.name] = (plan.seconds, plan.memory_gib, plan.is_simulated)
    return done.exit_code, done.output, plans


@pytest.mark.exhaustive
def test_six_published_runs_are_planned_as_they_were_measured(tmp_path: Path) -> None:
    report, picture = tmp_path / "report.md", tmp_path / "report.png"
    words = ["--check", str(RUNS), "--report", str(report), "--picture", str(picture)]
    ((code, output, plans),) = run_ranks(1, checked, words)
    assert code == 0, output
    for run in read_runs(RUNS):
        seconds, memory, is_simulated = plans[run.name]
        assert seconds == pytest.approx(run.seconds, rel=ERROR_OF_SECONDS), run.name
        if run.memory_gib is not None:
            assert memory == pytest.approx(run.memory_gib, rel=ERROR_OF_MEMORY), run.name
        assert is_simulated == (run["zero_level"] == 3), run.name
        # What the engine simulates and what the formulas give is one model of time.
        assert formula_of(run).seconds == pytest.approx(seconds, rel=0.03), run.name
        assert re.search(rf"^{run.name} ", output, re.MULTILINE)
    assert "errors of the step" in output
    text = report.read_text()
    assert "python tools/plan.py --check published_runs.jsonl --report report.md" in text
    assert "| product |" in text and "without each source" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def row(**changes: object) -> PublishedRun:
    """Return the first of the runs with changed fields."""
    first = json.loads(RUNS.read_text().splitlines()[0])
    return PublishedRun(first | changes)


def test_what_a_row_says_of_its_machine_is_planned() -> None:
    hardware = dict(row()["hardware"])
    machine = machine_of(row())
    assert machine.power_part == pytest.approx(500 / 700)
    assert machine.memory_bytes_per_second == 2.4e12
    rack = machine_of(row(hardware=hardware | {"kind": "gb200", "nvlink_domain": 72}))
    assert rack.domain == 64
    slow = machine_of(row(hardware=hardware | {"inside": "NVLink, 400 GB/s in both directions"}))
    assert slow.inside.bytes_per_second == 200e9
    with pytest.raises(NotExpressibleError, match="limit of 500 W, but the power of b300"):
        machine_of(row(hardware=hardware | {"kind": "b300"}))
    with pytest.raises(NotExpressibleError, match="kind abacus"):
        machine_of(row(hardware=hardware | {"kind": "abacus"}))


def test_a_run_without_its_microbatch_is_not_planned() -> None:
    with pytest.raises(NotExpressibleError, match="microbatch are not published"):
        mesh_of(row(micro_batch=None))
    with pytest.raises(NotExpressibleError, match="do not divide"):
        mesh_of(row(micro_batch=3))
    with pytest.raises(NotExpressibleError, match="precision int4 is none of"):
        mesh_of(row(precision="int4"))


def test_software_follows_from_the_framework_and_the_notes() -> None:
    assert software_of(row()).fusion == "compiled"
    assert software_of(row(compile=False)).fusion == "eager"
    assert software_of(row(notes="async TP")).overlaps_tensor
    assert software_of(row(framework="never heard of", compile=None)).fusion == "eager"
    assert software_of(row(gradient_reduction="bf16")).reduce_bytes == 2
    assert software_of(row(precision="fp8")).uses_fp8
    assert software_of(row(precision="fp32")).compute_bytes == 4


def test_a_run_may_state_the_imbalance_of_its_experts() -> None:
    experts = {"experts": 8, "top_k": 2, "expert_ffn": 14336}
    model = dict(row()["model"]) | {"moe": experts}
    even = formula_of(row(model=model, recompute="none"))
    uneven = formula_of(row(model=model, recompute="none", expert_imbalance=1.5))
    assert uneven.seconds > 1.1 * even.seconds
    assert uneven.peak_bytes > even.peak_bytes


def test_a_run_whose_messages_overlap_with_nothing_is_not_simulated() -> None:
    run = row(framework="nanotron", compile=None)
    assert not software_of(run).overlaps_data
    assert simulated_seconds(run, formula_of(run)) is None


def test_more_compute_and_more_recomputation_take_longer() -> None:
    seconds = formula_of(row()).seconds
    assert formula_of(row(recompute="full")).seconds > seconds
    assert formula_of(row(recompute="none")).seconds < seconds
    assert formula_of(row(global_batch=512)).seconds > 1.9 * seconds
    assert formula_of(row(precision="fp8")).seconds < seconds
    longer = dict(row()["model"]) | {"seq_length": 16384}
    assert formula_of(row(model=longer)).seconds > 2 * seconds
    assert sizes_of(row(model=longer)).flops_per_token > sizes_of(row()).flops_per_token


FASTER_IF_LARGER = ("product", "memory", "link")
LEAST_EFFECT = 0.01
"""Part of a step that the limits of a constant are apart, in the run where it matters most."""


@pytest.mark.parametrize("name", LIMITS)
def test_each_constant_changes_the_step(name: str) -> None:
    short = dict(row()["model"]) | {"seq_length": 256}
    experts = {"experts": 8, "top_k": 2, "expert_ffn": 14336}
    of_host = {"gpus": 8, "dp": 8, "global_batch": 16, "compile": False, "zero_level": 1}
    runs = [*read_runs(RUNS), row(**of_host, model=short)]
    runs.append(row(**of_host, model=short | {"moe": experts}))
    low, high = (replace(FITTED, **{name: value}) for value in LIMITS[name])
    slower, faster = (low, high) if name in FASTER_IF_LARGER else (high, low)
    effects = []
    for run in runs:
        effects.append(formula_of(run, slower).seconds / formula_of(run, faster).seconds - 1)
    assert min(effects) >= 0
    assert max(effects) > LEAST_EFFECT


def test_the_page_has_the_errors_of_the_report() -> None:
    report = (ROOT / "benchmarks/results/published_runs.md").read_text()
    page = (ROOT / "docs/planning.md").read_text()
    number = r"(\d+\.\d)%"
    every = re.search(rf"{number} +{number} +{number} +{number} +(\d+) +\S+ +all\n", report)
    left_out = re.search(rf"{number} +{number} of +\d+  all\n", report)
    one_profile = re.search(rf"{number} +{number} of +\d+  all, with one profile", report)
    assert every and left_out and one_profile
    *step, memory, of_memory, count = every.groups()
    rows = {
        "step": step,
        "step, by constants fitted without": left_out.groups(),
        "step, with": one_profile.groups(),
        "memory, of 14 runs": (memory, of_memory),
    }
    for title, (median, ninetieth) in rows.items():
        text = rf"^\| {title}[^|]* \| {median} % \| {ninetieth} % \|$"
        assert re.search(text, page, re.MULTILINE), (title, median, ninetieth)
    assert f", {count} of 82 runs of" in page


def test_a_report_on_one_source_has_no_cross_validation(tmp_path: Path) -> None:
    one = row(source={"title": "one"})
    compared = [ComparedRun(run, plan_of(run)) for run in (one, row(source={"title": "one"}))]
    lines = list(report_lines(compared, [], "a command"))
    assert "all runs have one source: there is nothing to fit without it" in lines
    with pytest.raises(ValueError, match="a fit needs runs"):
        fit([])


def plan_of(run: PublishedRun, memory_gib: float = 1.0) -> PlannedRun:
    return PlannedRun(
        seconds=formula_of(run).seconds,
        memory_gib=memory_gib,
        capacity_gib=74.5,
        flops_per_second=1e14,
        utilization=0.1,
        is_simulated=False,
    )


def test_a_report_lists_runs_that_are_planned_above_the_memory_of_their_gpu() -> None:
    compared = [ComparedRun(row(), plan_of(row(), 80.0)), ComparedRun(row(), plan_of(row()))]
    text = "\n".join(report_lines(compared, [], "a command"))
    assert f"- {row().name}: 80.0 of 74.5 GiB" in text
    assert text.count(" of 74.5 GiB") == 1


def test_a_fit_begins_at_no_run_and_a_constant_at_its_limit_is_marked() -> None:
    begin = neutral()
    for name, (low, high) in LIMITS.items():
        assert low < getattr(begin, name) < high
        assert bound_of(name, begin) == ""
    assert bound_of("memory", replace(begin, memory=0.7)) == "the least that is allowed, 0.7"
    assert bound_of("product", replace(begin, product=1.0)) == "the most that is allowed, 1"
