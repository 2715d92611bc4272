# SPDX-License-Identifier: Apache-2.0
"""Parameters that are not sharded stay plain, and train beside the sharded ones."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import megatron.fsdp
from megatron.fsdp.weight_average import WeightAverage
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard, fully_shard_model
from tests.support.fsdp import models
from tests.support.fsdp.models import ResidualBlock
from tests.support.fsdp.optimizers import OPTIMIZERS
from tests.support.fsdp.reference import Ranks, batch, close, evaluate, loss_of, mean_loss, on_ranks
from tests.support.fsdp.state_dicts import assert_equal, load_checkpoint, save_checkpoint, whole
from tests.support.fsdp.state_dicts import train as train_alike
from tests.support.fsdp.wrong_calls import message_of
from tests.support.pairwise import pairwise

IGNORED = ("embed.weight", "embed.bias", "blocks.1.up.weight")
"""All of a module outside of units, and one parameter inside of a unit."""


def ignored_of(module: nn.Module) -> set[nn.Parameter]:
    return {module.get_parameter(name) for name in IGNORED}


def by_keywords(
    module: nn.Module, optimizer: torch.optim.Optimizer, level: int, **settings: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    return fully_shard(
        module,
        optimizer,
        fsdp_unit_modules=[ResidualBlock],
        zero_dp_strategy=level,
        preserve_fp32_weights=False,
        ignored_params=ignored_of(module),
        **settings,
    )


def by_settings(
    module: nn.Module, optimizer: torch.optim.Optimizer, level: int
) -> tuple[megatron.fsdp.ShardedModule, torch.optim.Optimizer]:
    return megatron.fsdp.fully_shard(
        module,
        optimizer,
        units=[ResidualBlock],
        strategy=megatron.fsdp.Strategy(level=level, ignored=ignored_of(module)),
        precision=megatron.fsdp.MixedPrecisionPolicy(None),
    )


PUBLIC_FUNCTIONS = {"keywords": by_keywords, "settings": by_settings}


def average_ignored(model: nn.Module) -> None:
    """Average the gradients of ignored parameters over ranks, which is the user's task."""
    for name in IGNORED:  # in one order on all ranks, unlike a set
        parameter = model.module.get_parameter(name)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def compare(model: nn.Module, reference: nn.Module, what: str) -> None:
    expected = dict(reference.named_parameters())
    for name, value in whole(model.state_dict()).items():
        close(value, expected[name.removeprefix("module.")].detach(), f"{what}: {name}")


def train(function: str, level: int, optimizer_name: str) -> None:
    reference, module = models.build_stack(), models.build_stack()
    expected = OPTIMIZERS[optimizer_name](reference.parameters())
    model, optimizer = PUBLIC_FUNCTIONS[function](
        module, OPTIMIZERS[optimizer_name](module.parameters()), level
    )
    own = ignored_of(module)
    for step in range(3):
        mean_loss(reference, step).backward()
        loss_of(model(batch(step, dist.get_rank(), 0))).backward()
        average_ignored(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5), "norm", 1e-6)
        for each in (optimizer, expected):
            each.step()
            each.zero_grad(set_to_none=step != 1)
        compare(model, reference, f"weight after step {step}")
        close(evaluate(model, step)[0], evaluate(reference, step)[0], f"output after step {step}")
        assert all(each.grad is None or not each.grad.any() for each in own)
    named = {name.removeprefix("module."): each for name, each in model.named_parameters()}
    assert list(named) == [name for name, _ in reference.named_parameters()]
    assert {name for name, each in named.items() if type(each) is nn.Parameter} == set(IGNORED)
    assert all(named[name] is module.get_parameter(name) for name in IGNORED)
    loss_of(model(batch(0, 0, 0))).backward()
    model.zero_grad()
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.always("level=3-*", "level=0-*")
@pytest.mark.parametrize(
    ("level", "function", "optimizer"),
    pairwise(
        level=range(4),
        function=PUBLIC_FUNCTIONS,
        optimizer=["adamw_foreach", "adamw_fused", "asgd"],
    ),
)
def test_training_with_ignored_parameters_matches_the_unsharded_model(
    ranks: Ranks, level: int, function: str, optimizer: str
) -> None:
    ranks(2, train, function, level, optimizer)


@on_ranks(2)
def test_nothing_reduces_or_broadcasts_ignored_parameters() -> None:
    """Show that values and gradients of ignored parameters are those of their rank."""
    module = models.build_stack()
    with torch.no_grad():
        module.embed.bias += dist.get_rank()
    before = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = by_keywords(module, optimizer, 3)
    loss_of(model(batch(0, dist.get_rank(), 0))).backward()
    loss_of(before(batch(0, dist.get_rank(), 0))).backward()
    for name in IGNORED:
        parameter = module.get_parameter(name)
        close(parameter.detach(), before.get_parameter(name).detach(), name)
        close(parameter.grad, before.get_parameter(name).grad, f"gradient of {name}")
    optimizer.step()
    others = [torch.empty_like(module.embed.bias) for _ in range(dist.get_world_size())]
    dist.all_gather(others, module.embed.bias.detach())
    assert not torch.allclose(others[0], others[1])


