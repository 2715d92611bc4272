# SPDX-License-Identifier: Apache-2.0
"""The schedule: when units are unsharded and resharded, and when their gradients are reduced.

The calls of a unit are its users. A unit is unsharded for its first user and resharded after its
last. While one unit computes, the next units are prefetched and the gradients of the previous one
are reduced. Collectives are launched in the order of calls, which is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext

import torch
from torch import nn

from megatron.fsdp.engine.device import current_pass, in_backward
from megatron.fsdp.engine.microbatches import Microbatches
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.policy import Overlap, ShardingStrategy
from megatron.fsdp.engine.prefetch import Prefetcher
from megatron.fsdp.engine.reductions import Reductions
from megatron.fsdp.engine.unit import GRAPH, Unit, UnitCall


class Schedule:
    """Turns the calls of units, forward and backward, into all-gathers and reductions.

    Args:
        units: the root first, then in the order of registration.
        strategy: the ZeRO level.
        overlap: how communication overlaps compute.
        microbatches: tells which backward passes are synchronised.
        on_backward_begin: called when a backward pass first reaches the model.
        on_backward_end: called when that pass is over and every unit is finished.
    """

    def __init__(
        self,
        units: list[Unit],
        strategy: ShardingStrategy,
        overlap: Overlap,
        microbatches: Microbatches,
        on_backward_begin: Callable[[], None],
        on_backward_end: Callable[[], None],
    ):
        self.units = units
        self._root = units[0]
        self._strategy = strategy
        self._microbatches = microbatches
        self._on_backward_begin = on_backward_begin
        self._on_backward_end = on_backward_end
        self._edited: set[ParamGroup] = set()
        for unit in units:
            for group in unit.groups:
                group.edited = self._edited
        self._prefetcher = Prefetcher(units, overlap)
        self._reductions = Reductions(overlap.grad_reduce)
        self.reduces_late = False
        """True to reduce gradients when the backward pass is over, where no level forbids that.

        The loss may then reach other units on other ranks, at levels 0 and 1. Levels 2 and 3 reduce
        and gather unit by unit, so their ranks must reach the same ones."""

        self._is_in_backward = False
        # True while autograd records the backward pass itself (create_graph=True). The recorded
        # graph needs the weights later.
        self._keeps_graph = False

    # ---- weights

    def begin_forward(self) -> None:
        """Prepare for a forward of the root."""
        if in_backward():
            return
        if self._is_in_backward:
            self._abandon_backward()
        self._prefetcher.start_recording()
        self.install_edits()
        if not self._strategy.shards_parameters:
            self._prefetcher.unshard_all()

    def end_forward(self) -> None:
        """Finish a forward of the root."""
        self._prefetcher.stop_recording()

    def install_edits(self) -> None:
        """Install the main weights that operations on parameters have written to.

        These operations run on every rank, so that all ranks gather the same groups again.
        """
        if self._edited and not in_backward():
            for unit in self.units:
                for group in unit.groups:
                    if group in self._edited:
                        group.install_main_weights()

    def weights_change(self) -> None:
        """Prepare for new values of the main weights."""
        self._prefetcher.weights_change()

    def start_next_forward(self) -> None:
        """Start the all-gathers with which the next forward begins."""
        self._prefetcher.start_next_forward()

    def is_of_next_forward(self, unit: Unit) -> bool:
        """Return True if the unit was unsharded for a forward that has not begun to use it."""
        return self._prefetcher.is_of_next_forward(unit)

    def unshard(self, unit: Unit, user: Hashable) -> None:
        """Unshard a unit for ``user``, and prefetch the units that follow it."""
        self.unshard_borrowed(unit, user)
        self._prefetcher.reached(unit)

    def unshard_borrowed(self, unit: Unit, user: Hashable) -> None:
        """Unshard a unit for a call of another unit; it is neither recorded nor prefetched from."""
        unit.users[user] = current_pass()
        self._prefetcher.make_room(unit)
        unit.unshard()
        unit.wait_for_unshard()

    def end_use(self, unit: Unit, user: Hashable) -> None:
        """Note that ``user`` no longer needs the unit, and reshard it after its last user.

        Units that are used again at once stay unsharded.
        """
        unit.users.pop(user, None)
        for group in unit.groups:
            if group.is_readable:  # not after an exception
                group.writes.end_use()
        if not unit.users:
            self._reshard(unit)

    def _reshard(self, unit: Unit) -> None:
        if self._keeps_graph:
            # The unit stays unsharded until the end of the next backward pass that is not recorded.
            unit.users[GRAPH] = max(current_pass(), 0)
        elif not self._prefetcher.keep(unit):
            unit.reshard()

    # ---- gradients

    def enter_backward(self, queue_callback: Callable[[Callable[[], None]], None]) -> bool:
        """Note that a backward pass has reached the model, and return True if it had not before.

        Args:
            queue_callback: has autograd call a function when the pass is over.
        """
        if self._is_in_backward:
            return False
        self._is_in_backward = True
        self._keeps_graph = torch.is_grad_enabled()
        self._on_backward_begin()
        queue_callback(self._finish_backward)
        return True

    def grad_arrived(self, unit: Unit, parameter: nn.Parameter) -> None:
        """Note that autograd has accumulated the gradient of a compute parameter of ``unit``."""
        unit.add_grad(parameter)
        if _is_complete(unit, self.reduces_late) and not unit.awaits_inputs:
            self._finish_unit(unit)

    def inputs_arrived(self, call: UnitCall) -> None:
        """Note that the gradients of a call's inputs are complete."""
        unit = call.unit
        unit.end_backward(call)
        if unit.awaits_inputs:
            return
        if _is_complete(unit, self.reduces_late) or not unit.has_calls_in_backward:
            self._finish_unit(unit)

    def _finish_unit(self, unit: Unit) -> None:
        """End the backward of a unit: reduce its gradients if it is time, and reshard it."""
        if unit.has_grads:
            # Autograd records hooks only with create_graph=True, and a context has its price.
            with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
                self._reduce(unit)
        unit.reset_backward(is_over=not self._is_in_backward)
        if not unit.users:
            self._reshard(unit)
        if self._is_in_backward:
            self._prefetcher.prefetch()

    def _reduce(self, unit: Unit) -> None:
        """Accumulate the gradients of a unit, and reduce them if it is time."""
        self._reductions.advance()
        is_complete = self._microbatches.are_synchronised
        reduces_now = self._strategy.shards_gradients or (is_complete and not self.reduces_late)
        for group in unit.trained_groups:
            group.gradients.accumulate(reduces_now)
        if reduces_now:  # over the inner axis, and the outer one if it is the last microbatch
            for group in unit.trained_groups:
                self._reductions.start(group, True, is_complete)

    def _finish_backward(self) -> None:
        """End the backward pass: finish the units that have not been finished yet."""
        self._is_in_backward = False
        for unit in reversed(self.units):
            if unit.is_in_backward:
                self._finish_unit(unit)
            for group in unit.trainable_groups:
                group.gradients.local.forget_written()
        self._keeps_graph = False
        self._prefetcher.reshard_unused()
        self._on_backward_end()

    @torch.no_grad()
    def _abandon_backward(self) -> None:
        """Clean up after a backward pass that ended in an exception, and drop all gradients."""
        self._is_in_backward = self._keeps_graph = False
        self._reductions.wait()
        for unit in self.units:
            for group in unit.trainable_groups:
                # The sums of some groups already include the failed pass, those of others do not.
                group.gradients.clear()
            unit.reset_backward()
            unit.users.clear()
            unit.reshard()

    # ---- reductions

    @torch.no_grad()
    def reduce_pending(self) -> None:
        """Start to reduce all gradients that have accumulated."""
        for unit in reversed(self.units):
            for group in unit.trainable_groups:
                # Both are the same on all ranks, whichever of them have gradients.
                has_local = group.gradients.awaits_reduction
                if has_local or group.gradients.has_inner_sum:
                    self._reductions.start(group, has_local, True)

    @torch.no_grad()
    def wait_for_reductions(self) -> None:
        """Wait until the results of all reductions that have started are in the gradient shards."""
        self._reductions.wait()


def _is_complete(unit: Unit, reduces_late: bool) -> bool:
    # Where the loss may reach other parameters on other ranks, counting them would finish units in
    # another order there.
    return unit.has_all_grads and not reduces_late
