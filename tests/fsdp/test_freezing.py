# SPDX-License-Identifier: Apache-2.0
"""Parameters may be frozen before and after sharding."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.fsdp.meshes import shard_mesh
from tests.fsdp.models import build_stack
from tests.fsdp.reference import LEVELS, Ranks, compare_shards
from tests.fsdp.side_by_side import (
    mean_gradients,
    plain_backward,
    shard,
    shard_two_layers,
    train_side_by_side,
    whole_weights,
)


def freeze_the_blocks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if ".blocks.1." in f".{name}" or name.endswith("embed.weight"):
            parameter.requires_grad_(False)


def freeze_afterwards(level: int) -> None:
    mesh = shard_mesh()
    reference, model = train_side_by_side(
        build_stack, plain_backward, level, prepare=freeze_the_blocks, mesh=mesh
    )
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    assert len(frozen) == 6 and all(parameter.grad is None for parameter in frozen)
    for each in (reference, model):
        each.requires_grad_(True)
    expected = mean_gradients(reference, plain_backward, 5)
    model.zero_grad()
    plain_backward(model, 5, dist.get_rank())
    compare_shards(
        model, {name: p.grad for name, p in model.named_parameters()}, expected, "thawed"
    )


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_frozen_after_sharding_are_not_updated_and_thaw_again(
    ranks: Ranks, level: int
) -> None:
    ranks(2, freeze_afterwards, level)


def thaw_what_was_frozen(level: int) -> str:
    module = build_stack()
    module.embed.requires_grad_(False)
    model, _ = shard(module, level)
    dict(model.named_parameters())["module.embed.weight"].requires_grad_(True)
    with pytest.raises(RuntimeError) as error:
        plain_backward(model, 0, dist.get_rank())
    return str(error.value)


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_frozen_when_sharded_cannot_be_thawed(ranks: Ranks, level: int) -> None:
    for message in ranks(2, thaw_what_was_frozen, level):
        assert "embed.weight" in message and "frozen when the model was sharded" in message


def freeze_inside(level: int) -> None:
    model, optimizer = shard_two_layers(level)
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.module[0].requires_grad_(False)
    before = whole_weights(model)
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    assert [bool(torch.equal(old, new)) for old, new in zip(before, whole_weights(model))] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_freezing_the_modules_own_parameters_counts(ranks: Ranks, level: int) -> None:
    ranks(2, freeze_inside, level)
