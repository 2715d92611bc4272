# SPDX-License-Identifier: Apache-2.0
"""Parameters of tensor subclasses: sharded if they take the buffer's memory, refused otherwise."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from megatron.fsdp import Strategy
from megatron.fsdp import fully_shard as fully_shard_by_settings
from megatron_fsdp import fully_shard, fully_shard_model
from tests.support.fsdp.meshes import mesh_of
from tests.support.fsdp.reference import Ranks, on_ranks
from tests.support.fsdp.subclasses import Frozen4Bit
from tests.support.fsdp.wrong_calls import Scene, WrongCall, check_refusals, message_of


class KeepsItsMemory(nn.Parameter):
    """A parameter that ignores what is assigned to its data."""

    data = property(torch.Tensor.detach, lambda self, value: None)


class Named(nn.Parameter):
    """A plain subclass of the user's."""


def with_weight(weight: torch.Tensor) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
    return module


def quantized() -> torch.Tensor:
    return Frozen4Bit.of(torch.ones(2, 2))


def split_quantized_weight(scene: Scene) -> None:
    mesh = mesh_of("dp", "tp", sizes=(1, 2))
    module = with_weight(DTensor.from_local(torch.ones(2, 2), mesh["tp"], [Shard(0)]))
    module[0].weight._local_tensor = quantized()
    fully_shard_model(module, mesh, "dp", tp_dim="tp")


CALLS = {
    "trained": lambda scene: fully_shard_model(with_weight(quantized())),
    "by settings": lambda scene: fully_shard_by_settings(
        with_weight(quantized()), strategy=Strategy(level=1)
    ),
    "at level 0": lambda scene: fully_shard_model(with_weight(quantized()), zero_dp_strategy=0),
    "divided by tensor parallelism": split_quantized_weight,
}
WRONG_CALLS = {
    name: WrongCall(
        ("0.weight (Frozen4Bit)", "tensor subclasses around other tensors", "freeze them"),
        call,
        NotImplementedError,
    )
    for name, call in CALLS.items()
}


def test_trained_weights_without_main_weights_are_refused_alike(ranks: Ranks) -> None:
    check_refusals(ranks, __name__)


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 3])
@on_ranks(2)
def test_subclasses_of_parameters_take_the_memory_of_the_buffer_or_are_refused(level: int) -> None:
    """Train a plain subclass, and shard one that keeps its memory."""
    module = with_weight(Named(torch.ones(2, 2)))
    model, optimizer = fully_shard(
        module, torch.optim.SGD(module.parameters(), lr=1.0), zero_dp_strategy=level
    )
    x = torch.ones(1, 2)
    model(x).sum().backward()
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(model(x) - model(0 * x), torch.zeros(1, 2))  # weights of 1 less 1
    module = with_weight(KeepsItsMemory(torch.ones(2, 2)))
    message = message_of(NotImplementedError, fully_shard_model, module, zero_dp_strategy=level)
    assert "0.weight: a KeepsItsMemory cannot be sharded" in message, message
