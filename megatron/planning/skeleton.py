# SPDX-License-Identifier: Apache-2.0
"""Skeletons: modules that use their parameters as before, and compute nothing.

[Note: skeletons] A module with units inside calls its children in the order of their registration.
Any other module is one operation, which uses all parameters in it: a parameter is read by its name,
as a forward does, and gets a gradient in backward. Its cost is a :class:`Cost`. What is left of an
activation is its bytes; the tensor that flows through the skeleton has one element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.planning.simulation import Simulator


@dataclass(frozen=True)
class Cost:
    """The cost of one forward of a module, and of its backward.

    Args:
        forward: seconds of its forward.
        backward: seconds of its backward, recomputation included.
        kept_bytes: activations that its forward leaves for its backward.
        recomputed_bytes: activations that its backward computes again, for as long as it lasts.
    """

    forward: float = 0.0
    backward: float = 0.0
    kept_bytes: int = 0
    recomputed_bytes: int = 0


NO_COST = Cost()

Step = Callable[..., torch.Tensor]
"""Takes an activation, and parameters that are passed as arguments; returns another activation."""


@dataclass(frozen=True)
class Operation:
    """The work of one module of a skeleton.

    Args:
        simulator: the clock and the memory.
        name: of the module.
        cost: of one call.
    """

    simulator: Simulator
    name: str
    cost: Cost

    def forward(self) -> None:
        """Spend the time of a forward, and allocate what it keeps."""
        self.simulator.spend(self.cost.forward, "forward", self.name)
        self.simulator.change_memory(self.cost.kept_bytes)

    def backward(self, gradients: Sequence[torch.Tensor]) -> None:
        """Spend the time of a backward, and release what the forward has kept.

        Args:
            gradients: of parameters; they exist before activations are released.
        """
        self.simulator.change_memory(self.cost.recomputed_bytes)
        self.simulator.spend(self.cost.backward, "backward", self.name)
        for gradient in gradients:
            self.simulator.hold(gradient)
        released = self.cost.kept_bytes + self.cost.recomputed_bytes
        self.simulator.change_memory(-released)


class _Use(torch.autograd.Function):
    """An operation on an activation with parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        operation: Operation,
        activation: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        operation.forward()
        ctx.operation = operation
        ctx.parameters = parameters
        return torch.empty_like(activation)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gradients: list[torch.Tensor | None] = []
        for parameter, is_needed in zip(ctx.parameters, ctx.needs_input_grad[2:]):
            gradient = None
            if is_needed:
                gradient = torch.empty_like(parameter)
            gradients.append(gradient)
        made = [gradient for gradient in gradients if gradient is not None]
        ctx.operation.backward(made)
        del made
        ctx.parameters = ()
        return None, torch.empty_like(grads[0]), *gradients


def make_skeleton(
    root: nn.Module,
    units: Sequence[nn.Module],
    simulator: Simulator,
    cost_of: Callable[[nn.Module], Cost] = lambda module: NO_COST,
    passed: Mapping[nn.Module, tuple[nn.Module, str]] | None = None,
) -> None:
    """Replace the forwards of a model; see [Note: skeletons].

    Args:
        root: the model, after it was sharded.
        units: modules that are units, or are called by themselves.
        simulator: the clock and the memory.
        cost_of: returns the cost of a module without units inside.
        passed: modules without units inside that get a parameter as an argument: the module that
            owns it, and its name there.
    """
    plan = _Plan(simulator, cost_of, {*units}, passed or {})
    forwards: dict[nn.Module, _Forward] = {}
    for name, module in root.named_modules():
        if module is root or plan.is_called_by_itself(module):
            forwards[module] = _Forward([*plan.steps(module, name)])
    for module, forward in forwards.items():
        module.forward = forward


class _Forward:
    """The forward of a module of a skeleton: one step after the other."""

    def __init__(self, steps: Sequence[Step]):
        self._steps = steps

    def __call__(self, activation: torch.Tensor, *parameters: nn.Parameter) -> torch.Tensor:
        for step in self._steps:
            activation = step(activation, *parameters)
        return activation


@dataclass(frozen=True)
class _Plan:
    """The steps of the modules of a skeleton.

    Args:
        simulator: the clock and the memory.
        cost_of: returns the cost of a module without units inside.
        units: modules that are units.
        passed: modules that get a parameter as an argument: its owner, and its name there.
    """

    simulator: Simulator
    cost_of: Callable[[nn.Module], Cost]
    units: set[nn.Module]
    passed: Mapping[nn.Module, tuple[nn.Module, str]]

    def is_called_by_itself(self, module: nn.Module) -> bool:
        """Return True if a module has a forward of its own."""
        return module in self.units or module in self.passed

    def _has_units_inside(self, module: nn.Module) -> bool:
        for inner in module.modules():
            if inner is not module and self.is_called_by_itself(inner):
                return True
        return False

    def steps(self, module: nn.Module, name: str) -> Iterator[Step]:
        """Yield what a module does, one step after the other."""
        if not self._has_units_inside(module):
            operation = Operation(self.simulator, name, self.cost_of(module))
            yield _use([*module.modules()], operation)
            return
        if next(module.named_parameters(recurse=False), None) is not None:
            yield _use([module], Operation(self.simulator, name, NO_COST))
        for child_name, child in module.named_children():
            if child in self.passed:
                yield _call_with(child, *self.passed[child])
            elif child in self.units:
                yield child
            else:
                inner_name = f"{name}.{child_name}" if name else child_name
                yield from self.steps(child, inner_name)


def _call_with(
    module: nn.Module,
    owner: nn.Module,
    name: str,
) -> Step:
    """Return the step that calls a module with a parameter of another one as an argument."""

    def call(activation: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = module(activation, getattr(owner, name))
        return result

    return call


def _use(owners: Sequence[nn.Module], operation: Operation) -> Step:
    """Return the step that uses all parameters that some modules own."""
    read: list[tuple[nn.Module, str]] = []
    for owner in owners:
        for name, _ in owner.named_parameters(recurse=False):
            read.append((owner, name))

    def use(activation: torch.Tensor, *passed: nn.Parameter) -> torch.Tensor:
        parameters = [getattr(owner, name) for owner, name in read]
        result: torch.Tensor = _Use.apply(operation, activation, *parameters, *passed)
        return result

    return use
