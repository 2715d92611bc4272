# SPDX-License-Identifier: Apache-2.0
"""Hooks on modules, their inputs and outputs, and parameters: they drive the schedule.

[Note: one call of a unit]
    pre-forward        unshard the unit, the units that it shares parameters with, and any unit
                       whose parameter is passed as an argument (tied output layers)
    in forward         unshard a unit whose parameter the code reads by name, as in
                       ``self.embedding.weight``: the call borrows it
    post-forward       end the use of all of them. Not while autograd recomputes activations,
                       because the backward of the same unit follows at once
    pre-backward       at the first gradient of an output: unshard all of them again
    post-backward      at the last gradient of an input: the call's backward is over. Where inputs
                       are leaves of the graph, the gradients of the unit's parameters must be
                       there too

Hooks are attached to the input and output tensors themselves. An autograd function around the
module, the usual way, would return views of them. Without one, code may edit inputs and outputs in
place or free them, and they may be of any type that contains tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.utils._pytree import tree_leaves

from megatron.fsdp.engine import recorder
from megatron.fsdp.engine.device import in_backward
from megatron.fsdp.engine.schedule import Schedule
from megatron.fsdp.engine.states import CallState
from megatron.fsdp.engine.unit import Unit, UnitCall

PASSED_ON = "_fsdp_passed_on"
"""Attribute of parameters that code reads only to pass them on as arguments.

