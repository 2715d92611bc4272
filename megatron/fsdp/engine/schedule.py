# SPDX-License-Identifier: Apache-2.0
"""The schedule: when units are unsharded and resharded, and when their gradients are reduced."""

# A unit is unsharded for the first call that uses it and resharded after the last. While it
# computes, the next units are prefetched and the gradients of the previous one are reduced.
# Collectives are launched in the order of calls, which is the same on every rank.

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from megatron.fsdp.engine.buffer import FlatBuffer
from megatron.fsdp.engine.device import current_pass, in_backward
from megatron.fsdp.engine.gradients import GroupGradients
from megatron.fsdp.engine.param_group import unshard_groups
from megatron.fsdp.engine.policy import Overlap
from megatron.fsdp.engine.states import GradientState
from megatron.fsdp.engine.transforms import is_traced
from megatron.fsdp.engine.unit import GRAPH, NO_PASS, TRACE, Unit, UnitCall


class Microbatches:
    """The settings of the training loop for the backward passes to come.

    Args:
        sync_each: every pass ends with final gradients on the parameters.
    """

    # Gradients of a pass that does not synchronise stay local at levels 0 and 1. At levels 2 and 3
    # they are reduced over the inner axis and summed in the gradient shards, with an outer axis in
    # the inner sums. The rest of their reduction precedes the optimizer's step.

    def __init__(self, sync_each: bool):
        self.sync_each = sync_each
        self.is_last = True  # outside of `no_sync`
        # True if `no_sync` has marked a pass: one outside of it is then the last of its step.
        self._are_marked = False

    def mark(self, is_last: bool) -> None:
        """Mark the passes to come as the last ones of their step, or not."""
        self.is_last = is_last
        self._are_marked = self._are_marked or not is_last

    @property
    def are_synchronised(self) -> bool:
        """True if gradients of the pass under way are reduced completely."""
        return self.is_last and (self.sync_each or self._are_marked)

    def end_pass(self) -> None:
        """Note that a backward pass is over: marks count until the last pass of their step."""
        if self.is_last:
            self._are_marked = False

    def set_sync_each(self, sync_each: bool) -> None:
        """Set ``sync_each``, and forget earlier marks."""
        self.sync_each = sync_each
        self._are_marked = False


