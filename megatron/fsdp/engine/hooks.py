# SPDX-License-Identifier: Apache-2.0
"""Hooks on modules, their inputs and outputs, and parameters: they drive the schedule."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn
from torch.func import debug_unwrap
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from megatron.fsdp.engine import observe
from megatron.fsdp.engine.device import current_pass, in_backward
from megatron.fsdp.engine.schedule import Schedule
from megatron.fsdp.engine.states import CallState
from megatron.fsdp.engine.tensor_parallel import local_tensor
from megatron.fsdp.engine.transforms import (
    before_backward,
    has_other_backward,
    outside_transforms,
)
from megatron.fsdp.engine.unit import Unit, UnitCall

# [Note: one call of a unit]
#     pre-forward     unshard the unit, the units that it shares parameters with, and any unit whose
#                     parameter is passed as an argument (tied output layers)
#     in forward      unshard a unit whose parameter the code reads by name: the call borrows it
#     post-forward    end the use of all of them, but not while autograd recomputes activations:
#                     the backward of the same unit follows at once
#     pre-backward    at the first gradient of an output: unshard all of them again
#     post-backward   at the last gradient of an input: the call's backward is over. Where inputs
#                     are leaves of the graph, the unit's parameters must have theirs too. An input
#                     that other calls share may get its last one later: then the backward of a call
#                     that came before marks the end
# An autograd function around the module would do less: see docs/decisions/hooks_on_tensors.md.


class UnitCallbacks(Protocol):
    """The client that watches how code changes the weights of units."""

    def before_call(self) -> None:
        """Prepare for the outermost forward or method."""

    def after_use(self, unit: Unit) -> None:
        """Handle the end of a use of ``unit`` by a call, before its weights are resharded."""


class PassCallbacks(Protocol):
    """The client that gets the gradients of backward passes."""

    def begin_backward_pass(self) -> None:
        """Prepare for the gradients of a pass that has reached the model."""

    def end_backward_pass(self) -> None:
        """Handle the gradients of a pass in which every unit is finished."""


class UnitHooks:
    """Connects the modules of units to their schedule.

    Args:
        schedule: the schedule, which has the units.
        pass_callbacks: notified when a backward pass begins and ends.
        unit_callbacks: notified before calls and after uses of units.
    """

    def __init__(
        self,
        schedule: Schedule,
        pass_callbacks: PassCallbacks,
        unit_callbacks: UnitCallbacks,
    ):
        self._schedule = schedule
        self._pass_callbacks = pass_callbacks
        self.unit_callbacks = unit_callbacks
        self._root = schedule.units[0]
        self.unit_of: dict[nn.Parameter, Unit] = {}  # unit of each compute parameter
        self.calls: list[UnitCall] = []  # forwards and other methods under way, innermost last
        self._outside = Unit("outside of forwards", None)  # unit of calls of other methods
        self._awaiting: dict[UnitCall, None] = {}  # calls whose backward awaits gradients of inputs
        # Ids of the hooks on modules, which a copy of the module must not have.
        self.hook_ids: set[int] = set()
        self._on_parameters: list[RemovableHandle] = []
        post_forward = torch.compiler.disable(self._post_forward)
        for unit in schedule.units:
            self._hook_modules(unit, post_forward)
            for group in unit.groups:
                self.unit_of.update(dict.fromkeys(group.parameters, unit))
                if group.requires_grad:
                    self._hook_parameters(group.parameters)

    def _hook_modules(self, unit: Unit, post_forward: Callable[..., Any]) -> None:
        pre_forward = torch.compiler.disable(partial(self._pre_forward, unit))
        for module in unit.modules:
            before = module.register_forward_pre_hook(
                pre_forward,
                prepend=True,
                with_kwargs=True,
            )
            after = module.register_forward_hook(post_forward, always_call=True)
            self.hook_ids |= {before.id, after.id}

    def _hook_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        # Python's garbage collector does not see the references of these hooks.
        grad_arrived = partial(UnitHooks._grad_arrived, weakref.proxy(self))
        for parameter in parameters:
            handle = parameter.register_post_accumulate_grad_hook(grad_arrived)
            self._on_parameters.append(handle)

    def remove_from_parameters(self) -> None:
        """Remove the hooks on parameters; those on modules are known by ``hook_ids``."""
        for handle in self._on_parameters:
            handle.remove()

    # ---- forward

    def _pre_forward(
        self,
        unit: Unit,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        borrowed = list(unit.shared)
        # A tied output layer gets the weight of the embedding, which is another unit, as argument.
        for argument in (*args, *kwargs.values()):
            if not isinstance(argument, nn.Parameter):
                continue
            owner = self.unit_of.get(argument, unit)
            if owner is not unit and owner not in borrowed:
                borrowed.append(owner)
        call = UnitCall(unit, module, borrowed)
        self.calls.append(call)
        is_root = module is self._root.module
        observe.begin_forward(call, unit.shown_name, is_root)
        if len(self.calls) == 1:
            self.unit_callbacks.before_call()
        if is_root:
            self._schedule.begin_forward()
        self._schedule.begin_use(call)
        if torch.is_grad_enabled():
            self._watch_inputs(call, (args, kwargs))

    def _post_forward(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        output: Any,
    ) -> Any:
        call = self.calls.pop()
        observe.end_forward(call)
        try:
            output = self._copy_returned_weights(call.used_units, output)
            if torch.is_grad_enabled():
                output = self._watch_outputs(call, output)
        finally:
            # The call lives until its backward. Its inputs need not, unless the graph keeps them.
            call.inputs.clear()
            if not in_backward():  # else it is recomputation
                self.end_use(call, call.used_units)
                if module is self._root.module:
                    self._schedule.prefetcher.stop_recording()
        return output

    def _copy_returned_weights(self, units: Iterable[Unit], output: Any) -> Any:
        """Return ``output`` with copies of the weights in it that may be freed before its use."""
        # Linear layers may return their bias, for the caller to add. Copies cost less memory than
        # keeping the unit until the caller is done, which is the whole model's forward at worst.
        freed = set()  # storages
        for unit in units:
            for group in unit.groups:
                if group.reshards_after_use:
                    storage = group.compute.flat.untyped_storage()
                    freed.add(storage._cdata)
        if not freed:
            return output

        def is_freed(tensor: torch.Tensor) -> bool:
            local = local_tensor(debug_unwrap(tensor))
            has_storage = local.layout is torch.strided and not local.is_mkldnn
            if not has_storage:
                return False
            return local.untyped_storage()._cdata in freed

        def copy_if_freed(tensor: torch.Tensor) -> torch.Tensor:
            if is_freed(tensor):
                return tensor.clone()
            return tensor

        if not any(is_freed(tensor) for tensor in tensors_in(output)):
            return output
        return map_tensors(copy_if_freed, output)

    def forget_calls(self) -> None:
        """End the forwards under way after an exception for which torch calls no hooks."""
        while self.calls and not in_backward():
            call = self.calls.pop()
            call.inputs.clear()
            observe.end_forward(call)
            self.end_use(call, call.used_units)

    def call_method(
        self,
        method: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call a method of a module that is not its forward, and return its result.

        Args:
            method: the bound method.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        # Weights that it reads by name are gathered when it reads them, and for its backward.
        if self.calls or in_backward():
            return method(*args, **kwargs)
        self.unit_callbacks.before_call()
        call = UnitCall(self._outside, None, [])
        self.calls.append(call)
        try:
            output = method(*args, **kwargs)
        except BaseException:
            self.forget_calls()
            raise
        self.calls.remove(call)
        output = self._copy_returned_weights(call.borrowed, output)
        has_backward = torch.is_grad_enabled() and call.borrowed
        if has_backward:
            output = self._watch_outputs(call, output)
        self.end_use(call, call.borrowed)
        return output

    def borrow(self, unit: Unit) -> None:
        """Unshard ``unit`` for the innermost call, until it ends, unless a call already uses it."""
        if any(unit in call.used_units for call in self.calls):
            return
        innermost = self.calls[-1]
        innermost.borrowed.append(unit)
        self._schedule.unshard_for(unit, innermost)

    def end_use(self, call: UnitCall, units: Sequence[Unit]) -> None:
        """Note that ``call`` no longer needs ``units``."""
        for unit in units:
            self.unit_callbacks.after_use(unit)
            self._schedule.end_use(unit, call)

    # ---- backward

    def _watch_outputs(self, call: UnitCall, output: Any) -> Any:
        """Return ``output``, whose backward begins with :meth:`_pre_backward`."""
        call.end_forward()
        if has_other_backward():
            return self._watch_transformed_outputs(call, output)
        pre_backward = partial(self._pre_backward, call)
        pre_backward_of_node = partial(self._pre_backward_of_node, call)
        for tensor in tensors_in(output):
            if isinstance(tensor, nn.Parameter):
                continue  # it computes nothing, and hooks on it would pile up
            is_unchanged = call.is_unchanged_input(tensor)
            if call.module is self._root.module and tensor.requires_grad:
                # Before the user's hooks on the output, whose errors end the pass, and before those
                # of the last unit: prefetching expects that backward begins with the root.
                if is_unchanged:
                    tensor.register_hook(self._enter_backward)
                else:
                    tensor.register_hook(pre_backward)
            if is_unchanged:
                continue
            if tensor.grad_fn is not None:
                # Hooks of a tensor run before those of the node that computed it. If the tensor is
                # the next unit's input, the backward of that unit thus ends before this begins.
                tensor.grad_fn.register_prehook(pre_backward_of_node)
            elif tensor.requires_grad:
                tensor.register_hook(pre_backward)
            # Autograd replaces the node of a view that is edited in place later, but not the node
            # of its base. Linear layers return views of inputs with more than two dims.
            base = tensor._base
            if base is None or base.grad_fn is None:
                continue
            if not call.is_unchanged_input(base):
                base.grad_fn.register_prehook(pre_backward_of_node)
        return output

    def _watch_transformed_outputs(self, call: UnitCall, output: Any) -> Any:
        """Watch outputs inside of function transforms: see [Note: function transforms]."""
        pre_backward = partial(self._pre_backward_of_node, call)

        def watch(tensor: torch.Tensor) -> torch.Tensor:
            has_gradient = tensor.is_floating_point() or tensor.is_complex()
            if not has_gradient:
                return tensor
            if call.is_unchanged_input(tensor):
                return tensor
            return before_backward(pre_backward, tensor)

        return map_tensors(watch, output)

    def _grad_arrived(self, parameter: nn.Parameter) -> None:
        self._enter_backward()
        self._schedule.grad_arrived(self.unit_of[parameter], parameter)

    def _enter_backward(self, gradient: Any = None) -> None:
        if not self._schedule.is_in_backward:
            self._begin_pass()

    @outside_transforms
    def _begin_pass(self) -> None:
        self._pass_callbacks.begin_backward_pass()  # which may refuse the pass, before there is one
        self._schedule.begin_backward_pass()
        self._awaiting.clear()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    @outside_transforms
    def _end_pass(self) -> None:
        self._schedule.end_backward_pass()
        self._pass_callbacks.end_backward_pass()

    def _pre_backward(self, call: UnitCall, gradients: Any) -> None:
        self._enter_backward()
        if call.unit is self._outside:
            self._schedule.begin_use(call)
        elif call.state is CallState.IDLE:
            call.check_addresses()
            call.unit.begin_backward(call)
            if call.num_pending_inputs > 0:
                self._awaiting[call] = None
            if call.unit.groups:
                for observer in observe.observers:
                    observer.begin_unit_backward(call.unit.shown_name)
            self._schedule.begin_use(call)

    def _pre_backward_of_node(self, call: UnitCall, gradients: Any) -> None:
        # Autograd runs the nodes that were made last first, so those of later calls have run. The
        # gradients of their inputs need not be complete: `call` and others may share inputs (the
        # result of an encoder). In a second pass over a kept graph, no hooks report them.
        for later in list(self._awaiting):
            came_later = later.began > call.ended
            is_of_pass = later.unit.users.get(later) == current_pass()
            if came_later and is_of_pass and later.unit.has_all_grads:
                self._post_backward(later)
        self._pre_backward(call, gradients)

    def _watch_inputs(self, call: UnitCall, inputs: Any) -> None:
        leaves: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for tensor in tensors_in(inputs):
            if not tensor.requires_grad:
                continue
            call.note_input(tensor)
            if isinstance(tensor, nn.Parameter):
                continue
            if tensor.is_leaf:
                leaves.append(tensor)
            else:
                others.append(tensor)
        call.has_leaf_inputs = bool(leaves)

        def arrived(gradient: Any) -> None:
            call.num_pending_inputs -= 1
            if call.num_pending_inputs <= 0:  # less where the pass has not reached an output
                self._post_backward(call)

        # torch's hook on several tensors knows which of them get no gradient, but it rejects leaves
        # in `autograd.grad`, so each leaf gets a hook of its own.
        call.input_hooks = [leaf.register_hook(arrived) for leaf in leaves]
        if len(others) == 1:
            call.input_hooks.append(others[0].register_hook(arrived))
        elif others:
            hook = torch.autograd.graph.register_multi_grad_hook(others, arrived)
            call.input_hooks.append(hook)
        call.num_input_hooks = len(call.input_hooks)

    def _post_backward(self, call: UnitCall) -> None:
        # The hooks refer to the graph and the graph to the hooks. Unless they are removed, the
        # activations of the pass live until Python's garbage collector runs.
        for hook in call.input_hooks:
            hook.remove()
        self._awaiting.pop(call, None)
        if call.state is CallState.IDLE:
            return
        if not call.has_leaf_inputs:
            self.end_use(call, call.borrowed)
        self._schedule.inputs_arrived(call)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to the tensors that :func:`tensors_in` finds."""
    if isinstance(value, torch.Tensor):
        return function(value)
    mapped: Any
    if isinstance(value, Mapping):
        items = {}
        for key, item in value.items():
            items[key] = map_tensors(function, item)
        if not isinstance(value, MutableMapping):
            return MappingProxyType(items)
        # A copy has the class and the attributes; its constructor may expect other arguments.
        mapped = copy.copy(value)
        mapped.update(items)
        return mapped
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        mapped = copy.copy(value)
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            item = map_tensors(function, item)
            object.__setattr__(mapped, field.name, item)  # it may be frozen
        return mapped

    def map_leaf(leaf: Any) -> Any:
        if leaf is value:
            return leaf
        return map_tensors(function, leaf)

    return tree_map(map_leaf, value, is_leaf=lambda leaf: leaf is not value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists, mappings, dataclasses and registered pytrees."""
    if isinstance(value, torch.Tensor):
        return [value]
    # Torch's walk over a pytree takes longer than one over the usual types, and does not know all.
    inner: Iterable[Any]
    if isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, (tuple, list)):
        inner = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        inner = [getattr(value, field.name) for field in fields]
    else:
        leaves = tree_leaves(value)
        inner = [leaf for leaf in leaves if leaf is not value]
    found: list[torch.Tensor] = []
    for item in inner:
        if item is not None:
            found += tensors_in(item)
    return found
