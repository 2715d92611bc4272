# SPDX-License-Identifier: Apache-2.0
"""Optimizers that look at whole matrices step as on an unsharded model, whatever is sharded."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_fsdp import fully_shard, fully_shard_model, fully_shard_optimizer
from tests.fsdp.test_warnings_once import Messages
from tests.support.fsdp import matrix_optimizers as written
from tests.support.fsdp import models
from tests.support.fsdp.meshes import Meshes, shard_mesh
from tests.support.fsdp.optimizers import Signs, sharded_step, sharding, unsharded_step, weights
from tests.support.fsdp.reference import TOLERANCE, Ranks, batch, compare_shards, loss_of, on_ranks
from tests.support.fsdp.state_dicts import load_checkpoint, save_checkpoint
from tests.support.fsdp.state_dicts import train as train_alike
from tests.support.pairwise import each_value

Make = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "signs": Signs,
    "no_closure": written.TakesNoClosure,
    "own_adam": partial(written.OwnAdam, lr=0.02),
    "trust_ratio": written.TrustRatio,
    "row_means": written.RowMeans,
    "newton_schulz": written.NewtonSchulz,
    "shampoo": written.Shampoo,
    "sharpness_aware": written.LooksTwice,
    "adafactor": partial(torch.optim.Adafactor, lr=0.05, weight_decay=0.1),
    "adafactor_foreach": partial(torch.optim.Adafactor, lr=0.05, foreach=True),
}

PLACES: dict[str, tuple[int, str, dict[str, Any]]] = {
    **{f"level{level}": (3, "flat", {"zero_dp_strategy": level}) for level in range(4)},
    "more_ranks_than_rows": (4, "flat", {}),
    "whole_rows": (3, "flat", {"granularity": "rows"}),
    "hybrid": (4, "outer2", {}),
    "hybrid_optim": (4, "outer2", {"outer_dp_sharding_strategy": 1}),
}
"""Number of ranks, mesh and settings."""

PLACES_OF_OPTIMIZERS = each_value(
    always=[
        ("newton_schulz", "level3"),
        ("trust_ratio", "level1"),
        ("shampoo", "hybrid_optim"),
        ("row_means", "more_ranks_than_rows"),
        ("adafactor", "level3"),
    ],
    name=OPTIMIZERS,
    place=PLACES,
)


class OddStack(nn.Module):
    """Matrices whose rows no number of ranks divides, a cube, vectors and a scalar."""

    units = (nn.Linear,)

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(models.WIDTH, 11)
        self.down = nn.Linear(11, 3)
        self.cube = nn.Parameter(torch.randn(3, 5, 2))
        self.one = nn.Parameter(torch.randn(1, 7))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        hidden = torch.tanh(self.up(x)) * self.scale
        return self.down(hidden) + self.cube.square().mean() + self.one.square().sum()


def build() -> nn.Module:
    torch.manual_seed(2)
    return OddStack().double()


def train(make: Make, mesh: str, settings: dict[str, Any], steps: int = 3) -> None:
    reference, module = build(), build()
    expected, optimizer = make(reference.parameters()), make(module.parameters())
    place = {"device_mesh": shard_mesh()} if mesh == "flat" else Meshes().arguments(mesh)
    model, optimizer = fully_shard(module, optimizer, **{**sharding(module), **place, **settings})
    for step in range(steps):
        unsharded_step(reference, expected, step)
        sharded_step(model, optimizer, step)
        what = f"weight after step {step}"
        compare_shards(model, weights(model), weights(reference), what, TOLERANCE)


@pytest.mark.always("shampoo-hybrid_optim", "newton_schulz-level3")
@pytest.mark.parametrize(("name", "place"), PLACES_OF_OPTIMIZERS)
def test_updates_match_the_unsharded_optimizer(ranks: Ranks, name: str, place: str) -> None:
    size, mesh, settings = PLACES[place]
    ranks(size, train, OPTIMIZERS[name], mesh, settings)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("level", "how"),
    [
        *((3, how) for how in ("tensor", "data", "foreach", "redistribute")),
        (0, "tensor"),
        (1, "redistribute"),
    ],
)
def test_muon_for_dtensors_steps_as_on_one_rank(ranks: Ranks, level: int, how: str) -> None:
    make = partial(written.GatheringMuon, how=how)
    ranks(3, train, make, "flat", {"zero_dp_strategy": level})


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
@on_ranks(2)
def test_lbfgs_steps_with_losses_that_all_ranks_share(level: int) -> None:
    """Step LBFGS, whose closures return the same loss on all ranks."""
    reference, module = build(), build()
    settings = {"lr": 0.2, "max_iter": 4, "line_search_fn": "strong_wolfe"}
    expected = torch.optim.LBFGS(reference.parameters(), **settings)
    model, optimizer = fully_shard(
        module,
        torch.optim.LBFGS(module.parameters(), **settings),
        shard_mesh(),
        **sharding(module, level),
    )
    for _ in range(2):
        for each, stepped in ((reference, expected), (model, optimizer)):

            def closure(each: Any = each, stepped: Any = stepped) -> Tensor:
                stepped.zero_grad()
                loss = loss_of(each(batch(0, 0, 0)))
                loss.backward()
                return loss

            stepped.step(closure)
        compare_shards(model, weights(model), weights(reference), "weight", 1e-8)


# ---- what is gathered


def messages_of(make: Make, level: int) -> list[str]:
    messages = Messages()
    module = build()
    model, optimizer = fully_shard(
        module, make(module.parameters()), shard_mesh(), **sharding(module, level)
    )
    for step in range(2):
        sharded_step(model, optimizer, step)
    return messages.take()


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 3])
def test_what_is_gathered_is_said_once_on_the_first_rank(ranks: Ranks, level: int) -> None:
    first, second = ranks(2, messages_of, written.Shampoo, level)
    assert second == []
    if level == 0:
        assert first == []
        return
    (message,) = first
    assert "Shampoo gathers" in message and "whole tensors in each step" in message


@pytest.mark.always("Signs")
@pytest.mark.parametrize("make", [torch.optim.AdamW, Signs])
def test_an_element_wise_update_gathers_nothing(ranks: Ranks, make: Make) -> None:
    assert ranks(2, messages_of, make, 3) == [[], []]


# ---- state


def momentum_state(path: str, name: str, saves: bool) -> None:
    """Save after two steps, or load into an optimizer after one step and train on."""
    make = OPTIMIZERS[name]
    module = build()
    model, optimizer = fully_shard(
        module, make(module.parameters()), shard_mesh(), **sharding(module)
    )
    train_alike(model, optimizer, 2 if saves else 1)
    if saves:
        save_checkpoint(path, model, optimizer)
        return
    load_checkpoint(path, model, optimizer)
    reference = build()
    expected = make(reference.parameters())
    train_alike(reference, expected, 4)
    train_alike(model, optimizer, range(2, 4))
    compare_shards(model, weights(model), weights(reference), "weight", TOLERANCE)
    slots = optimizer.state[next(iter(model.parameters()))]
    assert any(isinstance(value, DTensor) for value in slots.values()) or name == "shampoo"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["row_means", "shampoo", "signs"])
def test_state_is_saved_and_loaded_for_another_number_of_ranks(
    ranks: Ranks, name: str, tmp_path: Path
) -> None:
    ranks(3, momentum_state, str(tmp_path), name, True)
    ranks(2, momentum_state, str(tmp_path), name, False)


@pytest.mark.always("shampoo")
@pytest.mark.parametrize("name", ["row_means", "newton_schulz", "shampoo", "adafactor"])
def test_state_made_before_sharding_is_kept(ranks: Ranks, name: str) -> None:
    ranks(2, shard_after_two_steps, OPTIMIZERS[name])


def shard_after_two_steps(make: Make) -> None:
    reference, module = build(), build()
    expected, optimizer = make(reference.parameters()), make(module.parameters())
    for step in range(2):
        unsharded_step(reference, expected, step)
        unsharded_step(module, optimizer, step)
    optimizer.zero_grad()
    model, optimizer = fully_shard(module, optimizer, shard_mesh(), **sharding(module))
    for step in range(2, 4):
        unsharded_step(reference, expected, step)
        sharded_step(model, optimizer, step)
        compare_shards(model, weights(model), weights(reference), "weight", TOLERANCE)


def load_own_state(make: Make) -> None:
    """Load an optimizer's state into itself after two steps, and train on."""
    reference, module = build(), build()
    expected, optimizer = make(reference.parameters()), make(module.parameters())
    model, optimizer = fully_shard(module, optimizer, shard_mesh(), **sharding(module))
    for step in range(4):
        if step == 2:
            optimizer.load_state_dict(optimizer.state_dict())
        unsharded_step(reference, expected, step)
        sharded_step(model, optimizer, step)
    compare_shards(model, weights(model), weights(reference), "weight", TOLERANCE)


@pytest.mark.always("adafactor")
@pytest.mark.parametrize("name", ["adafactor", "row_means", "shampoo"])
def test_an_optimizer_loads_its_own_state(ranks: Ranks, name: str) -> None:
    """Adafactor's column statistics have the shape of a parameter of one row, and of no other."""
    ranks(2, load_own_state, OPTIMIZERS[name])


@on_ranks(2)
def test_a_rank_of_level_0_needs_no_other_for_its_states() -> None:
    """At level 0 every rank has all state, so one rank may save and load by itself."""
    model = fully_shard_model(nn.Linear(3, 3), zero_dp_strategy=0)
    optimizer = fully_shard_optimizer(written.RowMeans(model.parameters(), lr=0.1))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        optimizer.load_state_dict(optimizer.state_dict())
        model.load_state_dict(model.state_dict())
