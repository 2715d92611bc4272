# SPDX-License-Identifier: Apache-2.0
"""Checks of a module, and of settings that only a module or a machine can refute."""

from __future__ import annotations

from collections.abc import Iterator, Set

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.backends.host_memory import problems_of_offload
from megatron.fsdp.config.memory import problems_of_nccl
from megatron.fsdp.config.meta_initialisation import (
    Initialiser,
    problems_of_initialisation,
)
from megatron.fsdp.config.problems import Problems
from megatron.fsdp.config.settings import (
    ComputePrecision,
    Settings,
    Units,
    resolve_unit_modules,
)
from megatron.fsdp.config.warnings_once import IS_COMPUTE
from megatron.fsdp.dtensor.sharded_param import is_linked
from megatron.fsdp.engine.mesh import Mesh
from megatron.fsdp.engine.policy import ParameterKind
from megatron.fsdp.engine.tensor_parallel import local_tensor
from megatron.fsdp.module.unit_choice import (
    NamedParameters,
    ParameterKinds,
    belongs_to_expert,
    kinds_of,
)
from megatron.fsdp.quantized.stored_forms import Sharding, refuse_parameters


def check_all(
    problems: Problems,
    module: nn.Module,
    settings: Settings,
    initialiser: Initialiser | None,
    sharded_before: Set[nn.Parameter] = frozenset(),
) -> None:
    """Add every reason why a module cannot be sharded.

    Args:
        problems: the reasons are added to it.
        module: any object; one that is no module is a problem.
        settings: its settings; their mesh is None if it could not be made.
        initialiser: gives parameters on the meta device their first values. None: such parameters
            are a problem.
        sharded_before: parameters of modules inside that an earlier call has sharded.
    """
    mesh = settings.mesh
    ignored = settings.strategy.ignored
    problems.add_all(_problems_of_outer_axis(settings))
    if mesh is not None and settings.memory.registers:
        problems.add_all(problems_of_nccl(settings.device))
    units = problems.check(resolve_unit_modules, settings.units)
    if not isinstance(module, nn.Module):
        problems.add(f"module expects a torch.nn.Module but got {type(module).__name__}")
        return
    if _is_sharded(module, sharded_before):
        problems.add("the module is sharded already")
        return
    named: NamedParameters = {}
    for name, parameter in module.named_parameters():
        if parameter not in ignored and parameter not in sharded_before:
            named[name] = parameter
    problems.check(_refuse_casts_of_dtensors, named, settings)
    kinds = _kinds(module, named, settings)
    _check_storage(problems, named, kinds, settings)
    problems.add_all(_problems_of_units(module, units or ()))
    problems.add_all(_problems_of_dtypes(named))
    if not named and not sharded_before:
        problems.add("the module has no parameters to shard")
    problems.add_all(_problems_of_shared_memory(named))
    num_foreign = len(ignored - set(module.parameters()))
    if num_foreign:
        problems.add(
            f"Strategy.ignored has {num_foreign} parameters that are no part of the model: take"
            " them from the model that is sharded, not from a copy of it"
        )
    if mesh is not None:
        problems.add_all(_problems_of_axes(named, mesh))
        problems.add_all(_problems_of_devices(named, settings))
        problems.add_all(_problems_of_kinds(set(kinds.values()), settings))
        problems.add_all(_problems_of_offload(named, kinds, settings, mesh))
    if initialiser is not None:
        problems.add_all(_problems_of_first_values(module, settings, initialiser))
    elif mesh is None or mesh.device.type != "meta":  # a simulated run, where nothing has values
        problems.add_all(_problems_of_meta_tensors(module))


def _problems_of_outer_axis(settings: Settings) -> Iterator[str]:
    if settings.mesh is None or settings.mesh.outer is not None:
        return
    for name in ("outer", "expert_outer"):
        if getattr(settings.strategy, name):
            yield f"Strategy.{name}='optim' needs Mesh.outer, the name of the outer axis"


def _kinds(
    module: nn.Module,
    named: NamedParameters,
    settings: Settings,
) -> ParameterKinds:
    mesh = settings.mesh
    return kinds_of(
        module,
        named,
        has_expert_mesh=mesh is not None and mesh.expert is not None,
        has_embedding_strategy=settings.strategy.embedding_level is not None,
    )


