# SPDX-License-Identifier: Apache-2.0
"""A schedule outside of the model: it runs parts of units, and forwards and backwards in turn."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard_model
from megatron_fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor
from tests.support.fsdp.reference import LEVELS, TOLERANCE, Ranks, on_ranks

WIDTH, NUM_UNITS, NUM_MICROBATCHES = 6, 3, 3


class LateProduct(torch.autograd.Function):
    """The product of a layer that computes its weight gradient itself, after the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: "LateLinear") -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.layer.waiting.append((gradient, x))
        return gradient @ weight, None, None


class LateLinear(nn.Linear):
    """A linear layer of whose weight autograd does not know."""

    def __init__(self, rows: int, columns: int):
        super().__init__(rows, columns, bias=False)
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        return LateProduct.apply(x, self.weight.detach(), self)

    def compute_weight_gradient(self) -> None:
        gradient, x = self.waiting.pop()
        self.weight.grad = gradient.T @ x


class PartedUnit(nn.Module):
    """A unit of two parts, neither of which is called through its forward."""

    def __init__(self, layer: type[nn.Linear]) -> None:
        super().__init__()
        self.first, self.second = layer(WIDTH, 5), layer(5, WIDTH)

    def parts(self) -> list[nn.Module]:
        return [self.first, self.second]

    def compute_weight_gradients(self) -> None:
        for part in self.parts():
            if isinstance(part, LateLinear):
                part.compute_weight_gradient()


class CalledUnit(nn.Linear):
    """A unit that is called as usual."""


class PartedModel(nn.Module):
    """A unit that is called, units that run in parts, and a weight of the root."""

    def __init__(self, layer: type[nn.Linear]) -> None:
        super().__init__()
        self.embedding = CalledUnit(WIDTH, WIDTH)
        self.units = nn.ModuleList(PartedUnit(layer) for _ in range(NUM_UNITS))
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for unit in self.units:
            for part in unit.parts():
                x = torch.tanh(part(x))
        return x * self.scale


class Microbatch:
    """A microbatch: between its parts the graph is cut."""

    def __init__(self, model: MegatronFSDP, x: Tensor):
        self.model, self.module, self.x = model, model.module, x
        self.cuts: list[tuple[Tensor, Tensor]] = []  # inputs and results of the parts that have run
        first = model.module.units[0]  # whose backward may end with that of the model
        self.ends_last = first if isinstance(first.first, LateLinear) else None

    def begin(self) -> None:
        self.model.pre_forward()
        self._run(self.module.embedding)

    def forward(self, unit: PartedUnit) -> None:
        self.model.pre_forward(unit)
        for part in unit.parts():
            self._run(lambda x, part=part: torch.tanh(part(x)))
        self.model.post_forward_release_module(unit)

    def end(self) -> None:
        self._run(lambda x: (x * self.module.scale).pow(2).mean())
        self.model.post_forward()

    def begin_backward(self) -> None:
        self.model.pre_backward()
        self._back(torch.ones_like(self.x))

    def backward(self, unit: PartedUnit) -> None:
        self.model.pre_backward(unit)
        for _ in unit.parts():
            self._back(self.gradient)
        if unit is not self.ends_last:
            unit.compute_weight_gradients()
            self.model.post_backward_release_module(unit)

    def end_backward(self) -> None:
        if self.ends_last:
            self.ends_last.compute_weight_gradients()
        self._back(self.gradient)
        self.model.post_backward()

    def _run(self, part: object) -> None:
        start = self.x.detach().requires_grad_(bool(self.cuts))
        self.x = part(start)
        self.cuts.append((start, self.x))

    def _back(self, gradient: Tensor) -> None:
        start, result = self.cuts.pop()
        result.backward(gradient)
        self.gradient = start.grad


def inputs(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shape = (NUM_MICROBATCHES, 4, WIDTH)
    return list(torch.randn(shape, generator=generator, dtype=torch.float64))


def gathered(model: MegatronFSDP) -> list[bool]:
    """Return True for the units whose weights have memory."""
    units = [unit for unit in model._units if isinstance(unit.module, PartedUnit)]
    return [unit.groups[0].compute.flat.untyped_storage().nbytes() > 0 for unit in units]


def build(
    level: int, layer: type[nn.Linear] = nn.Linear, **settings: object
) -> tuple[nn.Module, MegatronFSDP]:
    torch.manual_seed(1)
    reference = PartedModel(layer).double()
    model = fully_shard_model(
        deepcopy(reference),
        fsdp_unit_modules=[PartedUnit, CalledUnit],
        zero_dp_strategy=level,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=None),
        **settings,
    )
    for part in reference.modules():
        if isinstance(part, LateLinear):
            part.forward = partial(nn.functional.linear, weight=part.weight)
    return reference, model


def train(level: int, overlaps: bool, layer: type[nn.Linear]) -> tuple[float, list[list[bool]]]:
    """Job: run one forward and one backward in turn; return the error, and what was gathered."""
    reference, model = build(level, layer, overlap_param_gather=overlaps)
    seen: list[list[bool]] = []
    waiting: Microbatch | None = None
    for x in [*inputs(dist.get_rank()), None]:
        is_last, microbatch = x is None, None if x is None else Microbatch(model, x)
        model.is_last_microbatch = is_last
        if microbatch:
            microbatch.begin()
        if waiting:
            waiting.begin_backward()
        for unit, other in zip(model.module.units, reversed(model.module.units)):
            if microbatch:
                microbatch.forward(unit)
            if waiting:
                waiting.backward(other)
            seen.append(gathered(model))
        if microbatch:
            microbatch.end()
        if waiting:
            waiting.end_backward()
        waiting = microbatch
    seen.append(gathered(model))
    model.finish_grad_sync()
    for rank in range(dist.get_world_size()):
        for x in inputs(rank):
            (reference(x).pow(2).mean() / dist.get_world_size()).backward()
    errors = [
        (uneven_dtensor_to_full_tensor(own.grad) - other.grad).abs().max().item()
        for own, other in zip(model.parameters(), reference.parameters())
    ]
    return max(errors), seen


@pytest.mark.always("1-alone", "3-*")
@pytest.mark.parametrize("overlaps", [False, True], ids=["alone", "prefetched"])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_match_the_unsharded_model(ranks: Ranks, level: int, overlaps: bool) -> None:
    for error, seen in ranks(2, train, level, overlaps, nn.Linear):
        assert error < TOLERANCE
        if level < 3:
            assert all(map(all, seen))
        elif not overlaps:
            assert not any(map(any, seen))
        else:  # one unit ahead in each direction
            assert max(map(sum, seen)) <= 2
            assert not any(seen[-1])


@pytest.mark.always("3")
@pytest.mark.parametrize("level", [1, 3])
def test_weight_gradients_may_come_after_a_backward(ranks: Ranks, level: int) -> None:
    for error, seen in ranks(2, train, level, False, LateLinear):
        assert error < TOLERANCE
        if level == 3:  # the unit whose gradients come last, until the model's backward ends
            assert set(map(sum, seen)) == {0, 1}
            assert not any(seen[-1])


@on_ranks(2)
def test_a_backward_without_a_forward_is_refused() -> None:
    model = build(3)[1]
    with pytest.raises(RuntimeError, match="pre_backward expects a forward before it"):
        model.pre_backward()


@on_ranks(2)
def test_memory_slots_are_refused() -> None:
    model = build(3, fsdp_double_buffer=True)[1]
    message = "memory slots, with a schedule outside of the model"
    with pytest.raises(NotImplementedError, match=message):
        model.pre_forward()
