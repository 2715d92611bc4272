# SPDX-License-Identifier: Apache-2.0
"""When units are gathered, freed and reduced.

A unit is held by the calls that need its weights and freed when the last of them lets go. While one unit computes, the
next ones of the recorded order are gathered, no more than the window allows, and the reduction of the previous one
runs. Everything that communicates happens in the same order on every rank, because it follows the order of calls.
"""

from __future__ import annotations

from typing import Callable, Hashable, Iterable

from torch import nn

from megatron.fsdp.device import in_backward
from megatron.fsdp.param_group import ParamGroup
from megatron.fsdp.policy import OverlapPolicy, ShardingStrategy


class Unit:
    """A module whose parameters are gathered and freed together."""

    def __init__(self, name: str, module: nn.Module):
        self.name = name
        self.module = module
        self.groups: list[ParamGroup] = []
        self.holders: set[Hashable] = set()
        self.open_calls: dict[Hashable, bool] = {}  # calls in backward -> whether their inputs will tell the end
        self.awaited_grads = 0  # trainable compute parameters
        self.arrived: set[int] = set()  # ids of those whose gradient is there

    def unshard(self) -> None:
        for group in self.groups:
            group.unshard()

    def wait_for_unshard(self) -> None:
        for group in self.groups:
            group.wait_for_unshard()

    def reshard(self) -> None:
        for group in self.groups:
            group.reshard()

    @property
    def trainable_groups(self) -> list[ParamGroup]:
        return [group for group in self.groups if group.requires_grad]


