# SPDX-License-Identifier: Apache-2.0
"""Autograd on a sharded model: partial gradients, graphs used again, custom functions."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import fully_shard_model
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.models import WIDTH, ResidualBlock, Stack, TanhLayer, build_stack
from tests.support.fsdp.reference import LEVELS, Ranks, batch, close, loss_of, on_ranks
from tests.support.fsdp.side_by_side import (
    Backward,
    compare_plain_gradients,
    inner,
    plain_backward,
    shard,
    train_side_by_side,
)


class SavesItsWeight(torch.autograd.Function):
    """Keeps the weight for backward, as a saved tensor and as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        assert weight.data_ptr() == ctx.weight.data_ptr()
        return gradient @ ctx.weight, gradient.t() @ x


class WithFunction(ResidualBlock):
    def forward(self, x: Tensor) -> Tensor:
        return x + SavesItsWeight.apply(
            torch.tanh(SavesItsWeight.apply(x, self.up.weight)), self.down.weight
        )


class FunctionsOfOthers(Stack):
    """A model that uses weights of other modules, which are units or inside of one."""

    units = (ResidualBlock, WithFunction)

    def __init__(self) -> None:
        super().__init__()
        self.custom = WithFunction()

    def body(self, x: Tensor, step: int) -> Tensor:
        x = self.custom(super().body(x, step))
        return nn.functional.linear(x, self.embed.weight) + SavesItsWeight.apply(
            x, self.embed.weight
        )


class GradientInForward(Stack):
    """A model that calls autograd inside its forward, as force fields do."""

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            energy = super().forward(x, step).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return torch.cat([force, energy.expand(1, WIDTH)])


class ForceBlock(ResidualBlock):
    """A unit that differentiates its own result and that of the unit before to their input."""

    def forward(self, x: Tensor, energy: Tensor) -> Tensor:
        y = super().forward(x)
        (force,) = torch.autograd.grad((y * energy).sum(), x, retain_graph=True)
        return y + force


class ForcesOfSharedInput(Stack):
    """Two units share an input, and the second one differentiates through the first."""

    units = (ResidualBlock, ForceBlock)

    def __init__(self) -> None:
        super().__init__()
        self.forces = ForceBlock()

    def body(self, x: Tensor, step: int) -> Tensor:
        return self.forces(x, super().body(x, step))


class PartlyDetached(Stack):
    def body(self, x: Tensor, step: int) -> Tensor:
        first, second, third = self.blocks
        return third(second(first(x).detach()) + first(x))


class SavedTensorHooks(Stack):
    """A model whose saved tensors are packed and unpacked, as offloading does."""

    def body(self, x: Tensor, step: int) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return super().body(x, step)


CUSTOM = (FunctionsOfOthers, ForcesOfSharedInput, PartlyDetached, SavedTensorHooks)
BUILDERS: dict[str, Callable[[], nn.Module]] = {each.__name__: each for each in CUSTOM}


@pytest.mark.always("FunctionsOfOthers")
@pytest.mark.parametrize("model", BUILDERS)
@on_ranks(2)
def test_models_with_functions_of_their_own_match_the_unsharded_ones(model: str) -> None:
    mesh = shard_mesh()
    kind = BUILDERS[model]
    for level in (3, list(BUILDERS).index(model) % 3):
        train_side_by_side(
            lambda: kind().double(),
            plain_backward,
            level,
            mesh=mesh,
            fsdp_unit_modules=list(kind.units),
        )


def backward_twice(model: nn.Module, step: int, rank: int) -> None:
    loss = loss_of(model(batch(step, rank, 0)))
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses_of_one_forward(model: nn.Module, step: int, rank: int) -> None:
    output = model(batch(step, rank, 0))
    output.pow(2).mean().backward(retain_graph=True)
    output.sin().sum().backward()


def backward_from_two_tensors(model: nn.Module, step: int, rank: int) -> None:
    output = model(batch(step, rank, 0))
    torch.autograd.backward([output.sum(), output.pow(2)], [None, torch.ones_like(output)])


