# SPDX-License-Identifier: Apache-2.0
"""Layers replaced after sharding are named at once, before they run and are never trained."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from megatron_fsdp import fully_shard_model
from tests.support.fsdp.models import WIDTH, ResidualBlock, build_stack
from tests.support.fsdp.reference import LEVELS, batch, close, loss_of, on_ranks
from tests.support.fsdp.wrong_calls import message_of


def by_keywords(module: nn.Module, level: int) -> Any:
    return fully_shard_model(module, fsdp_unit_modules=[ResidualBlock], zero_dp_strategy=level)


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Adapted(nn.Module):
    """A linear layer with an adapter beside it, as PEFT puts it in the layer's place."""

    def __init__(self, base_layer: nn.Module):
        super().__init__()
        self.base_layer, self.lora = base_layer, nn.Linear(WIDTH, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora(x)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, 3).double()


def replace_a_weight(model: nn.Module) -> None:
    model.module.head.weight = nn.Parameter(torch.zeros(3, WIDTH).double())


@dataclasses.dataclass(frozen=True)
class Change:
    change: Callable[[Any], object]
    parts: tuple[str, ...]  # of the message


CHANGES = {
    "a new head": Change(
        lambda model: setattr(model.module, "head", linear()),
        ("2 new (head.weight, head.bias), 2 gone (head.weight, head.bias)",),
    ),
    "a head on the wrapper": Change(
        lambda model: setattr(model, "head", linear()), ("2 new (head.weight, head.bias), 0 gone",)
    ),
    "a new weight": Change(replace_a_weight, ("1 new (head.weight), 1 gone (head.weight)",)),
    "a new scalar beside a layer": Change(
        lambda model: model.module.blocks[0].register_parameter(
            "scale", nn.Parameter(torch.ones(1))
        ),
        ("1 new (blocks.0.scale), 0 gone ()",),
    ),
    "a deleted layer": Change(
        lambda model: model.module.blocks.pop(2), ("0 new (), 5 gone (blocks.2.",)
    ),
    "a deleted weight": Change(
        lambda model: delattr(model.module.head, "bias"), ("0 new (), 1 gone (head.bias)",)
    ),
    "an adapter": Change(
        lambda model: setattr(model.module, "head", Adapted(model.module.head)),
        ("2 new (head.lora.weight, head.lora.bias), 0 gone ()", "before fully_shard"),
    ),
    "a parametrization": Change(
        lambda model: parametrize.register_parametrization(model.module.head, "weight", Same()),
        ("1 new (head.parametrizations.weight.original), 1 gone (head.weight)",),
    ),
}


@pytest.mark.always("3")
@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_parameters_that_come_or_go_after_sharding_are_named(level: int) -> None:
    for name, wanted in CHANGES.items():
        model = by_keywords(build_stack(), level)
        model(batch(0, 0, 0))
        wanted.change(model)
        looks = [lambda model=model: model(batch(0, 0, 0)), model.state_dict]
        looks += [lambda model=model: list(model.parameters())]
        for message in [message_of(RuntimeError, look) for look in looks]:
            assert all(part in message for part in wanted.parts), f"{name}: {message}"


class Enclosing(nn.Module):
    """A module around another one with the same parameters, as torch.compile makes it."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self._orig_mod = module

    def forward(self, x: Tensor) -> Tensor:
        return self._orig_mod(x)


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
@on_ranks(2)
def test_buffers_and_modules_around_the_same_parameters_come_and_go(level: int) -> None:
    reference, module = build_stack(), build_stack()
    parametrize.register_parametrization(module.embed, "weight", Same())
    model = by_keywords(module, level)
    parametrize.remove_parametrizations(module.embed, "weight", leave_parametrized=False)
    model.module.blocks[1] = Enclosing(model.module.blocks[1])
    model.module.register_buffer("cache", torch.zeros(2))
    model.module.head.register_parameter("absent", None)
    x = batch(0, 0, 0)
    close(model(x), reference(x), "output")
    loss_of(model(x)).backward()
    del model.module.cache
    model.module.head.activation = nn.Tanh()
    assert len(list(model.parameters())) == len(list(reference.parameters()))
    assert all(parameter.grad is not None for parameter in model.parameters())
    kept, model.module.head = model.module.head, linear()
    message_of(RuntimeError, model, x)
    model.module.head = kept
    close(model(x), reference(x), "output with the head that was sharded")
