# SPDX-License-Identifier: Apache-2.0
"""The sharding of the parameters of a module: units, groups, flat buffers and memory slots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from functools import partial
from itertools import chain, starmap
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.agreement import check_agreement
from megatron.fsdp.backends.gloo_messages import GlooMessages
from megatron.fsdp.backends.memory_slots import EngineSlots, NcclMemory, allocate_slots
from megatron.fsdp.dtensor.sharded_param import ParameterMesh, ShardedParam, link
from megatron.fsdp.engine.buffer import Storage
from megatron.fsdp.engine.collectives import Communicator, agree
from megatron.fsdp.engine.device import Streams, streams_for
from megatron.fsdp.engine.mesh import Axes, NormGroup
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.tensor_parallel import local_tensor, set_local_tensor
from megatron.fsdp.engine.unit import Unit
from megatron.fsdp.engine.unit_choice import (
    assign_parameters,
    find_units,
    is_expert_parameter,
    merge_small_units,
)
from megatron.fsdp.meta_initialisation import Initialiser, initialisation_parts, materialize
from megatron.fsdp.module_access.own_names import own_name
from megatron.fsdp.optimizer.host.host_memory import Memories
from megatron.fsdp.quantized import stored_forms
from megatron.fsdp.quantized.tensor_subclasses import move, users_attributes
from megatron.fsdp.quantized.transformer_engine_weights import replace_meta_weights
from megatron.fsdp.settings import Settings, resolve_unit_modules
from megatron.fsdp.warnings_once import warn

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
        module: the module.
        settings: its settings.
        initialiser: of parameters on the meta device; None: there are none.
        sharded_before: parameters of modules inside that an earlier call has sharded, and the
            compute parameters of these. They are left as they are.
        streams: the streams of collectives. None: streams of this call.

    Returns:
        The units, the root first, the sharded parameters, and the memory slots, if any.
    """
    strategy, ignored = settings.strategy, settings.strategy.ignored | sharded_before
    move(module, settings.device, ignored)  # tensors on meta are allocated later
    wanted = resolve_unit_modules(settings.units)
    units = [Unit("", module)]
    if not strategy.one_unit:
        units = find_units(module, wanted, strategy.fine_grained, ignored)
    parameters_of = assign_parameters(units)
    for unit, parameters in parameters_of.items():
        parameters_of[unit] = {name: one for name, one in parameters.items() if one not in ignored}
    if not strategy.fine_grained:
        merge_small_units(units, parameters_of, settings.overlap.prefetch_bytes)
    for unit, parameters in parameters_of.items():
        unit.name, unit.shown_name = own_name(unit.name), own_name(unit.shown_name)
        parameters_of[unit] = {own_name(name): each for name, each in parameters.items()}
    check_agreement(settings, parameters_of, dict(module.named_buffers()))
    slots = _make_memory_slots(settings)
    numel = sum(sum(map(nn.Parameter.numel, given.values())) for given in parameters_of.values())
    sharder = Sharder(module, settings, slots, numel, streams or streams_for(settings.device))
    sharded_params = sharder.shard(parameters_of, initialiser)
    if initialiser is not None:
        sharder.initialise(units, sharded_params, initialiser)
    sharder.broadcast_buffers(module)
    for given, sharded_param in sharded_params.items():
        if given is not sharded_param.compute:  # optimizers have the one that was given
            link(given, sharded_param)
        stored_forms.refuse_own_memory(sharded_param.group, sharded_param.index)
        for name, value in users_attributes(given).items():
            setattr(sharded_param.parameter, name, value)
        link(sharded_param.parameter, sharded_param)
    for group in chain.from_iterable(unit.groups for unit in units):
        if not group.is_readable:
            group.guard.close()
    return units, {each.compute: each for each in sharded_params.values()}, slots


class GroupKey(NamedTuple):
    """The properties that all parameters of a group share."""

    stored: stored_forms.FormKey
    trainable: bool
    is_expert: bool
    alone: str | None  # name of a parameter that must be the only one of its group