def gradient_of_the_input_first(model: nn.Module, step: int, rank: int) -> None:
    """Compute a saliency map, then train on the same graph."""
    x = batch(step, rank, 0).requires_grad_()
    output = model(x)
    (saliency,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
    loss_of(output * saliency.mean().detach()).backward()


def gradient_of_a_hidden_state(model: nn.Module, step: int, rank: int) -> None:
    """Differentiate to a hidden state: only the units above it run a backward."""
    hidden: list[Tensor] = []
    handle = (
        inner(model)
        .blocks[0]
        .register_forward_hook(lambda module, args, output: hidden.append(output))
    )
    output = model(batch(step, rank, 0))
    handle.remove()
    (gradient,) = torch.autograd.grad(output.sum(), hidden[0], retain_graph=True)
    loss_of(output * gradient.mean().detach()).backward()


def inputs_that_want_gradients(model: nn.Module, step: int, rank: int) -> None:
    x = batch(step, rank, 0).requires_grad_()
    loss_of(model(x)).backward()
    with torch.no_grad():
        adversarial = x + 0.1 * x.grad.sign()
    loss_of(model(adversarial)).backward()


USES: dict[str, Backward] = {
    use.__name__: use
    for use in (
        backward_twice,
        two_losses_of_one_forward,
        backward_from_two_tensors,
        gradient_of_the_input_first,
        gradient_of_a_hidden_state,
        inputs_that_want_gradients,
    )
}


@pytest.mark.always("backward_twice", "two_losses_of_one_forward", "gradient_of_a_hidden_state")
@pytest.mark.parametrize("use", USES)
@on_ranks(2)
def test_gradients_are_those_of_the_unsharded_model(use: str) -> None:
    mesh = shard_mesh()
    for level in (3, list(USES).index(use) % 3):
        train_side_by_side(build_stack, USES[use], level, mesh=mesh)


def gradient_penalty(model: nn.Module, step: int, rank: int) -> None:
    x = batch(step, rank, 0).requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (loss_of(output) + gradient.pow(2).sum()).backward()


def backward_with_a_graph(model: nn.Module, step: int, rank: int) -> None:
    x = batch(step, rank, 0).requires_grad_()
    loss_of(model(x)).backward(create_graph=True)


def double_backward(level: int, name: str) -> str:
    """Return "right", or the error."""
    try:
        use = {"penalty": gradient_penalty, "create_graph": backward_with_a_graph}.get(
            name, plain_backward
        )
        kind = GradientInForward if name == "in_forward" else Stack
        _, model = train_side_by_side(lambda: kind().double(), use, level)
        if level == 3:  # nothing stays for a graph that is gone
            plain_backward(model, 0, dist.get_rank())
            assert {group.state.name for group in model.groups} == {"SHARDED"}
    except (RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "right"


@pytest.mark.always("0-penalty", "3-penalty")
@pytest.mark.parametrize(
    ("level", "use"),
    [
        *((level, "penalty") for level in LEVELS),
        *((level, "create_graph") for level in (1, 3)),
        *((level, "in_forward") for level in (0, 3)),
    ],
)
def test_a_gradient_of_a_gradient_is_right_or_refused(ranks: Ranks, level: int, use: str) -> None:
    for outcome in ranks(2, double_backward, level, use):
        assert outcome == "right", outcome


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
@on_ranks(2)
def test_autograd_grad_of_sharded_parameters_says_how_to_get_their_gradients(level: int) -> None:
    """Ask for gradients of the sharded parameters, which is refused, and train on."""
    model, _ = shard(build_stack(), level)
    loss = loss_of(model(batch(0, dist.get_rank(), 0)))
    for options in ({}, {"allow_unused": True}):
        with pytest.raises(NotImplementedError, match="cannot return gradients of sharded"):
            torch.autograd.grad(loss, list(model.parameters()), **options)
    compare_plain_gradients(model, build_stack(), 0, "afterwards")


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
@on_ranks(2)
def test_a_second_backward_without_a_graph_is_refused_by_torch_and_does_no_harm(level: int) -> None:
    model, _ = shard(build_stack(), level)
    loss = loss_of(model(batch(0, dist.get_rank(), 0)))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    compare_plain_gradients(model, build_stack(), 0, "afterwards")


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
@on_ranks(2)
def test_the_jacobian_over_inputs_is_that_of_the_unsharded_model(level: int) -> None:
    reference, (model, _) = build_stack(), shard(build_stack(), level)
    x = batch(0, 0, 0)[:1]
    expected = torch.autograd.functional.jacobian(reference, x)
    close(torch.autograd.functional.jacobian(model, x), expected, "jacobian")


@pytest.mark.always("0", "3")
@pytest.mark.parametrize("level", range(4))
@on_ranks(2)
def test_a_step_after_a_failed_backward_begins_with_fresh_gradients(level: int) -> None:
    net = nn.Sequential(TanhLayer(), TanhLayer())
    model = fully_shard_model(
        net, fsdp_unit_modules=[TanhLayer], zero_dp_strategy=level, sync_model_each_microbatch=False
    )
    x = torch.randn(2, 8)

    def explode(gradient: torch.Tensor) -> None:
        raise RuntimeError("boom")

    with model.no_sync():
        model(x).sum().backward()
        hidden = model.module[0](x)
        hidden.register_hook(explode)
    with pytest.raises(RuntimeError, match="boom"), model.no_sync():
        hidden = model(x)
        broken = hidden * 1
        hidden.register_hook(explode)
        broken.sum().backward()
    model(x).sum().backward()
    model.finish_grad_sync()
    once = [full_tensor(parameter.grad) for parameter in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    model.finish_grad_sync()
    assert all(
        torch.equal(left, full_tensor(right.grad)) for left, right in zip(once, model.parameters())
    )


class ForceField(nn.Module):
    """A unit that differentiates inside its forward, and then uses its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(4, 1)
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad((self.energy(x) * self.shift.sum()).sum(), x)
        return force + self.shift


@on_ranks(2)
def test_a_forward_that_differentiates_keeps_its_weights() -> None:
    torch.manual_seed(0)
    module = ForceField()
    reference = copy.deepcopy(module)
    model = fully_shard_model(
        nn.Sequential(module), fsdp_unit_modules=[ForceField], preserve_fp32_weights=False
    )
    for _ in range(2):
        torch.testing.assert_close(model(torch.ones(2, 4)), reference(torch.ones(2, 4)))
