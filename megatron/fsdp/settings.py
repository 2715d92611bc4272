# SPDX-License-Identifier: Apache-2.0
"""The settings of a sharded model, which check themselves."""

# Messages name a setting as `Strategy.level`; interfaces with names of their own replace that.
# `Mesh`, `Overlap`, `Memory` and `MetaInitialisation` are beside the parts that they are for.

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPrecision

from megatron.fsdp.backends.memory_slots import Memory
from megatron.fsdp.engine.mesh import Mesh
from megatron.fsdp.engine.policy import (
    MixedPrecisionPolicy,
    Overlap,
    Precision,
    ShardingStrategy,
    problems_of_flags,
    raise_problems,
)
from megatron.fsdp.meta_initialisation import MetaInitialisation
from megatron.fsdp.optimizer.host.offload import Offload

Units = Sequence[type | nn.Module | str]  # import paths are "package.module.Class"


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """The state that is sharded, and the parts in which it is.

    Args:
        level: the ZeRO level: 0 to 3, or "no_shard", "optim", "optim_grads", "optim_grads_params".
        outer: the strategy of the outer axis: 0 ("no_shard"), or 1 ("optim"): it shards optimizer
            state too, at level 3.
        expert_level: ``level`` of expert parameters, over ``Mesh.expert_mesh``. None: ``level``.
        expert_outer: ``outer`` of expert parameters. None: ``outer`` at level 3, otherwise 0.
        boundaries: "prefer_rows": a shard boundary may cut inside a row of a parameter where rows
            would cost more than 1 % of padding; the local tensor is then flat. "rows": never. A
            number: nor inside a block of so many elements, for optimizers that quantize state.
            "prefer_tensors": nowhere, if no parameter of a group has to be cut within that 1 %.
        one_unit: make the whole model one unit.
        fine_grained: make each module that owns parameters a unit, inside named units too.
        ignored: parameters of the model that are not sharded. They stay as they are, on their
            device and with the values of their rank, in ``parameters()`` and state dicts too.
            An optimizer steps them as plain tensors; nothing reduces their gradients over ranks.
    """

    level: int | str | ShardingStrategy = ShardingStrategy.OPTIM_GRADS_PARAMS
    outer: int | str | ShardingStrategy = ShardingStrategy.NO_SHARD
    expert_level: int | str | ShardingStrategy | None = None
    expert_outer: int | str | ShardingStrategy | None = None
    boundaries: str | int = "prefer_rows"
    one_unit: bool = False
    fine_grained: bool = False
    ignored: Set[nn.Parameter] = frozenset()

    def __post_init__(self) -> None:
        problems = problems_of_flags(self)
        given: Any = () if self.ignored is None else self.ignored
        are_several = isinstance(given, Iterable) and not isinstance(given, torch.Tensor)
        ignored = list(given) if are_several else [given]
        if not are_several or not all(isinstance(one, nn.Parameter) for one in ignored):
            found = ", ".join(sorted({type(one).__name__ for one in ignored}))
            problems.append(f"Strategy.ignored expects a set of parameters but got {found}")
        parsed: dict[str, ShardingStrategy] = {}
        for name in ("level", "outer", "expert_level", "expert_outer"):
            value = getattr(self, name)
            try:
                if value is not None or not name.startswith("expert"):
                    parsed[name] = ShardingStrategy.parse(value, f"Strategy.{name}")
            except ValueError as error:
                problems.append(str(error))
        for kind in ("", "expert_"):
            name, level = f"Strategy.{kind}outer", parsed.get(f"{kind}level", parsed.get("level"))
            outer = parsed.get(f"{kind}outer", ShardingStrategy.NO_SHARD)
            if outer > ShardingStrategy.OPTIM:
                wrong = getattr(self, f"{kind}outer")
                problems.append(f"{name} expects no_shard/0 or optim/1 but got {wrong!r}")
            elif outer and level is not None and not level.shards_parameters:
                problems.append(
                    f"{name}='optim' needs Strategy.{kind}level='optim_grads_params' but got"
                    f" {str(level)!r}"
                )
        size = self.boundaries
        is_size = isinstance(size, int) and not isinstance(size, bool) and size > 0
        if not is_size and size not in ("prefer_rows", "rows", "prefer_tensors"):
            problems.append(
                "Strategy.boundaries expects 'prefer_rows', 'rows', 'prefer_tensors' or the number"
                f" of elements of a block but got {size!r}"
            )
        raise_problems(problems)
        for name, strategy in parsed.items():
            object.__setattr__(self, name, strategy)
        object.__setattr__(self, "ignored", frozenset(ignored))

    def of(self, is_expert: bool) -> tuple[ShardingStrategy, bool]:
        """Return the level of some parameters, and True if the outer axis shards their state."""
        level, outer = self.level, self.outer
        if is_expert:
            level = level if self.expert_level is None else self.expert_level
            outer = outer if self.expert_outer is None else self.expert_outer
        parsed = ShardingStrategy.parse(level)
        return parsed, parsed.shards_parameters and ShardingStrategy.parse(outer).shards_optimizer


PER_PARAMETER = "param_dtype_override_fn"
REDUCES_AS_MAIN = hasattr(TorchPrecision, PER_PARAMETER)
"""Since torch 2.15 FSDP2 reduces in the dtype of main weights where the policy names no other."""


