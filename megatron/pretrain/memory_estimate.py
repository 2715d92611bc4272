# SPDX-License-Identifier: Apache-2.0
"""The memory of a rank in bytes, from a model on the meta device and the sizes of its mesh axes."""

# Units, groups and layouts are made by the functions of the engine, without process groups.

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from operator import add

from torch import nn

from megatron.fsdp.config.settings import Strategy, resolve_unit_modules
from megatron.fsdp.engine.layout import PREFER_ROWS, Granularity, plan
from megatron.fsdp.engine.policy import (
    MixedPrecisionPolicy,
    ParameterKind,
    Precision,
    ShardingStrategy,
)
from megatron.fsdp.engine.tensor_parallel import local_tensor
from megatron.fsdp.module import unit_choice
from megatron.fsdp.module.builder import GroupKey, names_of_groups
from megatron.fsdp.module.unit_choice import belongs_to_expert, kinds_of


@dataclass(frozen=True)
class AxisSizes:
    """Ranks over which some parameters are sharded, and which hold copies of the shards."""

    inner: int
    outer: int = 1


@dataclass(frozen=True)
class MemoryPlan:
    """The settings of a sharded model, for :func:`estimate_memory`."""

    unit_modules: Sequence[type | nn.Module | str]  # modules, classes or import paths of units
    strategy: Strategy  # of which the levels count
    precision: MixedPrecisionPolicy
    dense: AxisSizes  # the axes of parameters that are no experts'
    expert: AxisSizes | None = None  # the axes of expert parameters; None: those of the others
    offloaded: float = 0.0  # the part of main weights, gradients and state that is on the host
    states: int = 2  # tensors of optimizer state for each weight, such as 2 for Adam
    state_bytes: int | None = None  # of all of them for an element; None: in the weights' dtype
    decoupled: bool = False  # gradients keep the dtype in which they accumulate
    matrices: frozenset[nn.Parameter] = frozenset()  # an owner has all of their state, one tensor
    fine_grained: bool = False  # make units inside units too
    prefetch_bytes: int | None = None  # see ``Overlap``; it bounds the root's unit too
    granularity: Granularity = PREFER_ROWS
    coded: frozenset[nn.Parameter] = frozenset()  # weights that are stored and gathered as codes
    code_bytes: float = 1.0  # of each element of those, with its part of a scale


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank, by part."""

    weights: int = 0  # these three exist between steps, the others are peaks within a step
    gradients: int = 0
    optimizer_state: int = 0
    gathered: int = 0  # by two units at once, one in use and one ahead
    local_gradients: int = 0  # before they are reduced, in a step of several microbatches
    host: int = 0  # of main weights, gradients and optimizer state that are not on the device

    def __add__(self, other: MemoryEstimate) -> MemoryEstimate:
        return MemoryEstimate(*map(add, astuple(self), astuple(other)))

    @property
    def total(self) -> int:
        """Bytes of all parts on the device."""
        return sum(astuple(self)) - self.host


def estimate_memory(model: nn.Module, memory_plan: MemoryPlan) -> MemoryEstimate:
    """Return the bytes on one rank of the part of a model that it has, on any device."""
    wanted = resolve_unit_modules(memory_plan.unit_modules)
    units = unit_choice.find_units(model, wanted, fine_grained=memory_plan.fine_grained)
    parameters_of = unit_choice.assign_parameters(units)
    if not memory_plan.fine_grained:
        unit_choice.merge_small_units(units, parameters_of, memory_plan.prefetch_bytes)
    kinds = kinds_of(
        model,
        dict(model.named_parameters()),
        has_expert_mesh=memory_plan.expert is not None,
        has_embedding_strategy=memory_plan.strategy.embedding_level is not None,
    )
    usages = []
    for parameters in parameters_of.values():
        usages.append(_usage_of_unit(parameters, kinds, memory_plan))

    def whole(part: str) -> int:
        return sum(usage[part] for usage in usages)

    def two_largest(part: str) -> int:  # for memory that is freed after its use
        return sum(sorted(usage[part] for usage in usages)[-2:])

    return MemoryEstimate(
        weights=whole("weights"),
        gradients=whole("gradients"),
        optimizer_state=whole("optimizer_state"),
        gathered=two_largest("gathered"),
        local_gradients=whole("waiting") + two_largest("reduced_at_once"),
        host=whole("host"),
    )


def _usage_of_unit(
    parameters: dict[str, nn.Parameter],
    kinds: dict[str, ParameterKind],
    memory_plan: MemoryPlan,
) -> Counter[str]:
    """Return the bytes of the groups of a unit, by part.

    Args:
        parameters: those of the unit, by their names.
        kinds: their kinds, by their names.
        memory_plan: the sharding of the model.
    """
    usage: Counter[str] = Counter()
    for key, names in names_of_groups(parameters, kinds).items():
        coded = []
        plain = []
        for name in names:
            parameter = parameters[name]
            if parameter in memory_plan.coded:
                coded.append(parameter)
            else:
                plain.append(parameter)
        for members, code_bytes in ((plain, None), (coded, memory_plan.code_bytes)):
            if members:
                group = _GroupUsage.of(key, members, memory_plan, code_bytes)
                usage.update(group.bytes_of_weights())
                if key.trainable:
                    usage.update(group.bytes_of_training())
    return usage


def experts_in(model: nn.Module) -> bool:
    """Return True if a model has expert parameters, which have a mesh of their own."""
    return any(belongs_to_expert(*named) for named in model.named_parameters())


def host_bytes(
    numel: int,
    precision: Precision,
    trainable: bool,
    states: int,
) -> int:
    """Return the bytes of a group whose shards are on the host.

    Args:
        numel: elements that the rank owns.
        precision: dtypes of the group.
        trainable: with gradients and optimizer state.
        states: tensors of optimizer state for each weight, in the dtype of main weights.
    """
    main = precision.main_param.itemsize
    element = main
    if trainable:
        element += main * states + precision.main_grad.itemsize
        if precision.main_param != precision.main_grad:
            # The gradient in the dtype of the optimizer is another tensor, which is kept too.
            element += main
    return numel * element


@dataclass(frozen=True)
class _GroupUsage:
    """The sizes of one group on a rank; see [Note: the weights of a group] for its tensors."""

    memory_plan: MemoryPlan
    precision: Precision
    trainable: bool
    compute_bytes: float
    """Bytes of an element as the forward reads it, which may be a code."""
    axes: AxisSizes
    level: ShardingStrategy
    num_inner: int
    """Ranks of the inner axis over which main weights are sharded."""
    num_outer: int
    """Ranks of the outer axis over which they are sharded."""
    numel: int
    """Elements of the whole group, with padding."""
    numel_in_matrices: int
    """Elements in matrices that have owners."""

    @classmethod
    def of(
        cls,
        key: GroupKey,
        members: list[nn.Parameter],
        memory_plan: MemoryPlan,
        code_bytes: float | None,
    ) -> _GroupUsage:
        """Lay a group out.

        Args:
            key: properties of all members.
            members: weights of the group, all stored as codes or none.
            memory_plan: settings of the model.
            code_bytes: bytes of an element that is gathered as a code; None for plain weights.
        """
        axes = memory_plan.dense
        if key.kind is ParameterKind.EXPERT and memory_plan.expert is not None:
            axes = memory_plan.expert
        level, shards_outer = memory_plan.strategy.of(key.kind)
        num_inner = axes.inner if level.shards_optimizer else 1
        num_outer = axes.outer if shards_outer else 1
        shapes = [tuple(local_tensor(member).shape) for member in members]
        layout = plan(shapes, num_inner * num_outer, memory_plan.granularity)
        precision = memory_plan.precision.resolve(key.stored.dtype, key.trainable)
        matrices = memory_plan.matrices.intersection(members)
        return cls(
            memory_plan=memory_plan,
            precision=precision,
            trainable=key.trainable,
            compute_bytes=precision.compute.itemsize if code_bytes is None else code_bytes,
            axes=axes,
            level=level,
            num_inner=num_inner,
            num_outer=num_outer,
            numel=layout.numel,
            numel_in_matrices=sum(local_tensor(matrix).numel() for matrix in matrices),
        )

    @property
    def owned(self) -> int:
        """Elements of this rank's shard of main weights."""
        return self.numel // (self.num_inner * self.num_outer)

    @property
    def inner_shard(self) -> int:
        """Elements of a shard over the inner axis alone."""
        return self.numel // self.num_inner

    def bytes_of_weights(self) -> dict[str, int]:
        """Return the bytes of weights, on the device and on the host, with all of its state."""
        precision = self.precision
        main = precision.main_param.itemsize
        has_main = precision.main_param != precision.compute
        is_freed = self.level.shards_parameters and self.num_inner > 1
        gathered = int(self.numel * self.compute_bytes)
        weights = 0
        if has_main:
            weights += self.owned * main
        if not is_freed:
            weights += gathered
        elif not has_main or self.num_outer > 1 or self.compute_bytes != precision.compute.itemsize:
            # Codes are made once a step. Otherwise the compute shard is cast at each all-gather.
            weights += int(self.inner_shard * self.compute_bytes)
        offloaded = self.memory_plan.offloaded
        if has_main or (is_freed and self.num_outer == 1):  # main weights that are nothing else
            weights -= int(self.owned * main * offloaded)
        host = host_bytes(self.owned, precision, self.trainable, self.memory_plan.states)
        return {
            "weights": weights,
            "gathered": gathered if is_freed else 0,
            "host": int(host * offloaded),
        }

    def bytes_of_training(self) -> dict[str, int]:
        """Return the bytes of gradients and of optimizer state on the device."""
        memory_plan = self.memory_plan
        main = self.precision.main_param.itemsize
        main_grad = self.precision.main_grad.itemsize
        # The gradient is kept in its own dtype, or in that of the optimizer, not in both at once.
        gradients = self.owned * (main_grad if memory_plan.decoupled else main)
        state = memory_plan.state_bytes or main * memory_plan.states
        momentum = self.numel_in_matrices // (self.axes.inner * self.axes.outer) * main
        others = self.owned - self.numel_in_matrices // (self.num_inner * self.num_outer)
        waiting = 0  # for other microbatches
        at_once = 0  # from the end of a backward to the reduction
        frees_local = self.level.shards_gradients and self.num_inner > 1
        if frees_local:
            at_once += self.numel * self.precision.grad_comm.itemsize
        elif self.num_inner * self.num_outer > 1 or memory_plan.offloaded:
            waiting += self.numel * main_grad  # otherwise they are the gradient shard
        if self.num_inner > 1 and self.axes.outer > 1:
            inner_sum = self.inner_shard * main_grad
            if frees_local:
                waiting += inner_sum
            else:  # below level 2 it is reduced over the outer axis at once
                at_once += inner_sum
        kept = 1 - memory_plan.offloaded
        return {
            "gradients": int(gradients * kept),
            "optimizer_state": int(others * kept) * state + int(momentum * kept),
            "waiting": waiting,
            "reduced_at_once": at_once,
        }
