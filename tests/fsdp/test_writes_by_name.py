# SPDX-License-Identifier: Apache-2.0
"""Writes to weights that code reads by name last: in methods, in forwards and outside of both.

Outside of both, code gets the sharded parameter; inside, it gets the compute parameter.
"""

import itertools
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron.fsdp.module import weight_writes
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from tests.support.fsdp import models, side_by_side
from tests.support.fsdp.meshes import Meshes
from tests.support.fsdp.models import WIDTH, ResidualBlock, Stack
from tests.support.fsdp.reference import LEVELS, Ranks, batch, on_ranks, optimizer_over
from tests.support.fsdp.side_by_side import plain_backward, train_side_by_side


class Resettable(nn.Module):
    """A model with methods that write to its weights, in the ways that code does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.block = ResidualBlock()
        self.head = nn.Linear(WIDTH, 3)
        self.to(dtype)
        self.dtype = dtype

    @torch.no_grad()
    def in_place(self) -> None:
        self.head.weight.zero_()
        self.embed.bias[1] = 3.0

    def through_data(self) -> None:
        self.head.weight.data.copy_(torch.arange(15.0).view(3, WIDTH) / 8)
        self.block.up.weight.data[0] = 0.5

    def through_init(self) -> None:
        nn.init.constant_(self.head.bias, 0.25)
        nn.init.ones_(self.block.norm.weight)
        self.embed.weight.detach().mul_(-1.0)

    def between_forwards(self) -> Tensor:
        x = batch(3, 0, 0).to(self.dtype)
        before = self(x)
        with torch.no_grad():
            self.head.weight.fill_(1.0)
        return before + self(x)

    def beside_listed_parameters(self) -> None:
        weight = self.head.weight
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5)
            self.block.down.weight.fill_(0.125)
            weight.fill_(7.0)

    @torch.no_grad()
    def and_fail(self) -> None:
        self.head.bias.fill_(4.0)
        raise KeyError("after a write")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x)))


METHODS = ("in_place", "through_data", "through_init", "between_forwards", "and_fail")


def build(dtype: torch.dtype, kind: type[Resettable] = Resettable) -> Resettable:
    torch.manual_seed(3)
    return kind(dtype)


def shard(
    dtype: torch.dtype, level: int, meshes: Meshes, mesh: str, kind: type[Resettable] = Resettable
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Shard a model with main weights of float32, on an outer axis of two ranks for "outer2"."""
    module = build(dtype, kind)
    return fully_shard(
        module,
        optimizer_over(module, "sgd"),
        **meshes.arguments(mesh),
        **({"outer_dp_sharding_strategy": "optim"} if (mesh, level) == ("outer2", 3) else {}),
        fsdp_unit_modules=[ResidualBlock],
        zero_dp_strategy=level,
        mixed_precision_policy=MixedPrecisionPolicy(torch.float32),
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    model(batch(0, 0, 0).to(dtype)).tanh().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def call(target: nn.Module, method: str) -> None:
    try:
        getattr(target, method)()
    except KeyError:
        assert method == "and_fail"


def compare_with_plain(model: MegatronFSDP, plain: nn.Module, what: str) -> None:
    """Compare main weights and outputs; main weights are rounded to the plain model's dtype."""
    for name, parameter in plain.named_parameters():
        main = full_tensor(dict(model.named_parameters())[f"module.{name}"])
        assert torch.equal(main.to(parameter.dtype), parameter), f"{what}: {name}"
    x = batch(1, 0, 0).to(parameter.dtype)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x)), what


def plain_copy(
    model: MegatronFSDP, dtype: torch.dtype, kind: type[Resettable] = Resettable
) -> Resettable:
    """Return a plain model with the weights that the sharded one computes with."""
    plain = build(dtype, kind)
    plain.load_state_dict(
        {name: full_tensor(each).to(dtype) for name, each in model.module.state_dict().items()}
    )
    return plain


def write(level: int, dtype: torch.dtype, mesh: str) -> None:
    """Call each method on the wrapper and on the module, after a step and after a forward."""
    model, optimizer = shard(dtype, level, Meshes(), mesh)
    calls = list(itertools.product(METHODS, ("wrapper", "module")))
    # In a method, as in a forward, nobody sees writes through `data` of compute parameters.
    calls.remove(("through_data", "wrapper"))
    if dtype == torch.float32:  # it rounds main weights of float32 otherwise
        calls.append(("beside_listed_parameters", "wrapper"))
    for number, (method, whose) in enumerate(calls):
        # Neighbouring levels have the other of the two before each call.
        before = ("step", "forward")[(number + level) % 2]
        train(model, optimizer, dtype)  # goes on from weights that were written
        if before == "forward":
            with torch.no_grad():
                model(batch(2, 0, 0).to(dtype))
        plain = plain_copy(model, dtype)
        call(plain, method)
        call(model if whose == "wrapper" else model.module, method)
        compare_with_plain(model, plain, f"{method} of the {whose} after a {before}")


CASES = list(itertools.product(LEVELS, ["float32", "bfloat16"]))
"""Levels, and dtypes of the module."""


