# SPDX-License-Identifier: Apache-2.0
"""Checks that all ranks shard the same model with the same settings, and freeze the same of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.config.problems import refuse_differences
from megatron.fsdp.config.settings import Settings
from megatron.fsdp.engine.mesh import Mesh
from megatron.fsdp.engine.policy import ParameterKind
from megatron.fsdp.module.trainability import Trainability
from megatron.fsdp.module.unit_choice import (
    ParameterKinds,
    ParametersOfUnits,
    belongs_to_expert,
)

# Types of an optimizer's settings that ranks compare.
_COMPARED_TYPES = (bool, int, float, str, tuple, type(None))

_num_models: Counter[tuple[int, ...]] = Counter()  # models that these ranks have sharded


def check_agreement(
    settings: Settings,
    parameters_of: ParametersOfUnits,
    kinds: ParameterKinds,
    buffers: dict[str, torch.Tensor],
) -> None:
    """Check that all ranks shard the same model by the same settings; a collective.

    Args:
        settings: the settings of this rank.
        parameters_of: parameters of every unit by their names.
        kinds: the kinds of all of them by their names.
        buffers: buffers of the model by their names.

    Raises:
        ValueError: on every rank, naming what differs.
    """
    # Ranks that differ would wait for each other forever.
    values: dict[str, object] = {"Settings.precision": settings.precision}
    compared = (
        settings.strategy,
        settings.gradients,
        settings.overlap,
        settings.memory,
    )
    for setting in compared:
        for field in fields(setting):
            if field.name not in ("device", "ignored"):
                name = f"{type(setting).__name__}.{field.name}"
                values[name] = getattr(setting, field.name)
    unit_names = [unit.name or "the model" for unit in parameters_of]
    values["the list of units"] = ", ".join(unit_names)
    num_parameters = 0
    for parameters in parameters_of.values():
        for name, parameter in parameters.items():
            description = _description(parameter, kinds[name])
            values[f"parameter {num_parameters}"] = f"{name} {description}"
            num_parameters += 1
    values["the number of parameters"] = num_parameters
    for number, (name, buffer) in enumerate(buffers.items()):
        values[f"buffer {number}"] = f"{name} {tuple(buffer.shape)} {buffer.dtype}"
    values["the number of buffers"] = len(buffers)
    refuse_differences(values, data_groups(settings.checked_mesh))


def _description(parameter: nn.Parameter, kind: ParameterKind) -> str:
    text = f"{tuple(parameter.shape)} {parameter.dtype}"
    if parameter.requires_grad:
        text += " trainable"
    else:
        text += " frozen"
    if parameter.is_meta:
        text += " on meta"
    if kind is not ParameterKind.DENSE:
        text += f" {kind.value}"
    return text


def data_groups(mesh: Mesh) -> list[dist.ProcessGroup]:
    """Return groups that together reach the ranks which share the parameters of this one."""
    groups = [mesh.dense.inner.get_group()]
    if mesh.dense.outer is not None:
        groups.append(mesh.dense.outer.get_group())
    return groups


def compared_settings(
    optimizer: torch.optim.Optimizer,
    names: Sequence[Sequence[str]],
    which: str,
) -> dict[str, object]:
    """Return the settings of an optimizer that must be equal on all ranks, by their names.

    Otherwise each rank would update its shards in its own way.

    Args:
        optimizer: any optimizer.
        names: names of the parameters of each of its param groups.
        which: name of the optimizer for messages, such as "the optimizer".
    """
    values: dict[str, object] = {
        f"the class of {which}": type(optimizer).__name__,
        f"the number of param groups of {which}": len(optimizer.param_groups),
    }
    settings = getattr(optimizer, "defaults", {})  # optimizers of other packages may have none
    for number, group in enumerate(optimizer.param_groups):
        of_group = f"of param group {number} of {which}"
        values[f"the list of parameters {of_group}"] = ", ".join(names[number])
        for name in settings.keys() & group.keys():  # others are notes of the program
            value = group[name]
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, _COMPARED_TYPES):
                values[f"{name} {of_group}"] = value
    return values


def names_on_all_ranks(
    optimizer: torch.optim.Optimizer,
    module: nn.Module,
    settings: Settings,
) -> list[list[str]]:
    """Return the names of each group's parameters, without experts, which other ranks may lack.

    Args:
        optimizer: an optimizer over parameters of the module.
        module: the module, before it is sharded.
        settings: with the mesh of experts, if they have one.
    """
    mesh = settings.mesh
    has_expert_mesh = mesh is not None and mesh.expert is not None
    name_of: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters():
        if has_expert_mesh and belongs_to_expert(name, parameter):
            continue
        name_of[parameter] = name
    names = []
    for group in optimizer.param_groups:
        names_of_group = []
        for parameter in group["params"]:
            if parameter in name_of:
                names_of_group.append(name_of[parameter])
        names.append(names_of_group)
    return names


class FreezingAgreement:
    """Checks that ranks which freeze or unfreeze parameters do so alike.

    Args:
        trainability: the parameters of the model, and which of them are frozen.
        mesh: the mesh of the model.
    """

    # Ranks that differ would reduce different units, and add up gradients of different parameters
    # or wait for each other. Only ranks whose parameters have changed can compare them, so they use
    # the store of the process group, which is no collective. What was agreed on once is not
    # compared again.

    def __init__(self, trainability: Trainability, mesh: Mesh):
        self.trainability = trainability
        # Experts that have a mesh of their own are not compared: other ranks have other ones.
        self._compared: list[int] = []  # indices of parameters
        named = zip(trainability.names, trainability.parameters)
        for index, (name, parameter) in enumerate(named):
            if mesh.expert is None or not belongs_to_expert(name, parameter):
                self._compared.append(index)
        group = mesh.dense.data_group
        if group is None:  # the mesh cannot provide all data ranks
            group = mesh.dense.inner.get_group()
        self._ranks = dist.get_process_group_ranks(group)
        self._num_seen = trainability.num_changes
        self._agreed = {hash(self._flags())}
        self._num_checks = 0
        number = _num_models[tuple(self._ranks)]
        _num_models[tuple(self._ranks)] += 1
        ranks = "_".join(str(rank) for rank in self._ranks)
        self._prefix = f"fsdp_frozen/{ranks}/{number}"

    def check(self) -> None:
        """Compare what is frozen, before a backward, if that has changed on this rank.

        Ranks that differ raise ``RuntimeError``; if others have changed nothing, after a timeout.
        """
        if self._num_seen == self.trainability.num_changes:
            return
        self._num_seen = self.trainability.num_changes
        flags = self._flags()
        # A rank that trains nothing reduces nothing: it may be alone, with a gradient of inputs.
        if not any(flags) or len(self._ranks) == 1:
            return
        if hash(flags) in self._agreed:
            return
        digits = ["01"[flag] for flag in flags]
        different = self._exchange("".join(digits))
        if different:
            raise RuntimeError(
                "all ranks must freeze and unfreeze the same parameters, before the same backward:"
                f" {different}"
            )
        self._agreed.add(hash(flags))

    def _flags(self) -> tuple[bool, ...]:
        flags = self.trainability.flags
        return tuple(flags[index] for index in self._compared)

    def _exchange(self, flags: str) -> str:
        """Wait until all ranks have changed their flags, and return a difference; "" if none."""
        store = dist.distributed_c10d._get_default_store()
        rank = dist.get_rank()
        self._num_checks += 1
        key = f"{self._prefix}/{self._num_checks}"
        first = store.compare_set(f"{key}/first", "", f"{rank} {flags}").decode()
        first_rank, first_flags = first.split()
        if first_flags != flags:
            position = 0  # position of the first difference
            while flags[position] == first_flags[position]:
                position += 1
            name = self.trainability.names[self._compared[position]]
            frozen: int | str = first_rank
            trained: int | str = rank
            if flags[position] == "0":
                frozen, trained = trained, frozen
            text = f"{name} is frozen on rank {frozen} and trained on rank {trained}"
            store.set(f"{key}/different", text)
        if store.add(f"{key}/number", 1) == len(self._ranks):
            difference = ""
            if store.check([f"{key}/different"]):
                difference = store.get(f"{key}/different").decode()
            store.set(f"{key}/end", difference)
        try:
            return store.get(f"{key}/end").decode()
        except RuntimeError:
            return f"rank {rank} has changed some, and not all of ranks {self._ranks} have"