class Schedule:
    """Turns the calls of units, forward and backward, into gathers and reductions."""

    def __init__(
        self,
        units: list[Unit],
        strategy: ShardingStrategy,
        overlap: OverlapPolicy,
        on_backward_begin: Callable[[], None],
        on_backward_end: Callable[[], None],
    ):
        self.units = units  # root first, then in the order of registration
        self.is_last_microbatch = True
        self.backward_active = False
        self._strategy = strategy
        self._overlap = overlap
        self._on_backward_begin = on_backward_begin
        self._on_backward_end = on_backward_end
        self._recording: list[Unit] = []
        self._after: dict[Unit, Unit] = {}  # successor in forward
        self._before: dict[Unit, Unit] = {}  # successor in backward
        self._ahead: set[Unit] = set()  # gathered, held by nobody yet
        self._current: Unit = units[0]  # the last one that was needed
        self._reducing: list[ParamGroup] = []

    # ---- weights -------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """The root's forward begins: forget a backward that died, start to record the order."""
        if self.backward_active and not in_backward():
            self._abandon_backward()
        if not in_backward():
            self._recording = []

    def acquire(self, unit: Unit, holder: Hashable) -> None:
        """Gather a unit for ``holder`` and begin with the ones that follow it."""
        self.hold(unit, holder)
        if self.units[0].holders and not in_backward():
            self._recording.append(unit)
        self._current = unit
        self._prefetch()

    def hold(self, unit: Unit, holder: Hashable) -> None:
        """Gather a unit for ``holder``, out of turn: nothing follows from it."""
        unit.holders.add(holder)
        self._ahead.discard(unit)
        unit.unshard()
        unit.wait_for_unshard()

    def release(self, unit: Unit, holder: Hashable) -> None:
        """``holder`` needs the unit no longer; the last one frees it."""
        unit.holders.discard(holder)
        if not unit.holders:
            unit.reshard()

    def end_forward(self) -> None:
        """The root's forward is over: keep its order, free what was gathered for nothing."""
        order = self._recording
        self._after = dict(zip(order, order[1:]))
        self._before = dict(zip(order[1:], order))
        if order:
            self._before[order[0]] = order[-1]  # the root's backward begins first and leads to the last unit
        self._free_ahead(keep=set())

    def _prefetch(self) -> None:
        if not self._overlap.param_gather:
            return
        successor = self._before if in_backward() else self._after
        window: list[Unit] = []
        unit = self._current
        while len(window) < self._room() and (unit := successor.get(unit)) and unit not in window:
            window.append(unit)
        self._free_ahead(keep=set(window))
        for unit in window:
            if not unit.holders:
                unit.unshard()
                self._ahead.add(unit)

    def _room(self) -> int:
        """How many units may be gathered ahead. In backward a unit begins before the one above it is freed."""
        if not in_backward():
            return self._overlap.prefetch_units
        held = sum(1 for unit in self.units[1:] if unit.holders and unit is not self._current)
        return self._overlap.prefetch_units - held

    def _free_ahead(self, keep: set[Unit]) -> None:
        for unit in self._in_order(self._ahead - keep):
            self._ahead.discard(unit)
            if not unit.holders:
                unit.reshard()

    # ---- gradients -----------------------------------------------------------------------------------------------

    def enter_backward(self, queue_callback: Callable[[Callable[[], None]], None]) -> None:
        """Something of this backward pass has reached us: be told when it ends."""
        if not self.backward_active:
            self.backward_active = True
            self._on_backward_begin()
            queue_callback(self.finish_backward)

    def grad_arrived(self, unit: Unit, parameter: nn.Parameter) -> None:
        """Autograd has put the gradient of one compute parameter on it."""
        unit.arrived.add(id(parameter))
        if len(unit.arrived) == unit.awaited_grads and not any(unit.open_calls.values()):
            self.finish_unit(unit)

    def finish_call(self, unit: Unit, call: Hashable, parameters_may_follow: bool) -> None:
        """The gradients of a call's inputs are there: its backward is over, or when all of the unit's are there too."""
        if parameters_may_follow:
            unit.open_calls[call] = False
        else:
            unit.open_calls.pop(call, None)
        all_arrived = len(unit.arrived) == unit.awaited_grads
        if not any(unit.open_calls.values()) and (all_arrived or not unit.open_calls):
            self.finish_unit(unit)

    def finish_unit(self, unit: Unit) -> None:
        """A unit's backward is over: take its gradients, reduce them if it is time, free its weights."""
        if unit.arrived:
            self.wait_for_reductions()  # one unit's gradient buffers at a time
            for group in unit.trainable_groups:
                group.accumulate()
            if self._strategy.shards_gradients or self.is_last_microbatch:
                self._reduce(unit.trainable_groups)
        unit.arrived.clear()
        unit.open_calls.clear()
        unit.holders.clear()
        unit.reshard()
        if self.backward_active:
            self._prefetch()

    def finish_backward(self) -> None:
        """The backward pass is over: finish what did not finish by itself."""
        self.backward_active = False
        for unit in reversed(self.units):
            if unit.arrived or unit.open_calls or unit.holders:
                self.finish_unit(unit)
        self._free_ahead(keep=set())
        self._on_backward_end()

    def reduce_pending(self) -> None:
        """Begin to reduce whatever has accumulated."""
        for unit in reversed(self.units):
            self._reduce([group for group in unit.trainable_groups if group.has_local_grad])

    def wait_for_reductions(self) -> None:
        """Every reduction that has begun is in the gradient shards."""
        for group in self._reducing:
            group.wait_for_reduce()
        self._reducing.clear()

    def _reduce(self, groups: Iterable[ParamGroup]) -> None:
        for group in groups:
            group.reduce()
            self._reducing.append(group)
            if not self._overlap.grad_reduce:
                self.wait_for_reductions()

    def _abandon_backward(self) -> None:
        self.backward_active = False
        self.wait_for_reductions()
        for unit in self.units:
            for group in unit.trainable_groups:
                group.zero_grad()  # how much of the dead pass is in the sums differs from group to group
            unit.arrived.clear()
            unit.open_calls.clear()
            unit.holders.clear()
            unit.reshard()

    def _in_order(self, units: set[Unit]) -> list[Unit]:
        """A set has an order of its own on every rank; communication must not follow it."""
        return [unit for unit in self.units if unit in units] if units else []
