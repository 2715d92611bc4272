# SPDX-License-Identifier: Apache-2.0
"""Optimizers are taken or refused by what they do to small tensors, whole and cut."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.fsdp.optimizer.elementwise import KNOWN, torch_class, why_not_elementwise


class Simple(torch.optim.Optimizer):
    """Base of the optimizers here: `direction` of each parameter, times the learning rate."""

    def __init__(self, params: Any, lr: float = 0.01, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = closure() if closure else None
        for group, parameter in self.with_gradients():
            parameter.sub_(group["lr"] * self.direction(parameter, parameter.grad, group))
        return loss

    def with_gradients(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        for group in self.param_groups:
            yield from (
                (group, parameter) for parameter in group["params"] if parameter.grad is not None
            )

    def direction(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad


class Lion(Simple):
    def direction(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
        update = (0.9 * average + 0.1 * grad).sign()
        average.lerp_(grad, 0.01)
        return update


class DecaysMatrices(Simple):
    """An optimizer that looks at the number of dims, which local parts of DTensors keep."""

    def direction(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad + 0.1 * parameter if parameter.dim() > 1 else grad


class TakesNoClosure(Simple):
    def step(self) -> None:
        super().step()


class OwnAdam(torch.optim.AdamW):
    """Changes the step of a known one, and stays element-wise."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.clamp_(-1, 1)
        return super().step(closure)


