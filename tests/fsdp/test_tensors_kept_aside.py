# SPDX-License-Identifier: Apache-2.0
"""Weights that are read when they are freed, or not gathered yet.

A tensor leaves a unit by another way than as its result, and its loss has a backward; or code reads
a weight past its module.
"""

import re
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import fully_shard_model
from tests.support.fsdp.models import WIDTH, ResidualBlock, Stack
from tests.support.fsdp.reference import (
    LEVELS,
    Ranks,
    batch,
    compare_shards,
    loss_of,
    on_ranks,
    shown_gradients,
)
from tests.support.fsdp.side_by_side import inner, mean_gradients, plain_backward, shard

UNREAD = re.compile(
    r"unit 'blocks\.\d': blocks\.\d\.extra\.weight is read while its weights are not"
)


class KeepsTensor(ResidualBlock):
    """A unit that keeps a tensor on itself, computed before its result or from it."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.computed(x)
        y = super().forward(x + self.kept if self.when == "inside" else x)
        if self.when == "after":
            self.kept = self.computed(y)
        return y

    def computed(self, x: Tensor) -> Tensor:
        return torch.tanh(self.extra(torch.tanh(self.extra(x))))


def keep_by_hook(module: KeepsTensor, args: tuple[Tensor], y: Tensor) -> None:
    module.kept = module.computed(y)


class Keeping(Stack):
    def __init__(self, when: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeepsTensor(when) for _ in range(3))
        for block in self.blocks if when == "hook" else ():
            block.register_forward_hook(keep_by_hook)


def build(when: str, is_frozen: bool) -> nn.Module:
    torch.manual_seed(1)
    model = Keeping(when).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" in name or not is_frozen)
    return model


def all_losses(model: nn.Module, step: int, rank: int) -> None:
    loss = loss_of(model(batch(step, rank, 0)))
    (loss + sum(block.kept.sin().sum() for block in inner(model).blocks)).backward()


def kept_loss(model: nn.Module, step: int, rank: int) -> None:
    model(batch(step, rank, 0))
    inner(model).blocks[1].kept.sin().sum().backward()


def outcome(level: int, when: str, backward: Callable[..., None], is_frozen: bool) -> str:
    """Return "right" if gradients are those of the unsharded model, or the error."""
    reference = build(when, is_frozen)
    model, _ = shard(build(when, is_frozen), level, fsdp_unit_modules=[KeepsTensor])
    result = "right"
    # The first pass finds the order of units, so the second prefetches in another way.
    for step, use in enumerate((backward, backward, plain_backward)):
        expected = mean_gradients(reference, use, step)
        model.zero_grad()
        try:
            use(model, step, dist.get_rank())
        except RuntimeError as error:
            assert use is not plain_backward
            result = str(error)
            continue
        compare_shards(model, shown_gradients(model), expected, f"{when}, step {step}")
    return result


WAYS = ("before", "inside", "after", "hook")


@pytest.mark.always("3-before-*", "3-after-False", "1-inside-*")
@pytest.mark.parametrize(
    ("level", "when", "is_frozen"),
    [
        *((3, when, number % 2 == 0) for number, when in enumerate(WAYS)),
        (3, "inside", True),
        (3, "after", False),
        (0, "before", False),
        (0, "after", True),
        (1, "inside", True),
        (1, "after", False),
        (2, "before", True),
        (2, "hook", False),
    ],
)
def test_a_kept_tensor_in_the_loss_is_right_or_refused(
    ranks: Ranks, level: int, when: str, is_frozen: bool
) -> None:
    # Without the result in the loss, nothing tells that the backward of the unit begins.
    is_seen = level < 3 or when in ("before", "inside")
    for backward, is_right in ((all_losses, is_seen), (kept_loss, level < 3)):
        for result in ranks(2, outcome, level, when, backward, is_frozen):
            assert result == "right" if is_right else UNREAD.match(result)


class KeepsWeight(torch.autograd.Function):
    """A linear function that keeps its weight where autograd does not check it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        return None, gradient.t() @ x


class KeepsInList(nn.Module):
    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(KeepsWeight.apply(x, self.weight))
        return x


