# SPDX-License-Identifier: Apache-2.0
"""The classes of emerging_optimizers, unmodified, update matrices as without sharding, to the bit.

Muon of this package takes float32 alone.
"""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import fully_shard
from tests.fsdp.optimizer.test_matrix_owners import PLACES, Matrices
from tests.support import emerging_optimizers_wheel
from tests.support.fsdp.meshes import Meshes
from tests.support.fsdp.optimizers import sharding, weights
from tests.support.fsdp.reference import Ranks, batch, compare_shards, loss_of
from tests.support.pairwise import each_value

MATRICES, SHAMPOO = "orthogonalized_optimizers", "soap"
ADAPTIVE = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}

OPTIMIZERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "muon": (MATRICES, "Muon", {"lr": 0.02, "nesterov": True}),
    "muon_fp32": (MATRICES, "Muon", {"lr": 0.02, "fp32_matmul_prec": "highest"}),
    "scion": (MATRICES, "Scion", {"lr": 0.02}),
    "polar": (MATRICES, "PolarGrad", {"lr": 0.02}),
    "hyperball": (MATRICES, "MuonHyperball", {"lr": 0.02}),
    "adamuon": (MATRICES, "AdaptiveMuon", {**ADAPTIVE, "moment2_method": "adamuon"}),
    "normuon": (MATRICES, "AdaptiveMuon", {**ADAPTIVE, "moment2_method": "normuon"}),
    "soap": (SHAMPOO, "SOAP", {"lr": 0.02}),
    "rekls": (SHAMPOO, "REKLS", {"lr": 0.02}),
}
"""Module of the package, class and settings."""


@pytest.fixture(autouse=True)
def package() -> None:
    emerging_optimizers_wheel.require()


def build() -> nn.Module:
    torch.manual_seed(3)
    return Matrices()


def optimizers_of(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizer of the package over the matrices of blocks, AdamW over the rest."""
    emerging_optimizers_wheel.install()
    folder, kind, settings = OPTIMIZERS[name]
    make = getattr(importlib.import_module(f"emerging_optimizers.{folder}"), kind)
    named = dict(model.named_parameters())
    matrices = [each for key, each in named.items() if "blocks" in key and each.ndim == 2]
    others = [each for key, each in named.items() if "blocks" not in key or each.ndim != 2]
    return [make(matrices, **settings), torch.optim.AdamW(others, lr=0.02)]


def sharded(name: str, place: str) -> tuple[nn.Module, list[Any]]:
    _, mesh, settings = PLACES[place]
    module = build()
    return fully_shard(
        module,
        optimizers_of(name, module),
        **{**sharding(module), **Meshes().arguments(mesh), **settings},
    )


def train(name: str, place: str) -> None:
    reference = build()
    expected = optimizers_of(name, reference)
    model, optimizers = sharded(name, place)
    for step in range(4):
        loss_of(model(batch(step, dist.get_rank(), 0).float())).backward()
        model.finish_grad_sync()
        # Ranks add up gradients in an order of their own; here the update is compared.
        for parameter, own in zip(reference.parameters(), model.parameters()):
            parameter.grad = full_tensor(own.grad).clone()
        for optimizer in [*expected, *optimizers]:
            optimizer.step()
            optimizer.zero_grad()
        what = f"weight after step {step}"
        compare_shards(model, weights(model), weights(reference), what, 0.0)


CASES = each_value(
    always=[
        ("muon", "level3"),
        ("muon", "hybrid_level3"),
        ("scion", "level1"),
        ("normuon", "hybrid_optim"),
        ("soap", "level0"),
        ("soap", "four_level3"),
    ],
    name=OPTIMIZERS,
    place=PLACES,
)


@pytest.mark.always("muon-*", "scion-level1", "normuon-hybrid_optim", "soap-level0", "soap-four*")
@pytest.mark.parametrize(("name", "place"), CASES)
def test_steps_are_those_of_the_unsharded_optimizers(ranks: Ranks, name: str, place: str) -> None:
    ranks(PLACES[place][0], train, name, place)


# ---- state


def step_all(model: nn.Module, optimizers: list[Any], step: int) -> None:
    loss_of(model(batch(step, 0, 0).float())).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def states_of(model: nn.Module, optimizers: list[Any]) -> dict[str, Any]:
    return {"model": model.state_dict(), "state": get_optimizer_state_dict(model, optimizers)}


def save(path: str, name: str, place: str) -> None:
    model, optimizers = sharded(name, place)
    for step in range(2):
        step_all(model, optimizers, step)
    dcp.save(states_of(model, optimizers), checkpoint_id=path)


def load(path: str, name: str, place: str) -> None:
    """Load after one step on other data, and go on as the unsharded optimizer does."""
    model, optimizers = sharded(name, place)
    step_all(model, optimizers, 9)
    states = states_of(model, optimizers)
    dcp.load(states, checkpoint_id=path)
    model.load_state_dict(states["model"])
    set_optimizer_state_dict(model, optimizers, states["state"])
    reference = build()
    expected = optimizers_of(name, reference)
    for step in range(4):
        step_all(reference, expected, step)
    for step in (2, 3):
        step_all(model, optimizers, step)
    compare_shards(model, weights(model), weights(reference), "weight", 0.0)


@pytest.mark.always("muon-level0", "soap-hybrid_level3")
@pytest.mark.parametrize(
    ("name", "place"),
    each_value(
        always=[("muon", "level0"), ("soap", "hybrid_level3")],
        name=["muon", "hyperball", "adamuon", "normuon", "soap"],
        place=["level0", "level3", "hybrid_level3"],
    ),
)
def test_state_loads_into_another_layout(
    ranks: Ranks, tmp_path: Path, name: str, place: str
) -> None:
    ranks(2, save, str(tmp_path), name, "level3")
    ranks(PLACES[place][0], load, str(tmp_path), name, place)
