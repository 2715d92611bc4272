# SPDX-License-Identifier: Apache-2.0
"""Who tells the schedule: hooks on modules, on their inputs and outputs, and on compute parameters.

[Note: one call of a unit]
    before forward      hold the unit, those it shares parameters with others in, and any unit whose
    parameter is handed in
                        as an argument (tied output layers)
    in forward          hold a unit whose parameter the code of this one reads by name
    (`self.embedding.weight`)
    after forward       let go, except while autograd recomputes: the same unit's backward follows
    output gradient     hold again
    input gradients     the call's backward is over; with leaves among them, once the unit's own are
    there too
Hooks on tensors are attached to what produced them, so inputs and outputs are passed on as they
are: they may be edited in place, freed or be of any type that holds tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from megatron.fsdp.engine.device import in_backward
from megatron.fsdp.engine.schedule import Schedule, Unit


class Call:
    """One call of a unit's forward: what it holds."""

    def __init__(self, unit: Unit, borrowed: list[Unit]):
        self.unit = unit
        self.borrowed = borrowed  # units that are not its own but whose parameters it uses
        self.awaited_inputs = 0  # gradients of inputs that will tell the end of the call's backward
        self.input_hooks: list[RemovableHandle] = []
        # Autograd hurries to leaves: their gradients may come before those of parameters on paths
        # of their own.
        self.hurried = False


PASSED_ON = "_fsdp_passed_on"
"""Attribute of parameters that code reads only to hand them on as arguments: reading one does not hold its unit."""


class UnitHooks:
    """Connects the modules of units to their schedule.

    Args:
        sharded: the sharded parameters, by the module's own: what code outside of any forward finds
            where weights are away.
    """

    def __init__(self, schedule: Schedule, sharded: dict[nn.Parameter, nn.Parameter]):
        self._schedule = schedule
        self._sharded = sharded
        self._root = schedule.units[0]
        self._owner = {
            parameter: unit
            for unit in schedule.units
            for group in unit.groups
            for parameter in group.parameters
        }
        self._calls: list[Call] = []  # forwards under way, innermost last
        for unit in schedule.units:
            if unit.module is not None:
                unit.module.register_forward_pre_hook(
                    self._before_forward(unit), prepend=True, with_kwargs=True
                )
                unit.module.register_forward_hook(self._after_forward(unit), always_call=True)
            self._watch_gradients(unit)
        for module in _not_compiled(self._root.module):
            if any(True for _ in module.parameters(recurse=False)):
                module._parameters = WatchedParameters(
                    module._parameters, self._read, self._present
                )

    def _watch_gradients(self, unit: Unit) -> None:
        parameters = [
            parameter for group in unit.trainable_groups for parameter in group.parameters
        ]
        unit.awaited_grads = len(parameters)

        def arrived(parameter: nn.Parameter) -> None:
            self._schedule.enter_backward(_queue_callback)
            self._schedule.grad_arrived(unit, parameter)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(arrived)

    # ---- forward
    # -------------------------------------------------------------------------------------------------

    def _before_forward(self, unit: Unit) -> Callable[..., None]:
        @torch.compiler.disable
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if unit is self._root:
                self._schedule.begin_pass()
            call = Call(unit, self._borrowed(unit, (*args, *kwargs.values())) + unit.shared)
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

    def forget_calls(self) -> None:
        """Let go of what forwards hold that an interrupt has ended: torch calls no hooks then."""
        while self._calls and not in_backward():
            call = self._calls.pop()
            for held in (call.unit, *call.borrowed):
                self._schedule.release(held, call)

    def _acquire(self, call: Call) -> None:
        for borrowed in call.borrowed:
            self._schedule.hold(borrowed, call)
        self._schedule.acquire(call.unit, call)

    def _borrowed(self, unit: Unit, arguments: tuple) -> list[Unit]:
        owners = [
            self._owner.get(argument)
            for argument in arguments
            if isinstance(argument, nn.Parameter)
        ]
        return list(
            dict.fromkeys(owner for owner in owners if owner is not None and owner is not unit)
        )

    def _present(self, parameter: nn.Parameter) -> nn.Parameter:
        """What code gets that looks at ``parameter``: outside of forwards, where its weights are away, the sharded one."""
        owner = self._owner.get(parameter)
        if owner is not None and not self._calls:
            owner.wait_for_unshard()
        return (
            parameter
            if owner is None or self._calls or owner.is_readable
            else self._sharded[parameter]
        )

    def _read(self, parameter: nn.Parameter) -> nn.Parameter:
        """The same for code that asks for it by name: inside a forward its unit is held as long as that call may need it."""
        owner = self._owner.get(parameter)
        if owner is not None and self._calls and not hasattr(parameter, PASSED_ON):
            if not any(owner is call.unit or owner in call.borrowed for call in self._calls):
                self._calls[-1].borrowed.append(owner)
                self._schedule.hold(owner, self._calls[-1])
        return self._present(parameter)

    # ---- backward
    # ------------------------------------------------------------------------------------------------

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
            tensor
            for tensor in tensors_in(inputs)
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter)
        ]
        leaves = [tensor for tensor in tensors if tensor.is_leaf]
        others = [tensor for tensor in tensors if not tensor.is_leaf]
        call.awaited_inputs = len(leaves) + bool(others)
        call.hurried = bool(leaves)

        def arrived(gradient: Any) -> None:
            call.awaited_inputs -= 1
            if call.awaited_inputs == 0:
                self._finish(call)

        # torch's hook on several tensors knows which of them get no gradient, but refuses leaves in
        # `autograd.grad`.
        call.input_hooks = [leaf.register_hook(arrived) for leaf in leaves]
        if others:
            call.input_hooks.append(torch.autograd.graph.register_multi_grad_hook(others, arrived))

    def _finish(self, call: Call) -> None:
        # The hooks refer to the graph and the graph to the hooks: unless taken off, the pass'
        # activations would live until Python's garbage collector comes by.
        for hook in call.input_hooks:
            hook.remove()
        if call in call.unit.open_calls:
            if not call.hurried:
                for borrowed in call.borrowed:
                    self._schedule.release(borrowed, call)
            self._schedule.finish_call(call.unit, call, parameters_may_follow=call.hurried)


class WatchedParameters(dict):
    """A module's own parameters, by name.

    Args:
        parameters: the module's.
        on_read: what those get who ask for one by name.
        present: what those get who look at all.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter | None],
        on_read: Callable[[nn.Parameter], nn.Parameter],
        present: Callable[[nn.Parameter], nn.Parameter],
    ):
        super().__init__(parameters)
        self._on_read = on_read
        self._present = present

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        return None if parameter is None else self._on_read(parameter)

    def items(self) -> list[tuple[str, nn.Parameter | None]]:
        return [
            (name, None if value is None else self._present(value))
            for name, value in super().items()
        ]

    def values(self) -> list[nn.Parameter | None]:
        return [value for _, value in self.items()]

    def __reduce__(self) -> tuple:
        return dict, (dict(super().items()),)


def _not_compiled(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in ``module`` that are not part of a compiled one: its guards read parameters before its forward."""
    if module._compiled_call_impl is not None or isinstance(module, OptimizedModule):
        return
    yield module
    for child in module.children():
        yield from _not_compiled(child)


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
