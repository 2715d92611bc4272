# SPDX-License-Identifier: Apache-2.0
"""Warnings of what is hardly meant, once and on one rank; an optimizer that trains nothing."""

import logging
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.config import warnings_once
from megatron_fsdp import fully_shard, fully_shard_model, fully_shard_optimizer
from tests.support.fsdp.models import ResidualBlock, build_stack
from tests.support.fsdp.reference import Ranks, on_ranks, shard_with_sgd
from tests.support.fsdp.side_by_side import plain_backward
from tests.support.fsdp.state_dicts import load_checkpoint, save_checkpoint


class Messages(logging.Handler):
    """Keeps the warnings of the package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("megatron.fsdp").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def take(self) -> list[str]:
        texts, self.texts = self.texts, []
        return texts


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [0, 3])
@on_ranks(2)
def test_the_step_of_an_optimizer_from_before_sharding_is_refused(level: int) -> None:
    module = nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(module.parameters())
    model = fully_shard_model(module, zero_dp_strategy=level)
    model(torch.ones(2, 3)).sum().backward()
    messages = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            optimizer.step()
        messages.append(str(error.value))
    other = nn.Linear(3, 5)
    torch.optim.AdamW(other.parameters()).step()
    assert len(messages) == 2, messages
    assert all("2 of the optimizer's 2 parameters" in message for message in messages), messages
    assert "fully_shard_optimizer" in messages[0], messages


@on_ranks(2)
def test_an_optimizer_that_stepped_before_sharding_is_refused_after_it() -> None:
    """Step the plain module while another model is sharded."""
    fully_shard_model(nn.Linear(3, 5))
    module = nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.step()
    fully_shard_model(module)
    with pytest.raises(RuntimeError, match="would train nothing"):
        optimizer.step()


def train_without_sharded_optimizer() -> tuple[list[str], list[str]]:
    messages = Messages()
    model = fully_shard_model(nn.Linear(3, 5))
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
    without = messages.take()
    fully_shard_optimizer(torch.optim.SGD(fully_shard_model(nn.Linear(3, 5)).parameters()))
    model, optimizer = shard_with_sgd(nn.Linear(3, 5))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return without, messages.take()


def test_a_backward_without_a_sharded_optimizer_is_said_once(ranks: Ranks) -> None:
    first, second = ranks(2, train_without_sharded_optimizer)
    assert len(first[0]) == 1 and "fully_shard_optimizer" in first[0][0]
    assert first[1] == []
    assert second == ([], [])


class NotThere(nn.Module):
    """No part of any model."""


def name_units_that_are_not_there() -> list[str]:
    messages = Messages()
    blocks = nn.Sequential(ResidualBlock(), ResidualBlock(), nn.Linear(5, 5))
    fully_shard_model(blocks, fsdp_unit_modules=[NotThere, nn.Linear])
    return messages.take()


def test_a_hint_names_the_most_repeated_modules() -> None:
    layers: list[nn.Module] = []
    for count, letter in enumerate("ABCDEF", start=2):
        kind = type(letter, (nn.Sequential,), {})
        layers += [kind(nn.Linear(1, 1)) for _ in range(count)]
    with patch.object(warnings_once, "warn") as warn:
        warnings_once.warn_of_unmatched_units(nn.Sequential(*layers), [NotThere])
    assert warn.call_args.args[0].endswith("Its repeated modules are F, E, D, C, B")


def test_unit_classes_that_match_nothing_are_said(ranks: Ranks) -> None:
    first, second = ranks(2, name_units_that_are_not_there)
    assert second == []
    (message,) = first
    assert "no NotThere" in message and "no Linear" not in message
    assert "ResidualBlock" in message


@on_ranks(2)
def test_modules_that_are_no_part_of_the_model_are_refused_as_units() -> None:
    blocks = nn.Sequential(ResidualBlock(), nn.Linear(5, 5))
    with pytest.raises(ValueError) as error:
        fully_shard_model(blocks, fsdp_unit_modules=[blocks[0], ResidualBlock()])
    fully_shard_model(blocks, fsdp_unit_modules=[blocks[0]])
    message = str(error.value)
    assert "1 modules that are no part of the model (ResidualBlock)" in message, message


def load_with_dcp(path: str, name: str, steps_first: bool) -> tuple[list[str], float]:
    """Resume from a checkpoint; return the warnings, and the difference after another step."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        module = build_stack()
        return fully_shard(
            module, OPTIMIZERS[name](module.parameters()), preserve_fp32_weights=False
        )

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        plain_backward(model, number, dist.get_rank())
        optimizer.step()

    model, optimizer = make()
    for number in range(3):
        step(model, optimizer, number)
    save_checkpoint(path, model, optimizer)
    step(model, optimizer, 3)
    resumed, fresh = make()
    if steps_first:
        step(resumed, fresh, 0)
    messages = Messages()
    load_checkpoint(path, resumed, fresh)
    step(resumed, fresh, 3)
    pairs = zip(model.parameters(), resumed.parameters())
    return messages.take(), max((left - right).abs().max().item() for left, right in pairs)


OPTIMIZERS = {
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "dampened": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "adamw": torch.optim.AdamW,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_dcp_cannot_load_into_a_fresh_optimizer_is_told_of(
    ranks: Ranks, name: str, tmp_path: Path
) -> None:
    (messages, difference), _ = ranks(2, load_with_dcp, str(tmp_path / "fresh"), name, False)
    if name == "adamw":
        assert messages == [] and difference == 0
        return
    (message,) = messages
    assert "Take a step before state_dict() and dcp.load" in message and difference > 1e-4
    after_a_step = ranks(2, load_with_dcp, str(tmp_path / "stepped"), name, True)
    assert after_a_step == [([], 0.0)] * 2
