# SPDX-License-Identifier: Apache-2.0
"""Replicas of weights that differ end the run with their names, on all ranks."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron.pretrain import loop
from tests.support.pretrain.saved_runs import FSDP
from tests.support.pretrain.training_runs import SMALL, refuse, train
from tests.support.rank_pool import run_ranks

CHECK = "--exit-interval 4 --check-weight-hash-across-dp-replicas-interval 2"
SHARDED = f"{FSDP} --data-parallel-sharding-strategy"
LAYOUTS = {
    "ddp": (2, ""),
    "ddp_overlap": (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "zero0": (2, f"{SHARDED} no_shard"),
    "zero1": (2, f"{SHARDED} optim"),
    "zero2": (2, f"{SHARDED} optim_grads"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_replicas_train_on_as_without_the_check(layout: str) -> None:
    ranks, flags = LAYOUTS[layout]
    line = f"{SMALL} {flags}"
    plain, checked = run_ranks(ranks, train, f"{line} --exit-interval 4", f"{line} {CHECK}")[0]
    assert checked.losses == plain.losses


def spoiled(command_line: str, rank: int, name: str) -> str:
    """Job: the error of a run in which a weight of one rank changes after the second step."""
    check = loop.check_replicas

    def change_and_check(args: Any, model: Any, iteration: int) -> None:
        if dist.get_rank() == rank:
            if args.use_megatron_fsdp:
                named = {each.name: each for each in model[0].module.sharded_params}
                each = next(named[key] for key in named if key.endswith(name))
                weight = each.compute
            else:
                weight = dict(model[0].named_parameters())[f"module.{name}"]
            with torch.no_grad():
                weight.view(-1)[0] += 1
        check(args, model, iteration)

    with patch.object(loop, "check_replicas", change_and_check):
        return refuse(command_line)


@pytest.mark.always("zero2")
@pytest.mark.parametrize("layout", ["ddp", "zero0", "zero2"])
def test_a_weight_that_differs_is_named_on_all_ranks(layout: str) -> None:
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    ranks, flags = LAYOUTS[layout]
    spoiled_rank = ranks - 1
    errors = run_ranks(ranks, spoiled, f"{SMALL} {flags} {CHECK}", spoiled_rank, name)
    assert len(set(errors)) == 1
    start, *names = errors[0].split("\n  ")
    assert start == (
        "RunError: after iteration 2 these weights differ from those of the first replica:"
    )
    (line,) = names
    assert line.startswith(f"rank {spoiled_rank}: ") and line.endswith(name)