class Schedule:
    """Turns the calls of units, forward and backward, into all-gathers and reductions.

    Args:
        units: all units, the root first, then in the order of registration.
        overlap: the overlap of communication with compute.
        microbatches: when gradients are reduced completely.
        reduces_late: reduce gradients when the backward pass is over: at levels 0 and 1, the loss
            may then reach other units on other ranks. Levels 2 and 3 reduce unit by unit anyway.
    """

    def __init__(
        self,
        units: list[Unit],
        overlap: Overlap,
        microbatches: Microbatches,
        reduces_late: bool,
    ):
        self.units = units
        self.microbatches = microbatches
        self._overlaps_reductions = overlap.grad_reduce
        self._reduces_late = reduces_late
        self.prefetcher = Prefetcher(units, overlap)
        self._reducing: list[GroupGradients] = []  # reductions under way, oldest first
        self.is_in_backward = False
        # True while autograd records the backward pass itself (create_graph=True). The recorded
        # graph needs the weights later.
        self._records_backward = False

    # ---- weights

    def begin_forward(self) -> None:
        """Prepare for a forward of the root."""
        if in_backward():
            return
        if self.is_in_backward:
            self._abandon_backward()
        self.prefetcher.start_recording()
        self.unshard_stale()

    def unshard_stale(self) -> None:
        """Start the all-gathers of all stale weights whose storage is allocated anyway."""
        for unit in self.units:
            allocated = [group for group in unit.groups if not group.strategy.shards_parameters]
            unshard_groups(allocated)
            if not self.prefetcher.is_enabled:
                unit.wait_for_unshard()

    def begin_use(self, call: UnitCall) -> None:
        """Unshard the units that a call uses, and prefetch those that follow."""
        for borrowed in call.borrowed:
            self.unshard_for(borrowed, call)
        unit = call.unit
        if not unit.modules:
            return  # a method of no unit's module
        # A call of a merged module, while its unit is in use, is not recorded.
        is_recorded = call.module is unit.module or not unit.users
        self.unshard_for(unit, call)
        if is_recorded:
            self.prefetcher.record_use_and_prefetch(unit)

    def unshard_for(self, unit: Unit, user: Hashable) -> None:
        """Unshard a unit for a user and wait; record no use and prefetch no other unit."""
        unit.users[user] = current_pass()
        self.prefetcher.before_use(unit)
        unit.unshard()
        unit.wait_for_unshard()

    def end_use(self, unit: Unit, user: Hashable) -> None:
        """Note that ``user`` no longer needs the unit, and reshard it after its last user."""
        unit.users.pop(user, None)
        self._reshard(unit)

    def _reshard(self, unit: Unit) -> None:
        if unit.users:
            return
        if is_traced():
            unit.users[TRACE] = NO_PASS
        elif self._records_backward:
            # The unit stays unsharded until the end of the next backward pass that is not recorded.
            # So this is a number of a pass, never NO_PASS, and `reset_backward` drops it.
            unit.users[GRAPH] = max(current_pass(), 0)
        elif not self.prefetcher.keep(unit):
            unit.reshard()

    # ---- gradients

    def begin_backward_pass(self) -> None:
        """Note that a backward pass has reached the model."""
        self.is_in_backward = True
        self._records_backward = torch.is_grad_enabled()

    def grad_arrived(self, unit: Unit, parameter: nn.Parameter) -> None:
        """Note that autograd has accumulated the gradient of a compute parameter of ``unit``."""
        unit.add_grad(parameter)
        if unit.has_all_grads and not (self._reduces_late or unit.awaits_inputs):
            self._finish_unit(unit)

    def inputs_arrived(self, call: UnitCall) -> None:
        """Note that the gradients of a call's inputs are complete."""
        unit = call.unit
        unit.end_backward(call)
        if unit.awaits_inputs:
            return
        # Where the loss may reach other parameters on other ranks, counting them would finish units
        # in another order there.
        has_all = unit.has_all_grads and not self._reduces_late
        if has_all or not unit.calls_in_backward:
            self._finish_unit(unit)

    def _finish_unit(self, unit: Unit) -> None:
        """End the backward of a unit: reduce its gradients if it is time, and reshard it."""
        if unit.arrived:
            # Autograd records hooks only with create_graph=True. A context costs host time.
            with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
                self._reduce(unit)
        unit.reset_backward(is_over=not self.is_in_backward)
        self._reshard(unit)
        if self.is_in_backward:
            self.prefetcher.prefetch()

    def _reduce(self, unit: Unit) -> None:
        """Accumulate the gradients of a unit, and reduce them if it is time."""
        # At levels 2 and 3 this frees the previous unit's flat gradient buffers. So one unit has
        # some at a time there, unless layers write those of the next one themselves.
        self._advance_reductions()
        is_complete = self.microbatches.are_synchronised
        due = []
        for group in unit.trained_groups:
            is_due = group.strategy.shards_gradients
            if is_complete and not self._reduces_late:
                is_due = True
            group.gradients.accumulate(is_due)
            if is_due:
                due.append(group.gradients)
        for gradients in due:  # over the outer axis only after the last microbatch
            self._start_reduction(gradients, over_inner=True, over_outer=is_complete)

    def _start_reduction(
        self,
        gradients: GroupGradients,
        over_inner: bool,
        over_outer: bool,
    ) -> None:
        gradients.reduce(over_inner, over_outer)
        self._reducing.append(gradients)
        if not self._overlaps_reductions:
            self.wait_for_reductions()

    def _advance_reductions(self) -> None:
        """Wait for every collective under way, and start the next one of each reduction."""
        under_way = []
        for gradients in self._reducing:
            if gradients.advance_reduce():
                under_way.append(gradients)
        self._reducing = under_way

    @torch.no_grad()
    def reduce_pending(self) -> None:
        """Start to reduce all gradients that have accumulated."""
        for unit in reversed(self.units):
            for group in unit.trainable_groups:
                # Both are the same on all ranks, whichever of them have gradients.
                gradients = group.gradients
                is_due = gradients.state is GradientState.WAITING
                if is_due or gradients.has_inner_sum:
                    self._start_reduction(gradients, over_inner=is_due, over_outer=True)

    @torch.no_grad()
    def wait_for_reductions(self) -> None:
        """Wait until the results of all reductions that have started are in the gradient shards."""
        while self._reducing:
            self._advance_reductions()

    def end_backward_pass(self) -> None:
        """Note that the backward pass is over: finish the units that are not finished yet."""
        self.is_in_backward = False
        for unit in reversed(self.units):
            was_traced = unit.users.pop(TRACE, None) is not None
            if unit.is_in_backward:
                self._finish_unit(unit)
            elif was_traced:
                self._reshard(unit)
            for group in unit.trainable_groups:
                group.gradients.forget_written()
        self._records_backward = False
        self.prefetcher.reshard_prefetched()

    @torch.no_grad()
    def _abandon_backward(self) -> None:
        """Clean up after a backward pass that ended in an exception, and drop all gradients."""
        self.is_in_backward = False
        self._records_backward = False
        # Collectives under way still read and write the buffers that are dropped below.
        self.wait_for_reductions()
        for unit in self.units:
            for group in unit.trainable_groups:
                # The sums of some groups already include the failed pass, those of others do not.
                group.gradients.drop()
            unit.reset_backward()
            unit.users.clear()
            unit.reshard()


