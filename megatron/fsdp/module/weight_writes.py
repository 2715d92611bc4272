# SPDX-License-Identifier: Apache-2.0
"""Writes of forwards and methods to compute weights, which are copied into the main weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.fsdp.engine.device import in_backward
from megatron.fsdp.engine.loops_in_c import concatenated
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.states import MainState
from megatron.fsdp.engine.unit import Unit
from megatron.fsdp.module.known_parameters import KnownParameters
from megatron.fsdp.module.trainability import Trainability


class WeightWrites:
    """Copies what forwards write to compute weights in place into the main weights.

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

    def __init__(
        self,
        units: Sequence[Unit],
        trainability: Trainability,
        known: KnownParameters,
    ):
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
        """Sync changed flags; refuse parameters that code has added or removed."""
        if not in_backward():
            self._known.check()
            self._trainability.sync_requires_grad()

    def after_use(self, unit: Unit) -> None:
        """Copy writes of a call to compute weights into the main weights."""
        before = self._versions.get(unit)
        if before is None:
            return
        now = self._read(unit)
        if before == now:
            return
        self._versions[unit] = now
        groups = self._groups[unit]
        parameters = concatenated([group.parameters for group in groups])
        written = set()
        for parameter, old, new in zip(parameters, before, now):
            if old != new:
                written.add(parameter)
        for group in groups:
            # Not after an exception, and not between a step and its weights that are installed
            # later: writes of a forward are lost then.
            if not group.is_readable or group.main_state is MainState.HELD:
                continue
            for index, parameter in enumerate(group.parameters):
                if parameter in written:
                    take_written(group, index)

    def _read(self, unit: Unit) -> list[int]:
        return concatenated([group.guard.versions for group in self._groups[unit]])


def _takes_writes(group: ParamGroup) -> bool:
    """Return True if writes must be copied: compute weights are values, but not the main ones."""
    if group.compute.layout is not group.layout:
        return False
    is_slice = group.compute_shard._base is group.compute.flat
    return not (group.main_is_compute and is_slice)


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
    if group.main_is_compute:
        return
    # Main weights that are the same in the dtype of the module keep their precision.
    owned = group.layout.owned(index, group.rank)
    main = group.main_view(index).view(-1)
    compute = group.compute.views[index].reshape(-1)
    written = compute[owned.start : owned.stop].to(main.device)
    is_same = written == main.to(written.dtype)
    values = torch.where(is_same, main, written.to(main.dtype))
    main.copy_(values)
