# SPDX-License-Identifier: Apache-2.0
"""Checks of a module, and of settings that only a module or a machine can refute."""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.backends.memory_slots import problems_of_nccl
from megatron.fsdp.dtensor.sharded_param import is_linked
from megatron.fsdp.engine.mesh import Mesh
from megatron.fsdp.engine.tensor_parallel import local_tensor
from megatron.fsdp.engine.unit_choice import is_expert_parameter
from megatron.fsdp.meta_initialisation import Initialiser, problems_of_initialisation
from megatron.fsdp.optimizer.host.host_memory import problems_of_offload
from megatron.fsdp.problems import Problems
from megatron.fsdp.quantized.stored_forms import Sharding, refuse_parameters
from megatron.fsdp.settings import ComputePrecision, Settings, Units, resolve_unit_modules
from megatron.fsdp.warnings_once import IS_COMPUTE


def check_all(
    problems: Problems,
    module: nn.Module,
    settings: Settings,
    initialiser: Initialiser | None,
    sharded_before: Set[nn.Parameter] = frozenset(),
) -> None:
    """Add every reason why ``module``, of any type, cannot be sharded with ``settings``.

    ``sharded_before`` are parameters of modules inside that an earlier call has sharded.
    """
    mesh, strategy = settings.mesh, settings.strategy
    for name in ("outer", "expert_outer") if mesh is not None and mesh.outer is None else ():
        if getattr(strategy, name):
            problems.add(f"Strategy.{name}='optim' needs Mesh.outer, the name of the outer axis")
    if mesh is not None and settings.memory.registers:
        for problem in problems_of_nccl(settings.device):
            problems.add(problem)
    units = problems.check(resolve_unit_modules, settings.units)
    if not isinstance(module, nn.Module):
        problems.add(f"module expects a torch.nn.Module but got {type(module).__name__}")
        return
    # The wrapper again, or the module inside it, which may be compiled.
    own = [one for one in module.parameters() if one not in sharded_before]
    if any(is_linked(one) or hasattr(one, IS_COMPUTE) for one in own):
        problems.add("the module is sharded already")
        return
    others = strategy.ignored | sharded_before
    named = {name: one for name, one in module.named_parameters() if one not in others}
    problems.check(_refuse_casts_of_dtensors, named, settings)
    has_slices = mesh is not None and mesh.tensor is not None
    has_mesh, slots = mesh is not None and mesh.expert is not None, settings.memory.uses_slots
    kinds = {name: has_mesh and is_expert_parameter(name, one) for name, one in named.items()}
    for is_expert in (False, True):
        of_kind = {name: one for name, one in named.items() if kinds[name] == is_expert}
        sharding = Sharding(*strategy.of(is_expert), slots, has_slices)
        problems.check(refuse_parameters, of_kind, sharding)
    found = [*_problems_of_units(module, units or ()), *_problems_of_dtypes(named)]
    if not named and not sharded_before:
        found.append("the module has no parameters to shard")
    found += _problems_of_shared_memory(named)
    if foreign := len(strategy.ignored - set(module.parameters())):
        found.append(
            f"Strategy.ignored has {foreign} parameters that are no part of the model: take them"
            " from the model that is sharded, not from a copy of it"
        )
    if mesh is not None:
        found += [*_problems_of_axes(named, mesh), *_problems_of_devices(named, settings)]
        if {strategy.expert_level, strategy.expert_outer} != {None} and True not in kinds.values():
            found.append(
                "Strategy.expert_level and Strategy.expert_outer need Mesh.expert_mesh and expert"
                " parameters: with allreduce=False, or in a module called experts"
            )
        found += _problems_of_offload(named, kinds, settings, mesh)
    if initialiser is not None:
        found += _problems_of_first_values(module, settings, initialiser)
    elif mesh is None or mesh.device.type != "meta":  # a simulated run, where nothing has values
        found += _problems_of_meta_tensors(module)
    for problem in found:
        problems.add(problem)


def _refuse_casts_of_dtensors(named: dict[str, nn.Parameter], settings: Settings) -> None:
    """Raise ``NotImplementedError`` for DTensors whose dtype would have to change in place."""
    precision = settings.precision
    dtype = precision.param_dtype if isinstance(precision, ComputePrecision) else None
    for name, parameter in named.items():
        if isinstance(parameter, DTensor) and dtype not in (None, parameter.dtype):
            raise NotImplementedError(
                f"{name} is a DTensor, which is not cast to param_dtype={dtype}: convert the module"
                " first, and pass a policy with main_params_dtype"
            )


def _problems_of_units(module: nn.Module, units: Units) -> Iterator[str]:
    own = set(module.modules())
    strangers = [unit for unit in units if isinstance(unit, nn.Module) and unit not in own]
    if strangers:
        names = ", ".join(type(unit).__name__ for unit in strangers[:5])
        yield (
            f"Settings.units has {len(strangers)} modules that are no part of the model ({names}):"
            " take them from the model that is sharded (not from a copy of it), or name their class"
        )


