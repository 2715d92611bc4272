# SPDX-License-Identifier: Apache-2.0
"""The sharding of the parameters of a module: units, groups, flat buffers and memory slots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.backends.gloo_messages import GlooMessages
from megatron.fsdp.backends.host_memory import ShardMemoryChoice
from megatron.fsdp.backends.memory_slots import EngineSlots
from megatron.fsdp.backends.slot_memory import NcclMemory, allocate_slots
from megatron.fsdp.config.meta_initialisation import (
    Initialiser,
    initialisation_parts,
    materialize,
)
from megatron.fsdp.config.settings import Settings, resolve_unit_modules
from megatron.fsdp.config.warnings_once import warn
from megatron.fsdp.dtensor.sharded_param import (
    ParameterMesh,
    ShardedParam,
    link,
)
from megatron.fsdp.engine.buffer import Storage
from megatron.fsdp.engine.collectives import Communicator, Transport, agree
from megatron.fsdp.engine.device import Streams, streams_for
from megatron.fsdp.engine.mesh import Axes, NormGroup
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.policy import ParameterKind
from megatron.fsdp.engine.tensor_parallel import local_tensor, set_local_tensor
from megatron.fsdp.engine.unit import Unit
from megatron.fsdp.module.agreement import check_agreement
from megatron.fsdp.module.own_names import own_name
from megatron.fsdp.module.unit_choice import (
    NamedParameters,
    ParameterKinds,
    ParametersOfUnits,
    assign_parameters,
    belongs_to_expert,
    find_units,
    kinds_of,
    merge_small_units,
)
from megatron.fsdp.quantized import stored_forms
from megatron.fsdp.quantized.tensor_subclasses import move, users_attributes
from megatron.fsdp.quantized.transformer_engine_weights import replace_meta_weights

ShardedParams = dict[nn.Parameter, ShardedParam]  # by the module's own parameters


def shard_parameters(
    module: nn.Module,
    settings: Settings,
    initialiser: Initialiser | None,
    sharded_before: Set[nn.Parameter] = frozenset(),
    streams: Streams | None = None,
) -> tuple[list[Unit], ShardedParams, EngineSlots | None]:
    """Move a module to its device and shard its parameters, as views of buffers; a collective.

    Args:
        module: the module, of which parameters become views of flat buffers.
        settings: its settings, which were checked.
        initialiser: gives parameters on the meta device their first values, if any.
        sharded_before: parameters of modules inside that an earlier call has sharded, and the
            compute parameters of these. They are left as they are.
        streams: the streams of collectives. None: streams of this call.

    Returns:
        The units, the root first; the sharded parameters by their compute parameters; the memory
        slots, if there are any.
    """
    ignored = settings.strategy.ignored | sharded_before
    move(module, settings.device, ignored)  # tensors on meta are allocated later
    units, parameters_of = _find_units(module, settings, ignored)
    named: NamedParameters = {}
    for parameters in parameters_of.values():
        named.update(parameters)
    kinds = kinds_of(
        module,
        named,
        has_expert_mesh=settings.checked_mesh.expert is not None,
        has_embedding_strategy=settings.strategy.embedding_level is not None,
    )
    buffers = dict(module.named_buffers())
    check_agreement(settings, parameters_of, kinds, buffers)
    slots = _make_memory_slots(settings)
    numel = sum(parameter.numel() for parameter in named.values())
    if streams is None:
        streams = streams_for(settings.device)
    sharder = Sharder(
        module,
        settings,
        slots=slots,
        numel=numel,
        streams=streams,
    )
    sharded_params = sharder.shard(parameters_of, kinds, initialiser)
    if initialiser is not None:
        sharder.initialise(units, sharded_params, initialiser)
    sharder.broadcast_buffers(module)
    by_compute = _linked_by_compute(sharded_params)
    for unit in units:
        for group in unit.groups:
            if not group.is_readable:
                group.guard.close()
    return units, by_compute, slots


def _linked_by_compute(sharded_params: ShardedParams) -> ShardedParams:
    """Link parameters to their sharded ones, and return these by their compute parameters.

    Args:
        sharded_params: the sharded parameters, by the parameters that were given.
    """
    by_compute: ShardedParams = {}
    for given, sharded_param in sharded_params.items():
        if given is not sharded_param.compute:  # optimizers have the one that was given
            link(given, sharded_param)
        stored_forms.refuse_own_memory(sharded_param.group, sharded_param.index)
        for name, value in users_attributes(given).items():
            setattr(sharded_param.parameter, name, value)
        link(sharded_param.parameter, sharded_param)
        by_compute[sharded_param.compute] = sharded_param
    return by_compute


def _find_units(
    module: nn.Module,
    settings: Settings,
    ignored: Set[nn.Parameter],
) -> tuple[list[Unit], ParametersOfUnits]:
    """Return the units, the root first, and the parameters of each by their own names."""
    strategy = settings.strategy
    units = [Unit("", module)]
    unit_modules = resolve_unit_modules(settings.units)
    if not strategy.one_unit:
        units = find_units(module, unit_modules, strategy.fine_grained, ignored)
    parameters_of: ParametersOfUnits = {}
    for unit, parameters in assign_parameters(units).items():
        sharded: NamedParameters = {}
        for name, parameter in parameters.items():
            if parameter not in ignored:
                sharded[own_name(name)] = parameter
        parameters_of[unit] = sharded
    if not strategy.fine_grained:
        merge_small_units(units, parameters_of, settings.overlap.prefetch_bytes)
    for unit in parameters_of:
        unit.name = own_name(unit.name)
        unit.shown_name = own_name(unit.shown_name)
    return units, parameters_of


class GroupKey(NamedTuple):
    """The properties that all parameters of a group share.

    Args:
        stored: the form in which they are stored, with their dtype.
        trainable: they require gradients.
        kind: their kind, which decides their mesh and their strategy.
        alone: name of a parameter that must be the only one of its group; None for others.
    """

    stored: stored_forms.FormKey
    trainable: bool
    kind: ParameterKind
    alone: str | None


def names_of_groups(
    parameters: NamedParameters,
    kinds: ParameterKinds,
) -> dict[GroupKey, list[str]]:
    """Return the names of the parameters of each group of a unit.

    Args:
        parameters: those of the unit, by their names.
        kinds: the kinds of these and others by their names.
    """
    names: dict[GroupKey, list[str]] = defaultdict(list)
    for name, parameter in parameters.items():
        # A weight that pipeline stages share must be sharded alike on all of them, whatever else
        # is in their units.
        alone = None
        if getattr(parameter, "shared_embedding", False):
            alone = name
        key = GroupKey(
            stored=stored_forms.form_of(parameter),
            trainable=parameter.requires_grad,
            kind=kinds[name],
            alone=alone,
        )
        names[key].append(name)
    return names


class Sharder:
    """Shards the parameters of units over the ranks of the mesh.

    Args:
        module: the model.
        settings: its settings.
        slots: memory slots of gathered weights and local gradients, if any.
        numel: number of elements of all parameters.
        streams: the streams of collectives.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        *,
        slots: EngineSlots | None,
        numel: int,
        streams: Streams,
    ):
        self._module = module
        self._settings = settings
        self._slots = slots
        self._streams = streams
        self._transport = Transport()
        if settings.device.type == "cpu":
            self._transport = GlooMessages()
        self._memory_choice = ShardMemoryChoice(settings.device, settings.offload, numel)
        self._has_expert_mesh = settings.checked_mesh.expert is not None
        dense = self._communicator(ParameterKind.DENSE)
        self._communicators = {
            ParameterKind.DENSE: dense,
            ParameterKind.EMBEDDING: dense,
        }
        if self._has_expert_mesh:
            experts = ParameterKind.EXPERT
            self._communicators[experts] = self._communicator(experts)
        self._parameter_meshes: dict[ParameterKind, ParameterMesh] = {}
        for kind in self._communicators:
            self._parameter_meshes[kind] = self._parameter_mesh(kind)

    def shard(
        self,
        parameters_of: ParametersOfUnits,
        kinds: ParameterKinds,
        initialiser: Initialiser | None,
    ) -> ShardedParams:
        """Create the groups of every unit, and move parameters into the buffers of their groups.

        Args:
            parameters_of: the parameters of every unit by their names.
            kinds: the kinds of all of them by their names.
            initialiser: gives parameters on the meta device their first values. None: there are
                none.
        """
        # The values of a parameter move into the buffer as soon as the buffer exists, so a module
        # on the device of the shards never needs twice its memory. Parameters on the meta device
        # are filled by `initialise`, unless the shards are there too: then a run is simulated.
        sharded_params: ShardedParams = {}
        given: dict[nn.Parameter, nn.Parameter] = {}  # keys: those that initialisation put in place
        for unit, parameters in parameters_of.items():
            if initialiser is not None:
                given |= replace_meta_weights(
                    self._module,
                    parameters,
                    initialiser.initialise,
                )
            for key, names in names_of_groups(parameters, kinds).items():
                members = {name: parameters[name] for name in names}
                group = self._make_group(key, members, unit.shown_name)
                unit.groups.append(group)
                parameter_mesh = self._parameter_meshes[key.kind]
                for index, parameter in enumerate(group.parameters):
                    original = given.get(parameter, parameter)
                    sharded_params[original] = ShardedParam(group, index, parameter_mesh)
                    if not parameter.is_meta or self._settings.device.type == "meta":
                        group.shard_parameter(index)
        return sharded_params

    def initialise(
        self,
        units: list[Unit],
        sharded_params: ShardedParams,
        initialiser: Initialiser,
    ) -> None:
        """Initialise the parameters on the meta device, and shard them, part by part."""
        named = []
        for unit in units:
            if unit.module is not None and not unit.is_automatic:
                named.append(unit.module)
        root, *modules = named
        for part in initialisation_parts(root, modules, initialiser.kept_together):
            for parameter in materialize(part, self._settings.device, initialiser):
                sharded_param = sharded_params[parameter]
                sharded_param.group.shard_parameter(sharded_param.index)

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Give all data ranks the buffers of the first one, as they have its weights."""
        changed: list[str] = []
        for path, inner in module.named_modules():
            kind = ParameterKind.DENSE
            if self._has_experts(path, inner):
                kind = ParameterKind.EXPERT
            communicator = self._communicators[kind]
            for name, buffer in inner.named_buffers(path, recurse=False):
                if _broadcast_buffer(buffer, communicator):
                    changed.append(own_name(name))
        names = agree(changed, self._settings.checked_mesh.all_groups())
        if names:
            warn(
                "buffers differ between ranks, and become the first one's: %s",
                ", ".join(names),
            )

    def _has_experts(self, path: str, module: nn.Module) -> bool:
        """Return True if a module has experts inside: other ranks have other ones."""
        if not self._has_expert_mesh:
            return False
        tensors: dict[str, torch.Tensor] = {}
        tensors.update(module.named_buffers(path, recurse=False))
        tensors.update(module.named_parameters(path))
        return any(belongs_to_expert(name, tensor) for name, tensor in tensors.items())

    def _make_group(
        self,
        key: GroupKey,
        parameters: NamedParameters,
        unit_name: str,
    ) -> ParamGroup:
        settings = self._settings
        precision = settings.precision.resolve(key.stored.dtype, key.trainable)
        level, shards_outer = settings.strategy.of(key.kind)
        form = stored_forms.make_form(
            key.stored,
            parameters,
            self._module,
            axes=settings.checked_mesh.axes(key.kind),
            shards_outer=shards_outer,
            device=settings.device,
            precision=precision,
            boundaries=settings.strategy.boundaries,
            keeps_copies=settings.memory.keeps_copies,
        )
        weight_storage = gradient_storage = Storage()
        if self._slots is not None:
            weight_storage = self._slots.weights
            gradient_storage = self._slots.gradients
        numel = sum(parameter.numel() for parameter in parameters.values())
        make_group = stored_forms.group_class(form)
        return make_group(
            named=parameters,
            strategy=level,
            shards_outer=shards_outer,
            precision=precision,
            communicator=self._communicators[key.kind],
            unit_name=unit_name,
            weight_storage=weight_storage,
            gradient_storage=gradient_storage,
            form=form,
            memory=self._memory_choice.of_group(numel),
        )

    def _communicator(self, kind: ParameterKind) -> Communicator:
        mesh = self._settings.checked_mesh
        gradients = self._settings.gradients
        axes = mesh.axes(kind)
        outer = None
        if axes.outer is not None:
            outer = axes.outer.get_group()
        divisor = 1
        if not gradients.sum_only:
            # Expert gradients are summed over fewer ranks, but the loss is the mean over all.
            divisor = mesh.dense.num_data_ranks * gradients.divisor
        return Communicator(
            inner=axes.inner.get_group(),
            outer=outer,
            all_gather_group=axes.all_gather_group,
            divisor=divisor,
            average_in_collective=gradients.average_in_collective,
            streams=self._streams,
            transport=self._transport,
        )

    def _parameter_mesh(self, kind: ParameterKind) -> ParameterMesh:
        axes = self._settings.checked_mesh.axes(kind)
        _, shards_outer = self._settings.strategy.of(kind)
        sliced, copied = self._norm_groups(axes, kind)
        return ParameterMesh(
            kind,
            axes,
            mesh=axes.dtensor_mesh(shards_outer),
            norm_group_of_slices=sliced,
            norm_group_of_copies=copied,
        )

    def _norm_groups(
        self,
        axes: Axes,
        kind: ParameterKind,
    ) -> tuple[NormGroup, NormGroup]:
        """Return the norm groups of tensor-parallel slices, and of copies."""
        level, shards_outer = self._settings.strategy.of(kind)
        dense = self._settings.checked_mesh.dense
        data_groups: tuple[dist.ProcessGroup, ...] = ()
        of_experts = kind is ParameterKind.EXPERT
        if level.shards_optimizer or of_experts:
            data_groups = self._data_groups(shards_outer)
        groups = data_groups
        if dense.tensor is not None:
            groups = (*groups, dense.tensor.get_group())
        if not of_experts:
            return NormGroup(groups), NormGroup(data_groups)
        # Other ranks own other experts of the same name. Norms are over all of them.
        copies = 1
        if not level.shards_optimizer:
            copies = axes.inner.size()
        tensor_copies = copies
        if axes.tensor is not None:
            tensor_copies *= axes.tensor.size()
        of_slices = NormGroup(groups, copies)
        of_copies = NormGroup(groups, tensor_copies)
        return of_slices, of_copies

    def _data_groups(self, shards_outer: bool) -> tuple[dist.ProcessGroup, ...]:
        dense = self._settings.checked_mesh.dense
        inner = dense.inner.get_group()
        if not shards_outer or dense.outer is None:
            return (inner,)
        if dense.data_group is not None:  # then norms cost one collective
            return (dense.data_group,)
        return inner, dense.outer.get_group()


def _broadcast_buffer(buffer: Any, communicator: Communicator) -> bool:
    """Give a buffer the values of the first rank; return True if they differ on this rank."""
    local = local_tensor(buffer).detach()
    if local.layout is not torch.strided:
        return False
    if hasattr(local, "__tensor_flatten__"):
        return False
    # As bytes, because backends do not know all dtypes.
    values = local.contiguous().view(-1).view(torch.uint8)
    before = values.clone()
    communicator.broadcast(values)
    if local.is_meta or torch.equal(before, values):
        return False
    received = values.view(local.dtype).view(local.shape)
    if 0 in local.stride():  # expanded: its elements cannot be written to
        set_local_tensor(buffer, received)
    else:
        local.copy_(received)
    return True


def _make_memory_slots(settings: Settings) -> EngineSlots | None:
    memory = settings.memory
    device = settings.device
    if not memory.uses_slots:
        return None
    if not memory.registers:
        return EngineSlots(memory, partial(allocate_slots, device))
    mesh = settings.checked_mesh
    meshes = [mesh.dense, mesh.expert or mesh.dense]
    groups = [axes.all_gather_group for axes in meshes]
    groups += [axes.inner.get_group() for axes in meshes]
    nccl = NcclMemory(
        groups,
        device,
        is_symmetric=not memory.registers_locally,
    )
    return EngineSlots(memory, nccl.allocate, nccl)
