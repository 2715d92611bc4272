# SPDX-License-Identifier: Apache-2.0
"""Who tells the schedule: hooks on modules, on their inputs and outputs, and on compute parameters.

[Note: one call of a unit]
    before forward      hold the unit, and any unit whose parameter is handed in as an argument (tied output layers)
    after forward       let go, except while autograd recomputes: the same unit's backward follows
    output gradient     hold again
    input gradients     the call's backward is over; with leaves among them, once the unit's own are there too
Hooks on tensors are attached to what produced them, so inputs and outputs are passed on as they are: they may be
edited in place, freed or be of any type that holds tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Callable, Iterator

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from megatron.fsdp.device import in_backward
from megatron.fsdp.schedule import Schedule, Unit


class Call:
    """One call of a unit's forward: what it holds."""

    def __init__(self, unit: Unit, borrowed: list[Unit]):
        self.unit = unit
        self.borrowed = borrowed  # units whose parameters were handed in as arguments
        self.awaited_inputs = 0  # gradients of inputs that will tell the end of the call's backward
        self.input_hooks: list[RemovableHandle] = []
        # Autograd hurries to leaves: their gradients may come before those of parameters on paths of their own.
        self.hurried = False


class UnitHooks:
    """Connects the modules of units to their schedule."""

    def __init__(self, schedule: Schedule):
        self._schedule = schedule
        self._root = schedule.units[0]
        self._owner = {
            parameter: unit for unit in schedule.units for group in unit.groups for parameter in group.parameters
        }
        self._calls: list[Call] = []  # forwards under way, innermost last
        for unit in schedule.units:
            unit.module.register_forward_pre_hook(self._before_forward(unit), prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(self._after_forward(unit), always_call=True)
            self._watch_gradients(unit)

    def _watch_gradients(self, unit: Unit) -> None:
        parameters = [parameter for group in unit.trainable_groups for parameter in group.parameters]
        unit.awaited_grads = len(parameters)

        def arrived(parameter: nn.Parameter) -> None:
            self._schedule.enter_backward(_queue_callback)
            self._schedule.grad_arrived(unit, parameter)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(arrived)

    # ---- forward -------------------------------------------------------------------------------------------------

    def _before_forward(self, unit: Unit) -> Callable[..., None]:
        @torch.compiler.disable
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if unit is self._root:
                self._schedule.begin_pass()
            call = Call(unit, self._borrowed(unit, (*args, *kwargs.values())))
            self._calls.append(call)
            self._acquire(call)
            if torch.is_grad_enabled():
                self._watch_inputs(call, (args, kwargs))

        return hook

    def _after_forward(self, unit: Unit) -> Callable[..., None]:
        @torch.compiler.disable
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            call = self._calls.pop()
            if torch.is_grad_enabled():
                self._watch_outputs(call, output)
            if in_backward():
                return
            for held in (unit, *call.borrowed):
                self._schedule.release(held, call)
            if unit is self._root:
                self._schedule.end_forward()

        return hook

    def _acquire(self, call: Call) -> None:
        for borrowed in call.borrowed:
            self._schedule.hold(borrowed, call)
        self._schedule.acquire(call.unit, call)

    def _borrowed(self, unit: Unit, arguments: tuple) -> list[Unit]:
        owners = [self._owner.get(argument) for argument in arguments if isinstance(argument, nn.Parameter)]
        return list(dict.fromkeys(owner for owner in owners if owner is not None and owner is not unit))

    # ---- backward ------------------------------------------------------------------------------------------------

    def _watch_outputs(self, call: Call, output: Any) -> None:
        def begin(gradient: torch.Tensor) -> None:
            self._begin_backward(call)

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(begin)

    def _begin_backward(self, call: Call) -> None:
        self._schedule.enter_backward(_queue_callback)
        if call not in call.unit.open_calls:
            call.unit.open_calls[call] = call.awaited_inputs > 0
            self._acquire(call)

    def _watch_inputs(self, call: Call, inputs: Any) -> None:
        tensors = [
            tensor for tensor in tensors_in(inputs) if tensor.requires_grad and not isinstance(tensor, nn.Parameter)
        ]
        leaves = [tensor for tensor in tensors if tensor.is_leaf]
        others = [tensor for tensor in tensors if not tensor.is_leaf]
        call.awaited_inputs = len(leaves) + bool(others)
        call.hurried = bool(leaves)

        def arrived(gradient: Any) -> None:
            call.awaited_inputs -= 1
            if call.awaited_inputs == 0:
                self._finish(call)

        # torch's hook on several tensors knows which of them get no gradient, but refuses leaves in `autograd.grad`.
        call.input_hooks = [leaf.register_hook(arrived) for leaf in leaves]
        if others:
            call.input_hooks.append(torch.autograd.graph.register_multi_grad_hook(others, arrived))

    def _finish(self, call: Call) -> None:
        # The hooks refer to the graph and the graph to the hooks: unless taken off, the pass' activations would live
        # until Python's garbage collector comes by.
        for hook in call.input_hooks:
            hook.remove()
        if call in call.unit.open_calls:
            if not call.hurried:
                for borrowed in call.borrowed:
                    self._schedule.release(borrowed, call)
            self._schedule.finish_call(call.unit, call, parameters_may_follow=call.hurried)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a nest of tuples, lists, mappings, dataclasses and registered pytrees."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from tensors_in(list(leaf.values()))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def _queue_callback(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)
