# SPDX-License-Identifier: Apache-2.0
"""Recomputed and compiled modules have the names of plain ones, wherever a name goes out or in."""

import copy
import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as torch_state_dict

from megatron.fsdp.module.own_names import own_name
from megatron.fsdp.weight_average import WeightAverage
from megatron_fsdp import fully_shard
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.optimizers import FLOAT64
from tests.support.fsdp.reference import Ranks, on_ranks, shard_with_sgd
from tests.support.fsdp.state_dicts import assert_equal, whole


def compiled(module: nn.Module) -> nn.Module:
    with patch.dict(os.environ, TORCHDYNAMO_DISABLE="0"):  # other tests compile nothing
        result = torch.compile(module, backend="eager")
    assert isinstance(result, OptimizedModule)
    return result


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    "recomputed": checkpoint_wrapper,
    "compiled": compiled,
    "recomputed_and_compiled": lambda module: checkpoint_wrapper(compiled(module)),
    "compiled_and_recomputed": lambda module: compiled(checkpoint_wrapper(module)),
}


class BufferedBlock(nn.Module):
    """A layer with a buffer, and modules inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.scale


def build(way: str) -> nn.Module:
    torch.manual_seed(3)
    module = nn.Sequential(
        nn.Linear(5, 5), BufferedBlock(), BufferedBlock(), nn.Linear(5, 2)
    ).double()
    for number in (1, 2):
        module[number] = WAYS[way](module[number])
    return module


def sharded(way: str, level: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = build(way)
    return fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=0.05),
        shard_mesh(),
        zero_dp_strategy=level,
        fsdp_unit_modules=[BufferedBlock],
        mixed_precision_policy=FLOAT64,
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(3, 5, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def all_names(way: str, level: int) -> list[list[str]]:
    model, optimizer = sharded(way, level)
    return [
        list(model.state_dict()),
        [name for name, _ in model.named_parameters()],
        list(chain.from_iterable(group["param_names"] for group in optimizer.param_groups)),
        list(WeightAverage(model).state_dict()),
        [unit.shown_name for unit in model._units],
        list(torch_state_dict.get_model_state_dict(model)),
        list(torch_state_dict.get_optimizer_state_dict(model, optimizer)["state"]),
    ]


@on_ranks(2)
def test_names_are_those_of_the_plain_model() -> None:
    names = {way: all_names(way, (3, 1)[number % 2]) for number, way in enumerate(WAYS)}
    assert "module.1.up.weight" in names["plain"][0], names
    assert names == dict.fromkeys(WAYS, names["plain"]), names


def save(way: str, level: int, path: str) -> None:
    model, optimizer = sharded(way, level)
    model.module[1].scale.fill_(0.25)
    train(model, optimizer, 2)
    average = WeightAverage(model)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save({**state, "average": average.state_dict()}, checkpoint_id=path)


def load(way: str, level: int, path: str) -> None:
    """Load, train on, and compare with the run that was never stopped."""
    model, optimizer = sharded(way, level)
    train(model, optimizer, 1)
    average = WeightAverage(model)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state["average"] = average.state_dict()
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    average.load_state_dict(state["average"])
    assert model.module[1].scale.item() == 0.25
    expected, scratch = build("plain"), {}
    expected[1].scale.fill_(0.25)
    scratch = torch.optim.AdamW(expected.parameters(), lr=0.05)
    train(expected, scratch, 2)
    with average.applied():
        assert_equal(own(model), expected.state_dict(), 1e-11)
    train(model, optimizer, 2)
    train(expected, scratch, 2)
    assert_equal(own(model), expected.state_dict(), 1e-11)


def own(model: nn.Module) -> dict[str, Tensor]:
    state = whole(model.state_dict()).items()
    return {name.removeprefix("module."): value for name, value in state}


def save_and_load(pairs: list[tuple[str, str]], folder: str) -> None:
    for number, (saved, loaded) in enumerate(pairs):
        save(saved, 3, f"{folder}/{number}")
        load(loaded, 1, f"{folder}/{number}")


@pytest.mark.always("recomputed")
@pytest.mark.parametrize(
    "pairs",
    [[("recomputed", "plain")], [("plain", "compiled"), tuple(WAYS)[-2:]]],
    ids=["recomputed", "compiled"],
)
def test_a_checkpoint_loads_with_other_wrappers(
    ranks: Ranks, pairs: list[tuple[str, str]], tmp_path: Path
) -> None:
    ranks(2, save_and_load, pairs, str(tmp_path))


@pytest.mark.always("recomputed")
@pytest.mark.parametrize("way", ["recomputed", "compiled"])
@on_ranks(2)
def test_states_with_the_names_of_wrappers_load(way: str) -> None:
    """Load what the wrapped and unsharded model and its optimizer have, names and all."""
    module = build(way)
    scratch = torch.optim.AdamW(module.named_parameters(), lr=0.05)
    train(module, scratch, 2)
    expected = {own_name(name): value.clone() for name, value in module.state_dict().items()}
    for each in ("plain", way):
        model, optimizer = sharded(each, 3)
        raw = {f"module.{name}": value for name, value in module.named_parameters()}
        model.load_state_dict({**raw, **{f"module.{n}": b for n, b in module.named_buffers()}})
        assert_equal(own(model), expected)
        model.load_state_dict(module.state_dict())
        assert_equal(own(model), expected)
        optimizer.load_state_dict(copy.deepcopy(scratch.state_dict()))
        slots = optimizer.state[dict(model.named_parameters())["module.1.up.weight"]]
        assert slots["step"].item() == 2


def set_by_torch(way: str, level: int, is_broadcast: bool) -> None:
    """Set full state dicts, of all ranks or of the first one alone, of the plain model."""
    model, optimizer = sharded("plain", level)
    train(model, optimizer, 2)
    full = torch_state_dict.StateDictOptions(full_state_dict=True)
    states = torch_state_dict.get_state_dict(model, optimizer, options=full)
    expected = own(model)
    if is_broadcast and dist.get_rank() != 0:
        states = {}, {}
    other, other_optimizer = sharded(way, level)
    options = torch_state_dict.StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=is_broadcast
    )
    weights, moments = copy.deepcopy(states)
    torch_state_dict.set_model_state_dict(other, weights, options=options)
    torch_state_dict.set_optimizer_state_dict(other, other_optimizer, moments, options=options)
    assert_equal(own(other), expected)
    train(other, other_optimizer, 2)
    train(model, optimizer, 2)
    assert_equal(own(other), own(model), 1e-11)


@pytest.mark.always("recomputed")
@pytest.mark.parametrize(
    "cases",
    [
        [("recomputed", True)],
        [("compiled", False), ("recomputed_and_compiled", True), ("compiled_and_recomputed", True)],
    ],
    ids=["recomputed", "compiled"],
)
@on_ranks(2)
def test_torch_sets_full_states(cases: list[tuple[str, bool]]) -> None:
    """The plain model is in `test_other_checkpoints.py`."""
    for way, is_broadcast in cases:
        set_by_torch(way, 3, is_broadcast)


MISFITS = {
    "missing keys: 1.up.weight": ("plain", True),
    "ranks load different keys": ("recomputed", True),
    "1.up.weight and module.1.up.weight are given": ("recomputed", False),
}
"""Words of the error, how the model is wrapped, and whether the load is strict."""


def set_what_does_not_fit() -> list[str]:
    messages = []
    for way, strict in MISFITS.values():
        model, _ = sharded(way, 3)
        state = own(model)  # other names, which torch neither broadcasts nor leaves out
        if way == "plain":
            state = {f"module.{name}": value + 1 for name, value in state.items()}
            del state["module.1.up.weight"]
        options = torch_state_dict.StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=True, strict=strict
        )
        weights = state if dist.get_rank() == 0 else {}
        with pytest.raises(RuntimeError, match="does not fit") as error:
            torch_state_dict.set_model_state_dict(model, weights, options=options)
        messages.append(str(error.value))
    return messages


def test_what_torch_broadcasts_in_part_is_an_error_on_all_ranks(ranks: Ranks) -> None:
    first, second = ranks(2, set_what_does_not_fit)
    assert first == second
    for words, message in zip(MISFITS, first, strict=True):
        assert words in message


class Saved(nn.Sequential):
    def save_pretrained(self, found: list[str], state_dict: dict[str, Any]) -> None:
        found.extend(state_dict)


def save_whole(way: str) -> list[str]:
    module = Saved(*build(way))
    shard_with_sgd(module, shard_mesh())
    found: list[str] = []
    module.save_pretrained(found)
    return found


def save_all_ways() -> dict[str, list[str]]:
    return {way: save_whole(way) for way in WAYS}


@pytest.mark.exhaustive
def test_save_pretrained_writes_own_names(ranks: Ranks) -> None:
    first, second = ranks(2, save_all_ways)
    assert "1.up.weight" in first["plain"]
    for found in (first, second):
        assert found == dict.fromkeys(WAYS, found["plain"])


@on_ranks(2)
def test_a_compiled_wrapper_keeps_its_own_prefix() -> None:
    for level in (0, 3):
        model, _ = sharded("plain", level)
        outer = compiled(model)
        state = outer.state_dict()
        assert all(key.startswith("_orig_mod.module.") for key in state)
        outer.load_state_dict(state)