@dataclass(frozen=True)
class ComputePrecision(MixedPrecisionPolicy):
    """FSDP2's precision: weights are cast to a compute dtype, and main weights keep theirs.

    Args:
        param_dtype: dtype of compute weights. None: the module's.
        output_dtype: dtype that floating-point outputs of units are cast to; None: as they are.
        cast_forward_inputs: cast floating-point inputs of units to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def resolve(self, compute_dtype: torch.dtype, trainable: bool) -> Precision:
        """Return the dtypes of a group; its main weights keep the dtype of the module."""
        main = compute_dtype
        if self.param_dtype is not None and main.is_floating_point:
            compute_dtype = self.param_dtype
        comm = main if REDUCES_AS_MAIN else compute_dtype
        return Precision(compute_dtype, main, main, self.grad_comm_dtype or comm)


def parse_precision(policy: MixedPrecisionPolicy | TorchPrecision) -> MixedPrecisionPolicy:
    """Return a policy of this package for one of it or of ``torch.distributed.fsdp``."""
    if isinstance(policy, TorchPrecision):
        if getattr(policy, PER_PARAMETER, None) is not None:
            raise NotImplementedError(
                f"not built: {PER_PARAMETER}; without it param_dtype is that of all parameters"
            )
        dtypes = policy.reduce_dtype, policy.param_dtype, policy.output_dtype
        return ComputePrecision(None, None, *dtypes, policy.cast_forward_inputs)
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ValueError(f"Settings.precision expects a MixedPrecisionPolicy but got {policy!r}")
    return policy


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """The reduction of gradients over ranks, and what the optimizer sees of it.

    Args:
        sum_only: sum gradients instead of averaging them (per-token loss divides later).
        average_in_collective: let the collective average; otherwise its sum is divided.
        sync_each_microbatch: after every backward the gradients on ``param.grad`` are final;
            several backward passes before a step add up. False: the optimizer's step, or
            ``finish_grad_sync``, makes them final, and levels 0 and 1 reduce nothing before it,
            unless ``no_sync`` marks all microbatches but the last.
        report_nonfinite: raise an error that names the parameter and the rank of a NaN or Inf.
        are_decoupled: put gradients on ``param.decoupled_grad``, in ``main_grads_dtype``.
        find_unused: leave ``param.grad`` None, not zero, if the parameter got no gradient on any
            rank since gradients were cleared. It costs a small all-reduce for each
            synchronisation, and levels 0 and 1 reduce when backward is over.
        divisor: what averaged gradients are divided by further: the size of expert parallelism for
            experts that are sharded as a model of their own.
    """

    sum_only: bool = False
    average_in_collective: bool = False
    sync_each_microbatch: bool = True
    report_nonfinite: bool = False
    are_decoupled: bool = False
    find_unused: bool = False
    divisor: int = 1

    def __post_init__(self) -> None:
        problems = problems_of_flags(self)
        if not isinstance(self.divisor, int) or self.divisor < 1:
            problems.append(f"Gradients.divisor expects a positive int but got {self.divisor!r}")
        if self.sum_only and self.average_in_collective:
            problems.append(
                "Gradients.sum_only cannot be combined with Gradients.average_in_collective"
            )
        raise_problems(problems)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a sharded model; see :func:`megatron.fsdp.fully_shard` for each of them."""

    mesh: Mesh | None  # None: it cannot be made, which is an error of the caller
    units: Units | None = None
    strategy: Strategy = Strategy()
    precision: MixedPrecisionPolicy = MixedPrecisionPolicy()
    gradients: Gradients = Gradients()
    overlap: Overlap = Overlap()
    memory: Memory = Memory()
    initialisation: MetaInitialisation | None = None

    @property
    def offload(self) -> Offload | None:
        """The place of main weights, gradients and optimizer state; None: the device."""
        return Offload.parse(self.memory.offload)

    @property
    def own_mesh(self) -> Mesh:
        """The mesh, when all settings have been checked."""
        assert self.mesh is not None
        return self.mesh

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        of_mesh, device = self.own_mesh.device, self.memory.device
        is_fixed = self.initialisation is not None or of_mesh.type == "meta"
        if is_fixed or device in (None, torch.device(of_mesh.type)):  # "cuda" is this rank's GPU
            return of_mesh
        return torch.device(device)


def resolve_unit_modules(
    unit_modules: Units | None,
) -> list[type | nn.Module]:
    """Import the classes that are given by path; raise ``ValueError`` with every wrong entry."""
    expected = "Settings.units expects a list of module classes or their import paths"
    if isinstance(unit_modules, (str, type, nn.Module)):
        raise ValueError(f"{expected} but got {unit_modules!r} alone")
    resolved: list[type | nn.Module] = []
    problems = []
    for entry in unit_modules or ():
        try:
            value = pkgutil.resolve_name(entry) if isinstance(entry, str) else entry
        except (ImportError, AttributeError, ValueError) as error:
            problems.append(f"{entry!r} cannot be imported as package.module.Class ({error})")
            continue
        is_class = isinstance(value, type) and issubclass(value, nn.Module)
        if is_class or isinstance(value, nn.Module):
            resolved.append(value)
        else:
            problems.append(f"{entry!r} is no torch.nn.Module class")
    if problems:
        raise ValueError(
            f"Settings.units expects module classes or their import paths: {'; '.join(problems)}"
        )
    return resolved
