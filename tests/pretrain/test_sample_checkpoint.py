# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of the published Megatron-FSDP loads, and training continues as it would there."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.pretrain.sample_runs import (
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    command_line,
    continue_run,
)
from tests.support.pretrain.training_runs import load_state, train
from tests.support.rank_pool import run_ranks

SAMPLE = Path(__file__).parents[1] / "data" / "fsdp_dtensor" / "dense_swiglu_bf16_dp2"
INFO = json.loads((SAMPLE / "info.json").read_text())
LINE = command_line(INFO, SAMPLE, with_fsdp=True)
LR_AT_NEXT_STEP = 0.004965817444277468
"""Rate after three of twenty steps: two of warm-up, then cosine from 0.005 to 0.0005."""


@pytest.mark.always("1")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_weights_and_moments_are_those_of_the_run_that_wrote_it(num_ranks: int) -> None:
    line = LINE
    if num_ranks == 3:  # another batch size, other steps
        line = line.replace("--global-batch-size 8", "--global-batch-size 6")
        line += " --use-checkpoint-opt-param-scheduler"
    expected = torch.load(SAMPLE / "expected.pt", weights_only=True)
    for state in run_ranks(num_ranks, load_state, line):
        assert state.args["iteration"] == INFO["iteration"]
        assert {float(step) for step in state.slots["step"].values()} == {3.0}
        for mine, theirs in (
            (state.weights, expected["param"]),
            (state.slots["exp_avg"], expected["exp_avg"]),
            (state.slots["exp_avg_sq"], expected["exp_avg_sq"]),
        ):
            assert mine.keys() == theirs.keys()
            assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []
        assert sorted(group["wd_mult"] for group in state.groups) == [0.0, 1.0]
        assert {group["lr"] for group in state.groups} == {LR_AT_NEXT_STEP}
        assert {tuple(group["betas"]) for group in state.groups} == {
            (0.9, 0.95)
        }  # the file's, not the flags' default


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_next_step_is_the_one_that_the_run_would_have_made(num_ranks: int) -> None:
    line = LINE
    if num_ranks == 4:
        line = line.replace("--micro-batch-size 2", "--micro-batch-size 1")
    line = f"{line} --log-num-zeros-in-grad"
    for result in run_ranks(num_ranks, continue_run, line, str(SAMPLE / "batch.pt")):
        assert result.step["learning-rate"] == LR_AT_NEXT_STEP
        assert result.loss_before == pytest.approx(
            INFO["eval_loss_at_checkpoint"], abs=LOSS_TOLERANCE
        )
        assert result.step["lm loss"] == pytest.approx(
            INFO["next_step"]["loss"], abs=LOSS_TOLERANCE
        )
        assert result.step["grad-norm"] == pytest.approx(
            INFO["next_step"]["grad_norm"], abs=NORM_TOLERANCE
        )
        assert result.step["num-zeros"] == pytest.approx(INFO["next_step"]["num_zeros"], rel=0.01)
        assert result.loss_after == pytest.approx(
            INFO["eval_loss_after_next_step"], abs=LOSS_TOLERANCE
        )


@pytest.mark.exhaustive
def test_a_checkpoint_written_here_has_the_keys_and_chunks_of_the_published_one(
    tmp_path: Path,
) -> None:
    line = LINE.replace(
        "--mock-data", f"--mock-data --save {tmp_path} --save-interval 1 --exit-interval 4"
    )
    run_ranks(2, train, line)
    ours = dcp.FileSystemReader(tmp_path / "iter_0000004").read_metadata()
    theirs = dcp.FileSystemReader(SAMPLE / "iter_0000003").read_metadata()
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for key, entry in theirs.state_dict_metadata.items():
        assert type(ours.state_dict_metadata[key]) is type(entry)
        assert getattr(ours.state_dict_metadata[key], "size", None) == getattr(entry, "size", None)
        if isinstance(entry, dcp.metadata.TensorStorageMetadata):
            # torch 2.15 has the field strides too, which the published file does not have.
            properties = {**vars(ours.state_dict_metadata[key].properties), "strides": None}
            assert properties == {**vars(entry.properties), "strides": None}
    assert ours.planner_data == theirs.planner_data
