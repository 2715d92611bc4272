# SPDX-License-Identifier: Apache-2.0
"""Frozen weights of subclasses around several tensors: sharded and gathered as bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model
from tests.support.fsdp.reference import Ranks, on_ranks
from tests.support.fsdp.subclasses import Frozen4Bit, RoundedLayer
from tests.support.fsdp.wrong_calls import message_of


def build() -> nn.Sequential:
    torch.manual_seed(2)
    module = nn.Sequential(RoundedLayer(8, 13), RoundedLayer(13, 5), RoundedLayer(5, 8))
    for layer in module:
        layer.weight = nn.Parameter(Frozen4Bit.of(layer.weight.detach()), requires_grad=False)
        layer.weight.of_mine = 7
    return module


def shard(level: int, **settings: object) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    module = build()
    trained = [one for one in module.parameters() if one.requires_grad]
    return fully_shard(
        module,
        torch.optim.SGD(trained, lr=0.1),
        fsdp_unit_modules=[RoundedLayer],
        zero_dp_strategy=level,
        **settings,
    )


@pytest.mark.always("2-*")
@pytest.mark.parametrize(
    ("num_ranks", "level", "uses_slots"),
    [(1, 0, False), (2, 1, False), (4, 2, False), (2, 3, False), (4, 3, True)],
)
@on_ranks()
def test_forwards_read_the_same_bits(num_ranks: int, level: int, uses_slots: bool) -> None:
    reference = build()
    model, optimizer = shard(level, fsdp_double_buffer=uses_slots)
    plain = torch.optim.SGD([one for one in reference.parameters() if one.requires_grad], lr=0.1)
    x = torch.randn(4, 8)
    for _ in range(3):
        expected, output = reference(x), model(x)
        assert torch.equal(output, expected)
        expected.sum().backward()
        output.sum().backward()
        for one in (plain, optimizer):
            one.step()
            one.zero_grad()
    weight = model.module[0].weight
    assert weight.dtype == torch.uint8 and weight.of_mine == 7
    read: list[torch.Tensor] = []
    layer = model.module[0]
    layer.register_forward_pre_hook(lambda *_: read.append(layer.weight))
    model(x)
    assert isinstance(read[0], Frozen4Bit)


def save_and_load(folder: str, level: int) -> None:
    model, _ = shard(level)
    x = torch.randn(4, 8)
    with torch.no_grad():
        expected = model(x)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    other, _ = shard(3 - level)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
        assert not torch.equal(other(x), expected)
        state = other.state_dict()
        dcp.load({"model": state}, checkpoint_id=folder)
        other.load_state_dict(state)
        assert torch.equal(other(x), expected)
    for (name, mine), theirs in zip(model.state_dict().items(), other.state_dict().values()):
        assert torch.equal(full_tensor(mine), full_tensor(theirs)), name


@pytest.mark.always("1")
@pytest.mark.parametrize("level", [0, 1])
def test_checkpoints_hold_the_bytes(ranks: Ranks, tmp_path: Path, level: int) -> None:
    ranks(2, save_and_load, str(tmp_path / "checkpoint"), level)


class WeightOfNewerRelease(Frozen4Bit):
    """A quantized weight of Transformer Engine that this library does not know."""


WeightOfNewerRelease.__module__ = "transformer_engine.pytorch.tensor"


def shard_unknown_weight() -> str:
    module = nn.Linear(8, 8)
    module.weight = nn.Parameter(WeightOfNewerRelease.of(module.weight.detach()))
    return message_of(NotImplementedError, fully_shard_model, module)


def test_trained_weights_of_an_unknown_class_of_transformer_engine_are_refused(
    ranks: Ranks,
) -> None:
    first, second = ranks(2, shard_unknown_weight)
    assert first == second
    assert "weight (WeightOfNewerRelease) of Transformer Engine cannot be sharded yet" in first
    assert "MXFP8Tensor" in first