@dataclass(frozen=True)
class UseOrder:
    """The order in which a forward has used units; one may occur several times.

    Args:
        forward: the units in this order.
        backward: the reverse order, but for the root: it comes first, and is in use until the end.
        first_in_backward: the units with which backward begins: they stay unsharded when their
            last call of the forward ends.
        num_uses_before_end: number of uses after which units of ``first_in_backward`` stay.
        num_updates: number of updates of the main weights that came before the forward.
    """

    forward: list[Unit] = field(default_factory=list)
    backward: list[Unit] = field(default_factory=list)
    first_in_backward: list[Unit] = field(default_factory=list)
    num_uses_before_end: int = 0
    num_updates: int = 0


class Prefetcher:
    """Unshards units before they are used, never more of them than the window allows.

    Args:
        units: all units, the root first.
        overlap: whether weights are prefetched, and how many.
    """

    # The order is recorded in every forward of the root. All ranks prefetch the same units at the
    # same points, because only calls of units, and of `start_param_sync`, trigger prefetching.

    def __init__(self, units: list[Unit], overlap: Overlap):
        self.is_enabled = overlap.param_gather
        self._units = units
        self._max_units = overlap.prefetch_units
        self._max_bytes = overlap.prefetch_bytes
        self._unit_of: dict[FlatBuffer, Unit] = {}
        # Otherwise weights stay allocated, and each forward begins with all gathers that are due.
        self._are_resharded = False
        # Several units may then have the same memory, and take turns in it.
        self._are_assigned_ahead = False
        for unit in units:
            for group in unit.groups:
                self._unit_of.update(dict.fromkeys(group.buffers, unit))
                self._are_resharded |= group.reshards_after_use
                self._are_assigned_ahead |= group.compute.storage.is_assigned_ahead
        self._recorded: list[Unit] = []  # units used so far by the current forward
        self._order = UseOrder()  # order of units in the last forward
        self._current = units[0]  # unit that was used last
        self._position = -1  # position of that use in the order that is followed
        self._upcoming: list[Unit] = []  # window of units after that use
        self._in_use: dict[Unit, None] = {}  # units that calls use, and some that have finished
        # Unsharded units that no call uses: prefetched ones, and those that stay unsharded for a
        # later call of the forward or for the backward.
        self._prefetched: set[Unit] = set()
        self._gathered_for_next_forward: set[Unit] = set()  # prefetched units before it has begun
        self._num_updates = 0  # updates of the main weights since the last forward began

    # ---- the order

    def start_recording(self) -> None:
        """Start to record the order of units, at the beginning of the root's forward."""
        self._recorded = []
        self._position = -1
        self._upcoming = []
        if self._num_updates:  # none between microbatches
            self._order = replace(self._order, num_updates=self._num_updates)
            self._num_updates = 0
        # Those kept for a backward that has not come are resharded: weights may change till then.
        self.reshard_if_unused(self._prefetched - self._gathered_for_next_forward)

    def stop_recording(self) -> None:
        """Keep the recorded order, and reshard units that were prefetched but not used."""
        stay: list[Unit] = []
        if torch.is_grad_enabled():
            stay = self._order.first_in_backward
        self.reshard_if_unused(self._prefetched.difference(stay))
        order = self._recorded
        # Backward begins with the units that were used last. They stay unsharded, as many as may be
        # prefetched, which saves their second all-gather.
        last: list[Unit] = []
        if self.is_enabled:
            for unit in reversed(order[1:]):
                if not self._fits([*last, unit]):
                    break
                last.append(unit)
        self._order = UseOrder(
            forward=list(order),
            backward=order[:1] + order[:0:-1],
            first_in_backward=order[:1] + last,
            num_uses_before_end=len(order) - max(1, len(last)),
            num_updates=self._order.num_updates,
        )
        self._position = -1
        self._upcoming = []

    def record_use_and_prefetch(self, unit: Unit) -> None:
        """Record that a call of ``unit`` begins, and prefetch the units that follow it."""
        is_backward = in_backward()
        if self._units[0].users and not is_backward:
            self._recorded.append(unit)
        self._current = unit
        order = self._order.forward
        if is_backward:
            order = self._order.backward
        next_position = self._position + 1
        if unit in order[next_position:]:
            self._position = order.index(unit, next_position)
        elif unit in order:
            self._position = order.index(unit)
        else:
            self._position = len(order)  # nothing is prefetched after an unknown unit
        self.prefetch()

    # ---- unsharding ahead

    def prefetch(self) -> None:
        """Unshard the units in the window, and reshard prefetched ones that have left it."""
        if not (self.is_enabled and self._are_resharded):
            return
        if in_backward():
            self._forget_finished_units()
        self._upcoming = self._window()
        if self._prefetched:
            wanted = [*self._upcoming, *self._kept_for_backward()]
            unwanted = self._prefetched.difference(wanted)
            self.reshard_if_unused(unwanted)
        self._unshard_ahead(self._upcoming)

    def _unshard_ahead(self, units: list[Unit]) -> None:
        for unit in units:
            if unit.users:
                continue
            if self._are_assigned_ahead and unit.blockers:
                continue  # another unit occupies its memory
            unit.unshard()
            self._prefetched.add(unit)

    def _forget_finished_units(self) -> None:
        for unit in list(self._in_use):
            if not unit.users:
                del self._in_use[unit]

    def _window(self) -> list[Unit]:
        """Return the units that follow the current one, with their units of shared parameters."""
        ahead: list[Unit] = []
        order = self._order.forward
        if in_backward():
            order = self._order.backward
            # When a unit's backward begins, the unit above it is still unsharded: count it too.
            for unit in self._in_use:
                if unit is not self._current and unit is not self._units[0]:
                    ahead.append(unit)
        window: list[Unit] = []
        for unit in order[self._position + 1 :]:
            if unit in window or not self._fits([*ahead, unit]):
                break
            ahead.append(unit)
            window += [unit, *unit.shared]
        return window

    def _fits(self, units: Sequence[Unit]) -> bool:
        """Return True if these units may be unsharded in addition to the one in use."""
        if self._max_bytes is None:
            return len(units) <= self._max_units
        num_bytes = 0
        for unit in units:
            for group in unit.groups:
                if group.reshards_after_use:
                    num_bytes += group.compute.num_bytes
        return num_bytes <= self._max_bytes

    def reshard_for_new_weights(self) -> None:
        """Reshard all prefetched units, because main weights have new values."""
        self._num_updates += 1
        self.reshard_prefetched()

    def prefetch_next_forward(self) -> None:
        """Unshard the units with which the last forward began, after an optimizer's step."""
        root = self._units[0]
        # Where several optimizers step parts of the model, the step of the last one begins this.
        is_early = self._num_updates < self._order.num_updates
        if not self.is_enabled or is_early or root.users or in_backward():
            return
        self._current = root
        self._position = 0
        self._upcoming = []
        if self._order.forward:
            window = [root, *self._window()]
            self._unshard_ahead(window)
            gathered = self._prefetched.intersection(window)
            self._gathered_for_next_forward.update(gathered)

    # ---- resharding

    def keep(self, unit: Unit) -> bool:
        """Keep a unit whose call ends unsharded if it is used again at once; return True then."""
        # It may be called again, or its backward is among the first. Then it counts as prefetched,
        # so that no more units than the window allows are unsharded.
        is_kept = unit in self._upcoming or unit in self._kept_for_backward()
        if is_kept:
            self._prefetched.add(unit)
        return is_kept

    def _kept_for_backward(self) -> list[Unit]:
        """Return the units that stay unsharded from now on: the last ones of a forward."""
        num_uses = len(self._recorded)
        is_end_of_forward = num_uses > self._order.num_uses_before_end and not in_backward()
        if is_end_of_forward and torch.is_grad_enabled():
            return self._order.first_in_backward
        return []

    def before_use(self, unit: Unit) -> None:
        """Prepare for a call that uses ``unit`` now: reshard unused units in its memory."""
        self._in_use[unit] = None
        self._prefetched.discard(unit)
        self._gathered_for_next_forward.discard(unit)
        if self._are_assigned_ahead:
            blocking = {self._unit_of[buffer] for buffer in unit.blockers}
            self.reshard_if_unused(blocking)

    def reshard_prefetched(self) -> None:
        """Reshard all prefetched units that no call uses."""
        self._upcoming = []
        self.reshard_if_unused(set(self._prefetched))

    def reshard_if_unused(self, units: set[Unit]) -> None:
        """Reshard those of the units that no call uses."""
        if not units:
            return
        for unit in self._units:  # the order of a set differs between ranks
            if unit in units:
                self._prefetched.discard(unit)
                self._gathered_for_next_forward.discard(unit)
                if not unit.users:
                    unit.reshard()
