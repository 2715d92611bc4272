# SPDX-License-Identifier: Apache-2.0
"""Prefetching: all-gathers of the units to be used next, in the order of the last forward."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch

from megatron.fsdp.engine.device import in_backward
from megatron.fsdp.engine.policy import OverlapPolicy
from megatron.fsdp.engine.unit import Unit


class Prefetcher:
    """Unshards units before they are used, never more of them than the window allows.

    The order is recorded in every forward of the root, so a model may change it from step to step.
    Backward uses the reverse order. All ranks prefetch the same units at the same points, because
    only calls of units trigger prefetching.

    Args:
        units: of the model, the root first.
        overlap: enables prefetching, and gives the size of the window in units.
    """

    def __init__(self, units: list[Unit], overlap: OverlapPolicy):
        self._units = units
        self._is_enabled = overlap.param_gather
        self._window_size = overlap.prefetch_units
        self._order: list[Unit] = []  # of the forward that is being recorded
        self._next_in_forward: dict[Unit, Unit] = {}
        self._next_in_backward: dict[Unit, Unit] = {}
        self._current = units[0]  # the unit that was used last
        self._prefetched: set[Unit] = set()  # unsharded, and no call uses them yet
        self._last_in_forward: list[Unit] = []  # units that stay unsharded for their backward
        self._num_recorded = 0  # calls of units in the last recorded forward

    def start_recording(self) -> None:
        """Start to record the order of units, at the beginning of the root's forward."""
        self._order = []
        self.reshard_unused()  # kept for a backward that has not come: weights may change till then

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
        self._num_recorded = len(order)
        self._last_in_forward = order[:1]
        if order:
            # Backward begins with the root; the last unit of the forward comes next.
            self._next_in_backward[order[0]] = order[-1]
            if self._is_enabled:
                self._last_in_forward += order[:0:-1][: self._window_size]

    def keep(self, unit: Unit) -> bool:
        """Keep a unit that ends its forward unsharded if its backward is among the first.

        These are the root, with which the backward begins, and the units that would be prefetched
        then. They count as prefetched, so nothing more than the window is unsharded.
        """
        is_last = len(self._order) > self._num_recorded - self._window_size
        is_kept = (
            unit in self._last_in_forward
            and is_last
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

    def discard(self, unit: Unit) -> None:
        """Remove ``unit`` from the prefetched units, because a call uses it now."""
        self._prefetched.discard(unit)

    def prefetch(self) -> None:
        """Unshard the units in the window, and reshard prefetched ones that have left it."""
        if not self._is_enabled:
            return
        window = self._window(self._next_in_backward if in_backward() else self._next_in_forward)
        self._reshard_prefetched(self._prefetched.difference(window))
        for unit in window:
            if not unit.users:
                unit.unshard()
                self._prefetched.add(unit)

    def reshard_unused(self) -> None:
        """Reshard all prefetched units that no call uses."""
        self._reshard_prefetched(set(self._prefetched))

    def _window(self, successor: Mapping[Unit, Unit]) -> list[Unit]:
        """Return the units that follow the current one, with their units of shared parameters."""
        window: list[Unit] = []
        unit = successor.get(self._current)
        for _ in range(self._free_window_size()):
            if unit is None or unit in window:
                break
            window += [unit, *unit.shared]
            unit = successor.get(unit)
        return window

    def _free_window_size(self) -> int:
        """Return how many more units may be unsharded now."""
        if not in_backward():
            return self._window_size
        # In backward a unit begins before the unit above it is resharded, so that one counts too.
        used = [unit for unit in self._units[1:] if unit.users and unit is not self._current]
        return self._window_size - len(used)

    def _reshard_prefetched(self, units: set[Unit]) -> None:
        """Reshard ``units`` in the model's order: the order of a set differs between ranks."""
        if not units:
            return
        for unit in self._units:
            if unit in units:
                self._prefetched.discard(unit)
                if not unit.users:
                    unit.reshard()