class TrustRatio(Simple):
    """LARS, LAMB and their kin."""

    def direction(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad * parameter.norm() / grad.norm()


class NormalizesRows(Simple):
    def direction(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad / grad.norm(dim=-1, keepdim=True) if grad.dim() > 1 else grad


class Orthogonalizes(Simple):
    """Muon and its kin, some of which take matrices only."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            if any(parameter.dim() != 2 for parameter in group["params"]):
                raise ValueError("matrices only")

    def direction(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        left, _, right = torch.linalg.svd(grad, full_matrices=False)
        return left @ right


class FactorsTheSecondMoment(Simple):
    """Only large matrices."""

    def direction(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        if min(grad.shape) < 128:
            return grad
        return (
            grad
            / (grad.square().mean(0, keepdim=True) * grad.square().mean(1, keepdim=True))
            .sqrt()
            .sqrt()
        )


class ClipsTheModel(Simple):
    """By the norm over all parameters."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        closure()
        parameters = [parameter for _, parameter in self.with_gradients()]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        super().step()


class LooksTwice(Simple):
    """Goes uphill by a step of fixed length first (sharpness-aware)."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        parameters = [parameter for _, parameter in self.with_gradients()]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        uphill = [0.5 * parameter.grad / norm for parameter in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, uphill)
            closure()
            torch._foreach_sub_(parameters, uphill)
        super().step()


class QuantizesBlocks(Simple):
    """State of large parameters is in 8 bits with one scale for a block, as in 8-bit Adam."""

    def direction(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        if grad.numel() < 4096:
            return grad
        padded = nn.functional.pad(grad.reshape(-1), (0, -grad.numel() % 256)).view(-1, 256)
        scale = padded.abs().amax(1, keepdim=True) / 127
        return ((padded / scale).round() * scale).view(-1)[: grad.numel()].view_as(grad)


class AddsNoise(Simple):
    def direction(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad + torch.randn_like(grad) + random.random()


class FailsOnNothing(Simple):
    def direction(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad.clamp(max=grad.abs().max().item())


class OfAnotherKindByGroup(Simple):
    """One class for two methods, as combinations of Muon and Adam are."""

    def direction(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad / grad.norm() if group.get("whole") else grad


class NeedsMore(TrustRatio):
    def __init__(self, params: Any, model: nn.Module, lr: float = 0.01) -> None:
        super().__init__(params, lr)


class DistributedShampoo(Simple):
    """Known by its name."""


class LambdaDecay(Simple):
    """Not LAMB."""


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))]


def reason(optimizer: torch.optim.Optimizer) -> str | None:
    return why_not_elementwise(type(optimizer), optimizer.defaults, optimizer.param_groups)


@pytest.mark.parametrize("kind", KNOWN)
def test_optimizers_of_torch_are_elementwise_as_known(kind: type) -> None:
    """They have another name here, so that they are tried out."""

    class Unknown(kind):
        def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
            return super().step(closure)

    assert torch_class(kind) is kind
    assert torch_class(Unknown) is None
    assert reason(kind(parameters())) is None
    assert reason(Unknown(parameters())) is None


@pytest.mark.parametrize(
    "kind", [Simple, Lion, DecaysMatrices, TakesNoClosure, OwnAdam, LambdaDecay]
)
def test_other_elementwise_optimizers_are_taken(kind: type) -> None:
    assert reason(kind(parameters(), lr=0.02)) is None


BY_TRIAL = [
    TrustRatio,
    NormalizesRows,
    FactorsTheSecondMoment,
    ClipsTheModel,
    LooksTwice,
    QuantizesBlocks,
    AddsNoise,
]


@pytest.mark.parametrize("kind", BY_TRIAL)
@pytest.mark.parametrize(
    "rate", [0.01, 0.0, torch.tensor(0.0)], ids=["", "before_warm_up", "tensor_before_warm_up"]
)
def test_optimizers_that_look_beyond_elements_are_refused(kind: type, rate: float | Tensor) -> None:
    assert "is not element-wise" in reason(kind(parameters(), lr=rate))


def test_optimizers_of_matrices_only_are_refused() -> None:
    assert "is not element-wise" in reason(Orthogonalizes([nn.Parameter(torch.randn(3, 2))]))


def test_optimizers_that_fail_on_empty_shards_are_refused() -> None:
    assert "cannot step on pieces" in reason(FailsOnNothing(parameters()))


def test_settings_of_every_group_are_tried() -> None:
    matrix, vector = parameters()
    assert reason(OfAnotherKindByGroup([{"params": [matrix]}, {"params": [vector]}])) is None
    assert "is not element-wise" in reason(
        OfAnotherKindByGroup([{"params": [vector]}, {"params": [matrix], "whole": True}])
    )


def test_optimizers_that_cannot_be_tried_are_accepted_unless_known_by_name() -> None:
    assert reason(NeedsMore(parameters(), nn.Linear(1, 1))) is None
    assert "needs whole matrices" in reason(DistributedShampoo(parameters()))


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon])
def test_optimizers_of_torch_that_need_the_whole_are_refused(kind: type) -> None:
    assert "needs whole matrices" in reason(kind([nn.Parameter(torch.randn(3, 2))]))


def test_sparse_and_differentiable_ones_are_refused() -> None:
    assert "sparse" in reason(torch.optim.SparseAdam(parameters()))
    assert "differentiable" in reason(torch.optim.Adam(parameters(), differentiable=True))


def test_a_subclass_with_only_a_constructor_of_its_own_is_the_known_one() -> None:
    class Configured(torch.optim.AdamW):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)

    Configured(parameters())  # torch wraps the step of a class when its first optimizer is made
    assert torch_class(Configured) is torch.optim.AdamW
    assert torch_class(Lion) is None


def test_nothing_of_the_user_is_touched() -> None:
    weights = parameters()
    optimizer = AddsNoise(weights, lr=torch.tensor(0.25), note=["a list"])
    optimizer.state[weights[0]]["kept"] = torch.ones(2)
    before = copy.deepcopy(optimizer.state_dict())
    values = [weight.detach().clone() for weight in weights]
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    assert reason(optimizer)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert all(
        torch.equal(left, right) and left.grad is None for left, right in zip(weights, values)
    )
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert torch.equal(after["state"][0]["kept"], before["state"][0]["kept"])
    assert optimizer.param_groups[0]["note"] is optimizer.defaults["note"]
