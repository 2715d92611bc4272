# SPDX-License-Identifier: Apache-2.0
"""Hooks on modules and tensors: inputs and outputs of any nest, hooks of users, exceptions."""

import dataclasses
import gc
import weakref
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.fsdp.engine.hooks import tensors_in
from tests.support.fsdp import models
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.models import ResidualBlock, Stack
from tests.support.fsdp.reference import (
    compare_shards,
    on_ranks,
    optimizer_over,
    shard_with_sgd,
    shown_gradients,
)
from tests.support.fsdp.side_by_side import (
    inner,
    mean_gradients,
    plain_backward,
    shard,
    train_side_by_side,
)


class Remembering(nn.Module):
    """A unit that keeps a weak reference to an activation which autograd saves."""

    def __init__(self, seen: list):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.linear(x))
        self.seen.append(weakref.ref(hidden))
        return x + hidden * hidden


@on_ranks(2)
def test_activations_die_with_their_backward_pass() -> None:
    seen: list = []
    net = nn.Sequential(*[Remembering(seen) for _ in range(3)])
    model, optimizer = shard_with_sgd(net, fsdp_unit_modules=[Remembering])
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(reference() is None for reference in seen)
    finally:
        gc.enable()


def test_tensors_are_found_in_any_nest() -> None:
    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor
        extra: dict

    one, two, three = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    nest = (Output(one, {"hidden": [two]}), OrderedDict(last=three), "text", None)
    assert [tensor.numel() for tensor in tensors_in(nest)] == [1, 2, 3]


class Hooked(Stack):
    """Hooks that change what passes by, registered before the model is sharded."""

    def __init__(self) -> None:
        super().__init__()
        block = self.blocks[1]
        block.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        block.register_forward_hook(lambda module, args, output: output + args[0].sin())
        block.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 0.5,))
        block.register_full_backward_hook(lambda module, grads, outputs: (grads[0] * 2.0,))
        self.blocks[2].up.weight.register_hook(lambda gradient: gradient * 3.0)


def build_hooked() -> nn.Module:
    return Hooked().double()


def hook_afterwards(model: nn.Module) -> None:
    block = inner(model).blocks[0]
    block.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    block.register_forward_hook(lambda module, args, output: output + args[0].sin())
    block.register_full_backward_hook(lambda module, grads, outputs: (grads[0] * 2.0,))
    model.register_forward_hook(lambda module, args, output: output * 2)


@on_ranks(2)
def test_hooks_of_users_change_the_same_numbers() -> None:
    mesh = shard_mesh()
    for level in (1, 3):
        train_side_by_side(build_hooked, plain_backward, level, prepare=hook_afterwards, mesh=mesh)


class Failing(nn.Module):
    """A unit that fails in forward or backward on request."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.WIDTH, models.WIDTH)
        self.when = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "forward":
            raise OSError("told so")
        x = self.linear(x)
        if self.when == "backward":
            x.register_hook(self.fail)
        return x

    def fail(self, gradient: Tensor) -> None:
        raise OSError("told so")


def build_failing() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(models.WIDTH, models.WIDTH), ResidualBlock(), Failing(), ResidualBlock()
    ).double()


@pytest.mark.always("1-backward", "3-backward")
@pytest.mark.parametrize(
    ("level", "when"),
    [(0, "backward"), (1, "backward"), (2, "forward"), (3, "forward"), (3, "backward")],
)
@on_ranks(2)
def test_an_exception_is_followed_by_a_good_step(level: int, when: str) -> None:
    reference, module = build_failing(), build_failing()
    model, optimizer = shard(module, level, fsdp_unit_modules=[ResidualBlock, Failing])
    expected_optimizer = optimizer_over(reference, "fused_adamw")
    for step in range(3):
        optimizer.zero_grad()
        if step == 1:
            module[2].when = when
            with pytest.raises(OSError, match="told so"):
                plain_backward(model, step, dist.get_rank())
            module[2].when = ""
            optimizer.zero_grad()
        expected = mean_gradients(reference, plain_backward, step)
        plain_backward(model, step, dist.get_rank())
        compare_shards(model, shown_gradients(model), expected, f"step {step}")
        expected_optimizer.step()
        optimizer.step()
