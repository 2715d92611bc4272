# SPDX-License-Identifier: Apache-2.0
"""The classes of emerging_optimizers, unmodified, update matrices as without sharding, to the bit.

Muon of this package takes float32 alone.
"""

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.dtensor.tensor_part import full_tensor
from tests.fsdp.optimizer import test_matrix_owners
from tests.fsdp.optimizer.test_matrix_owners import PLACES, load, save, sharded_pair
from tests.support import emerging_optimizers_wheel
from tests.support.fsdp.optimizers import weights
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


def optimizers_of(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizer of the package over the matrices of blocks, AdamW over the rest."""
    emerging_optimizers_wheel.install()
    folder, kind, settings = OPTIMIZERS[name]
    make = getattr(importlib.import_module(f"emerging_optimizers.{folder}"), kind)
    muon, adamw = test_matrix_owners.optimizers_of(model)
    return [make(muon.param_groups[0]["params"], **settings), adamw]


def train(name: str, place: str) -> None:
    reference = test_matrix_owners.build().float()
    expected = optimizers_of(name, reference)
    make = partial(optimizers_of, name)
    model, optimizers = sharded_pair(*PLACES[place][1:], make, torch.float32)
    for step in range(3):
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
    always=[("muon", "level3"), ("normuon", "hybrid_optim"), ("soap", "level0")],
    name=OPTIMIZERS,
    place=PLACES,
)


@pytest.mark.always("muon-*", "soap-level0")
@pytest.mark.parametrize(("name", "place"), CASES)
def test_steps_are_those_of_the_unsharded_optimizers(ranks: Ranks, name: str, place: str) -> None:
    ranks(PLACES[place][0], train, name, place)


# ---- state


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "place"), [("muon", "level0"), ("normuon", "four_level3"), ("soap", "hybrid_level3")]
)
def test_state_loads_into_another_layout(
    ranks: Ranks, tmp_path: Path, name: str, place: str
) -> None:
    make, size = partial(optimizers_of, name), PLACES[place][0]
    ranks(2, save, str(tmp_path), *PLACES["level3"][1:], make, torch.float32)
    ranks(size, load, str(tmp_path), *PLACES[place][1:], make, torch.float32)
