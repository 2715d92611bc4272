# SPDX-License-Identifier: Apache-2.0
"""Prefetching: all-gathers of the units to be used next, in the order of the last forward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch

from megatron.fsdp.engine.device import in_backward
from megatron.fsdp.engine.policy import Overlap
from megatron.fsdp.engine.unit import Unit


class Prefetcher:
    """Unshards units before they are used, never more of them than the window allows.

    The order is recorded in every forward of the root, so a model may change it from step to step,
    and a unit may be in it several times. Backward uses the reverse order. All ranks prefetch the
    same units at the same points, because only calls of units, and of ``start_param_sync``, trigger
    prefetching.

    Args:
        units: of the model, the root first.
        overlap: enables prefetching, and gives the size of the window in units or bytes.
    """

    def __init__(self, units: list[Unit], overlap: Overlap):
        self._units = units
        self._is_enabled = overlap.param_gather
        self._max_units = overlap.prefetch_units
        self._max_bytes = overlap.prefetch_bytes
        self._order: list[Unit] = []  # of the forward that is being recorded
        self._forward_order: list[Unit] = []  # of the last forward that was recorded
        self._backward_order: list[Unit] = []  # of its backward
        self._current = units[0]  # the unit that was used last
        self._position = -1  # of that use in the order that is followed
        self._upcoming: list[Unit] = []  # the window after it
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
        self._follow_order_from(0)
        window = [root, *self._window()] if self._forward_order else []
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
        self._follow_order_from(-1)
        if self._updates:  # none between microbatches
            self._updates_before_forward, self._updates = self._updates, 0
        # Those kept for a backward that has not come are resharded: weights may change till then.
        self._reshard_prefetched(self._prefetched - self._of_next_forward)

    def _follow_order_from(self, position: int) -> None:
        """Set the position in the order that is followed, -1 for before its first unit."""
        self._position = position
        self._upcoming = []

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
        self._forward_order = list(order)
        # Backward begins with the root, and never comes back to it: it is in use until the end.
        self._backward_order = order[:1] + order[:0:-1]
        self._follow_order_from(-1)
        kept_units: list[Unit] = []
        for unit in order[:0:-1] if self._is_enabled else ():
            if not self._fits([*kept_units, unit]):
                break
            kept_units.append(unit)
        self._last_in_forward = order[:1] + kept_units
        self._first_kept = len(order) - max(1, len(kept_units))

    def keep(self, unit: Unit) -> bool:
        """Keep a unit whose call ends unsharded if it is used again at once.

        It may be called again, or its backward is among the first: that is so for the root, with
        which backward begins, and for the units that would be prefetched then. They count as
        prefetched, so nothing more than the window is unsharded.
        """
        is_kept = unit in self._upcoming or unit in self._kept_for_backward()
        if is_kept:
            self._prefetched.add(unit)
        return is_kept

    def _kept_for_backward(self) -> list[Unit]:
        """Return the units that stay unsharded from now on: the last ones of a forward."""
        is_end_of_forward = len(self._order) > self._first_kept and not in_backward()
        return self._last_in_forward if is_end_of_forward and torch.is_grad_enabled() else []

    def reached(self, unit: Unit) -> None:
        """Record that a call of ``unit`` begins, and prefetch the units that follow it."""
        if self._units[0].users and not in_backward():
            self._order.append(unit)
        self._current = unit
        self._position = self._position_of(unit)
        self.prefetch()

    def _position_of(self, unit: Unit) -> int:
        """Return where the order that is followed has this use of ``unit``.

        It is the next position after that of the last use, or else the first one. A unit that the
        order does not have is at its end: nothing is prefetched after it.
        """
        order = self._backward_order if in_backward() else self._forward_order
        for start in (self._position + 1, 0):
            try:
                return order.index(unit, start)
            except ValueError:
                continue
        return len(order)

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
        self._upcoming = self._window()
        wanted = [*self._upcoming, *self._kept_for_backward()]
        self._reshard_prefetched(self._prefetched.difference(wanted))
        for unit in self._upcoming:
            if not unit.users and not unit.is_blocked:
                unit.unshard()
                self._prefetched.add(unit)

    def reshard_unused(self) -> None:
        """Reshard all prefetched units that no call uses."""
        self._upcoming = []
        self._reshard_prefetched(set(self._prefetched))

    def _window(self) -> list[Unit]:
        """Return the units that follow the current one, with their units of shared parameters."""
        ahead: list[Unit] = []
        order = self._forward_order
        if in_backward():
            order = self._backward_order
            # A unit begins before the unit above it is resharded, so that one counts too.
            others = (self._current, self._units[0])
            ahead = [unit for unit in self._used if unit.users and unit not in others]
        window: list[Unit] = []
        for unit in islice(order, self._position + 1, None):
            if unit in window or not self._fits([*ahead, unit]):
                break
            ahead.append(unit)
            window += [unit, *unit.shared]
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
