# SPDX-License-Identifier: Apache-2.0
"""The construction of a sharded model: its parts, in the order in which they need each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.agreement import FreezingAgreement, check_agreement
from megatron.fsdp.backends.gloo_messages import GlooMessages
from megatron.fsdp.backends.memory_slots import EngineSlots, NcclMemory, allocate_slots
from megatron.fsdp.dtensor.gradient import NormGroup
from megatron.fsdp.dtensor.sharded_param import ParameterMesh, ShardedParam, link
from megatron.fsdp.engine.buffer import Storage
from megatron.fsdp.engine.collectives import Communicator
from megatron.fsdp.engine.device import streams_for
from megatron.fsdp.engine.hooks import UnitHooks
from megatron.fsdp.engine.layout import PREFER_ROWS, ROWS
from megatron.fsdp.engine.mesh import Axes
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.schedule import Microbatches, Schedule
from megatron.fsdp.engine.unit import Unit
from megatron.fsdp.engine.unit_choice import (
    assign_parameters,
    find_units,
    is_expert_parameter,
    merge_small_units,
)
from megatron.fsdp.gradient_sync import GradientSync
from megatron.fsdp.meta_initialisation import Initialiser, initialisation_parts, materialize
from megatron.fsdp.module_access.casts import cast_at_units
from megatron.fsdp.module_access.shown_parameters import ShownParameters
from megatron.fsdp.module_access.trainability import Trainability
from megatron.fsdp.module_access.unit_access import UnitAccess
from megatron.fsdp.settings import ComputePrecision, Settings

ShardedParams = dict[nn.Parameter, ShardedParam]
"""Sharded parameters by the module's own parameters."""


@dataclass(frozen=True)
class Parts:
    """The parts of a sharded model.

    Args:
        units: modules whose parameters are all-gathered and freed together, the root first.
        slots: memory slots; None: buffers have storage of their own.
        sharded_params: a DTensor over the main weights for every parameter of the module.
        by_name: sharded parameters in the module's order, with all names of tied ones.
        trainability: which parameters are frozen.
        microbatches: what the user says about backward passes.
        gradients: of all parameters, between backward and the optimizer.
        schedule: when units are gathered, freed and reduced.
        hooks: on modules and tensors, which report to the schedule.
    """

    units: list[Unit]
    slots: EngineSlots | None
    sharded_params: ShardedParams
    by_name: dict[str, ShardedParam]
    trainability: Trainability
    microbatches: Microbatches
    gradients: GradientSync
    schedule: Schedule
    hooks: UnitHooks


def build(
    module: nn.Module,
    settings: Settings,
    initialiser: Initialiser | None,
    report_nonfinite: Callable[[list[ShardedParam]], None],
    after_backward: Callable[[], None],
) -> Parts:
    """Shard the parameters of a module, and make everything that drives them; a collective.

    Args:
        module: its parameters become views of flat buffers.
        settings: valid ones.
        initialiser: initialises parameters on the meta device; None: there are none.
        report_nonfinite: called with the parameters whose gradient is NaN or Inf on this rank.
        after_backward: called when a backward pass has ended.

    Raises:
        ValueError: if ranks have different parameters or settings, on every rank.
    """
    _move(module, settings.device)
    named = list(module.named_parameters(remove_duplicate=False))
    units, parameters_of = _choose_units(module, settings)
    check_agreement(settings, parameters_of)

    slots = make_memory_slots(settings)
    sharder = Sharder(settings, slots)
    sharded_params = sharder.shard(parameters_of)
    if initialiser is not None:
        sharder.initialise(units, sharded_params, initialiser)
    by_name = {name: sharded_params[parameter] for name, parameter in named}
    for sharded_param in sharded_params.values():
        _give_attributes(sharded_param)

    sharded = _parameters_of_optimizer(sharded_params)
    trainability = Trainability(units, sharded)
    find_unused = settings.gradients.find_unused
    microbatches = Microbatches(settings.gradients.sync_each_microbatch)
    schedule = Schedule(
        units, settings.level, settings.overlap, microbatches, reduces_late=find_unused
    )
    gradients = GradientSync(
        sharded_params.values(),
        schedule,
        FreezingAgreement(trainability, settings.own_mesh),
        use_decoupled_grad=settings.gradients.are_decoupled,
        report_nonfinite=report_nonfinite if settings.gradients.report_nonfinite else None,
        groups_of_use=settings.own_mesh.all_groups() if find_unused else None,
        after_pass=after_backward,
    )
    hooks = UnitHooks(schedule, gradients, UnitAccess(units, trainability))
    ShownParameters(hooks, sharded, trainability, module)
    precision = settings.precision
    if isinstance(precision, ComputePrecision):
        hooks.handles |= cast_at_units(units, precision.input_dtype, precision.output_dtype)
    return Parts(
        units,
        slots,
        sharded_params,
        by_name,
        trainability,
        microbatches,
        gradients,
        schedule,
        hooks,
    )