def names_of_groups(
    parameters: dict[str, nn.Parameter], has_expert_mesh: bool
) -> dict[GroupKey, list[str]]:
    """Return the names of the parameters of each group of a unit."""
    names: dict[GroupKey, list[str]] = defaultdict(list)
    for name, parameter in parameters.items():
        key = GroupKey(
            stored_forms.form_of(parameter),
            parameter.requires_grad,
            has_expert_mesh and is_expert_parameter(name, parameter),
            # A weight that pipeline stages share must be sharded alike on all of them, whatever
            # else is in their units.
            name if getattr(parameter, "shared_embedding", False) else None,
        )
        names[key].append(name)
    return names


class Sharder:
    """Shards the parameters of units over the ranks of the mesh."""

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        slots: EngineSlots | None,
        numel: int,
        streams: Streams,
    ):
        self._module = module
        self._settings = settings
        self._slots = slots
        self._streams = streams
        self._memories = Memories(settings.device, settings.offload, numel)
        # Of dense parameters (False) and of expert parameters (True).
        kinds = [False] if settings.own_mesh.expert is None else [False, True]
        self._communicators = {is_expert: self._communicator(is_expert) for is_expert in kinds}
        self._parameter_meshes = {is_expert: self._parameter_mesh(is_expert) for is_expert in kinds}

    def shard(
        self, parameters_of: dict[Unit, dict[str, nn.Parameter]], initialiser: Initialiser | None
    ) -> ShardedParams:
        """Create the groups of every unit, and move parameters into the buffers of their groups."""
        # The values of a parameter move into the buffer as soon as the buffer exists, so a module
        # on the device of the shards never needs twice its memory. Parameters on the meta device
        # are filled by `initialise`, unless the shards are there too: then a run is simulated.
        sharded_params: ShardedParams = {}
        has_expert_mesh = self._settings.own_mesh.expert is not None
        given: dict[nn.Parameter, nn.Parameter] = {}  # by those that initialisation has made anew
        for unit, parameters in parameters_of.items():
            if initialiser is not None:
                given |= replace_meta_weights(self._module, parameters, initialiser.initialise)
            for key, names in names_of_groups(parameters, has_expert_mesh).items():
                members = {name: parameters[name] for name in names}
                group = self._make_group(key, members, unit.shown_name)
                unit.groups.append(group)
                parameter_mesh = self._parameter_meshes[key.is_expert]
                for index, parameter in enumerate(group.parameters):
                    named = given.get(parameter, parameter)
                    sharded_params[named] = ShardedParam(group, index, parameter_mesh)
                    if not parameter.is_meta or self._settings.device.type == "meta":
                        group.shard_parameter(index)
        return sharded_params

    def initialise(
        self, units: list[Unit], sharded_params: ShardedParams, initialiser: Initialiser
    ) -> None:
        """Initialise the parameters on the meta device, and shard them, part by part."""
        named = [unit.module for unit in units if not unit.is_automatic]
        root, *modules = [module for module in named if module is not None]
        for part in initialisation_parts(root, modules, initialiser.kept_together):
            for parameter in materialize(part, self._settings.device, initialiser):
                sharded_param = sharded_params[parameter]
                sharded_param.group.shard_parameter(sharded_param.index)

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Give all data ranks the buffers of the first one, as they have its weights."""
        # Those of modules with experts inside are of the first rank with the same experts.
        mesh = self._settings.own_mesh
        changed: list[str] = []
        for path, inner in module.named_modules():
            buffers: dict[str, Any] = dict(inner.named_buffers(path, recurse=False))
            inside = {**buffers, **dict(inner.named_parameters(path))}
            is_expert = mesh.expert is not None and any(
                starmap(is_expert_parameter, inside.items())
            )
            for name, buffer in buffers.items():
                local = local_tensor(buffer).detach()
                if local.layout is not torch.strided or hasattr(local, "__tensor_flatten__"):
                    continue
                # As bytes, because backends do not know all dtypes.
                values = local.contiguous().view(-1).view(torch.uint8)
                before = values.clone()
                self._communicators[is_expert].broadcast(values)
                if local.is_meta or torch.equal(before, values):
                    continue
                changed.append(own_name(name))
                given = values.view(local.dtype).view(local.shape)
                if 0 in local.stride():  # expanded: its elements cannot be written to
                    set_local_tensor(buffer, given)
                else:
                    local.copy_(given)
        if names := agree(changed, mesh.all_groups()):
            warn("buffers differ between ranks, and become the first one's: %s", ", ".join(names))

    def _make_group(
        self, key: GroupKey, parameters: dict[str, nn.Parameter], unit_name: str
    ) -> ParamGroup:
        settings = self._settings
        precision = settings.precision.resolve(key.stored.dtype, key.trainable)
        level, shards_outer = settings.strategy.of(key.is_expert)
        ranks = settings.own_mesh.axes(key.is_expert), shards_outer, settings.device
        how = precision, settings.strategy.boundaries, settings.memory.keeps_copies
        form = stored_forms.make_form(key.stored, parameters, self._module, *ranks, *how)
        return stored_forms.group_class(form)(
            parameters,
            level,
            shards_outer,
            precision,
            self._communicators[key.is_expert],
            unit_name,
            self._slots.weights if self._slots else Storage(),
            self._slots.gradients if self._slots else Storage(),
            form,
            self._memories.of_group(sum(each.numel() for each in parameters.values())),
        )

    def _communicator(self, is_expert: bool) -> Communicator:
        mesh, gradients = self._settings.own_mesh, self._settings.gradients
        axes = mesh.axes(is_expert)
        return Communicator(
            inner=axes.inner.get_group(),
            outer=axes.outer.get_group() if axes.outer is not None else None,
            all_gather_group=axes.all_gather_group,
            # Expert gradients are summed over fewer ranks, but the loss is the mean over all.
            divisor=1 if gradients.sum_only else mesh.dense.num_data_ranks * gradients.divisor,
            average_in_collective=gradients.average_in_collective,
            streams=self._streams,
            transport=GlooMessages(),
        )

    def _parameter_mesh(self, is_expert: bool) -> ParameterMesh:
        axes = self._settings.own_mesh.axes(is_expert)
        mesh = axes.dtensor_mesh(self._settings.strategy.of(is_expert)[1])
        return ParameterMesh(axes, mesh, *self._norm_groups(axes, is_expert))

    def _norm_groups(self, axes: Axes, is_expert: bool) -> tuple[NormGroup, NormGroup]:
        """Return the norm groups of parameters: tensor-parallel slices, and copies."""
        level, shards_outer = self._settings.strategy.of(is_expert)
        data = self._data_groups(shards_outer) if level.shards_optimizer or is_expert else []
        tensor = self._settings.own_mesh.dense.tensor
        every = (*data, *([] if tensor is None else [tensor.get_group()]))
        if not is_expert:
            return NormGroup(every), NormGroup(tuple(data))
        # Other ranks own other experts of the same name. Norms are over all of them.
        copies = 1 if level.shards_optimizer else axes.inner.size()
        tensor_copies = axes.tensor.size() if axes.tensor is not None else 1
        return NormGroup(every, copies), NormGroup(every, copies * tensor_copies)

    def _data_groups(self, shards_outer: bool) -> list[dist.ProcessGroup]:
        dense = self._settings.own_mesh.dense
        if not shards_outer or dense.outer is None:
            return [dense.inner.get_group()]
        if dense.data_group is not None:  # then norms cost one collective
            return [dense.data_group]
        return [dense.inner.get_group(), dense.outer.get_group()]


def _make_memory_slots(settings: Settings) -> EngineSlots | None:
    memory, device = settings.memory, settings.device
    if not memory.uses_slots:
        return None
    if not memory.registers:
        return EngineSlots(memory, partial(allocate_slots, device))
    meshes = (settings.own_mesh.dense, settings.own_mesh.expert or settings.own_mesh.dense)
    groups = [axes.all_gather_group for axes in meshes]
    groups += [axes.inner.get_group() for axes in meshes]
    nccl = NcclMemory(groups, device, not memory.registers_locally)
    return EngineSlots(memory, nccl.allocate, nccl)
