# SPDX-License-Identifier: Apache-2.0
"""Optimizers of torchao, whose state is quantized in blocks, step as they do without sharding."""

from __future__ import annotations

import copy
import logging
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import fully_shard, fully_shard_model, fully_shard_optimizer
from tests.support.fsdp.meshes import mesh_of
from tests.support.fsdp.reference import Ranks, on_ranks

logging.getLogger("torchao").setLevel(logging.ERROR)  # it says that it has no CUDA kernels here
pytest.importorskip("torchao", reason="torchao is not installed")

# The class and the elements of a block.
KINDS = {"AdamW8bit": 256, "Adam8bit": 256, "AdamW4bit": 128, "AdamWFp8": 256, "_AdamW": None}
WIDTH = 80


class LayersInBlocks(nn.Module):
    """Parameters with and without whole blocks, in rows that no block divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(WIDTH, 192)  # a block of whole rows is 16 rows
        self.odd = nn.Linear(192, 43, bias=False)  # 8256 elements: no multiple of 256 or 128
        self.narrow = nn.Linear(43, WIDTH)  # below 4096 elements
        self.scale = nn.Parameter(torch.randn(64 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.narrow(self.odd(self.wide(x).relu()).relu())
        return (y.repeat(1, 64) * self.scale).tanh()


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    from torchao.optim import adam

    made = getattr(adam, kind)
    optimizer: torch.optim.Optimizer = made(model.parameters(), lr=0.01)
    return optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    """Return the losses of steps whose gradients are the same on all ranks."""
    losses = []
    with torch.compiler.set_stance("force_eager"):  # torchao would compile its update
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            loss = model(torch.randn(16, WIDTH, generator=generator)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return losses


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return whole weights, under the names of the plain module."""
    named = model.named_parameters()
    return {name.removeprefix("module."): full_or_plain(value) for name, value in named}


def values_of(optimizer: Any, model: nn.Module) -> dict[str, Tensor]:
    """Return weights and moments, whole and dequantized."""
    values = weights_of(model)
    for name, parameter in zip(list(values), model.parameters()):
        for slot, value in optimizer.state[parameter].items():
            values[f"{name}.{slot}"] = full_or_plain(value)
    return values


def full_or_plain(value: Tensor) -> Tensor:
    if hasattr(value, "full_tensor"):
        return full_tensor(value).clone()
    is_quantized = hasattr(value, "__tensor_flatten__")
    return (value.dequantize() if is_quantized else value).detach().clone()


UNITS: dict[str, Any] = {"fsdp_unit_modules": [nn.Linear]}
HYBRID = {"dp_shard_dim": "shard", "dp_outer_dim": "outer"}


def compare_with_unsharded(kind: str, before: int, axes: tuple[str, ...], **settings: Any) -> None:
    """Compare bits; the first steps are taken before sharding."""
    reference, module = LayersInBlocks(), LayersInBlocks()
    expected, optimizer = optimizer_of(kind, reference), optimizer_of(kind, module)
    train(module, optimizer, range(before))
    wanted = train(reference, expected, range(5))
    mesh = mesh_of(*axes, sizes=(2, 2) if len(axes) > 1 else ())
    model, optimizer = fully_shard(module, optimizer, mesh, **UNITS, **settings)
    assert torch.equal(
        torch.stack(train(model, optimizer, range(before, 5))), torch.stack(wanted[before:])
    )
    assert_same(values_of(optimizer, model), values_of(expected, reference))


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name in actual if not torch.equal(actual[name], expected[name])]
    assert not different


@pytest.mark.always("AdamW8bit-0")
@pytest.mark.parametrize(("kind", "before"), zip(KINDS, cycle((0, 2))))
def test_updates_have_the_bits_of_the_unsharded_optimizer(
    ranks: Ranks, kind: str, before: int
) -> None:
    ranks(4, compare_with_unsharded, kind, before, ("shard",))


@pytest.mark.always("1")
@pytest.mark.parametrize("level", [0, 1, 2])
def test_other_levels_have_the_same_bits(ranks: Ranks, level: int) -> None:
    ranks(2, compare_with_unsharded, "AdamW8bit", 0, ("shard",), zero_dp_strategy=level)


