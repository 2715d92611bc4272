# SPDX-License-Identifier: Apache-2.0
"""The settings of a sharded model: frozen dataclasses that check their fields."""

# Messages name a field as `Strategy.level`; interfaces with other names replace that. `Mesh`,
# `Overlap`, `Memory` and `MetaInitialisation` are in the files of the parts that use them.

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPrecision

from megatron.fsdp.config.memory import Memory
from megatron.fsdp.config.meta_initialisation import MetaInitialisation
from megatron.fsdp.config.offload import Offload
from megatron.fsdp.engine.mesh import Mesh
from megatron.fsdp.engine.policy import (
    MixedPrecisionPolicy,
    Overlap,
    ParameterKind,
    Precision,
    ShardingStrategy,
    problems_of_flags,
    raise_problems,
)

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
        embedding_level: ``level`` of embeddings and of the output layer: parameters of
            ``nn.Embedding`` and of the module that ``get_output_embeddings`` returns, and those
            with the attribute ``is_embedding_or_output_parameter``, as Megatron-Core marks them.
            Below 3 they stay gathered, as a fused cross entropy over the output layer needs it, and
            the outer axis does not shard their state. None: ``level``.
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
    embedding_level: int | str | ShardingStrategy | None = None
    boundaries: str | int = "prefer_rows"
    one_unit: bool = False
    fine_grained: bool = False
    ignored: Set[nn.Parameter] = frozenset()

    def __post_init__(self) -> None:
        problems = problems_of_flags(self)
        ignored: list[Any] = []
        if isinstance(self.ignored, Iterable) and not isinstance(self.ignored, torch.Tensor):
            ignored = list(self.ignored)
        elif self.ignored is not None:
            problems.append(self._problem_of_ignored([self.ignored]))
        if not all(isinstance(parameter, nn.Parameter) for parameter in ignored):
            problems.append(self._problem_of_ignored(ignored))
        parsed: dict[str, ShardingStrategy] = {}
        for name in ("level", "outer", "expert_level", "expert_outer", "embedding_level"):
            value = getattr(self, name)
            if value is None and name not in ("level", "outer"):
                continue
            try:
                parsed[name] = ShardingStrategy.parse(value, f"Strategy.{name}")
            except ValueError as error:
                problems.append(str(error))
        problems += self._problems_of_outer("level", "outer", parsed)
        problems += self._problems_of_outer("expert_level", "expert_outer", parsed)
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

    def _problem_of_ignored(self, entries: list[Any]) -> str:
        classes = sorted({type(entry).__name__ for entry in entries})
        return f"Strategy.ignored expects a set of parameters but got {', '.join(classes)}"

    def _problems_of_outer(
        self,
        level_name: str,
        outer_name: str,
        parsed: dict[str, ShardingStrategy],
    ) -> list[str]:
        outer = parsed.get(outer_name, ShardingStrategy.NO_SHARD)
        if outer > ShardingStrategy.OPTIM:
            value = getattr(self, outer_name)
            return [f"Strategy.{outer_name} expects no_shard/0 or optim/1 but got {value!r}"]
        level = parsed.get(level_name, parsed.get("level"))
        if outer and level is not None and not level.shards_parameters:
            return [
                f"Strategy.{outer_name}='optim' needs Strategy.{level_name}='optim_grads_params'"
                f" but got {str(level)!r}"
            ]
        return []

    def of(self, kind: ParameterKind) -> tuple[ShardingStrategy, bool]:
        """Return the level of a kind of parameters, and True if the outer axis shards their state.

        It does so at level 3 only.
        """
        level = self.level
        outer = self.outer
        if kind is ParameterKind.EMBEDDING and self.embedding_level is not None:
            level = self.embedding_level
        if kind is ParameterKind.EXPERT and self.expert_level is not None:
            level = self.expert_level
        if kind is ParameterKind.EXPERT and self.expert_outer is not None:
            outer = self.expert_outer
        parsed = ShardingStrategy.parse(level)
        return parsed, parsed.shards_parameters and ShardingStrategy.parse(outer).shards_optimizer

    @property
    def highest_level(self) -> ShardingStrategy:
        """The highest one of the levels of all kinds of parameters."""
        levels = [self.of(kind)[0] for kind in ParameterKind]
        return max(levels)


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
        """Return the dtypes of a group; its main weights keep the dtype of the module.

        Args:
            compute_dtype: dtype of the parameters in the module.
            trainable: makes no difference.
        """
        main = compute_dtype
        if self.param_dtype is not None and main.is_floating_point:
            compute_dtype = self.param_dtype
        grad_comm = self.grad_comm_dtype
        if grad_comm is None:
            grad_comm = main if REDUCES_AS_MAIN else compute_dtype
        return Precision(
            compute=compute_dtype,
            main_param=main,
            main_grad=main,
            grad_comm=grad_comm,
        )


def parse_precision(policy: MixedPrecisionPolicy | TorchPrecision) -> MixedPrecisionPolicy:
    """Return a policy of this package for one of it or of ``torch.distributed.fsdp``.

    Raises:
        ValueError: for any other object.
        NotImplementedError: for a policy of torch with a dtype for each parameter.
    """
    if isinstance(policy, TorchPrecision):
        if getattr(policy, PER_PARAMETER, None) is not None:
            raise NotImplementedError(
                f"not built: {PER_PARAMETER}; without it param_dtype is that of all parameters"
            )
        return ComputePrecision(
            main_params_dtype=None,
            grad_comm_dtype=policy.reduce_dtype,
            param_dtype=policy.param_dtype,
            output_dtype=policy.output_dtype,
            cast_forward_inputs=policy.cast_forward_inputs,
        )
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
        divisor: further divisor of averaged gradients: the size of expert parallelism for experts
            that are sharded as a model of their own.
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
        """The settings of offloaded main weights, gradients and state; None: on the device."""
        return Offload.parse(self.memory.offload)

    @property
    def checked_mesh(self) -> Mesh:
        """The mesh, when all settings have been checked."""
        assert self.mesh is not None
        return self.mesh

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        of_mesh = self.checked_mesh.device
        device = self.memory.device
        is_fixed = self.initialisation is not None or of_mesh.type == "meta"
        if is_fixed or device in (None, torch.device(of_mesh.type)):  # "cuda" is this rank's GPU
            return of_mesh
        return torch.device(device)


def resolve_unit_modules(unit_modules: Units | None) -> list[type | nn.Module]:
    """Import the classes that are given by path.

    Raises:
        ValueError: names every entry that is neither a module, nor a class of modules, nor a path.
    """
    expected = "Settings.units expects a list of module classes or their import paths"
    if isinstance(unit_modules, (str, type, nn.Module)):
        raise ValueError(f"{expected} but got {unit_modules!r} alone")
    resolved: list[type | nn.Module] = []
    problems = []
    for entry in unit_modules or ():
        try:
            value: Any = entry
            if isinstance(entry, str):
                value = pkgutil.resolve_name(entry)
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
