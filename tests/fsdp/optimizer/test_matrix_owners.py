# SPDX-License-Identifier: Apache-2.0
"""Owners of matrices update these as the unsharded optimizers do, whatever is sharded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from megatron.fsdp.optimizer.matrix.owners import steps_whole_matrices
from megatron_fsdp import fully_shard
from tests.fsdp.optimizer.test_matrix_axes import assert_owned
from tests.support.fsdp import models
from tests.support.fsdp.meshes import Meshes
from tests.support.fsdp.optimizers import sharding, weights
from tests.support.fsdp.reference import Ranks, batch, compare_shards, loss_of

Make = Callable[[nn.Module], list[torch.optim.Optimizer]]

STEPS = 3
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


@steps_whole_matrices
class Kronecker(torch.optim.Optimizer):
    """An optimizer with a counter, and factors in a list, which its first step creates."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                assert not isinstance(parameter, DTensor)
                state, grad = self.state[parameter], parameter.grad
                if not state:
                    state["step"], state["average"] = 0, torch.zeros_like(grad)
                    state["scale"] = torch.zeros((), dtype=grad.dtype)
                    state["factors"] = [grad.new_zeros(size, size) for size in grad.shape]
                state["step"] += 1
                state["scale"].add_(grad.norm())
                state["average"] = state["average"].lerp(grad, 0.5)
                left, right = state["factors"]
                left.add_(grad @ grad.T)
                right.add_(grad.T @ grad)
                update = left @ state["average"] @ right / state["scale"] ** 3 / state["step"]
                parameter.sub_(group["lr"] * update)


def kronecker_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    muon, adamw = optimizers_of(model)
    return [Kronecker(muon.param_groups[0]["params"]), adamw]


PLACES: dict[str, tuple[int, str, dict[str, Any]]] = {
    **{f"level{level}": (2, "flat", {"zero_dp_strategy": level}) for level in range(4)},
    "four_level3": (4, "flat", {}),
    "whole_rows": (3, "flat", {"granularity": "rows"}),
    "one_unit": (3, "flat", {"disable_bucketing": True}),
    "hybrid_level1": (4, "outer2", {"zero_dp_strategy": 1}),
    "hybrid_level3": (4, "outer2", {}),
    "hybrid_optim": (4, "outer2", {"outer_dp_sharding_strategy": 1}),
}
"""Number of ranks, mesh and settings."""


def train(
    mesh: str,
    settings: dict[str, Any],
    microbatches: int = 1,
    clips: bool = False,
    dtype: torch.dtype = torch.float64,
) -> None:
    reference, module = build().to(dtype), build().to(dtype)
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
                data = batch(step, rank, microbatch).to(dtype)
                (loss_of(reference(data)) / size).backward()
            data = batch(step, dist.get_rank(), microbatch).to(dtype)
            loss_of(model(data)).backward()
        if clips:
            for each in (reference, model):
                nn.utils.clip_grad_norm_(each.parameters(), 0.5)
        for optimizer in [*expected, *optimizers]:
            optimizer.step()
        for optimizer in [*expected, *optimizers]:
            optimizer.zero_grad()
        what = f"weight after step {step}"
        tolerance = EXACT if dtype == torch.float64 else 1e-6
        compare_shards(model, weights(model), weights(reference), what, tolerance)
    assert_owned(optimizers[0])


@pytest.mark.always("level1", "level3", "one_unit", "hybrid_optim")
@pytest.mark.parametrize("place", PLACES)
def test_steps_are_those_of_the_unsharded_optimizers(ranks: Ranks, place: str) -> None:
    size, mesh, settings = PLACES[place]
    ranks(size, train, mesh, settings)


@pytest.mark.always("3-2")
@pytest.mark.parametrize(("level", "size"), [(1, 4), (3, 2)])
def test_steps_in_float32_differ_by_a_millionth(ranks: Ranks, level: int, size: int) -> None:
    # Gradients are summed in the order of ranks, as here; bfloat16 would show another order.
    ranks(size, train, "flat", {"zero_dp_strategy": level}, dtype=torch.float32)


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
def test_accumulated_and_clipped_gradients_reach_the_owners(ranks: Ranks, level: int) -> None:
    ranks(2, train, "flat", {"zero_dp_strategy": level}, 3, True)


# ---- state


def step_on_the_same_data(
    model: nn.Module, optimizers: list[Any], step: int, dtype: torch.dtype = torch.float64
) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss_of(model(batch(step, 0, 0).to(dtype))).backward()
    for optimizer in optimizers:
        optimizer.step()


def sharded_pair(
    mesh: str, settings: dict[str, Any], make: Make, dtype: torch.dtype
) -> tuple[Any, list[Any]]:
    module = build().to(dtype)
    return fully_shard(
        module, make(module), **{**sharding(module), **Meshes().arguments(mesh), **settings}
    )


def save(
    path: str, mesh: str, settings: dict[str, Any], make: Make, dtype: torch.dtype = torch.float64
) -> None:
    """Save after two steps; saving changes nothing in the steps after it."""
    model, optimizers = sharded_pair(mesh, settings, make, dtype)
    for step in range(2):
        step_on_the_same_data(model, optimizers, step, dtype)
    dcp.save(states_of(model, optimizers), checkpoint_id=path)
    train_on(model, optimizers, make, dtype)


def train_on(model: Any, optimizers: list[Any], make: Make, dtype: torch.dtype) -> None:
    """Take the third and fourth step, and compare with an unsharded model that takes all four."""
    for step in (2, 3):
        step_on_the_same_data(model, optimizers, step, dtype)
    reference = build().to(dtype)
    expected = make(reference)
    for step in range(4):
        step_on_the_same_data(reference, expected, step, dtype)
    tolerance = EXACT if dtype == torch.float64 else 0.0
    compare_shards(model, weights(model), weights(reference), "weight", tolerance)


def states_of(model: nn.Module, optimizers: list[Any]) -> dict[str, Any]:
    # torch's checkpoint loads numbers under keys that are names, but not under positions.
    states = {"model": model.state_dict(), "by name": get_optimizer_state_dict(model, optimizers)}
    return states | {str(n): each.state_dict() for n, each in enumerate(optimizers)}


def load(
    path: str, mesh: str, settings: dict[str, Any], make: Make, dtype: torch.dtype = torch.float64
) -> None:
    """Load what :func:`save` has saved after one step on other data, and train on."""
    model, optimizers = sharded_pair(mesh, settings, make, dtype)
    for by_name in (True, False) if make is optimizers_of else (True,):
        step_on_the_same_data(model, optimizers, 9, dtype)
        states = states_of(model, optimizers)
        dcp.load(states, checkpoint_id=path)
        model.load_state_dict(states["model"])
        if by_name:
            set_optimizer_state_dict(model, optimizers, states["by name"])
        for number, optimizer in enumerate(() if by_name else optimizers):
            optimizer.load_state_dict(states[str(number)])
        train_on(model, optimizers, make, dtype)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("other", "make"),
    [
        ("level0", optimizers_of),
        ("four_level3", kronecker_and_adamw),
        ("hybrid_level3", kronecker_and_adamw),
    ],
)
def test_state_loads_into_another_layout(
    ranks: Ranks, tmp_path: Path, make: Make, other: str
) -> None:
    ranks(3, save, str(tmp_path), "flat", {"zero_dp_strategy": 3}, make)
    size, mesh, settings = PLACES[other]
    ranks(size, load, str(tmp_path), mesh, settings, make)