def fresh(level: int) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    module = models.build_stack()
    return by_keywords(module, OPTIMIZERS["adamw"](module.parameters()), level)


def save(path: str, level: int) -> None:
    model, optimizer = fresh(level)
    train_alike(model, optimizer, range(2))
    save_checkpoint(path, model, optimizer)


def load(path: str, level: int) -> None:
    reference = models.build_stack()
    train_alike(reference, expected := OPTIMIZERS["adamw"](reference.parameters()), range(2))
    model, optimizer = fresh(level)
    train_alike(model, optimizer, range(5, 6))
    load_checkpoint(path, model, optimizer)
    compare(model, reference, "loaded")
    weights, moments = get_state_dict(model, optimizer)  # torch's own functions
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    train_alike(model, optimizer, range(2, 4))
    train_alike(reference, expected, range(2, 4))
    compare(model, reference, "two steps after loading")
    module = models.build_stack()  # of a plain program
    other, _ = fresh(level)
    other.load_state_dict(module.state_dict())
    compare(other, module, "from a plain state dict")


@pytest.mark.exhaustive
def test_a_checkpoint_with_ignored_parameters_loads_into_another_level(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(2, save, str(tmp_path), 3)
    ranks(3, load, str(tmp_path), 1)


@on_ranks(1)
def test_what_cannot_be_ignored_is_refused_by_name() -> None:
    module = models.build_stack()

    def refused(given: object, **settings: Any) -> str:
        return message_of(ValueError, fully_shard_model, module, ignored_params=given, **settings)

    with torch.device("meta"):
        absent = models.Stack()
    messages = [
        refused(["embed.weight"], granularity="columns"),
        refused(module.embed.weight),
        refused(5),
        refused({copy.deepcopy(module.embed.weight)}),
        refused(module.parameters()),
        message_of(
            ValueError,
            fully_shard_model,
            absent,
            init_model_with_meta_device=True,
            ignored_params=[absent.embed.weight],
        ),
    ]
    assert all("ignored_params" in message for message in (*messages[:4], messages[5]))
    names, one, number, foreign, everything, meta = messages
    assert "got str" in names and "'columns'" in names
    assert "got Parameter" in one and "got int" in number
    assert "no part of the model" in foreign and "no parameters to shard" in everything
    assert "meta device" in meta


@on_ranks(2)
def test_deep_copies_have_copies_of_ignored_parameters() -> None:
    model, optimizer = fresh(3)
    train_alike(model, optimizer, range(1))
    copied, average = copy.deepcopy(model), WeightAverage(model, decay=0.0)
    assert len(average.state_dict()) == len(list(model.parameters())) - len(IGNORED) + 1
    weights = copied_weights(model)
    assert_equal(whole(copied.state_dict()), weights)
    own = set(copied.parameters())
    assert all(copied.module.get_parameter(name) in own for name in IGNORED)
    train_alike(copied, torch.optim.SGD(ignored_of(copied.module), lr=0.1), range(1))
    assert_equal(whole(model.state_dict()), weights)
    assert not torch.equal(copied.module.embed.bias, model.module.embed.bias)
    average.update()
    with average.applied():
        assert_equal(whole(model.state_dict()), weights)


def copied_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in whole(model.state_dict()).items()}


@on_ranks(2)
def test_an_optimizer_for_each_kind_and_a_scaler_for_both() -> None:
    """Train by an optimizer for each kind, with a scaler that sees an overflow on one rank."""
    model, optimizer = fresh(2)
    module = model.module
    sharded = [each for each in model.parameters() if isinstance(each, DTensor)]
    optimizer = megatron.fsdp.shard_optimizer(torch.optim.SGD(sharded, lr=0.1))
    plain = torch.optim.SGD(ignored_of(module), lr=0.1)
    before = copied_weights(model)
    loss_of(model(batch(0, 0, 0))).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(each.grad is None for each in sharded)
    assert module.embed.bias.grad is not None  # another optimizer steps it
    plain.step()
    plain.zero_grad()
    assert all(
        not torch.equal(value, before[name]) for name, value in whole(model.state_dict()).items()
    )
    both = megatron.fsdp.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    weights = copied_weights(model)
    scaler.scale(loss_of(model(batch(0, 0, 0)))).backward()
    if dist.get_rank() == 1:
        module.embed.bias.grad[0] = torch.inf
    scaler.step(both)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert_equal(whole(model.state_dict()), weights)


class OwnsIgnoredOnly(nn.Module):
    """A meta model whose ignored parameter, which has values, is alone in its module."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, models.WIDTH, device="cpu")
        self.block = ResidualBlock()


@on_ranks(2)
def test_initialisation_leaves_ignored_parameters_alone() -> None:
    with torch.device("meta"):
        module = OwnsIgnoredOnly()
    values = module.table.weight.detach().clone()
    model = fully_shard_model(
        module,
        init_model_with_meta_device=True,
        mixed_precision_policy=MixedPrecisionPolicy(None),
        fsdp_unit_modules=[ResidualBlock],
        ignored_params=[module.table.weight],
    )
    assert torch.equal(module.table.weight, values)
    assert (whole(model.state_dict())["module.block.norm.weight"] == 1).all()