def _choose_units(
    module: nn.Module, settings: Settings
) -> tuple[list[Unit], dict[Unit, dict[str, nn.Parameter]]]:
    """Return the units of a module, the root first, and the parameters of each by name."""
    strategy = settings.strategy
    units = find_units(module, settings.units or (), strategy.one_unit, strategy.fine_grained)
    parameters_of = assign_parameters(units)
    if not strategy.fine_grained:
        merge_small_units(units, parameters_of, settings.overlap.prefetch_bytes)
    return units, parameters_of


class GroupKey(NamedTuple):
    """The properties that all parameters of a group share."""

    dtype: torch.dtype
    trainable: bool
    is_expert: bool
    alone: str | None  # name of a parameter that must be the only one of its group


def names_of_groups(
    parameters: dict[str, nn.Parameter], has_expert_mesh: bool
) -> dict[GroupKey, list[str]]:
    """Return the names of the parameters of each group.

    Args:
        parameters: of a unit, by name.
        has_expert_mesh: expert parameters are sharded over other ranks than the rest.
    """
    names: dict[GroupKey, list[str]] = defaultdict(list)
    for name, parameter in parameters.items():
        key = GroupKey(
            parameter.dtype,
            parameter.requires_grad,
            has_expert_mesh and is_expert_parameter(name, parameter),
            # A weight that pipeline stages share must be sharded alike on all of them, whatever
            # else is in their units.
            name if getattr(parameter, "shared_embedding", False) else None,
        )
        names[key].append(name)
    return names


class Sharder:
    """Shards the parameters of units over the ranks of the mesh.

    Args:
        settings: the mesh, the strategies and the precision.
        slots: the memory slots of all units; None: buffers have storage of their own.
    """

    def __init__(self, settings: Settings, slots: EngineSlots | None = None):
        self._settings = settings
        self._slots = slots
        self._streams = streams_for(settings.device)
        # Of dense parameters (False) and of expert parameters (True).
        self._communicators: dict[bool, Communicator] = {}
        self._parameter_meshes: dict[bool, ParameterMesh] = {}

    def shard(self, parameters_of: dict[Unit, dict[str, nn.Parameter]]) -> ShardedParams:
        """Create the groups of every unit, and move every parameter into the buffer of its group.

        The values of a parameter move into the buffer as soon as the buffer exists, so a module on
        the device of the shards never needs twice its memory. Parameters on the meta device are
        filled by :meth:`initialise`, unless the shards are there too: then a run is simulated.

        Args:
            parameters_of: the parameters of each unit, by name.

        Returns:
            A sharded parameter for each of them.
        """
        sharded_params: ShardedParams = {}
        has_expert_mesh = self._settings.own_mesh.expert is not None
        for unit, parameters in parameters_of.items():
            for key, names in names_of_groups(parameters, has_expert_mesh).items():
                members = {name: parameters[name] for name in names}
                group = self._make_group(key, members, unit.shown_name)
                unit.groups.append(group)
                parameter_mesh = self._parameter_mesh(key.is_expert)
                for index, parameter in enumerate(group.parameters):
                    sharded_params[parameter] = ShardedParam(group, index, parameter_mesh)
                    if not parameter.is_meta or self._settings.device.type == "meta":
                        group.shard_parameter(index)
        return sharded_params

    def initialise(
        self, units: list[Unit], sharded_params: ShardedParams, initialiser: Initialiser
    ) -> None:
        """Initialise the parameters on the meta device, and shard them.

        Args:
            units: all units, the root first.
            sharded_params: the sharded parameters of all parameters.
            initialiser: gives them their first values.
        """
        root = units[0].module
        assert root is not None  # only units of shared parameters have none
        modules = [unit.module for unit in units if not unit.is_automatic]
        unit_modules = [each for each in modules if each is not None]
        for part in initialisation_parts(root, unit_modules, initialiser.kept_together()):
            on_meta = _meta_parameters(part)
            materialize(part, self._settings.device, initialiser)
            for parameter in on_meta:
                sharded_param = sharded_params[parameter]
                sharded_param.group.shard_parameter(sharded_param.index)

    def _make_group(
        self, key: GroupKey, parameters: dict[str, nn.Parameter], unit_name: str
    ) -> ParamGroup:
        settings = self._settings
        return ParamGroup(
            list(parameters),
            list(parameters.values()),
            settings.level,
            settings.shards_outer,
            settings.precision.resolve(key.dtype, key.trainable),
            self._communicator(key.is_expert),
            settings.device,
            unit_name,
            self._slots.weights if self._slots else Storage(),
            self._slots.gradients if self._slots else Storage(),
            ROWS if settings.strategy.boundaries == "rows" else PREFER_ROWS,
        )

    def _communicator(self, is_expert: bool) -> Communicator:
        if is_expert not in self._communicators:
            settings = self._settings
            axes = settings.own_mesh.axes(is_expert)
            self._communicators[is_expert] = Communicator(
                inner=axes.inner.get_group(),
                outer=axes.outer.get_group() if axes.outer is not None else None,
                all_gather_group=axes.all_gather_group,
                # Expert gradients are summed over fewer ranks, but the loss is the mean over all
                # data ranks.
                divisor=1
                if settings.gradients.sum_only
                else settings.own_mesh.dense.num_data_ranks,
                average_in_collective=settings.gradients.average_in_collective,
                streams=self._streams,
                transport=GlooMessages(),
            )
        return self._communicators[is_expert]

    def _parameter_mesh(self, is_expert: bool) -> ParameterMesh:
        if is_expert not in self._parameter_meshes:
            axes = self._settings.own_mesh.axes(is_expert)
            mesh = axes.dtensor_mesh(self._settings.shards_outer)
            norm_groups = self._expert_norm_groups(axes) if is_expert else self._norm_groups(axes)
            self._parameter_meshes[is_expert] = ParameterMesh(axes, mesh, *norm_groups)
        return self._parameter_meshes[is_expert]

    def _norm_groups(self, axes: Axes) -> tuple[NormGroup, NormGroup]:
        """Return the norm groups of dense parameters: tensor-parallel slices, and copies."""
        groups = self._data_groups() if self._settings.level.shards_optimizer else []
        tensor = [axes.tensor.get_group()] if axes.tensor is not None else []
        return NormGroup((*groups, *tensor)), NormGroup(tuple(groups))

    def _expert_norm_groups(self, axes: Axes) -> tuple[NormGroup, NormGroup]:
        """Return the norm groups of expert parameters: tensor-parallel slices, and copies.

        Other ranks own other experts of the same name; the norm is over all of them.
        """
        dense = self._settings.own_mesh.dense
        groups = self._data_groups()
        if dense.tensor is not None:
            groups.append(dense.tensor.get_group())
        copies = 1 if self._settings.level.shards_optimizer else axes.inner.size()
        tensor_copies = axes.tensor.size() if axes.tensor is not None else 1
        return NormGroup(tuple(groups), copies), NormGroup(tuple(groups), copies * tensor_copies)

    def _data_groups(self) -> list[dist.ProcessGroup]:
        """Return groups that reach all ranks with other shards of a dense parameter.

        It is one group if the mesh can provide it, so that norms cost one collective.
        """
        dense = self._settings.own_mesh.dense
        if not self._settings.shards_outer or dense.outer is None:
            return [dense.inner.get_group()]
        if dense.data_group is not None:
            return [dense.data_group]
        return [dense.inner.get_group(), dense.outer.get_group()]


