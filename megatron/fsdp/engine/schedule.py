# SPDX-License-Identifier: Apache-2.0
"""When units are gathered, freed and reduced.

A unit is held by the calls that need its weights and freed when the last of them lets go. While one
unit computes, the next ones of the recorded order are gathered, no more than the window allows, and
the reduction of the previous one runs. Everything that communicates happens in the same order on
every rank, because it follows the order of calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable

import torch
from torch import nn

from megatron.fsdp.engine.device import current_pass, in_backward
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.policy import OverlapPolicy, ShardingStrategy


class Unit:
    """Parameters that are gathered and freed together: those of a module, or those that several units share.

    Args:
        name: the module's name, or those of the units that share the parameters.
        module: whose calls need the unit. None: only other units' calls do.
        is_automatic: not asked for by the user.
    """

    def __init__(self, name: str, module: nn.Module | None, is_automatic: bool = False):
        self.name = name
        self.module = module
        self.is_automatic = is_automatic
        self.groups: list[ParamGroup] = []
        self.shared: list[Unit] = []  # units of parameters that this one has in common with others
        self.holders: dict[
            Hashable, int
        ] = {}  # who needs the weights, and the backward pass since which
        self.open_calls: dict[
            Hashable, bool
        ] = {}  # calls in backward -> whether their inputs will tell the end
        self.awaited_grads = 0  # trainable compute parameters
        self.arrived: set[int] = set()  # ids of those whose gradient is there
        self.may_arrive_again = (
            False  # a pass inside of the one that the unit is held for has brought gradients
        )

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
    def all_arrived(self) -> bool:
        """Whether every trainable compute parameter has its gradient, as far as counting can tell."""
        return len(self.arrived) == self.awaited_grads and not self.may_arrive_again

    def forget_backward(self) -> None:
        """Nobody waits for gradients of this unit, or needs its weights, any more."""
        self.arrived.clear()
        self.may_arrive_again = False
        self.open_calls.clear()
        # A forward that runs a backward inside of it goes on.
        self.holders = {holder: since for holder, since in self.holders.items() if since == FORWARD}

    @property
    def is_readable(self) -> bool:
        """Whether the compute parameters have values, and those of the main weights."""
        return all(group.is_readable for group in self.groups)

    @property
    def trainable_groups(self) -> list[ParamGroup]:
        return [group for group in self.groups if group.requires_grad]


FORWARD = -1
"""Since when those hold a unit that do so in a forward: in no backward pass."""

GRAPH = "graph"
"""Holder of units that a graph over a backward pass (``create_graph=True``) refers to."""


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
        self._keeps_graph = (
            False  # this backward pass is recorded itself: its graph needs the weights later
        )
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

    # ---- weights
    # -------------------------------------------------------------------------------------------------

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
        unit.holders[holder] = current_pass()
        self._ahead.discard(unit)
        unit.unshard()
        unit.wait_for_unshard()

    def release(self, unit: Unit, holder: Hashable) -> None:
        """``holder`` needs the unit no longer; the last one frees it."""
        unit.holders.pop(holder, None)
        if not unit.holders:
            self._free(unit)

    def _free(self, unit: Unit) -> None:
        if self._keeps_graph:
            unit.holders[GRAPH] = max(
                current_pass(), 0
            )  # until the end of the next backward pass that is not recorded
        else:
            unit.reshard()

    def end_forward(self) -> None:
        """The root's forward is over: keep its order, free what was gathered for nothing."""
        order = self._recording
        self._after = dict(itertools.pairwise(order))
        self._before = dict(zip(order[1:], order))
        if order:
            self._before[order[0]] = order[
                -1
            ]  # the root's backward begins first and leads to the last unit
        self._free_ahead(keep=set())

    def _prefetch(self) -> None:
        if not self._overlap.param_gather:
            return
        successor = self._before if in_backward() else self._after
        window: list[Unit] = []
        unit, room = self._current, self._room()
        while room > 0 and (unit := successor.get(unit)) and unit not in window:
            window += [unit, *unit.shared]
            room -= 1
        self._free_ahead(keep=set(window))
        for unit in window:
            if not unit.holders:
                unit.unshard()
                self._ahead.add(unit)

    def _room(self) -> int:
        """How many units may be gathered ahead.

        In backward a unit begins before the one above it is freed.
        """
        if not in_backward():
            return self._overlap.prefetch_units
        held = sum(1 for unit in self.units[1:] if unit.holders and unit is not self._current)
        return self._overlap.prefetch_units - held

    def _free_ahead(self, keep: set[Unit]) -> None:
        for unit in self._in_order(self._ahead - keep):
            self._ahead.discard(unit)
            if not unit.holders:
                unit.reshard()

    # ---- gradients
    # -----------------------------------------------------------------------------------------------

    def enter_backward(self, queue_callback: Callable[[Callable[[], None]], None]) -> None:
        """Something of this backward pass has reached us: be told when it ends."""
        if not self.backward_active:
            self.backward_active = True
            self._keeps_graph = torch.is_grad_enabled()
            self._on_backward_begin()
            queue_callback(self.finish_backward)

    def grad_arrived(self, unit: Unit, parameter: nn.Parameter) -> None:
        """Autograd has put the gradient of one compute parameter on it."""
        unit.arrived.add(id(parameter))
        # What is recomputed has a pass of its own, and the pass around it may use the same
        # parameter again.
        unit.may_arrive_again |= any(since != current_pass() for since in unit.holders.values())
        if unit.all_arrived and not any(unit.open_calls.values()):
            self.finish_unit(unit)

    def finish_call(self, unit: Unit, call: Hashable, parameters_may_follow: bool) -> None:
        """The gradients of a call's inputs are there: its backward is over, or when all of the unit's are there too."""
        if parameters_may_follow:
            unit.open_calls[call] = False
        else:
            unit.open_calls.pop(call, None)
        if not any(unit.open_calls.values()) and (unit.all_arrived or not unit.open_calls):
            self.finish_unit(unit)

    def finish_unit(self, unit: Unit) -> None:
        """A unit's backward is over: take its gradients, reduce them if it is time, free its weights."""
        if unit.arrived:
            self._advance_reductions()
            for group in unit.trainable_groups:
                group.accumulate()
            if self._strategy.shards_gradients or self.is_last_microbatch:
                self._reduce(unit, over_inner=True, over_outer=self.is_last_microbatch)
        unit.forget_backward()
        if not unit.holders:
            self._free(unit)
        if self.backward_active:
            self._prefetch()

    def finish_backward(self) -> None:
        """The backward pass is over: finish what did not finish by itself."""
        self.backward_active = False
        for unit in reversed(self.units):
            if (
                unit.arrived
                or unit.open_calls
                or any(since != FORWARD for since in unit.holders.values())
            ):
                self.finish_unit(unit)
        self._keeps_graph = False
        self._free_ahead(keep=set())
        self._on_backward_end()

    def reduce_pending(self) -> None:
        """Begin to reduce whatever has accumulated."""
        for unit in reversed(self.units):
            has_local_grad = any(group.has_local_grad for group in unit.trainable_groups)
            if has_local_grad or any(group.has_inner_sum for group in unit.trainable_groups):
                self._reduce(unit, over_inner=has_local_grad, over_outer=True)

    def wait_for_reductions(self) -> None:
        """Every reduction that has begun is in the gradient shards."""
        while self._reducing:
            self._advance_reductions()

    def _reduce(self, unit: Unit, over_inner: bool, over_outer: bool) -> None:
        for group in unit.trainable_groups:
            group.reduce(over_inner, over_outer)
            self._reducing.append(group)
            if not self._overlap.grad_reduce:
                self.wait_for_reductions()

    def _advance_reductions(self) -> None:
        """Reductions over the inner axis give their buffers back, so that one unit's are alive at a time; those over
        the outer axis begin.
        """
        self._reducing = [group for group in self._reducing if group.advance_reduce()]

    def _abandon_backward(self) -> None:
        self.backward_active = self._keeps_graph = False
        self.wait_for_reductions()
        for unit in self.units:
            for group in unit.trainable_groups:
                # How much of the dead pass is in the sums differs from group to group
                group.zero_grad()
            unit.forget_backward()
            unit.holders.clear()
            unit.reshard()

    def _in_order(self, units: set[Unit]) -> list[Unit]:
        """A set has an order of its own on every rank; communication must not follow it."""
        return [unit for unit in self.units if unit in units] if units else []