@pytest.mark.exhaustive
@pytest.mark.parametrize("outer", [0, 1])
def test_hybrid_sharding_has_the_same_bits(ranks: Ranks, outer: int) -> None:
    settings = {**HYBRID, "outer_dp_sharding_strategy": outer}
    ranks(4, compare_with_unsharded, "AdamW4bit", 0, ("outer", "shard"), **settings)


def shard_apart(granularity: int | str) -> str:
    """Shard a model, and the optimizer after it; return the error."""
    model = fully_shard_model(LayersInBlocks(), mesh_of("shard"), granularity=granularity, **UNITS)
    try:
        optimizer = fully_shard_optimizer(optimizer_of("AdamW8bit", model))
    except ValueError as error:
        return str(error)
    train(model, optimizer, range(1))
    return ""


@pytest.mark.exhaustive
def test_cut_blocks_are_refused_with_what_to_set(ranks: Ranks) -> None:
    assert ranks(3, shard_apart, 256) == [""] * 3
    for message in ranks(3, shard_apart, "rows"):
        assert "wide.weight" in message and "granularity=256" in message


def save(kind: str, path: str) -> dict[str, Tensor]:
    module = LayersInBlocks()
    model, optimizer = fully_shard(module, optimizer_of(kind, module), mesh_of("shard"), **UNITS)
    train(model, optimizer, range(3))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    train(model, optimizer, range(3, 5))
    return values_of(optimizer, model)


def load(kind: str, path: str) -> dict[str, Tensor]:
    module = LayersInBlocks()
    model, optimizer = fully_shard(module, optimizer_of(kind, module), mesh_of("shard"), **UNITS)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    train(model, optimizer, range(3, 5))
    return values_of(optimizer, model)


@pytest.mark.always("AdamW4bit")
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_checkpoints_are_resharded_bit_by_bit(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    expected = ranks(4, save, kind, str(tmp_path))[0]
    for actual in ranks(2, load, kind, str(tmp_path)):
        assert_same(actual, expected)


@on_ranks(2)
def test_whole_state_has_the_values_of_moments() -> None:
    """Compare whole and copied state with the values of moments."""
    module = LayersInBlocks()
    optimizer = optimizer_of("AdamW4bit", module)
    model, optimizer = fully_shard(module, optimizer, mesh_of("shard"), **UNITS)
    train(model, optimizer, range(2))
    values = values_of(optimizer, model)
    copies = copy.deepcopy(optimizer.state_dict())
    options = StateDictOptions(full_state_dict=True)
    for name, slots in get_state_dict(model, optimizer, options=options)[1]["state"].items():
        for slot, value in slots.items():
            assert torch.equal(value, values[f"{name.removeprefix('module.')}.{slot}"])
    train(model, optimizer, range(2, 3))
    moment = copies["state"][0]["exp_avg"]
    assert torch.equal(full_tensor(moment), values["scale.exp_avg"])


@on_ranks(2)
def test_moments_of_other_optimizers_are_quantized() -> None:
    """Load moments of fp32, which become quantized."""
    reference = LayersInBlocks()
    adam = torch.optim.AdamW(reference.parameters())
    train(reference, adam, range(2))
    model = fully_shard_model(LayersInBlocks(), mesh_of("shard"), granularity=256, **UNITS)
    optimizer = fully_shard_optimizer(optimizer_of("AdamW8bit", model))
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": adam.state_dict()["state"], "param_groups": groups})
    moment: Any = optimizer.state[dict(model.named_parameters())["module.wide.weight"]]["exp_avg"]
    expected = adam.state[reference.wide.weight]["exp_avg"]
    assert moment._local_tensor.codes.dtype == torch.uint8
    assert (full_tensor(moment) - expected).abs().max() < 0.02 * expected.abs().max()


@on_ranks(2)
def test_thawed_parameters_get_state_in_blocks() -> None:
    """Train a parameter that was frozen when the optimizer was sharded."""
    reference, module = LayersInBlocks(), LayersInBlocks()
    expected = optimizer_of("AdamW8bit", reference)
    model = fully_shard_model(module, mesh_of("shard"), granularity=256, **UNITS)
    reference.wide.requires_grad_(False)
    module.wide.requires_grad_(False)
    optimizer = fully_shard_optimizer(optimizer_of("AdamW8bit", model))
    for steps in (range(2), range(2, 4)):
        assert train(model, optimizer, steps) == train(reference, expected, steps)
        module.wide.requires_grad_(True)
        reference.wide.requires_grad_(True)
    assert_same(weights_of(model), weights_of(reference))
