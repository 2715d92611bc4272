# SPDX-License-Identifier: Apache-2.0
"""Checks of a module and of arguments, before the module is changed."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.sharded_param import is_linked
from megatron.fsdp.engine.layout import PREFER_ROWS, ROWS, Granularity
from megatron.fsdp.engine.mesh import FSDPDistributedIndex
from megatron.fsdp.engine.policy import ShardingStrategy
from megatron.fsdp.meta_init import Initialiser, problems_of_initialisation

IS_SHARDED = "_fsdp_is_sharded"
"""Attribute of a wrapper whose parameters are sharded."""


def parse_outer_strategy(
    value: str | int, mesh: FSDPDistributedIndex | None, inner: ShardingStrategy | None
) -> ShardingStrategy:
    """Return the strategy of the outer axis: replication, or sharded optimizer state.

    Args:
        value: ``outer_dp_sharding_strategy``.
        mesh: the mesh; None leaves it unchecked.
        inner: the strategy of the inner axis; None leaves it unchecked.

    Raises:
        ValueError: for any other strategy, and for sharded optimizer state if there is no outer
            axis or the inner axis does not shard parameters.
    """
    strategy = ShardingStrategy.parse(value, "outer_dp_sharding_strategy")
    if strategy > ShardingStrategy.OPTIM:
        raise ValueError(
            f"outer_dp_sharding_strategy expects no_shard/0 or optim/1 but got {value!r}"
        )
    if mesh is not None and mesh.hsdp_outer_dp_shard:
        strategy = ShardingStrategy.OPTIM
    if strategy.shards_optimizer and mesh is not None and mesh.dense.outer is None:
        raise ValueError(
            "outer_dp_sharding_strategy='optim' needs dp_outer_dim, the name of the outer data axis"
        )
    if strategy.shards_optimizer and inner is not None and not inner.shards_parameters:
        raise ValueError(
            "outer_dp_sharding_strategy='optim' needs zero_dp_strategy='optim_grads_params' but"
            f" got {inner.name.lower()!r}"
        )
    return strategy


def check_flags(**flags: object) -> None:
    """Check that every flag is True or False: the string "false" would otherwise count as true.

    Raises:
        ValueError: names every other flag.
    """
    wrong = [
        f"{name} expects True or False but got {value!r}"
        for name, value in flags.items()
        if value not in (True, False)
    ]
    if wrong:
        raise ValueError("\n".join(wrong))


def parse_device(device: torch.device | str | None) -> torch.device | None:
    """Return ``device`` as a ``torch.device``; None stays None.

    Raises:
        ValueError: for an unknown device, and for ``meta``, where weights have no values.
    """
    try:
        found = torch.device(device) if device is not None else None
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device expects a torch.device, its name or None but got {device!r}"
        ) from error
    if found is not None and found.type == "meta":
        raise ValueError(
            "device expects one that holds values, not meta; init_model_with_meta_device is for"
            " modules built there"
        )
    return found


def parse_size(suggested_communication_unit_size: int | None) -> int | None:
    """Return the suggested number of bytes of one communication.

    Raises:
        ValueError: for anything but None and a positive whole number.
    """
    size = suggested_communication_unit_size
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(
            "suggested_communication_unit_size expects a positive number of bytes or None but got"
            f" {size!r}"
        )
    return size


def parse_granularity(granularity: str) -> Granularity:
    """Return the smallest part of a parameter that is never cut.

    Raises:
        ValueError: for anything but "prefer_rows" and "rows".
    """
    known = {"prefer_rows": PREFER_ROWS, "rows": ROWS}
    if not isinstance(granularity, str) or granularity not in known:
        raise ValueError(f"granularity expects 'prefer_rows' or 'rows' but got {granularity!r}")
    return known[granularity]


def check_function(function: object) -> None:
    """Check ``param_init_fn``.

    Raises:
        ValueError: for anything but None and a callable.
    """
    if function is not None and not callable(function):
        raise ValueError(
            f"param_init_fn expects a function of a module, or None, but got {function!r}"
        )


def check_nccl(device: torch.device | None) -> None:
    """Check that memory can be registered with NCCL.

    Args:
        device: of the buffers; None: the accelerator if there is one, otherwise the CPU.

    Raises:
        ValueError: for a device without NCCL, or an allocator whose memory cannot be registered.
    """
    # A build of torch for GPUs has an accelerator wherever it runs.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = (device or accelerator or torch.device("cpu")).type
    if kind != "cuda":
        raise ValueError(
            f"nccl_ub registers memory with NCCL, which there is none of on {kind}: use"
            " fsdp_double_buffer alone"
        )
    options = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments:true" in options.lower().replace(" ", ""):
        raise ValueError(
            "nccl_ub needs memory whose segments do not grow: remove expandable_segments from"
            " PYTORCH_CUDA_ALLOC_CONF"
        )


def check_module(
    module: nn.Module,
    mesh: FSDPDistributedIndex | None,
    strategy: ShardingStrategy | None,
    initialiser: Initialiser | None,
) -> None:
    """Check that a module can be sharded.

    Args:
        module: the user's argument, of any type.
        mesh: the mesh; None leaves it unchecked.
        strategy: the strategy of the inner axis; None leaves it unchecked.
        initialiser: initialises meta parameters; None: there must be no meta parameters.

    Raises:
        ValueError: lists every reason why the module cannot be sharded.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module expects a torch.nn.Module but got {type(module).__name__}")
    # The user may pass the wrapper again, or the module inside it, which its parameters reveal.
    has_wrapper = any(hasattr(each, IS_SHARDED) for each in module.modules())
    if has_wrapper or any(is_linked(each) for each in module.parameters()):
        raise ValueError("the module is sharded already")
    problems = [] if mesh is None else _problems_of_mesh(module, mesh)
    problems += _problems_of_dtypes(module)
    if initialiser is None:
        if mesh is None or mesh.device.type != "meta":  # which simulates a run: nothing has values
            problems += _problems_of_meta_tensors(module)
    else:
        problems += problems_of_initialisation(module, initialiser)
        if strategy is ShardingStrategy.NO_SHARD:
            problems.append(
                "init_model_with_meta_device needs a sharding strategy: at level 0 every rank holds"
                " everything"
            )
    if problems:
        raise ValueError("\n".join(problems))


