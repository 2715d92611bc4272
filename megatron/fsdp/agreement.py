# SPDX-License-Identifier: Apache-2.0
"""Checks that all ranks shard the same model with the same settings, and freeze the same of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from itertools import chain, compress

import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.engine.mesh import Mesh
from megatron.fsdp.engine.unit import Unit
from megatron.fsdp.engine.unit_choice import belongs_to_expert
from megatron.fsdp.module_access.trainability import Trainability
from megatron.fsdp.problems import refuse_differences
from megatron.fsdp.settings import Settings

_num_models: Counter[tuple[int, ...]] = Counter()  # that were sharded over the same ranks


def check_agreement(
    settings: Settings,
    parameters_of: dict[Unit, dict[str, nn.Parameter]],
    buffers: dict[str, torch.Tensor],
) -> None:
    """Raise ``ValueError`` on every rank if ranks shard other models or by other settings."""
    # Ranks that differ would wait for each other forever.
    values: dict[str, object] = {"Settings.precision": settings.precision}
    for setting in (settings.strategy, settings.gradients, settings.overlap, settings.memory):
        for field in fields(setting):
            if field.name not in ("device", "ignored"):
                name = f"{type(setting).__name__}.{field.name}"
                values[name] = getattr(setting, field.name)
    values["the list of units"] = ", ".join(unit.name or "the model" for unit in parameters_of)
    parameters = list(chain.from_iterable(of.items() for of in parameters_of.values()))
    for number, (name, parameter) in enumerate(parameters):
        trainable = "trainable" if parameter.requires_grad else "frozen"
        on_meta = " on meta" if parameter.is_meta else ""
        values[f"parameter {number}"] = (
            f"{name} {tuple(parameter.shape)} {parameter.dtype} {trainable}{on_meta}"
        )
    values["the number of parameters"] = len(parameters)
    for number, (name, buffer) in enumerate(buffers.items()):
        values[f"buffer {number}"] = f"{name} {tuple(buffer.shape)} {buffer.dtype}"
    values["the number of buffers"] = len(buffers)
    refuse_differences(values, data_groups(settings.own_mesh))


def data_groups(mesh: Mesh) -> list[dist.ProcessGroup]:
    """List groups that together reach the ranks which share the parameters of this one."""
    axes = mesh.dense
    return [axis.get_group() for axis in (axes.inner, axes.outer) if axis is not None]


def compared_settings(
    optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]], which: str
) -> dict[str, object]:
    """Return the settings of an optimizer that must be equal on all ranks, by their names.

    Otherwise each rank would update its shards in its own way. ``names`` are those of the
    parameters of each param group.
    """
    values: dict[str, object] = {
        f"the class of {which}": type(optimizer).__name__,
        f"the number of param groups of {which}": len(optimizer.param_groups),
    }
    settings = getattr(optimizer, "defaults", {})  # optimizers of other packages may have none
    for number, (group, own) in enumerate(zip(optimizer.param_groups, names)):
        of_group = f"of param group {number} of {which}"
        values[f"the list of parameters {of_group}"] = ", ".join(own)
        for name in settings.keys() & group.keys():  # others are notes of the program
            value = group[name]
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if value is None or isinstance(value, bool | int | float | str | tuple):
                values[f"{name} {of_group}"] = value
    return values


def names_on_all_ranks(
    optimizer: torch.optim.Optimizer, module: nn.Module, settings: Settings
) -> list[list[str]]:
    """Return the names of each group's parameters, without experts, which other ranks may lack."""
    has_mesh = settings.mesh is not None and settings.own_mesh.expert is not None
    name_of = {
        parameter: name
        for name, parameter in module.named_parameters()
        if not (has_mesh and belongs_to_expert(name, parameter))
    }
    groups = [group["params"] for group in optimizer.param_groups]
    return [[name_of[each] for each in own if each in name_of] for own in groups]


class FreezingAgreement:
    """Checks that ranks which freeze or thaw parameters do so alike."""

    # Ranks that differ would reduce different units, and add up gradients of different parameters
    # or wait for each other. Only ranks whose parameters have changed can compare them, so they use
    # the store of the process group, which is no collective. What was agreed on once is not
    # compared again.

    def __init__(self, trainability: Trainability, mesh: Mesh):
        self.trainability = trainability
        # Experts that have a mesh of their own are not compared: other ranks have other ones.
        self._is_compared = [
            mesh.expert is None or not belongs_to_expert(name, parameter)
            for name, parameter in zip(trainability.names, trainability.parameters)
        ]
        axes = mesh.dense  # whose inner axis is compared if the mesh cannot tell all data ranks
        group = axes.inner.get_group() if axes.data_group is None else axes.data_group
        self._ranks = dist.get_process_group_ranks(group)
        self._num_seen = trainability.num_changes
        self._agreed = {hash(self._flags())}
        self._num_checks = 0
        number = _num_models[tuple(self._ranks)]
        _num_models[tuple(self._ranks)] += 1
        self._prefix = f"fsdp_frozen/{'_'.join(map(str, self._ranks))}/{number}"

    def check(self) -> None:
        """Compare what is frozen, before a backward, if that has changed on this rank.

        Ranks that differ raise ``RuntimeError``; if others have changed nothing, after a timeout.
        """
        if self._num_seen == self.trainability.num_changes:
            return
        self._num_seen = self.trainability.num_changes
        flags = self._flags()
        # A rank that trains nothing reduces nothing: it may be alone, with a gradient of inputs.
        if hash(flags) in self._agreed or not any(flags) or len(self._ranks) == 1:
            return
        different = self._exchange("".join("01"[flag] for flag in flags))
        if different:
            raise RuntimeError(
                "all ranks must freeze and thaw the same parameters, before the same backward:"
                f" {different}"
            )
        self._agreed.add(hash(flags))

    def _flags(self) -> tuple[bool, ...]:
        return tuple(compress(self.trainability.flags, self._is_compared))

    def _exchange(self, flags: str) -> str:
        """Wait until all ranks have changed their flags, and return a difference; "" if none."""
        store = dist.distributed_c10d._get_default_store()
        rank = dist.get_rank()
        self._num_checks += 1
        key = f"{self._prefix}/{self._num_checks}"
        own = f"{rank} {flags}"
        first_rank, first = store.compare_set(f"{key}/first", "", own).decode().split()
        if first != flags:
            index = next(i for i, (one, other) in enumerate(zip(flags, first)) if one != other)
            frozen, trained = (rank, first_rank) if flags[index] == "0" else (first_rank, rank)
            name = list(compress(self.trainability.names, self._is_compared))[index]
            text = f"{name} is frozen on rank {frozen} and trained on rank {trained}"
            store.set(f"{key}/different", text)
        if store.add(f"{key}/number", 1) == len(self._ranks):
            is_different = store.check([f"{key}/different"])
            store.set(f"{key}/end", store.get(f"{key}/different").decode() if is_different else "")
        try:
            return store.get(f"{key}/end").decode()
        except RuntimeError:
            return f"rank {rank} has changed some, and not all of ranks {self._ranks} have"
