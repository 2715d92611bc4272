# SPDX-License-Identifier: Apache-2.0
"""The schedule: when units are unsharded and resharded, and when their gradients are reduced.

The calls of a unit are its users. It is unsharded for the first and resharded after the last of
them. While one unit computes, the next ones are prefetched and the reduction of the previous one
runs. Everything that communicates follows the order of calls, and so is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import nn

from megatron.fsdp.engine.device import current_pass, in_backward
from megatron.fsdp.engine.policy import OverlapPolicy, ShardingStrategy
from megatron.fsdp.engine.prefetch import Prefetcher
from megatron.fsdp.engine.reductions import Reductions
from megatron.fsdp.engine.unit import GRAPH, Unit, UnitCall


class Schedule:
    """Turns the calls of units, forward and backward, into all-gathers and reductions.

    Args:
        units: the root first, then in the order of registration.
        strategy: the ZeRO level.
        overlap: how communication overlaps compute.
        on_backward_begin: called when a backward pass first reaches the model.
        on_backward_end: called when that pass is over and every unit is finished.
    """

    def __init__(
        self,
        units: list[Unit],
        strategy: ShardingStrategy,
        overlap: OverlapPolicy,
        on_backward_begin: Callable[[], None],
        on_backward_end: Callable[[], None],
    ):
        self.units = units
        self.is_last_microbatch = True
        self._root = units[0]
        self._strategy = strategy
        self._on_backward_begin = on_backward_begin
        self._on_backward_end = on_backward_end
        self._prefetcher = Prefetcher(units, overlap)
        self._reductions = Reductions(overlap.grad_reduce)
        self._is_in_backward = False
        # Autograd records the backward pass itself (create_graph=True), and the graph that it makes
        # needs the weights later.
        self._keeps_graph = False

    # ---- weights

    def begin_forward(self) -> None:
        """Prepare for a forward of the root."""
        if in_backward():
            return
        if self._is_in_backward:
            self._abandon_backward()
        self._prefetcher.start_recording()

    def end_forward(self) -> None:
        """Finish a forward of the root."""
        self._prefetcher.stop_recording()

    def unshard(self, unit: Unit, user: Hashable) -> None:
        """Unshard a unit for ``user``, and prefetch the ones that follow it."""
        self.unshard_borrowed(unit, user)
        self._prefetcher.reached(unit)

    def unshard_borrowed(self, unit: Unit, user: Hashable) -> None:
        """Unshard a unit out of its turn, for a call of another one: nothing follows from it."""
        unit.users[user] = current_pass()
        self._prefetcher.discard(unit)
        unit.unshard()
        unit.wait_for_unshard()

    def end_use(self, unit: Unit, user: Hashable) -> None:
        """Note that ``user`` needs the unit no longer; after its last user it is resharded."""
        unit.users.pop(user, None)
        if not unit.users:
            self._reshard(unit)

    def _reshard(self, unit: Unit) -> None:
        if self._keeps_graph:
            # Until the end of the next backward pass that is not recorded.
            unit.users[GRAPH] = max(current_pass(), 0)
        else:
            unit.reshard()

    # ---- gradients

    def enter_backward(self, queue_callback: Callable[[Callable[[], None]], None]) -> None:
        """Note that a backward pass has reached the model.

        Args:
            queue_callback: has autograd call a function when the pass is over.
        """
        if not self._is_in_backward:
            self._is_in_backward = True
            self._keeps_graph = torch.is_grad_enabled()
            self._on_backward_begin()
            queue_callback(self._finish_backward)

    def grad_arrived(self, unit: Unit, parameter: nn.Parameter) -> None:
        """Note that autograd has put the gradient on a compute parameter of ``unit``."""
        unit.add_grad(parameter)
        if unit.has_all_grads and not unit.awaits_inputs:
            self._finish_unit(unit)

    def inputs_arrived(self, call: UnitCall) -> None:
        """Note that the gradients of a call's inputs are complete."""
        unit = call.unit
        unit.end_backward(call)
        if unit.awaits_inputs:
            return
        if unit.has_all_grads or not unit.has_calls_in_backward:
            self._finish_unit(unit)

    def _finish_unit(self, unit: Unit) -> None:
        """Reduce a unit's gradients if it is time, and reshard it: its backward is over."""
        if unit.has_grads:
            self._reductions.advance()
            for group in unit.trainable_groups:
                group.gradients.accumulate()
            if self._strategy.shards_gradients or self.is_last_microbatch:
                self._reduce(unit, over_inner=True, over_outer=self.is_last_microbatch)
        unit.reset_backward()
        if not unit.users:
            self._reshard(unit)
        if self._is_in_backward:
            self._prefetcher.prefetch()

    def _finish_backward(self) -> None:
        """Finish the units that did not finish by themselves: the backward pass is over."""
        self._is_in_backward = False
        for unit in reversed(self.units):
            if unit.is_in_backward:
                self._finish_unit(unit)
        self._keeps_graph = False
        self._prefetcher.reshard_unused()
        self._on_backward_end()

    def _abandon_backward(self) -> None:
        """Forget a backward pass that ended in an exception, and all gradients with it."""
        self._is_in_backward = self._keeps_graph = False
        self._reductions.wait()
        for unit in self.units:
            for group in unit.trainable_groups:
                # How much of the failed pass is in the sums differs from group to group.
                group.gradients.clear()
            unit.reset_backward()
            unit.users.clear()
            unit.reshard()

    # ---- reductions

    def reduce_pending(self) -> None:
        """Begin to reduce everything that has accumulated."""
        for unit in reversed(self.units):
            has_local = any(group.gradients.has_local for group in unit.trainable_groups)
            if has_local or any(group.gradients.has_inner_sum for group in unit.trainable_groups):
                self._reduce(unit, over_inner=has_local, over_outer=True)

    def wait_for_reductions(self) -> None:
        """Return when every reduction that has begun is in the gradient shards."""
        self._reductions.wait()

    def _reduce(self, unit: Unit, over_inner: bool, over_outer: bool) -> None:
        for group in unit.trainable_groups:
            self._reductions.start(group, over_inner, over_outer)
