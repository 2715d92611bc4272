# SPDX-License-Identifier: Apache-2.0
"""Gradients that are not numbers skip the step on all ranks, or end the run with their name."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron.mcore_adapter.run.errors import RunError
from megatron.pretrain import loop
from megatron.pretrain.model.forward_step import ForwardStep
from tests.support.pretrain.parity import LLAMA, SHORT, Combination
from tests.support.pretrain.training_runs import Record, build, pretrain, tokenizer_of
from tests.support.rank_pool import run_ranks


def train_spoiled(command_line: str, rank: int, value: float) -> Record | str:
    """Job: train with one gradient element of `rank` set to `value` in the first step."""
    step = loop.forward_backward
    spoiled = []

    def forward_backward(run: loop.TrainingRun, *args: Any, **kwargs: Any) -> Any:
        result = step(run, *args, **kwargs)
        if not spoiled and dist.get_rank() == rank:
            spoiled.append(next(p for p in run.model[0].parameters() if p.to_local().numel()))
            spoiled[0].grad.to_local().view(-1)[0] = value
        return result

    with patch.object(loop, "forward_backward", forward_backward):
        return pretrain(command_line)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["pp2", "tp2"])
def test_an_overflow_on_one_rank_skips_the_step_everywhere(layout: str) -> None:
    # At this scale nothing overflows by itself.
    flags = f"{SHORT} --fp16 --initial-loss-scale 1024 --hysteresis 1"
    line = Combination(2, layout, 3, LLAMA, flags).with_few_microbatches().ours
    records = run_ranks(2, train_spoiled, line.replace("--log-num-zeros-in-grad", ""), 0, math.inf)
    for record in records:
        assert record.column("skipped") == [True, False, False]
        assert record.column("loss-scale") == [512.0] * 3
    assert records[0].losses == records[1].losses


def spoil_a_weight(command_line: str, rank: int) -> str:
    """Job: return the error of a step in which one weight gradient of `rank` is NaN."""
    run = build(command_line)
    loop.connect(run)
    data, _, _ = loop.build_datasets(run.args, tokenizer_of(run.args))
    if dist.get_rank() == rank:
        weight = next(
            each
            for each in run.model[0].module.sharded_params
            if each.name.endswith("linear_fc2.weight")
        )
        weight.compute.register_hook(lambda gradient: gradient * math.nan)
    with loop.batches(run.args, data, 0) as batches:
        try:
            loop.forward_backward(run, batches, forward_only=False)
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_gradient_that_is_not_a_number_names_parameter_and_rank() -> None:
    # Looked at when it is reduced: the rank is the one that owns this part of it.
    line = Combination(2, "dp", 3, LLAMA).ours
    for error in run_ranks(2, spoil_a_weight, line, 1):
        assert (
            error == "rank 0: NaN or Inf in the gradient of decoder.layers.0.mlp.linear_fc2.weight"
        )


def test_a_gradient_that_is_not_a_number_on_one_stage_ends_the_run() -> None:
    # Without an agreement the other stage would wait for this one in the next collective.
    for error in run_ranks(2, spoil_a_weight, Combination(2, "pp2", 3, LLAMA).ours, 1):
        assert (
            error == "rank 1: NaN or Inf in the gradient of decoder.layers.1.mlp.linear_fc2.weight"
        )


def refuse_infinite_loss(command_line: str) -> str:
    """Job: compute a loss that is NaN; the error."""
    run = build(command_line)
    forward_step = ForwardStep(run.args, run.device, 0, run.report.times)
    losses = torch.full((1, 4), math.nan)
    with pytest.raises(RunError) as caught:
        forward_step.loss(losses, torch.ones(1, 4))
    return str(caught.value)


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    line = Combination(1, "", 3, LLAMA, SHORT).ours
    assert "the loss is nan in iteration 1" in run_ranks(1, refuse_infinite_loss, line)[0]