def backward_without_saved_weights(level: int) -> str:
    kept: list[Tensor] = []
    module = nn.Sequential(KeepsInList(kept), KeepsInList([]))
    model = fully_shard_model(module, fsdp_unit_modules=[KeepsInList], zero_dp_strategy=level)
    model(torch.ones(2, 4))
    try:
        kept[0].sum().backward()
    except RuntimeError as error:
        return str(error)
    return "right"


def test_gradients_of_weights_that_are_not_gathered_name_the_unit(ranks: Ranks) -> None:
    for level in LEVELS:
        for result in ranks(2, backward_without_saved_weights, level):
            message = "unit '0': gradients reach its parameters, but none a result of its forward"
            assert result == "right" if level < 3 else result.startswith(message)


class PastModules(nn.Module):
    """Reads the weight of a unit that it never calls by a reference of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.layer = nn.Linear(4, 4)
        self.kept = {"table": self.table.weight}

    def forward(self, read: Callable[[Tensor], Any]) -> Tensor:
        read(self.kept["table"])
        return self.layer(torch.ones(2, 4)).sum()


READS: dict[str, Callable[[Tensor], Any]] = {
    "a row": lambda weight: weight[1],
    "an operation": lambda weight: weight + 1,
    "an operand": lambda weight: torch.ones(2, 4) @ weight.t(),
    "a list": lambda weight: torch.cat([torch.ones(1, 4), weight]),
    "a function": lambda weight: nn.functional.embedding(torch.tensor([1]), weight),
    "data": lambda weight: weight.data.sum(),
    "a write": lambda weight: weight.detach().zero_(),
    "Python's numbers": lambda weight: weight.tolist(),
    "its memory": lambda weight: weight.data_ptr(),
}


def read_past_modules(settings: dict[str, Any]) -> dict[str, str]:
    units = {"fsdp_unit_modules": [nn.Embedding, nn.Linear]}
    model = fully_shard_model(PastModules(), zero_dp_strategy=3, **units, **settings)
    found = {}
    for how, read in READS.items():
        try:
            model(read)
        except RuntimeError as error:
            found[how] = str(error)
    model(lambda weight: (weight.shape, weight.dtype, weight.device, weight.numel(), {weight: 1}))
    model(lambda weight: (torch.zeros_like(weight), torch.numel(weight), f"{weight}"))
    model(lambda weight: None).backward()
    assert torch.isfinite(inner(model).table.weight.full_tensor()).all()
    return found


@pytest.mark.parametrize("settings", [{}, {"fsdp_double_buffer": True}], ids=["freed", "slots"])
def test_a_weight_that_is_read_past_its_module_is_named(
    ranks: Ranks, settings: dict[str, Any]
) -> None:
    for found in ranks(2, read_past_modules, settings):
        assert list(found) == list(READS)
        for how, message in found.items():
            start = "unit 'table': table.weight is read while its weights are not gathered"
            assert message.startswith(start), (how, message)


class ReturnsOddly(nn.Module):
    """Returns a sparse tensor, or its weight in a mapping that cannot be written to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor, is_sparse: bool) -> Any:
        y = (x @ self.weight).relu()
        return y.to_sparse() if is_sparse else MappingProxyType({"y": y, "row": self.weight[0]})


class CallsOddly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unit = ReturnsOddly()

    def forward(self, x: Tensor) -> Tensor:
        found = self.unit(x, is_sparse=False)
        return (self.unit(x, is_sparse=True).to_dense() + found["y"] * found["row"]).sum()

    def rows(self) -> Tensor:
        return self.unit.weight[:2]


@on_ranks(2)
def test_odd_results_of_units_and_weights_that_methods_return_are_right() -> None:
    x = torch.rand(3, 4)
    model = fully_shard_model(CallsOddly(), zero_dp_strategy=3, fsdp_unit_modules=[ReturnsOddly])
    loss = model(x)
    loss.backward()
    assert torch.equal(loss.detach(), CallsOddly()(x).detach())
    assert torch.equal(model.rows().detach() + 1, torch.eye(4)[:2] + 1)
