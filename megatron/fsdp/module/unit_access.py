# SPDX-License-Identifier: Apache-2.0
"""Changes that code makes to compute parameters, and units that it unshards itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import UnshardHandle

from megatron.fsdp.engine.device import in_backward
from megatron.fsdp.engine.loops_in_c import are_same, concatenated
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.schedule import Prefetcher
from megatron.fsdp.engine.states import MainState
from megatron.fsdp.engine.unit import Unit
from megatron.fsdp.module.trainability import Trainability


class KnownParameters:
    """The parameters that were sharded: ``root``, the wrapper, has no others afterwards."""

    # Otherwise what code adds would be used and never trained, and what it removes would still be
    # among `parameters()`. Other objects may come and go: buffers, and modules around the same
    # parameters (torch.compile).

    def __init__(self, root: nn.Module, names: dict[nn.Parameter, str]):
        self._root = root
        self._names = names
        # Of every module in `root` the parameters and the children, as live views, and all that was
        # in them at the last check.
        self._views: list[Any] = []
        self._seen: list[object] = []

    def check(self) -> None:
        """Raise ``RuntimeError`` if parameters have appeared or vanished since sharding."""
        if self._views and are_same(self._seen, concatenated(self._views)):
            return
        views: list[Any] = []
        names: dict[nn.Parameter, str] = {}
        for path, module in self._root.named_modules():
            # Read as plain dicts, which do not show the sharded parameters instead.
            views.append(dict.values(module._parameters))
            views.append(dict.values(module._modules))
            for name, parameter in dict.items(module._parameters):
                if parameter is None:
                    continue
                if not isinstance(parameter, nn.Parameter):
                    return  # torch.func.functional_call has put it there for one call
                names[parameter] = f"{path}.{name}".removeprefix("module.")
        new = [name for parameter, name in names.items() if parameter not in self._names]
        gone = [name for parameter, name in self._names.items() if parameter not in names]
        if new or gone:
            raise RuntimeError(
                "the model has other parameters than when it was sharded:"
                f" {len(new)} new ({', '.join(new[:5])}), {len(gone)} gone ({', '.join(gone[:5])})."
                " The optimizer knows only those that were sharded: replace layers, resize"
                " embeddings, and add adapters and parametrizations before fully_shard"
            )
        self._views = views
        self._seen = concatenated(views)


class UnitAccess:
    """Follows flags of parameters before units are used, and writes to weights afterwards.

    Args:
        units: the units of a model.
        trainability: the flags of its parameters.
        known: the parameters that were sharded.
    """

    # Forwards and methods compute with compute parameters, and may write to them in place. Where
    # compute weights are not the main weights, a write would last only until they are gathered or
    # cast again, so it is copied into the main weights when the call ends. Nothing is communicated:
    # all ranks write the same, and each takes its own part. Version counters show that a parameter
    # was written to. `parameter.data` has another counter: such writes are not found.

    def __init__(self, units: Sequence[Unit], trainability: Trainability, known: KnownParameters):
        self._trainability = trainability
        self._known = known
        self._groups: dict[Unit, list[ParamGroup]] = {}  # groups of which writes must be copied
        self._versions: dict[Unit, list[int]] = {}  # counters of all parameters of these groups
        for unit in units:
            groups = [group for group in unit.groups if _takes_writes(group)]
            if groups:
                self._groups[unit] = groups
                self._versions[unit] = self._read(unit)

    def before_call(self) -> None:
        """Follow changed flags; refuse parameters that code has added or removed."""
        if not in_backward():
            self._known.check()
            self._trainability.follow()

    def after_use(self, unit: Unit) -> None:
        """Copy writes of a call to compute weights into the main weights."""
        before = self._versions.get(unit)
        if before is None:
            return
        now = self._read(unit)
        if before == now:
            return
        self._versions[unit] = now
        parameters = concatenated([group.parameters for group in self._groups[unit]])
        written = set()
        for parameter, old, new in zip(parameters, before, now):
            if old != new:
                written.add(parameter)
        for group in self._groups[unit]:
            # Not after an exception, and not between a step and its weights that are installed
            # later: writes of a forward are lost then.
            if group.is_readable and group.main_state is not MainState.HELD:
                for index, parameter in enumerate(group.parameters):
                    if parameter in written:
                        take_written(group, index)

    def _read(self, unit: Unit) -> list[int]:
        return concatenated([group.guard.versions for group in self._groups[unit]])


def _takes_writes(group: ParamGroup) -> bool:
    """Return True if writes must be copied: compute weights are values, but not the main ones."""
    is_main = group.main_is_compute and group.compute_shard._base is group.compute.flat
    return group.compute.layout is group.layout and not is_main


@torch.no_grad()
def take_written(group: ParamGroup, index: int) -> None:
    """Copy the values of a compute parameter into this rank's shards.

    The compute shard gets them, and main weights of another dtype the values that have changed.

    Args:
        group: the group of the parameter, unsharded.
        index: its position in the group.
    """
    position = group.layout.positions[index]
    size = group.compute_shard.numel()
    start = group.partition.inner_rank * size
    # Positions in this rank's shard: a parameter at [10, 18) and the shard [8, 16) have [2, 8).
    low = max(position.start - start, 0)
    high = min(position.stop - start, size)
    if low < high:
        gathered = group.compute.flat[start + low : start + high]
        group.compute_shard[low:high] = gathered
    if not group.main_is_compute:
        # Main weights that are the same in the dtype of the module keep their precision.
        owned = group.layout.owned(index, group.rank)
        main = group.main_view(index).view(-1)
        compute = group.compute.views[index].reshape(-1)
        written = compute[owned.start : owned.stop].to(main.device)
        is_same = written == main.to(written.dtype)
        main.copy_(torch.where(is_same, main, written.to(main.dtype)))


# ---- unsharding by hand


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
        if unit.module is not None and module in unit.module.modules():
            where = f"inside of the unit {unit.shown_name!r}: pass that, or None for the root"
    raise ValueError(f"module expects a unit but got a {type(module).__name__} {where}")
