# SPDX-License-Identifier: Apache-2.0
"""Owners of matrices update these as the unsharded optimizers do, whatever is sharded."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from tests.support.fsdp import models
from tests.support.fsdp.meshes import Meshes
from tests.support.fsdp.optimizers import sharding, weights
from tests.support.fsdp.reference import Ranks, batch, compare_shards, loss_of

STEPS = 10
EXACT = 1e-9
"""For float64: Muon iterates in bfloat16, to which a difference of 1e-16 is nothing."""


class Matrices(nn.Module):
    """Blocks of uneven matrices, and a table that is the output layer too."""

    units = (nn.Sequential,)

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, models.WIDTH)
        blocks = [(13, 7), (models.WIDTH, 3), (9, 16)]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(models.WIDTH, up), nn.Tanh(), nn.Linear(up, models.WIDTH))
            for up, _ in blocks
        )
        self.norm = nn.LayerNorm(models.WIDTH)
        self.head = nn.Linear(models.WIDTH, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x + block(x) + self.table(torch.tensor(number))
        return self.head(self.norm(x))


def build() -> nn.Module:
    torch.manual_seed(3)
    return Matrices().double()


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon over the matrices of the blocks and AdamW over all else."""
    named = dict(model.named_parameters())
    matrices = [each for name, each in named.items() if "blocks" in name and each.ndim == 2]
    others = [each for name, each in named.items() if "blocks" not in name or each.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.02)]


PLACES: dict[str, tuple[int, str, dict[str, Any]]] = {
    **{f"level{level}": (2, "flat", {"zero_dp_strategy": level}) for level in range(4)},
    **{f"four_level{level}": (4, "flat", {"zero_dp_strategy": level}) for level in range(4)},
    "whole_rows": (3, "flat", {"granularity": "rows"}),
    "one_unit": (3, "flat", {"disable_bucketing": True}),
    **{f"hybrid_level{level}": (4, "outer2", {"zero_dp_strategy": level}) for level in range(4)},
    "hybrid_optim": (4, "outer2", {"outer_dp_sharding_strategy": 1}),
}
"""Number of ranks, mesh and settings."""


def train(mesh: str, settings: dict[str, Any], microbatches: int, clips: bool) -> None:
    reference, module = build(), build()
    expected = optimizers_of(reference)
    model, optimizers = fully_shard(
        module,
        optimizers_of(module),
        **{**sharding(module), **Meshes().arguments(mesh), **settings},
    )
    size = dist.get_world_size()
    for step in range(STEPS):
        for microbatch in range(microbatches):
            for rank in range(size):
                (loss_of(reference(batch(step, rank, microbatch))) / size).backward()
            loss_of(model(batch(step, dist.get_rank(), microbatch))).backward()
        if clips:
            for each in (reference, model):
                nn.utils.clip_grad_norm_(each.parameters(), 0.5)
        for optimizer in [*expected, *optimizers]:
            optimizer.step()
        for optimizer in [*expected, *optimizers]:
            optimizer.zero_grad()
        what = f"weight after step {step}"
        compare_shards(model, weights(model), weights(reference), what, EXACT)


@pytest.mark.parametrize("place", PLACES)
def test_ten_steps_are_those_of_the_unsharded_optimizers(ranks: Ranks, place: str) -> None:
    size, mesh, settings = PLACES[place]
    ranks(size, train, mesh, settings, 1, False)
