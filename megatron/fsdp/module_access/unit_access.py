# SPDX-License-Identifier: Apache-2.0
"""Changes that code makes to compute parameters, and units that it unshards itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress
from operator import ne

import torch
from torch import nn
from torch.distributed.fsdp import UnshardHandle

from megatron.fsdp.engine.device import in_backward
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.schedule import Prefetcher
from megatron.fsdp.engine.states import MainState
from megatron.fsdp.engine.unit import Unit
from megatron.fsdp.module_access.trainability import Trainability


class KnownParameters:
    """The parameters that were sharded: ``root``, the wrapper, has no others afterwards."""

    # Otherwise what code adds would be used and never trained, and what it removes would still be
    # among `parameters()`. Other objects may come and go: buffers, and modules around the same
    # parameters (torch.compile).

    def __init__(self, root: nn.Module, names: dict[nn.Parameter, str]):
        self._root = root
        self._names = names
        # Of every module in `root` the parameters and the children, as live views; all that was in
        # them when they were looked at, and the ids of that. A forward compares ids, in C.
        self._views: list[Iterable[object]] = []
        self._seen: list[object] = []
        self._ids: list[int] = []

    def check(self) -> None:
        """Raise ``RuntimeError`` if parameters have appeared or vanished since sharding."""
        if self._views and list(map(id, chain.from_iterable(self._views))) == self._ids:
            return
        # Read as plain dicts, which do not show the sharded parameters instead.
        modules = dict(self._root.named_modules())
        names: dict[nn.Parameter, str] = {}
        for path, module in modules.items():
            for name, parameter in dict.items(module._parameters):
                if parameter is not None and not isinstance(parameter, nn.Parameter):
                    return  # torch.func.functional_call has put it there for one call
                if parameter is not None:
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
        stores = chain.from_iterable((one._parameters, one._modules) for one in modules.values())
        self._views = list(map(dict.values, stores))
        self._seen = list(chain.from_iterable(self._views))
        self._ids = list(map(id, self._seen))


class UnitAccess:
    """Follows what code has frozen before units are used, and what they have written afterwards."""

    # Forwards and methods compute with compute parameters, and may write to them in place. Where
    # compute weights are not the main weights, a write would last only until they are gathered or
    # cast again, so it is copied into the main weights when the call ends. Nothing is communicated:
    # all ranks write the same, and each takes its own part. Version counters tell that a parameter
    # was written to. Those of `parameter.data` are its own: such writes are not found.

    def __init__(self, units: Sequence[Unit], trainability: Trainability, known: KnownParameters):
        self._trainability = trainability
        self._known = known
        # The version counters of each unit's parameters that are not the main weights.
        own = {unit: list(filter(_takes_writes, unit.groups)) for unit in units}
        self._groups = {unit: groups for unit, groups in own.items() if groups}
        self._versions = {unit: self._read(unit) for unit in self._groups}

    def before_call(self) -> None:
        """Follow what code has frozen; refuse parameters that it has added or removed."""
        if not in_backward():
            self._known.check()
            self._trainability.follow()

    def after_use(self, unit: Unit) -> None:
        """Copy what a call has written to compute weights into the main weights."""
        before = self._versions.get(unit)
        if before is None or before == (now := self._read(unit)):
            return
        self._versions[unit] = now
        parameters = chain.from_iterable(group.parameters for group in self._groups[unit])
        written = set(compress(parameters, map(ne, before, now)))
        for group in self._groups[unit]:
            # Not after an exception, and not between a step and its weights that are installed
            # later: what a forward writes then is lost.
            if group.is_readable and group.main_state is not MainState.HELD:
                for index, parameter in enumerate(group.parameters):
                    if parameter in written:
                        take_written(group, index)

    def _read(self, unit: Unit) -> list[int]:
        return list(chain.from_iterable(group.guard.versions for group in self._groups[unit]))


def _takes_writes(group: ParamGroup) -> bool:
    """Return True if writes must be copied: compute weights are values, and not the main ones."""
    is_main = group.main_is_compute and group.compute_shard._base is group.compute.flat
    return group.compute.layout is group.layout and not is_main


@torch.no_grad()
def take_written(group: ParamGroup, index: int) -> None:
    """Copy the values of compute parameter ``index`` into what compute weights are made from."""
    partition, slot = group.partition, group.layout.positions[index]
    size = group.compute_shard.numel()
    start = partition.inner_rank * size
    # Positions in this rank's shard: a parameter at [10, 18) and the shard [8, 16) have [2, 8).
    low, high = max(slot.start - start, 0), min(slot.stop - start, size)
    if low < high:
        gathered = group.compute.flat[start + low : start + high]
        group.compute_shard[low:high] = gathered
    if not group.main_is_compute:
        # What is the same in the dtype of the module keeps its bits in the main weights.
        own = group.layout.owned(index, group.rank)
        main = group.main_view(index).view(-1)
        written = group.compute.views[index].reshape(-1)[own.start : own.stop].to(main.device)
        main.copy_(torch.where(written == main.to(written.dtype), main, written.to(main.dtype)))


# ---- unsharding by hand


class UnitHandle(UnshardHandle):
    """The all-gathers of units, which have started, to wait for."""

    def __init__(self, units: Sequence[Unit], prefetcher: Prefetcher):
        self._units = units
        for unit in units:
            prefetcher.used(unit)
            if not unit.blockers:  # otherwise the call gathers, when its memory slot is free
                unit.unshard()

    def wait(self) -> None:
        """Make compute wait for the all-gathers that have started."""
        for unit in self._units:
            unit.wait_for_unshard()


def units_of(units: Sequence[Unit], module: nn.Module | None) -> list[Unit]:
    """Return the unit of a module, None: the root's, and those whose parameters it shares."""
    where = "outside of the model"
    for unit in units:
        if module is None or module in unit.modules:
            return [unit, *unit.shared]
        if unit.module is not None and module in unit.module.modules():
            where = f"inside of the unit {unit.shown_name!r}: pass that, or None for the root"
    raise ValueError(f"module expects a unit but got a {type(module).__name__} {where}")