def _problems_of_dtypes(parameters: dict[str, nn.Parameter]) -> Iterator[str]:
    wrong = [
        f"{name} ({parameter.dtype})"
        for name, parameter in parameters.items()
        if parameter.requires_grad and not parameter.is_floating_point()
    ]
    if wrong:
        found = ", ".join(wrong[:5])
        yield f"trainable parameters expect a floating-point dtype, but there are {found}"


def _problems_of_offload(
    named: dict[str, nn.Parameter], kinds: dict[str, bool], settings: Settings, mesh: Mesh
) -> Iterator[str]:
    if settings.offload is None:
        return
    divided = {kind: settings.strategy.of(kind)[0].shards_optimizer for kind in (False, True)}
    how = settings.precision.resolve, kinds, divided
    yield from problems_of_offload(settings.offload, settings.device, mesh, named, *how)


def _problems_of_first_values(
    module: nn.Module, settings: Settings, initialiser: Initialiser
) -> Iterator[str]:
    yield from problems_of_initialisation(module, initialiser)
    if any(parameter.is_meta for parameter in settings.strategy.ignored):
        yield "Strategy.ignored has parameters on the meta device: give them values"
    if not max(map(settings.strategy.of, (False, True)))[0].shards_optimizer:
        yield "Settings.initialisation needs a sharding strategy: level 0 shards nothing"


def _problems_of_meta_tensors(module: nn.Module) -> Iterator[str]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    on_meta = [name for name, tensor in tensors if tensor.is_meta]
    if on_meta:
        yield (
            "parameters or buffers on the meta device have no values to shard:"
            f" {', '.join(on_meta[:5])}; pass Settings.initialisation=MetaInitialisation()"
        )


def _problems_of_shared_memory(named: dict[str, nn.Parameter]) -> Iterator[str]:
    ranges = []
    for name, parameter in named.items():
        local = local_tensor(parameter)
        is_plain = type(local.data) is torch.Tensor and local.layout is torch.strided
        if not is_plain or local.is_meta or not local.numel() or not local.data_ptr():
            continue
        # Between the elements of a slice there may be those of another one.
        steps = zip(local.shape, local.stride(), strict=True)
        if sum((size - 1) * stride for size, stride in steps) + 1 == local.numel():
            start = local.data_ptr()
            ranges.append((str(local.device), start, start + local.nbytes, name))
    ranges.sort()
    for (device, _, end, name), (other_device, start, _, other_name) in pairwise(ranges):
        if device == other_device and start < end:
            yield (
                f"{name} and {other_name} overlap in memory, and would become parameters of their"
                " own: to tie them, let both names be one nn.Parameter; otherwise clone one"
            )


def _problems_of_devices(named: dict[str, nn.Parameter], settings: Settings) -> Iterator[str]:
    device = settings.device
    if device.type not in ("cpu", "meta") and not torch.get_device_module(device).is_available():
        yield f"device {device}: this machine has none, or torch was built without it"
    others = {str(one.device) for one in named.values() if one.device.type not in ("cpu", "meta")}
    if others - {str(settings.device)} and settings.device.type != "meta":
        yield (
            f"the module has parameters on {', '.join(sorted(others))}, but this rank trains on"
            f" {settings.device}: call torch.cuda.set_device(local_rank) first, give a mesh of that"
            " device type, and load the module without a device_map"
        )


def _problems_of_axes(named: dict[str, nn.Parameter], mesh: Mesh) -> Iterator[str]:
    """Yield problems of parameters that need an axis that the mesh does not have."""
    experts = [name for name, one in named.items() if getattr(one, "allreduce", True) is False]
    if experts and mesh.expert is None:
        yield (
            f"{', '.join(experts[:3])} and others are expert parameters (allreduce=False),"
            " which differ between data ranks: pass Mesh.expert_mesh, the mesh of the ranks"
            " that hold the same experts"
        )
    for name, parameter in named.items():
        if not isinstance(parameter, DTensor):
            continue
        is_expert = mesh.expert is not None and is_expert_parameter(name, parameter)
        axis, own = mesh.axes(is_expert).tensor, parameter.device_mesh
        where = " of Mesh.expert_mesh" if is_expert else ""
        if axis is None:
            yield (
                f"{name} is a DTensor over {own.mesh_dim_names}: for tensor parallelism, pass that"
                f" axis{where} as Mesh.tensor, in one mesh with the data axes; if other software"
                " has sharded the model (FSDP2, or from_pretrained of transformers with tp_plan or"
                " a DistributedConfig), load it without that"
            )
            return  # the others have the same problem
        if own.mesh.tolist() != axis.mesh.tolist():
            yield f"{name} is a DTensor over another mesh than Mesh.tensor={mesh.tensor!r}{where}"
            return