def _is_sharded(module: nn.Module, sharded_before: Set[nn.Parameter]) -> bool:
    """Return True for a wrapper, and for the module inside one, which may be compiled."""
    for parameter in module.parameters():
        if parameter in sharded_before:
            continue
        if is_linked(parameter) or hasattr(parameter, IS_COMPUTE):
            return True
    return False


def _check_storage(
    problems: Problems,
    named: NamedParameters,
    kinds: ParameterKinds,
    settings: Settings,
) -> None:
    """Add the reasons why parameters of a kind cannot be stored as they are."""
    for kind in ParameterKind:
        level, shards_outer = settings.strategy.of(kind)
        sharding = Sharding(
            level=level,
            shards_outer=shards_outer,
            uses_slots=settings.memory.uses_slots,
            has_tensor_axis=settings.mesh is not None and settings.mesh.tensor is not None,
        )
        members = {}
        for name, parameter in named.items():
            if kinds[name] is kind:
                members[name] = parameter
        problems.check(refuse_parameters, members, sharding)


def _refuse_casts_of_dtensors(
    named: NamedParameters,
    settings: Settings,
) -> None:
    """Raise ``NotImplementedError`` for DTensors whose dtype would have to change in place."""
    precision = settings.precision
    if not isinstance(precision, ComputePrecision):
        return
    dtype = precision.param_dtype
    for name, parameter in named.items():
        if isinstance(parameter, DTensor) and dtype not in (None, parameter.dtype):
            raise NotImplementedError(
                f"{name} is a DTensor, which is not cast to param_dtype={dtype}: convert the module"
                " first, and pass a policy with main_params_dtype"
            )


def _problems_of_units(module: nn.Module, units: Units) -> Iterator[str]:
    inside = set(module.modules())
    foreign = [unit for unit in units if isinstance(unit, nn.Module) and unit not in inside]
    if foreign:
        names = ", ".join(type(unit).__name__ for unit in foreign[:5])
        yield (
            f"Settings.units has {len(foreign)} modules that are no part of the model ({names}):"
            " take them from the model that is sharded (not from a copy of it), or name their class"
        )


def _problems_of_dtypes(parameters: NamedParameters) -> Iterator[str]:
    wrong = []
    for name, parameter in parameters.items():
        if parameter.requires_grad and not parameter.is_floating_point():
            wrong.append(f"{name} ({parameter.dtype})")
    if wrong:
        found = ", ".join(wrong[:5])
        yield f"trainable parameters expect a floating-point dtype, but there are {found}"


def _problems_of_kinds(kinds: set[ParameterKind], settings: Settings) -> Iterator[str]:
    """Yield problems of strategies for kinds of parameters that the model does not have."""
    strategy = settings.strategy
    if strategy.embedding_level is not None and ParameterKind.EMBEDDING not in kinds:
        yield (
            "Strategy.embedding_level needs parameters of an nn.Embedding, of the module that"
            " get_output_embeddings returns, or with is_embedding_or_output_parameter=True: leave"
            " it out for models without them, such as a pipeline stage in the middle"
        )
    has_expert_strategy = strategy.expert_level is not None or strategy.expert_outer is not None
    if has_expert_strategy and ParameterKind.EXPERT not in kinds:
        yield (
            "Strategy.expert_level and Strategy.expert_outer need Mesh.expert_mesh and expert"
            " parameters: with allreduce=False, or in a module called experts"
        )


def _problems_of_offload(
    named: NamedParameters,
    kinds: ParameterKinds,
    settings: Settings,
    mesh: Mesh,
) -> Iterator[str]:
    if settings.offload is None:
        return
    is_sharded: dict[ParameterKind, bool] = {}
    for kind in ParameterKind:
        level, _ = settings.strategy.of(kind)
        is_sharded[kind] = level.shards_optimizer
    yield from problems_of_offload(
        offload=settings.offload,
        device=settings.device,
        mesh=mesh,
        named=named,
        precision_of=settings.precision.resolve,
        kinds=kinds,
        is_sharded=is_sharded,
    )