def check_units(module: nn.Module, unit_modules: Sequence[type | nn.Module] | None) -> None:
    """Check that the modules that are given as units are part of the model.

    Args:
        module: the user's argument, of any type.
        unit_modules: classes, which may be in other models, and modules; None leaves it unchecked.

    Raises:
        ValueError: names every module that is not in ``module``.
    """
    if unit_modules is None or not isinstance(module, nn.Module):
        return
    own = set(module.modules())
    strangers = [
        type(each).__name__
        for each in unit_modules
        if isinstance(each, nn.Module) and each not in own
    ]
    if strangers:
        raise ValueError(
            f"fsdp_unit_modules has {len(strangers)} modules that are no part of the model"
            f" ({', '.join(strangers[:5])}): take them from the model that is sharded (not from a"
            " copy of it), or name their class"
        )


def unmatched_units(
    module: nn.Module, unit_modules: Sequence[type | nn.Module]
) -> list[type[nn.Module]]:
    """Return the classes that no module in ``module`` is an instance of."""
    inside = list(module.modules())[1:]
    classes = [each for each in unit_modules if isinstance(each, type)]
    return [each for each in classes if not any(isinstance(one, each) for one in inside)]


def _problems_of_dtypes(module: nn.Module) -> list[str]:
    parameters = dict(module.named_parameters())
    if not parameters:
        return ["the module has no parameters to shard"]
    wrong = [
        f"{name} ({parameter.dtype})"
        for name, parameter in parameters.items()
        if parameter.requires_grad and not parameter.is_floating_point()
    ]
    if not wrong:
        return []
    return [
        f"trainable parameters expect a floating-point dtype, but there are {', '.join(wrong[:5])}"
    ]


def _problems_of_meta_tensors(module: nn.Module) -> list[str]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    on_meta = [name for name, tensor in tensors if tensor.is_meta]
    if not on_meta:
        return []
    return [
        "parameters or buffers on the meta device have no values to shard:"
        f" {', '.join(on_meta[:5])}; pass init_model_with_meta_device=True"
    ]


def _problems_of_mesh(module: nn.Module, mesh: FSDPDistributedIndex) -> list[str]:
    """Return a problem for parameters that need an axis that the mesh does not have."""
    problems = []
    named = dict(module.named_parameters())
    experts = [name for name, each in named.items() if getattr(each, "allreduce", True) is False]
    if experts and mesh.expert is None:
        problems.append(
            f"{', '.join(experts[:3])} and others are expert parameters (allreduce=False),"
            " which differ between data ranks: pass expt_device_mesh, the mesh of the ranks"
            " that hold the same experts"
        )
    for name, parameter in named.items():
        problem = _problem_of_tensor_axis(name, parameter, mesh)
        if problem is not None:
            return [*problems, problem]  # the others have the same problem
    return problems


def _problem_of_tensor_axis(
    name: str, parameter: nn.Parameter, mesh: FSDPDistributedIndex
) -> str | None:
    if not isinstance(parameter, DTensor):
        return None
    axis, own = mesh.dense.tensor, parameter.device_mesh
    if axis is None:
        return f"{name} is a DTensor over {own.mesh_dim_names}: pass that axis as tp_dim"
    if own.ndim != 1 or own.size() != axis.size():
        return f"{name} is a DTensor over another mesh than the axis tp_dim={mesh.tp_dim!r}"
    return None
