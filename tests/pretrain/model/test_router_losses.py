# SPDX-License-Identifier: Apache-2.0
"""Losses of routers and of multi-token prediction are reported as Megatron-Core sums them up."""

from pathlib import Path

import pytest

from tests.pretrain.report.test_timing import scalars
from tests.support.pretrain.saved_runs import FSDP
from tests.support.pretrain.training_runs import SMALL, Record, assert_close, train, trained
from tests.support.rank_pool import run_ranks

EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss seq_aux_loss"
    " --moe-aux-loss-coeff 1e-2 1e-3 --moe-z-loss-coeff 1e-3 --moe-layer-freq [1,0] --num-layers 2"
    " --disable-bias-linear"
)
LINE = f"{SMALL} {EXPERTS} --exit-interval 2 --log-interval 1"
ROTARY = "--position-embedding-type rope"
NAMES = ("load_balancing_loss", "seq_load_balancing_loss", "z_loss")


def column(record: Record, name: str) -> list[float]:
    return record.column(name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["", "--expert-model-parallel-size 2"], ids=["dp2", "ep2"])
def test_router_losses_are_those_of_one_rank(layout: str) -> None:
    alone = run_ranks(1, train, LINE)[0][0]
    ddp, fsdp = trained(f"{LINE} {layout}", f"{LINE} {layout} {FSDP}")
    for name in NAMES:
        assert_close(column(fsdp, name), column(ddp, name), 1e-5)
    # Balance is a mean over the microbatches of all ranks; the first rank reports its own z-loss.
    for name in NAMES[:2]:
        assert_close(column(ddp, name), column(alone, name), 1e-4)
    assert_close(column(ddp, "z_loss"), column(alone, "z_loss"), 1e-2)


@pytest.mark.exhaustive
def test_losses_of_routers_and_of_further_tokens_are_written(tmp_path: Path) -> None:
    board = f"--tensorboard-dir {tmp_path}"
    record = trained(f"{LINE} {board} {FSDP} --mtp-num-layers 1 {ROTARY}")[0]
    step = record.steps[0]
    assert step["mtp_1 loss"] == pytest.approx(step["lm loss"], rel=0.05)
    points = scalars(tmp_path)
    assert points["load_balancing_loss"] == points["mtp_1 loss"] == [1, 2]


@pytest.mark.exhaustive
def test_the_first_stage_reports_what_the_last_one_has() -> None:
    line = f"{SMALL} --exit-interval 1 --log-interval 1 --mtp-num-layers 1 {ROTARY}"
    first, last = run_ranks(2, train, f"{line} --pipeline-model-parallel-size 2")
    assert first[0].steps == last[0].steps
    step = first[0].steps[0]
    assert step["mtp_1 loss"] == pytest.approx(step["lm loss"], rel=0.05)


@pytest.mark.exhaustive
def test_a_step_that_is_not_reported_is_not_added_to_the_next() -> None:
    longer = f"{SMALL} {EXPERTS} --exit-interval 3"
    every = run_ranks(1, train, f"{longer} --log-interval 1")[0][0]
    third = run_ranks(1, train, f"{longer} --log-interval 3")[0][0]
    assert "z_loss" not in third.steps[1]
    assert third.steps[2]["z_loss"] == every.steps[2]["z_loss"]
