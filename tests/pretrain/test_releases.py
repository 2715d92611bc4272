# SPDX-License-Identifier: Apache-2.0
"""The program trains, saves and loads on every release of Megatron-Core, with the same numbers."""

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.parity import real_loop
from benchmarks.parity.files_by_release import WAYS, Way, compare
from tests.support import megatron_release
from tests.support.megatron_release import RELEASES
from tests.support.pretrain.release_runs import INSTALLED, train_on
from tests.support.pretrain.training_runs import (
    SMALL,
    Record,
    assert_same_run,
    trained,
)
from tests.support.transformer_engine.ranks import ranks, require
from tests.support.transformer_engine.training import LAYERS
from tests.support.transformer_engine.training import train as train_with_engine

RUN = f"{SMALL} --train-iters 3 --log-params-norm"
LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
FSDP = "--use-megatron-fsdp"
FIRST = f"{RUN} {FSDP} --exit-interval 2 --save-interval 2"
TUNED = f"{RUN} {FSDP} --finetune"

NEWEST = RELEASES[-1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record]]:
    """Train on the installed release; return a checkpoint and the records of all runs."""
    folder = tmp_path_factory.mktemp("installed")
    lines = (f"{FIRST} --save {folder}", RUN, f"{TUNED} --load {folder}")
    return folder, trained(*lines)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "release, levels",
    [(RELEASES[0], LEVELS[1:]), (RELEASES[1], LEVELS[::3]), (NEWEST, LEVELS[::2])],
    ids=RELEASES,
)
def test_losses_norms_and_checkpoints_are_those_of_the_installed_release(
    release: str,
    levels: Sequence[str],
    installed: tuple[Path, list[Record]],
    tmp_path: Path,
) -> None:
    mine, (_, reference, expected) = installed
    lines = [RUN, *(f"{RUN} {FSDP} --data-parallel-sharding-strategy {each}" for each in levels)]
    # It goes on from the file of the installed release, and writes one for it.
    lines += [f"{RUN} {FSDP} --load {mine}", f"{TUNED} --load {mine}"]
    *records, resumed, tuned, saved = train_on(release, 2, *lines, f"{FIRST} --save {tmp_path}")
    for record in records:
        assert_same_run(record, reference, loss=1e-6, norm=1e-5)
    assert saved.losses == pytest.approx(reference.losses[:2], rel=1e-6)
    assert resumed.losses == pytest.approx(reference.losses[2:], rel=1e-6)
    (back,) = trained(f"{RUN} {FSDP} --load {tmp_path}")
    assert back.losses == pytest.approx(reference.losses[2:], rel=1e-6)
    assert tuned.losses == pytest.approx(expected.losses, rel=1e-6)


NOT_CONVERTED = [way for way in WAYS if not way.convert]
CONVERTED = [way for way in WAYS if way.convert]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "release, model, ways",
    [
        (RELEASES[0], "gpt2", [*NOT_CONVERTED[::2], CONVERTED[0]]),
        (RELEASES[1], "llama", [*NOT_CONVERTED[1::2], CONVERTED[1]]),
        (NEWEST, "deepseek", [NOT_CONVERTED[0], *CONVERTED]),
    ],
    ids=RELEASES,
)
def test_files_load_and_convert_both_ways(
    release: str, model: str, ways: Sequence[Way], tmp_path: Path
) -> None:
    megatron_release.require(release)
    outcomes = [*compare([INSTALLED, release], [model], tmp_path, ways)]
    assert len(outcomes) == 2 * len(ways)
    assert [str(each) for each in outcomes if not each.is_equal] == []


# ---- Megatron-LM's own loop with the drop-in, against the same loop with its DDP

LOOP = {
    "0.17.1": ["zero0", "ep-zero2", "resume-tp-pp"],
    "0.18.2": ["cp", "hybrid-optim", "per-token", "second-generation", "resume-bf16"],
    "0.19.2": [
        *("zero1", "evaluation", "resume", "resume-double-buffer", "resume-ep", "resume-vpp-bf16"),
        *("resume-hybrid-model", "resume-precision-aware", "fp8"),
    ],
}
"""Rows of `real_loop.py`, which has all on each release: every axis and level on one of them.

FP4, and experts in FP8, are trained by the program's own loop, here and in `test_low_precision.py`.
"""
LOOP_CASES: list[tuple[str, str]] = []
for each, rows in LOOP.items():
    LOOP_CASES += [(each, row) for row in rows]
ROWS_ON_MODEL = ["resume", "fp8"]
"""Schedules of other axes have the same streams in `tests/cuda_model/test_adapter.py`."""


@functools.cache
def measured(row: str, release: str, on_model: str | None = None) -> tuple[float, float] | str:
    """Return the result of a row; skip where the release or its layers cannot run."""
    megatron_release.require(release)
    if real_loop.ROWS[row].with_engine:
        require()
    return real_loop.compare(row, release, on_model)


@pytest.mark.exhaustive
@pytest.mark.parametrize("release, row", LOOP_CASES)
def test_the_loop_trains_and_resumes_like_its_ddp(release: str, row: str) -> None:
    result = measured(row, release)
    assert real_loop.is_equal(result), result


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", ROWS_ON_MODEL)
def test_no_use_of_memory_is_out_of_order_on_the_model_of_a_cuda_device(row: str) -> None:
    on_model = measured(row, NEWEST, "")
    assert real_loop.is_equal(on_model), on_model
    assert on_model == measured(row, NEWEST)  # bit by bit


@pytest.mark.exhaustive
def test_captured_iterations_have_the_bits_of_a_run_without_graphs() -> None:
    """Level 1, and others of the program's own loop: `test_captured_iterations.py`."""
    assert measured("captured", NEWEST, "") == (0, 0)


@pytest.mark.exhaustive
def test_a_wait_that_is_left_out_is_reported() -> None:
    result = measured("default", NEWEST, "compute never waits")
    assert "used on two streams that nothing orders" in str(result)


# ---- FP4

E2M1 = "--fp4-format e2m1"


@pytest.mark.exhaustive
def test_weights_in_fp4_train_like_ddp() -> None:
    """Needs a release that keeps the values before quantization."""
    megatron_release.require(NEWEST)
    lines = (
        f"{FSDP} {E2M1}",
        f"--use-distributed-optimizer {E2M1} --fp4-param-gather",
        f"{FSDP} {E2M1} --fp4-param-gather --data-parallel-sharding-strategy optim",
        f"{FSDP} {E2M1} --fp4-param-gather",
    )
    run = ranks(2, release=NEWEST)
    computed, *others = run(train_with_engine, *(f"{LAYERS} {line}" for line in lines))[0]
    assert len(computed.losses) == 4
    assert all(record.losses == computed.losses for record in others)