def _problems_of_first_values(
    module: nn.Module,
    settings: Settings,
    initialiser: Initialiser,
) -> Iterator[str]:
    yield from problems_of_initialisation(module, initialiser)
    if any(parameter.is_meta for parameter in settings.strategy.ignored):
        yield "Strategy.ignored has parameters on the meta device: give them values"
    if not settings.strategy.highest_level.shards_optimizer:
        yield "Settings.initialisation needs a sharding strategy: level 0 shards nothing"


def _problems_of_meta_tensors(module: nn.Module) -> Iterator[str]:
    on_meta: list[str] = []
    tensors: list[tuple[str, torch.Tensor]] = [*module.named_parameters()]
    tensors += module.named_buffers()
    for name, tensor in tensors:
        if tensor.is_meta:
            on_meta.append(name)
    if on_meta:
        yield (
            "parameters or buffers on the meta device have no values to shard:"
            f" {', '.join(on_meta[:5])}; pass Settings.initialisation=MetaInitialisation()"
        )


def _problems_of_shared_memory(named: NamedParameters) -> Iterator[str]:
    ranges = []
    for name, parameter in named.items():
        local = local_tensor(parameter)
        if type(local.data) is not torch.Tensor or local.layout is not torch.strided:
            continue
        if local.is_meta or not local.numel() or not local.data_ptr():
            continue
        # Between the elements of a slice there may be those of another one.
        extent = 1  # elements from the first to the last
        for size, stride in zip(local.shape, local.stride(), strict=True):
            extent += (size - 1) * stride
        if extent == local.numel():
            start = local.data_ptr()
            stop = start + local.nbytes
            ranges.append((str(local.device), start, stop, name))
    ranges.sort()
    reached: dict[str, tuple[int, str]] = {}  # by device the range that ends last so far
    for device, start, stop, name in ranges:
        last_stop, other_name = reached.get(device, (start, ""))
        if start < last_stop:
            yield (
                f"{other_name} and {name} overlap in memory, and would become parameters of their"
                " own: to tie them, let both names be one nn.Parameter; otherwise clone one"
            )
        if stop > last_stop:
            reached[device] = (stop, name)


def _problems_of_devices(
    named: NamedParameters,
    settings: Settings,
) -> Iterator[str]:
    device = settings.device
    if device.type not in ("cpu", "meta"):
        backend = torch.get_device_module(device)
        if not backend.is_available():
            yield f"device {device}: this machine has none, or torch was built without it"
    found = set()
    for parameter in named.values():
        if parameter.device.type not in ("cpu", "meta"):
            found.add(str(parameter.device))
    if found - {str(device)} and device.type != "meta":
        yield (
            f"the module has parameters on {', '.join(sorted(found))}, but this rank trains on"
            f" {device}: call torch.cuda.set_device(local_rank) first, give a mesh of that"
            " device type, and load the module without a device_map"
        )


def _problems_of_axes(named: NamedParameters, mesh: Mesh) -> Iterator[str]:
    """Yield problems of parameters that need an axis that the mesh does not have."""
    experts = []
    for name, parameter in named.items():
        if getattr(parameter, "allreduce", True) is False:
            experts.append(name)
    if experts and mesh.expert is None:
        yield (
            f"{', '.join(experts[:3])} and others are expert parameters (allreduce=False),"
            " which differ between data ranks: pass Mesh.expert_mesh, the mesh of the ranks"
            " that hold the same experts"
        )
    for name, parameter in named.items():
        if not isinstance(parameter, DTensor):
            continue
        axes = mesh.dense
        where = ""
        if mesh.expert is not None and belongs_to_expert(name, parameter):
            axes = mesh.expert
            where = " of Mesh.expert_mesh"
        axis = axes.tensor
        found = parameter.device_mesh
        if axis is None:
            yield (
                f"{name} is a DTensor over {found.mesh_dim_names}: for tensor parallelism, pass"
                f" that axis{where} as Mesh.tensor, in one mesh with the data axes; if other"
                " software has sharded the model (FSDP2, or from_pretrained of transformers with"
                " tp_plan or a DistributedConfig), load it without that"
            )
            return  # the others have the same problem
        if found.mesh.tolist() != axis.mesh.tolist():
            yield f"{name} is a DTensor over another mesh than Mesh.tensor={mesh.tensor!r}{where}"
            return
