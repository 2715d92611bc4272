# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a model that is to be sharded, found before anything happens to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp import meta_init
from megatron.fsdp.engine.mesh import FSDPDistributedIndex
from megatron.fsdp.engine.policy import ShardingStrategy
from megatron.fsdp.engine.unit import Unit
from megatron.fsdp.problems import agree_on
from megatron.fsdp.sharding import Sharding

SHARDED = "_fsdp_is_sharded"
"""Attribute of a wrapper whose parameters are sharded."""


def outer_strategy(
    config: Any, index: FSDPDistributedIndex | None, inner: ShardingStrategy | None
) -> ShardingStrategy:
    """What the outer axis divides: nothing, or optimizer state.

    Without ``index`` the mesh is not looked at.

    Raises:
        ValueError: for anything else, without an outer axis, or where the inner axis does not
            divide everything.
    """
    value = getattr(config, "outer_dp_sharding_strategy", 0)
    strategy = ShardingStrategy.parse(value, "outer_dp_sharding_strategy")
    if strategy > ShardingStrategy.OPTIM:
        raise ValueError(
            f"outer_dp_sharding_strategy expects no_shard/0 or optim/1 but got {value!r}"
        )
    if index is not None and index.hsdp_outer_dp_shard:
        strategy = ShardingStrategy.OPTIM
    if strategy.shards_optimizer and index is not None and index.dense.outer is None:
        raise ValueError(
            "outer_dp_sharding_strategy='optim' needs dp_outer_dim, the name of the outer data axis"
        )
    if strategy.shards_optimizer and inner is not None and not inner.shards_parameters:
        raise ValueError(
            "outer_dp_sharding_strategy='optim' needs zero_dp_strategy='optim_grads_params' but"
            f" got {inner.name.lower()!r}"
        )
    return strategy


def check_flags(**flags: Any) -> None:
    """Raise ``ValueError`` naming every flag that is neither True nor False; "false" would count as true."""
    wrong = [
        f"{name} expects True or False but got {value!r}"
        for name, value in flags.items()
        if value not in (True, False)
    ]
    if wrong:
        raise ValueError("\n".join(wrong))


def device_of(device: Any) -> torch.device | None:
    """``device`` as torch has it.

    Raises:
        ValueError: where there is none of the name, and for ``meta``, which would drop the weights.
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


def check_module(
    module: Any,
    index: FSDPDistributedIndex | None,
    strategy: ShardingStrategy | None,
    initialiser: meta_init.Initialiser | None,
) -> None:
    """Raise ``ValueError`` listing why a module cannot be sharded."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"module expects a torch.nn.Module but got {type(module).__name__}")
    # A wrapper, or the module inside one, which shows sharded parameters.
    is_wrapped = any(hasattr(each, SHARDED) for each in module.modules())
    if is_wrapped or any(hasattr(parameter, "_fsdp_sharded") for parameter in module.parameters()):
        raise ValueError("the module is sharded already")
    problems = [] if index is None else problems_of_parameters(module, index)
    parameters = dict(module.named_parameters())
    if not parameters:
        problems.append("the module has no parameters to shard")
    odd = [
        f"{name} ({p.dtype})"
        for name, p in parameters.items()
        if p.requires_grad and not p.is_floating_point()
    ]
    if odd:
        problems.append(
            "trainable parameters expect a floating-point dtype, but there are"
            f" {', '.join(odd[:5])}"
        )
    meta = [
        name for name, tensor in (*parameters.items(), *module.named_buffers()) if tensor.is_meta
    ]
    if meta and initialiser is None:
        problems.append(
            "parameters or buffers on the meta device have no values to shard:"
            f" {', '.join(meta[:5])}; pass init_model_with_meta_device=True"
        )
    elif initialiser is not None:
        problems += meta_init.problems_of(module, initialiser)
        if strategy is ShardingStrategy.NO_SHARD:
            problems.append(
                "init_model_with_meta_device needs a sharding strategy: at level 0 every rank holds"
                " everything"
            )
    if problems:
        raise ValueError("\n".join(problems))


def check_agreement(
    sharding: Sharding, parameters_of: dict[Unit, dict[str, nn.Parameter]], **schedule: Any
) -> None:
    """Raise ``ValueError`` where ranks are about to shard different things; they would wait for each other forever.

    ``schedule``: other arguments, by name, that decide when ranks communicate.
    """
    shapes = [
        f"{name} {tuple(parameter.shape)} {parameter.dtype}"
        f" {'trainable' if parameter.requires_grad else 'frozen'}"
        + (" on meta" if parameter.is_meta else "")
        for parameters in parameters_of.values()
        for name, parameter in parameters.items()
    ]
    settings = {
        "the sharding strategy": f"{sharding.strategy.name}, outer {sharding.outer_strategy.name}",
        "mixed_precision_policy": sharding.precision,
        "the gradient policy": sharding.gradients,
        **schedule,
        "the list of units": ", ".join(unit.name or "the model" for unit in parameters_of),
        **{f"parameter {number}": shape for number, shape in enumerate(shapes)},
        "the number of parameters": len(shapes),
    }
    axes = sharding.index.dense
    groups = [axes.inner.get_group()] + ([axes.outer.get_group()] if axes.outer is not None else [])
    differing = agree_on(settings, groups)
    if differing:
        raise ValueError("\n".join(differing[:10]))


def problems_of_parameters(module: nn.Module, index: FSDPDistributedIndex) -> list[str]:
    """Parameters that the mesh has no axis for."""
    problems = []
    named = dict(module.named_parameters())
    if index.expert is None:
        experts = [
            name
            for name, parameter in named.items()
            if getattr(parameter, "allreduce", True) is False
        ]
        if experts:
            problems.append(
                f"{', '.join(experts[:3])} and others are expert parameters (allreduce=False),"
                " which differ between data ranks: pass expt_device_mesh, the mesh of the ranks"
                " that hold the same experts"
            )
    for name, parameter in named.items():
        if not isinstance(parameter, DTensor):
            continue
        if index.dense.tensor is None:
            problems.append(
                f"{name} is a DTensor over {parameter.device_mesh.mesh_dim_names}: pass that axis"
                " as tp_dim"
            )
        elif (
            parameter.device_mesh.ndim != 1
            or parameter.device_mesh.size() != index.dense.tensor.size()
        ):
            problems.append(
                f"{name} is a DTensor over another mesh than the axis tp_dim={index.tp_dim!r}"
            )
        else:
            continue
        break  # one names them all
    return problems
