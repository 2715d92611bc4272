# SPDX-License-Identifier: Apache-2.0
"""A step costs the host no DTensor, no call and no line for each parameter."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.fsdp import clip_grad_norm_
from megatron.fsdp.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from tests.support.fsdp.reference import Ranks, on_ranks

Optimizer = torch.optim.Optimizer


class Layers(nn.Sequential):
    def __init__(self, count: int):
        super().__init__(*[nn.Linear(8, 8) for _ in range(count)])


def shard_layers(count: int) -> tuple[nn.Module, Optimizer]:
    """Return a sharded model of four units of ``count`` layers each."""
    module = nn.Sequential(*[Layers(count) for _ in range(4)])
    optimizer = torch.optim.AdamW(module.parameters())
    precision = MixedPrecisionPolicy(main_params_dtype=None)
    return fully_shard(
        module, optimizer, fsdp_unit_modules=[Layers], mixed_precision_policy=precision
    )


class DTensorOperations(TorchDispatchMode):
    """Records operations with DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def watching_dtensors() -> Iterator[list[str]]:
    """Record DTensors that are made, and torch's functions and operations with DTensors."""
    made = DTensor.__new__

    def watched_new(cls: type, *args: Any, **kwargs: Any) -> Any:
        operations.found.append(f"{cls.__name__}()")
        return made(cls, *args, **kwargs)

    def watched_function(cls: type, function: Any, *args: Any, **kwargs: Any) -> Any:
        operations.found.append(str(function))
        return original(function, *args, **kwargs)

    original = UnevenDTensor.__torch_function__
    operations = DTensorOperations()
    with (
        patch.object(DTensor, "__new__", watched_new),
        patch.object(UnevenDTensor, "__torch_function__", classmethod(watched_function)),
        operations,
    ):
        yield operations.found


def phases_of(model: nn.Module, optimizer: Optimizer) -> list[Callable[[], object]]:
    """Return the parts of a step after the backward, but for clipping, which is torch's own."""
    return [model.attach_grad_to_optimizer_state, optimizer.step, optimizer.zero_grad]


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()


@on_ranks(2)
def test_a_steady_step_makes_no_dtensor_and_calls_nothing_with_one() -> None:
    model, optimizer = shard_layers(2)
    train(model, optimizer)
    with watching_dtensors() as found:
        for phase in phases_of(model, optimizer):
            phase()
    with watching_dtensors() as control:
        next(model.parameters()).detach() + 1
    assert len(control) >= 2
    assert found == [], found


def count_calls(count: int) -> list[int]:
    """Count the calls of each phase, of Python and of C."""
    model, optimizer = shard_layers(count)
    train(model, optimizer)
    numbers = []
    for phase in phases_of(model, optimizer):
        calls = 0

        def watch(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(watch)
        try:
            phase()
        finally:
            sys.setprofile(None)
        numbers.append(calls)
    return numbers


def test_calls_do_not_grow_with_the_parameters_of_a_unit(ranks: Ranks) -> None:
    few, many = ranks(1, count_calls, 2)[0], ranks(1, count_calls, 9)[0]
    assert few == many
    assert min(few) > 10


PER_PARAMETER = ("hooks.py", "shown_parameters.py", "unit.py", "schedule.py", "device.py")
"""Where modules read each parameter, and autograd reports the gradient of each."""


def count_lines(count: int) -> dict[str, int]:
    """Return how many lines of each module a step runs, loops counted as often as they go round."""
    model, optimizer = shard_layers(count)
    parameters = list(model.parameters())
    train(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    lines: dict[str, int] = defaultdict(int)

    def watch(frame: Any, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if "megatron/fsdp/" not in name or name.endswith(PER_PARAMETER):
            return None
        lines[name.rpartition("/")[2]] += event == "line"
        return watch

    sys.settrace(watch)
    try:
        # Backward runs on this thread, as on every CPU.
        model(torch.ones(2, 8)).sum().backward()
        clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    finally:
        sys.settrace(None)
    return dict(lines)


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_loop_of_a_step_goes_over_all_parameters(ranks: Ranks, world_size: int) -> None:
    # Neither needs padding, which would be cleared by one line more.
    few, many = ranks(world_size, count_lines, 2)[0], ranks(world_size, count_lines, 8)[0]
    assert few == many
    own = {"gradients.py", "gradient_sync.py", "flat_update.py"}
    assert own | {"sharded_gradient.py", "sharded_optimizer.py", "sharded_module.py"} <= set(few)


@on_ranks(2)
def test_norms_that_are_computed_together_are_those_of_the_gradients_now() -> None:
    model, optimizer = shard_layers(2)
    train(model, optimizer)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad.mul_(2.0)
            for order in (2.0, torch.inf):
                expected = torch.linalg.vector_norm(parameter.grad.full_tensor(), order)
                torch.testing.assert_close(parameter.grad.norm(order), expected)