def make_memory_slots(settings: Settings) -> EngineSlots | None:
    """Return the memory slots of a model; None if the settings do not ask for them."""
    memory, device = settings.memory, settings.device
    if not memory.uses_slots:
        return None
    if not memory.registers:
        allocate = partial(allocate_slots, device)
        return EngineSlots(memory, allocate, allocate)
    meshes = (settings.own_mesh.dense, settings.own_mesh.expert or settings.own_mesh.dense)
    is_symmetric = not memory.registers_locally
    gathering = NcclMemory([axes.all_gather_group for axes in meshes], device, is_symmetric)
    reducing = NcclMemory([axes.inner.get_group() for axes in meshes], device, is_symmetric)
    return EngineSlots(memory, gathering.allocate, reducing.allocate)


def _meta_parameters(modules: list[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters on the meta device that ``modules`` own directly, each once."""
    found: dict[nn.Parameter, None] = {}
    for module in modules:
        for parameter in module.parameters(recurse=False):
            if parameter.is_meta:
                found[parameter] = None
    return list(found)


def _move(module: nn.Module, device: torch.device) -> None:
    """Move a module to ``device`` in place; tensors on meta are allocated there later."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_meta else tensor.to(device)

    module._apply(move)


def _give_attributes(sharded_param: ShardedParam) -> None:
    """Give a sharded parameter what user code has set on the module's parameter."""
    compute = sharded_param.compute
    for name, value in vars(compute).items():
        if not (isinstance(compute, DTensor) and name in ("_local_tensor", "_spec")):
            setattr(sharded_param.parameter, name, value)
    link(sharded_param.parameter, sharded_param)


def _parameters_of_optimizer(sharded_params: ShardedParams) -> dict[nn.Parameter, nn.Parameter]:
    """Return the parameter that the optimizer steps for each of the module's own parameters."""
    parameters: dict[nn.Parameter, nn.Parameter] = {}
    for compute, sharded_param in sharded_params.items():
        parameter = sharded_param.parameter
        assert isinstance(parameter, nn.Parameter)
        parameters[compute] = parameter
    return parameters
