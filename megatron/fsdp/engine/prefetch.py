# SPDX-License-Identifier: Apache-2.0
"""Prefetching: all-gathers of the units to be used next, in the order of the last forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from megatron.fsdp.engine.device import in_backward
from megatron.fsdp.engine.policy import OverlapPolicy
from megatron.fsdp.engine.unit import Unit


class Prefetcher:
    """Unshards units before they are used, never more of them than the window allows.

    The order is recorded in every forward of the root, so a model may change it from step to step.
    Backward uses the reverse order. All ranks prefetch the same units at the same points, because
    only calls of units, and of ``start_param_sync``, trigger prefetching.

    Args:
        units: of the model, the root first.
        overlap: enables prefetching, and gives the size of the window in units or bytes.
    """

    def __init__(self, units: list[Unit], overlap: OverlapPolicy):
        self._units = units
        self._is_enabled = overlap.param_gather
        self._max_units = overlap.prefetch_units
        self._max_bytes = overlap.prefetch_bytes
        self._order: list[Unit] = []  # of the forward that is being recorded
        self._next_in_forward: dict[Unit, Unit] = {}
        self._next_in_backward: dict[Unit, Unit] = {}
        self._current = units[0]  # the unit that was used last
        self._used: list[Unit] = []  # units that calls use, and some that were used just now
        self._prefetched: set[Unit] = set()  # unsharded, and no call uses them yet
        self._of_next_forward: set[Unit] = set()  # those that were unsharded before it began
        self._updates = 0  # of the main weights since the last forward began
        self._updates_before_forward = 0  # as many came before that forward
        self._last_in_forward: list[Unit] = []  # units that stay unsharded for their backward
        self._first_kept = 0  # the number of calls in a forward before those of units that stay

    def weights_change(self) -> None:
        """Reshard all prefetched units, because main weights have new values."""
        self._updates += 1
        self.reshard_unused()

    def start_next_forward(self) -> None:
        """Unshard the units with which the last forward began, after an optimizer's step.

        Where several optimizers step parts of the model, this waits for the step of the last one.
        """
        root = self._units[0]
        is_early = self._updates < self._updates_before_forward
        if not self._is_enabled or is_early or root.users or in_backward():
            return
        self._current = root
        window = [root, *self._window(self._next_in_forward)] if self._next_in_forward else []
        for unit in window:
            if not unit.users and not unit.is_blocked:
                unit.unshard()
                self._prefetched.add(unit)
                self._of_next_forward.add(unit)

    def is_of_next_forward(self, unit: Unit) -> bool:
        """Return True if the unit was unsharded for a forward that has not begun to use it."""
        return unit in self._of_next_forward

    def start_recording(self) -> None:
        """Start to record the order of units, at the beginning of the root's forward."""
        self._order = []
        if self._updates:  # none between microbatches
            self._updates_before_forward, self._updates = self._updates, 0
        # Those kept for a backward that has not come are resharded: weights may change till then.
        self._reshard_prefetched(self._prefetched - self._of_next_forward)

    def unshard_all(self) -> None:
        """Unshard all units, where their storage is allocated anyway (levels 1 and 2)."""
        for unit in self._units:
            unit.unshard()
            if not self._is_enabled:
                unit.wait_for_unshard()

    def stop_recording(self) -> None:
        """Keep the recorded order, and reshard units that were prefetched but not used."""
        order = self._order
        kept = self._prefetched.intersection(self._last_in_forward)
        if not torch.is_grad_enabled():
            kept.clear()
        self._reshard_prefetched(self._prefetched - kept)
        self._next_in_forward = dict(pairwise(order))
        # Never back to the root: it is in use until the end of backward.
        self._next_in_backward = dict(zip(order[2:], order[1:]))
        if order:
            # Backward begins with the root; the last unit of the forward comes next.
            self._next_in_backward[order[0]] = order[-1]
        kept_units: list[Unit] = []
        for unit in order[:0:-1] if self._is_enabled else ():
            if not self._fits([*kept_units, unit]):
                break
            kept_units.append(unit)
        self._last_in_forward = order[:1] + kept_units
        self._first_kept = len(order) - max(1, len(kept_units))

    def keep(self, unit: Unit) -> bool:
        """Keep a unit that ends its forward unsharded if its backward is among the first.

        These are the root, with which the backward begins, and the units that would be prefetched
        then. They count as prefetched, so nothing more than the window is unsharded.
        """
        is_kept = (
            unit in self._last_in_forward
            and len(self._order) > self._first_kept
            and torch.is_grad_enabled()
            and not in_backward()
        )
        if is_kept:
            self._prefetched.add(unit)
        return is_kept

    def reached(self, unit: Unit) -> None:
        """Record that a call of ``unit`` begins, and prefetch the units that follow it."""
        if self._units[0].users and not in_backward():
            self._order.append(unit)
        self._current = unit
        self.prefetch()

    def make_room(self, unit: Unit) -> None:
        """Prepare for a call that uses ``unit`` now: reshard unused units in its memory slots."""
        self._used = [each for each in self._used if each.users and each is not unit] + [unit]
        self._prefetched.discard(unit)
        self._of_next_forward.discard(unit)
        blockers = {group.blocker for group in unit.groups if group.blocker is not None}
        for other in self._units if blockers else ():
            if not other.users and any(group.compute in blockers for group in other.groups):
                self._prefetched.discard(other)
                self._of_next_forward.discard(other)
                other.reshard()

    def prefetch(self) -> None:
        """Unshard the units in the window, and reshard prefetched ones that have left it."""
        if not self._is_enabled:
            return
        window = self._window(self._next_in_backward if in_backward() else self._next_in_forward)
        self._reshard_prefetched(self._prefetched.difference(window))
        for unit in window:
            if not unit.users and not unit.is_blocked:
                unit.unshard()
                self._prefetched.add(unit)

    def reshard_unused(self) -> None:
        """Reshard all prefetched units that no call uses."""
        self._reshard_prefetched(set(self._prefetched))

    def _window(self, successor: Mapping[Unit, Unit]) -> list[Unit]:
        """Return the units that follow the current one, with their units of shared parameters."""
        ahead: list[Unit] = []
        if in_backward():
            # A unit begins before the unit above it is resharded, so that one counts too.
            others = (self._current, self._units[0])
            ahead = [unit for unit in self._used if unit.users and unit not in others]
        window: list[Unit] = []
        unit = successor.get(self._current)
        while unit is not None and unit not in window and self._fits([*ahead, unit]):
            ahead.append(unit)
            window += [unit, *unit.shared]
            unit = successor.get(unit)
        return window

    def _fits(self, units: Sequence[Unit]) -> bool:
        """Return True if so many units may be unsharded beside the one in use."""
        if self._max_bytes is None:
            return len(units) <= self._max_units
        num_bytes = 0
        for unit in units:
            num_bytes += sum(group.compute.num_bytes for group in unit.groups)
        return num_bytes <= self._max_bytes

    def _reshard_prefetched(self, units: set[Unit]) -> None:
        """Reshard ``units`` in the model's order: the order of a set differs between ranks."""
        if not units:
            return
        for unit in self._units:
            if unit in units:
                self._prefetched.discard(unit)
                self._of_next_forward.discard(unit)
                if not unit.users:
                    unit.reshard()
