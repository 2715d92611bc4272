# SPDX-License-Identifier: Apache-2.0
"""A schedule outside of the model: it runs parts of units, and reports their begin and end."""

from __future__ import annotations

import torch
from torch import nn

from megatron.fsdp.engine.device import record_on_current_stream
from megatron.fsdp.engine.unit import Unit, UnitCall
from megatron.fsdp.module.sharded_module import ShardedModule
from megatron.fsdp.module.unshard_handle import UnitHandle, units_of

__all__ = ["OutsideSchedule"]


class OutsideSchedule(ShardedModule):
    """The calls of a schedule that runs parts of units, of two microbatches in turn.

    No forward of the model or of these units is called then, and each part has a backward pass of
    its own, so hooks cannot know when a unit begins and ends. For each microbatch the schedule
    calls :meth:`pre_forward`, :meth:`post_forward`, :meth:`pre_backward` and :meth:`post_backward`
    for the model, and between these :meth:`pre_forward` and :meth:`post_forward_release_module`,
    :meth:`pre_backward` and :meth:`post_backward_release_module` for each unit that it runs in
    parts. Backwards come in the order of forwards. Units that are called as usual keep their hooks.
    Weight gradients may be computed after the backward of a part, until the unit's backward ends:
    :meth:`post_backward` ends those that have not ended.
    """

    _root_call: UnitCall | None = None  # of all microbatches between forward and backward
    _num_microbatches = 0  # that have begun, and whose backward is not over
    _overlaps = False

    def pre_forward(self, module: nn.Module | None = None) -> None:
        """Begin the forward of a unit and unshard its weights.

        Args:
            module: module of the unit. None: the model.
        """
        unit = self._unit(module)
        if module is None:
            if self._root_call is None:
                self._begin()
            self._num_microbatches += 1
            if self._num_microbatches > 1:
                return
        call = UnitCall(unit, unit.module, list(unit.shared))
        self._hooks.calls.append(call)
        self._schedule.begin_use(call)
        if module is None:
            self._root_call = call
            self._awaiting: dict[Unit, list[UnitCall]] = {}
        else:
            self._prefetch(unit, 1)

    def post_forward(self) -> None:
        """End the forward of the model; its own weights stay until :meth:`post_backward`."""
        if not torch.is_grad_enabled():
            self._end_microbatch()

    def post_forward_release_module(self, module: nn.Module) -> None:
        """End the forward of a unit, and reshard it at level 3."""
        call = self._hooks.calls.pop()
        call.end_forward()
        if torch.is_grad_enabled():
            self._awaiting.setdefault(call.unit, []).append(call)
        self._hooks.end_use(call, call.used_units)

    def pre_backward(self, module: nn.Module | None = None) -> None:
        """Begin the backward of a unit and unshard its weights.

        Args:
            module: module of the unit. None: the model.

        Raises:
            RuntimeError: without a forward whose backward has not begun.
        """
        unit = self._unit(module)
        call = self._root_call
        if module is not None:
            awaiting = self._awaiting.get(unit)
            call = awaiting[0] if awaiting else None
        if call is None:
            raise RuntimeError(f"{unit}: pre_backward expects a forward before it")
        if module is None:
            self._gradients.begin_backward_pass()
            with torch.no_grad():  # no graph of the backward is recorded
                self._schedule.begin_backward_pass()
        unit.begin_backward(call)
        if module is None:
            return
        self._schedule.begin_use(call)
        self._hooks.calls.insert(0, call)  # weights that are read by name are its own, not borrowed
        self._prefetch(unit, -1)

    def post_backward_release_module(self, module: nn.Module) -> None:
        """End the backward of a unit: reduce its gradients, and reshard it at level 3."""
        self._end_backward(self._awaiting[self._unit(module)][0])

    def post_backward(self) -> None:
        """End the backward of the model: finish the units that are left, and attach gradients."""
        if self._root_call is not None:
            while self._hooks.calls[0] is not self._root_call:
                self._end_backward(self._hooks.calls[0])
        self._hold_gradients()
        self._schedule.end_backward_pass()
        self._gradients.end_backward_pass()
        self._end_microbatch()

    def _begin(self) -> None:
        if self._memory_slots is not None:
            raise NotImplementedError("memory slots, with a schedule outside of the model")
        self._hooks.unit_callbacks.before_call()
        self._schedule.begin_forward()
        # It knows one order of units, but forward and backward take turns here.
        prefetcher = self._schedule.prefetcher
        self._overlaps = prefetcher.is_enabled
        prefetcher.is_enabled = False

    def _end_backward(self, call: UnitCall) -> None:
        self._awaiting[call.unit].remove(call)
        self._hooks.calls.remove(call)
        for group in call.unit.trained_groups:
            # No hook of autograd reports gradients that are computed after a backward.
            for parameter in group.parameters:
                if parameter.grad is not None:
                    call.unit.arrived.add(id(parameter))
        self._hold_gradients()
        self._hooks.end_use(call, call.borrowed)
        call.unit.users.pop(call)
        self._schedule.inputs_arrived(call)

    def _end_microbatch(self) -> None:
        self._num_microbatches -= 1
        if self._num_microbatches or self._root_call is None:
            return
        call, self._root_call = self._root_call, None
        self._hooks.calls.remove(call)
        self._hooks.end_use(call, call.used_units)
        prefetcher = self._schedule.prefetcher
        prefetcher.reshard_if_unused(set(self._units))
        prefetcher.is_enabled = self._overlaps

    def _hold_gradients(self) -> None:
        """Keep the memory of gradients, which other streams have allocated, while they are used."""
        for unit in self._units:
            if not unit.arrived:
                continue
            for group in unit.trained_groups:
                for parameter in group.parameters:
                    if parameter.grad is not None:
                        record_on_current_stream(parameter.grad)

    def _prefetch(self, unit: Unit, step: int) -> None:
        """Unshard the unit that follows, in the order of registration."""
        position = self._units.index(unit) + step
        if self._overlaps and 0 < position < len(self._units):
            UnitHandle([self._units[position]], self._schedule.prefetcher)

    def _unit(self, module: nn.Module | None) -> Unit:
        return units_of(self._units, module)[0]
