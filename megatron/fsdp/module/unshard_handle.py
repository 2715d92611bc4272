# SPDX-License-Identifier: Apache-2.0
"""Units that code unshards by hand, as in FSDP2, and the handle to wait for them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import UnshardHandle

from megatron.fsdp.engine.schedule import Prefetcher
from megatron.fsdp.engine.unit import Unit


class UnitHandle(UnshardHandle):
    """The all-gathers of units, which have started, to wait for."""

    def __init__(self, units: Sequence[Unit], prefetcher: Prefetcher):
        self._units = units
        for unit in units:
            prefetcher.before_use(unit)
            if not unit.blockers:  # otherwise the call gathers, when its memory slot is free
                unit.unshard()

    def wait(self) -> None:
        """Make compute wait for the all-gathers that have started."""
        for unit in self._units:
            unit.wait_for_unshard()


def units_of(units: Sequence[Unit], module: nn.Module | None) -> list[Unit]:
    """Return the unit of a module, None: the root's, and those whose parameters it shares.

    Raises:
        ValueError: if the module is no unit.
    """
    where = "outside of the model"
    for unit in units:
        if module is None or module in unit.modules:
            return [unit, *unit.shared]
        if unit.module is None:
            continue
        if module in unit.module.modules():
            where = f"inside of the unit {unit.shown_name!r}: pass that, or None for the root"
    raise ValueError(f"module expects a unit but got a {type(module).__name__} {where}")
