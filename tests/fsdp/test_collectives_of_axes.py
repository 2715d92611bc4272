# SPDX-License-Identifier: Apache-2.0
"""The collectives of axes of one rank, and of experts in hybrid sharding."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.fsdp import trace
from megatron.fsdp.engine.observe import REDUCE
from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model
from tests.fsdp.test_communication import ORDER, collectives, order_of
from tests.support.fsdp.models import WIDTH
from tests.support.fsdp.recorded_steps import record_step
from tests.support.fsdp.reference import LEVELS, Ranks, batch, compare_shards, shown_gradients

# ---- axes of one rank

STRATEGIES = [*((level, 0) for level in LEVELS), (3, 1)]
"""Levels, and whether the outer axis shards optimizer state."""


@pytest.mark.always("1-0", "3-1")
@pytest.mark.parametrize("level, outer", STRATEGIES)
def test_an_outer_axis_of_one_rank_costs_nothing(ranks: Ranks, level: int, outer: int) -> None:
    entries = ranks(2, record_step, level, "outer1", outer_dp_sharding_strategy=outer)[0]
    assert order_of(entries) == [line.strip() for line in ORDER[level].strip().splitlines()]
    assert {each.ranks for each in collectives(entries)} == {(0, 1)}


@pytest.mark.parametrize(
    "level, outer, mesh",
    [*((*strategy, "outer1") for strategy in STRATEGIES), (0, 0, "flat"), (3, 0, "ep1")],
)
def test_one_rank_has_no_collectives(ranks: Ranks, level: int, outer: int, mesh: str) -> None:
    settings = {"outer_dp_sharding_strategy": outer} if mesh == "outer1" else {}
    assert collectives(ranks(1, record_step, level, mesh, 2, **settings)[0]) == []


@pytest.mark.always("0-0", "3-1")
@pytest.mark.parametrize("level, outer", STRATEGIES)
def test_an_inner_axis_of_one_rank_costs_nothing(ranks: Ranks, level: int, outer: int) -> None:
    """The outer axis is reduced at the last microbatch alone.

    Its strategy alone counts: without shards it is level 0, with sharded optimizer state level 1.
    """
    entries = ranks(2, record_step, level, "outer2", 3, outer_dp_sharding_strategy=outer)[0]
    assert order_of(entries) == [line.strip() for line in ORDER[outer].strip().splitlines()]
    assert {each.microbatch for each in collectives(entries) if each.track == REDUCE} == {2}


# ---- experts in hybrid sharding


class ExpertBlock(nn.Module):
    """A dense layer, and the expert of this rank, which may have no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor, has_tokens: bool = True) -> torch.Tensor:
        y = self.dense(x)
        return torch.tanh(y + self.experts[0](x) if has_tokens else y)


class ExpertStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ExpertBlock() for _ in range(2))

    def forward(self, x: torch.Tensor, has_tokens: bool) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, has_tokens)
        return x


def expert_gradients(model: ExpertStack, idle: int | None, step: int) -> dict[str, torch.Tensor]:
    """Return what this rank's gradients should be: it shares its expert with the next but one."""
    sums = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    for rank in range(4):
        model.zero_grad()
        for microbatch in range(2):
            model(batch(step, rank, microbatch), rank != idle).square().sum().backward()
        for name, parameter in model.named_parameters():
            is_shared = "experts" not in name or rank % 2 == dist.get_rank() % 2
            if is_shared and parameter.grad is not None:
                sums[name] += parameter.grad / 4
    return sums


def train_idle_experts(level: int, sharded: int, idle: int | None) -> list[tuple[str, int]]:
    """Job: two steps of two microbatches without marks; return the last step's last reductions.

    Experts are on two ranks, each in both slices of the outer axis, so their inner axis has one.
    """
    axes = ("dp_outer", "dp_shard", "ep")
    torch.manual_seed(0)
    reference = ExpertStack().double()
    model = fully_shard_model(
        copy.deepcopy(reference),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=axes[:2]),
        "dp_shard",
        "dp_outer",
        expt_device_mesh=init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=axes),
        fsdp_unit_modules=[ExpertBlock],
        zero_dp_strategy=level,
        outer_dp_sharding_strategy=sharded,
        sync_model_each_microbatch=False,
        mixed_precision_policy=MixedPrecisionPolicy(None, None),
    )
    for step in range(2):
        expected = expert_gradients(reference, idle, step)
        for microbatch in range(2):
            x = batch(step, dist.get_rank(), microbatch)
            model(x, dist.get_rank() != idle).square().sum().backward()
        with trace.record() as recorder:
            model.finish_grad_sync()
        with trace.record() as again:
            model.finish_grad_sync()
        assert not again.collectives
        compare_shards(model, shown_gradients(model), expected, f"gradient in step {step}")
        model.zero_grad()
    return [(entry.name, len(entry.ranks)) for entry in recorder.collectives]


@pytest.mark.always("1-0-1", "3-1-1")
@pytest.mark.parametrize(
    "level, sharded, idle",
    [*((*strategy, 1) for strategy in STRATEGIES), (0, 0, None), (3, 1, None)],
)
def test_experts_without_tokens_are_reduced_with_those_of_other_ranks(
    ranks: Ranks, level: int, sharded: int, idle: int | None
) -> None:
    results = ranks(4, train_idle_experts, level, sharded, idle)
    assert all(each == results[0] for each in results)
    if level >= 2:  # the dense layer is reduced over the inner axis already
        assert len(results[0]) == 2 * 2