@pytest.mark.always("3-float32")
@pytest.mark.parametrize(("level", "dtype"), CASES)
def test_methods_and_code_outside_of_forwards_write_to_weights(
    ranks: Ranks, level: int, dtype: str
) -> None:
    ranks(2, write, level, getattr(torch, dtype), "flat")


@pytest.mark.exhaustive
def test_writes_reach_the_shards_of_an_outer_axis(ranks: Ranks) -> None:
    ranks(4, write, 3, torch.bfloat16, "outer2")


# ---- writes inside of forwards


class Clamped(ResidualBlock):
    """Clamps a weight before its use, as critics of a Wasserstein distance and quantizers do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.2, 0.2)
            self.down.weight.detach()[0].clamp_(min=0.1)
        return super().forward(x)


class ClampedStack(Stack):
    units = (Clamped,)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Clamped() for _ in range(3))

    def forward(self, x: Tensor, step: int = 0) -> object:
        with torch.no_grad():
            nn.init.constant_(self.head.bias, 0.25)
        return super().forward(x, step)


STRATEGIES = {"flat": [(level, 0) for level in LEVELS], "outer2": [(2, 0), (3, 0), (3, 1)]}
"""By mesh: levels, and whether the outer axis shards optimizer state."""


@pytest.mark.always("2-flat")
@pytest.mark.parametrize(("num_ranks", "mesh"), [(2, "flat"), (2, "outer2"), (4, "outer2")])
@on_ranks()
def test_what_a_forward_writes_to_weights_is_trained_on(num_ranks: int, mesh: str) -> None:
    meshes = Meshes()
    for level, outer in STRATEGIES[mesh]:
        train_side_by_side(
            lambda: ClampedStack().double(),
            plain_backward,
            level,
            **{"mesh": None, **meshes.arguments(mesh)},
            fsdp_unit_modules=[Clamped],
            outer_dp_sharding_strategy=outer,
        )


class Decaying(Resettable):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.weight.mul_(0.75)
            self.block.up.weight[0].neg_()
        return super().forward(x)


IN_FORWARDS = [
    *((level, torch.bfloat16) for level in (0, 2, 3)),
    *((level, torch.float32) for level in (1, 3)),
]


@pytest.mark.always("1-flat")
@pytest.mark.parametrize(
    ("num_ranks", "mesh"), [(1, "flat"), (2, "flat"), (2, "outer2"), (4, "outer2")]
)
@on_ranks()
def test_what_forwards_write_stays_in_main_weights_of_any_dtype(num_ranks: int, mesh: str) -> None:
    """Compare main weights with those of a module that computes in the same dtype."""
    meshes = Meshes()
    for level, dtype in IN_FORWARDS:
        model, optimizer = shard(dtype, level, meshes, mesh, Decaying)
        for step in range(2):
            train(model, optimizer, dtype)
            plain = plain_copy(model, dtype, Decaying)
            what = f"level {level}, {dtype}, step {step}"
            compare_with_plain(model, plain, f"{what}, before")
            with torch.inference_mode():
                model(batch(2, 0, 0).to(dtype))
                plain(batch(2, 0, 0).to(dtype))
            with torch.no_grad():
                model.module.head.bias.data.fill_(1.5)  # by name, in between
                plain.head.bias.fill_(1.5)
            compare_with_plain(model, plain, f"{what}, after")
            # Main weights have more bits than the module's: the next step begins with equal ones.
            model.load_state_dict(plain.state_dict())


@pytest.mark.always("2")
@pytest.mark.parametrize("num_ranks", [2, 4])
@on_ranks()
def test_forwards_that_write_nothing_cost_no_comparison(num_ranks: int) -> None:
    """Train models whose forwards write nothing."""
    meshes = Meshes()
    with patch.object(weight_writes, "take_written") as take_written:
        for level, dtype in itertools.product(LEVELS, (torch.float32, torch.bfloat16)):
            model, optimizer = shard(dtype, level, meshes, "outer2")
            for _ in range(2):
                train(model, optimizer, dtype)
    assert take_written.call_count == 0


@on_ranks(2)
def test_weights_that_are_freed_early_are_not_taken_for_written() -> None:
    """Train a weight of two units, whose gradients free it before the first unit's backward."""
    with patch.object(weight_writes, "take_written") as take_written:
        model, optimizer = side_by_side.shard(models.build("tied_across_units"), 3)
        for step in range(2):
            plain_backward(model, step, 0)
            optimizer.step()
            optimizer.zero_grad()
    assert take_written.call_count == 0


@on_ranks(2)
def test_forwards_that_write_do_not_undo_a_step_that_is_not_installed() -> None:
    """Let a forward write while the new weights of an optimizer are not installed."""
    model, optimizer = shard(torch.bfloat16, 3, Meshes(), "flat", Decaying)
    train(model, optimizer, torch.bfloat16)
    x = batch(0, 0, 0).bfloat16()
    model(x).tanh().mean().backward()
    optimizer.step(install_optimized_model_weights=False)
    stepped = [full_tensor(parameter) for parameter in model.parameters()]
    with torch.no_grad():
        model(x)
    for before, parameter in zip(stepped, model.parameters()):
        assert torch.equal(full_tensor(parameter), before)