Reading such a parameter by name does not unshard its unit; the call that receives it does."""


REFUSED_COPY = (
    "the module inside a sharded model cannot be copied or pickled by itself: its weights are in"
    " shards, and its hooks belong to the model. Use copy.deepcopy(model) of the wrapper, which"
    " returns a sharded copy, or save model.state_dict()"
)


class UnitHooks:
    """Connects the modules of units to their schedule.

    Args:
        schedule: of the units.
        sharded: the sharded parameter of each compute parameter. Code outside a forward gets it
            instead of a compute parameter whose unit is not unsharded.
    """

    def __init__(self, schedule: Schedule, sharded: dict[nn.Parameter, nn.Parameter]):
        self._schedule = schedule
        self._sharded = sharded
        self._compute = {parameter: compute for compute, parameter in sharded.items()}
        self._root = schedule.units[0]
        self._unit_of: dict[nn.Parameter, Unit] = {}
        self._calls: list[UnitCall] = []  # forwards under way, innermost last
        self._outside = Unit("outside of forwards", None)  # of calls of other methods
        self._handles: set[int] = set()  # ids of the hooks on modules
        for unit in schedule.units:
            self._register(unit)
        assert self._root.module is not None  # only units of shared parameters have none
        for module in _not_compiled(self._root.module):
            if next(module.parameters(recurse=False), None) is not None:
                module._parameters = WatchedParameters(
                    module._parameters, self._read_by_name, self._look_at, self._to_store
                )

    def _register(self, unit: Unit) -> None:
        for group in unit.groups:
            self._unit_of.update(dict.fromkeys(group.parameters, unit))
        for module in unit.modules:
            before = module.register_forward_pre_hook(
                self._pre_forward_hook(unit), prepend=True, with_kwargs=True
            )
            after = module.register_forward_hook(self._post_forward_hook(unit), always_call=True)
            self._handles |= {before.id, after.id}

        def arrived(parameter: nn.Parameter) -> None:
            self._schedule.enter_backward(_queue_callback)
            self._schedule.grad_arrived(unit, parameter)

        for parameter in unit.trainable_parameters:
            parameter.register_post_accumulate_grad_hook(arrived)

    # ---- forward

    def _pre_forward_hook(self, unit: Unit) -> Callable[..., None]:
        @_not_traced
        def pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            borrowed = self._units_of_arguments(unit, (*args, *kwargs.values()))
            call = UnitCall(unit, module, borrowed + unit.shared)
            self._calls.append(call)
            recorder.begin_forward(call, unit.shown_name, module is self._root.module)
            if module is self._root.module:
                self._schedule.begin_forward()
            self._schedule.install_edits()
            self._unshard(call)
            if torch.is_grad_enabled():
                self._watch_inputs(call, (args, kwargs))

        return pre_forward

    def _post_forward_hook(self, unit: Unit) -> Callable[..., None]:
        @_not_traced
        def post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            call = self._calls.pop()
            recorder.end_forward(call)
            if torch.is_grad_enabled():
                self._watch_outputs(call, output)
            call.inputs.clear()
            if in_backward():  # recomputation
                return
            self._end_use(call)
            if module is self._root.module:
                self._schedule.end_forward()

        return post_forward

    def forget_calls(self) -> None:
        """End the forwards under way after an exception for which torch calls no hooks."""
        while self._calls and not in_backward():
            call = self._calls.pop()
            call.inputs.clear()
            recorder.end_forward(call)
            self._end_use(call)

    def call_method(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of a module that is not its forward, and return its result.

        Like a forward, it computes with whole weights: those that it reads by name are gathered
        when it does, and again for its backward. A method that reads none communicates nothing.
        """
        if self._calls or in_backward():
            return method(*args, **kwargs)
        self._schedule.install_edits()
        call = UnitCall(self._outside, None, [])
        self._calls.append(call)
        try:
            output = method(*args, **kwargs)
        except BaseException:
            self.forget_calls()
            raise
        self._calls.remove(call)
        if torch.is_grad_enabled() and call.borrowed:
            self._watch_outputs(call, output)
        for unit in call.borrowed:
            self._schedule.end_use(unit, call)
        return output

    def remove_from_copy(self, copied: nn.Module) -> None:
        """Remove the hooks from a deep copy of the root's module, which has copied them too."""
        assert self._root.module is not None
        for original, module in zip(self._root.module.modules(), copied.modules()):
            for name, hooks in vars(original).items():
                if name.startswith("_forward") and isinstance(hooks, dict):
                    for number in self._handles.intersection(hooks):
                        del vars(module)[name][number]
            vars(module).pop("_apply", None)

    def _unshard(self, call: UnitCall) -> None:
        for borrowed in call.borrowed:
            self._schedule.unshard_borrowed(borrowed, call)
        if call.unit is self._outside:
            return
        if call.is_inside_another:
            self._schedule.unshard_borrowed(call.unit, call)
        else:
            self._schedule.unshard(call.unit, call)

    def _end_use(self, call: UnitCall) -> None:
        for unit in call.used_units:
            self._schedule.end_use(unit, call)

    def _units_of_arguments(self, unit: Unit, arguments: tuple[Any, ...]) -> list[Unit]:
        """Return the other units whose parameters are among the arguments of a call of ``unit``."""
        units: list[Unit] = []
        for argument in arguments:
            owner = self._unit_of.get(argument) if isinstance(argument, nn.Parameter) else None
            if owner is not None and owner is not unit and owner not in units:
                units.append(owner)
        return units

    # ---- parameters that code reads

    def _look_at(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that code sees when it lists a module's parameters.

        Inside a forward it is the compute parameter, which is unsharded before it is used. Outside,
        and in other methods, it is the sharded parameter, at every level and for every number of
        ranks: it has the gradient, and an optimizer steps it.
        """
        unit = self._unit_of.get(parameter)
        if unit is None or (self._calls and self._calls[-1].unit is not self._outside):
            return parameter
        if in_backward():  # recomputation may list what it computes with
            return self._readable(unit, parameter)
        return self._sharded[parameter]

    def _readable(self, unit: Unit, parameter: nn.Parameter) -> nn.Parameter:
        """Return a compute parameter if it is readable, otherwise the sharded one."""
        if self._schedule.is_of_next_forward(unit):  # an edit of the gathered weights would be lost
            return self._sharded[parameter]
        for group in unit.groups:
            group.make_readable()
        return parameter if unit.is_readable else self._sharded[parameter]

    def _read_by_name(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that code sees when it reads one by name.

        Inside a forward, the innermost call borrows the parameter's unit until it ends, unless one
        of the calls under way uses the unit already. Outside, code may compute with the result at
        levels whose compute parameters stay readable.
        """
        unit = self._unit_of.get(parameter)
        if unit is None:
            return parameter
        if not self._calls:
            return self._readable(unit, parameter)
        # Nearly always the innermost call reads a parameter of its own unit.
        if self._calls[-1].unit is not unit and not hasattr(parameter, PASSED_ON):
            self._borrow(unit)
        return parameter

    def _to_store(
        self, name: str, value: nn.Parameter | None, present: nn.Parameter | None
    ) -> nn.Parameter | None:
        """Return the parameter to store where code assigns one to a module: never a sharded one.

        Args:
            name: the attribute of the module.
            value: the assigned parameter.
            present: the parameter that the module has under that name.

        Raises:
            ValueError: for a weight that is tied to another one only now: both are sharded already.
        """
        compute = value if value is None else self._compute.get(value, value)
        if compute is present or compute not in self._unit_of or present not in self._unit_of:
            return compute
        raise ValueError(
            f"{self._name_of(present)} cannot be tied to {self._name_of(compute)}: they were two"
            " parameters when the model was sharded, and each has its own shards and optimizer"
            f" state. Assign {name} before fully_shard; weights that were tied then stay tied"
        )

    def _name_of(self, parameter: nn.Parameter) -> str:
        for group in self._unit_of[parameter].groups:
            for name, each in zip(group.names, group.parameters):
                if each is parameter:
                    return name
        raise AssertionError("every parameter of a unit is in one of its groups")

    def _borrow(self, unit: Unit) -> None:
        if not any(unit in call.used_units for call in self._calls):
            self._calls[-1].borrowed.append(unit)
            self._schedule.unshard_borrowed(unit, self._calls[-1])

    # ---- backward

    def _watch_outputs(self, call: UnitCall, output: Any) -> None:
        call.note_slots()

        def pre_backward(gradients: Any) -> None:
            self._pre_backward(call)

        def enter_backward(gradient: torch.Tensor) -> None:
            self._schedule.enter_backward(_queue_callback)

        for tensor in tensors_in(output):
            if isinstance(tensor, nn.Parameter):
                continue  # it computes nothing, and hooks on it would pile up
            if call.module is self._root.module and tensor.requires_grad:
                # Before the hooks that the user sets on the output, whose errors end the pass.
                tensor.register_hook(enter_backward)
            if call.is_unchanged_input(tensor):
                continue
            if tensor.grad_fn is not None:
                # Hooks of a tensor run before those of the node that computed it. If the tensor is
                # the next unit's input, the backward of that one thus ends before this one begins.
                tensor.grad_fn.register_prehook(pre_backward)
            elif tensor.requires_grad:
                tensor.register_hook(pre_backward)
            # Autograd replaces the node of a view that is edited in place later, but not the node
            # of its base. Linear layers return views of inputs with more than two dims.
            base = tensor._base
            if base is not None and base.grad_fn is not None and not call.is_unchanged_input(base):
                base.grad_fn.register_prehook(pre_backward)

    def _pre_backward(self, call: UnitCall) -> None:
        self._schedule.enter_backward(_queue_callback)
        if call.unit is self._outside:
            self._unshard(call)
        elif call.state is CallState.FORWARD:
            call.check_slots()
            call.unit.begin_backward(call)
            if call.unit.groups:
                recorder.begin_backward(call.unit.shown_name)
            self._unshard(call)

    def _watch_inputs(self, call: UnitCall, inputs: Any) -> None:
        leaves: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for tensor in tensors_in(inputs):
            if tensor.requires_grad:
                call.note_input(tensor)
                if not isinstance(tensor, nn.Parameter):
                    (leaves if tensor.is_leaf else others).append(tensor)
        call.awaited_inputs = len(leaves) + bool(others)
        call.has_leaf_inputs = bool(leaves)

        def arrived(gradient: Any) -> None:
            call.awaited_inputs -= 1
            if call.awaited_inputs == 0:
                self._post_backward(call)

        # torch's hook on several tensors knows which of them get no gradient, but it rejects leaves
        # in `autograd.grad`, so each leaf gets a hook of its own.
        single = [*leaves, *others] if len(others) == 1 else leaves
        call.input_hooks = [tensor.register_hook(arrived) for tensor in single]
        if len(others) > 1:
            call.input_hooks.append(torch.autograd.graph.register_multi_grad_hook(others, arrived))

    def _post_backward(self, call: UnitCall) -> None:
        # The hooks refer to the graph and the graph to the hooks. Unless they are removed, the
        # activations of the pass live until Python's garbage collector runs.
        for hook in call.input_hooks:
            hook.remove()
        if call.state is CallState.FORWARD:
            return
        if not call.has_leaf_inputs:
            for borrowed in call.borrowed:
                self._schedule.end_use(borrowed, call)
        self._schedule.inputs_arrived(call)


class WatchedParameters(dict[str, "nn.Parameter | None"]):
    """The ``_parameters`` dict of a module, which calls back when code reads parameters.

    Args:
        parameters: the module's own ``_parameters``.
        read_by_name: called with a parameter that is read by name; returns the one that code gets.
        look_at: called with a parameter that is listed; returns the one that code gets.
        to_store: called with a name, the parameter that code assigns to it, and the one that is
            there; returns the one that is stored.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter | None],
        read_by_name: Callable[[nn.Parameter], nn.Parameter],
        look_at: Callable[[nn.Parameter], nn.Parameter],
        to_store: Callable[[str, nn.Parameter | None, nn.Parameter | None], nn.Parameter | None],
    ):
        super().__init__(parameters)
        self._read_by_name = read_by_name
        self._look_at = look_at
        self._to_store = to_store

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        super().__setitem__(name, self._to_store(name, value, super().get(name)))

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        return None if parameter is None else self._read_by_name(parameter)

    def items(self) -> list[tuple[str, nn.Parameter | None]]:  # type: ignore[override]  # no view
        """Return names and parameters; a list, not a view."""
        return [
            (name, None if parameter is None else self._look_at(parameter))
            for name, parameter in super().items()
        ]

    def values(self) -> list[nn.Parameter | None]:  # type: ignore[override]  # as above
        """Return the parameters; a list, not a view."""
        return [parameter for _, parameter in self.items()]

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        """Return the copies that ``memo`` has of the parameters, in a plain dict.

        Raises:
            NotImplementedError: if it has none: the module is copied by itself.
        """
        parameters = dict(super().items())
        present = [each for each in parameters.values() if each is not None]
        if not all(id(each) in memo for each in present):
            raise NotImplementedError(REFUSED_COPY)
        return {name: None if each is None else memo[id(each)] for name, each in parameters.items()}

    def __reduce__(self) -> NoReturn:
        raise NotImplementedError(REFUSED_COPY)


def _not_compiled(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in ``module`` that are not part of a compiled module.

    The guards of a compiled module read its parameters before its forward begins, so its
    parameters cannot be watched.
    """
    if module._compiled_call_impl is not None or isinstance(module, OptimizedModule):
        return
    yield module
    for child in module.children():
        yield from _not_compiled(child)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists, mappings, dataclasses and registered pytrees."""
    # Inputs of a unit, (args, kwargs), and its output nearly always hold tensors directly. Torch's
    # walk takes longer.
    if isinstance(value, torch.Tensor):
        yield value
        return
    if type(value) in (tuple, list, dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)
        return
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from tensors_in(list(leaf.values()))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def _not_traced(hook: Callable[..., None]) -> Callable[..., None]:
    """Keep torch.compile from tracing ``hook``; unlike torch's decorator, this one is typed."""
    untraced: Callable[..., None] = torch.compiler.disable(hook)
    return untraced


def _queue_callback(callback: Callable[[], None]) -> None:
    """Have autograd call ``callback`` when the backward pass under way is over."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
