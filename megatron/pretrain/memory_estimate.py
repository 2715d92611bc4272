# SPDX-License-Identifier: Apache-2.0
"""The memory of a rank in bytes, from a model on the meta device and the sizes of its mesh axes."""

# Units, groups and layouts are made by the functions of the engine, without process groups.

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from operator import add

from torch import nn

from megatron.fsdp.builder import names_of_groups
from megatron.fsdp.engine import unit_choice
from megatron.fsdp.engine.layout import PREFER_ROWS, Granularity, plan
from megatron.fsdp.engine.policy import (
    MixedPrecisionPolicy,
    ParameterKind,
    Precision,
    ShardingStrategy,
)
from megatron.fsdp.engine.tensor_parallel import local_tensor
from megatron.fsdp.engine.unit_choice import belongs_to_expert, kinds_of
from megatron.fsdp.settings import Strategy, resolve_unit_modules


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
    fine_grained = memory_plan.fine_grained
    wanted = resolve_unit_modules(memory_plan.unit_modules)
    units = unit_choice.find_units(model, wanted, fine_grained=fine_grained)
    parameters_of = unit_choice.assign_parameters(units)
    if not fine_grained:
        unit_choice.merge_small_units(units, parameters_of, memory_plan.prefetch_bytes)
    of_units = []
    for parameters in parameters_of.values():
        of_unit: Counter[str] = Counter()
        kinds = kinds_of(model, parameters, has_expert_mesh=memory_plan.expert is not None)
        for key, names in names_of_groups(parameters, kinds).items():
            axes = memory_plan.dense
            if key.kind is ParameterKind.EXPERT and memory_plan.expert:
                axes = memory_plan.expert
            precision = memory_plan.precision.resolve(key.stored.dtype, key.trainable)
            for is_coded in (False, True):
                members = [parameters[name] for name in names]
                members = [one for one in members if (one in memory_plan.coded) == is_coded]
                shapes = [tuple(local_tensor(one).shape) for one in members]
                element = memory_plan.code_bytes if is_coded else precision.compute.itemsize
                strategy = memory_plan.strategy.of(key.kind)
                matrices = memory_plan.matrices.intersection(members)
                in_matrices = sum(local_tensor(one).numel() for one in matrices)
                rest = (axes, strategy, precision, key.trainable, memory_plan, element, in_matrices)
                of_unit.update(_of_group(shapes, *rest) if members else {})
        of_units.append(of_unit)

    def whole(part: str) -> int:
        return sum(unit[part] for unit in of_units)

    def two_largest(part: str) -> int:  # of what is freed after its use
        return sum(sorted(unit[part] for unit in of_units)[-2:])

    return MemoryEstimate(
        weights=whole("weights"),
        gradients=whole("gradients"),
        optimizer_state=whole("optimizer_state"),
        gathered=two_largest("gathered"),
        local_gradients=whole("waiting") + two_largest("reduced_at_once"),
        host=whole("host"),
    )


def experts_in(model: nn.Module) -> bool:
    """Return True if a model has expert parameters, which have a mesh of their own."""
    return any(belongs_to_expert(*named) for named in model.named_parameters())


def host_bytes(numel: int, precision: Precision, trainable: bool, states: int) -> int:
    """Return the bytes of a group with ``numel`` owned elements whose shards are on the host."""
    dtypes = [precision.main_param]
    if trainable:
        dtypes += [precision.main_param] * states + [precision.main_grad]
        # The gradient in the dtype of the optimizer is another tensor, which is kept too.
        dtypes += {precision.main_param} - {precision.main_grad}
    return sum(numel * dtype.itemsize for dtype in dtypes)


def _of_group(
    shapes: list[tuple[int, ...]],
    axes: AxisSizes,
    strategy: tuple[ShardingStrategy, bool],
    precision: Precision,
    trainable: bool,
    memory_plan: MemoryPlan,
    compute: float,
    in_matrices: int,
) -> dict[str, int]:
    """Return the bytes of one group; see [Note: the weights of a group] for its tensors.

    ``compute`` are those of an element as the forward reads it, which may be a code;
    ``in_matrices`` is the number of elements in matrices that have owners.
    """
    level, shards_outer = strategy
    num_inner = axes.inner if level.shards_optimizer else 1
    num_outer = axes.outer if shards_outer else 1
    layout = plan(shapes, num_inner * num_outer, memory_plan.granularity)
    whole, inner_shard, owned = layout.numel, layout.numel // num_inner, layout.shard_size
    main = precision.main_param.itemsize
    is_freed = level.shards_parameters and num_inner > 1
    has_main = precision.main_param != precision.compute
    weights = owned * main if has_main else 0
    if not is_freed:
        weights += int(whole * compute)
    elif not has_main or num_outer > 1 or compute != precision.compute.itemsize:
        # Codes are made once a step. Else the compute shard is cast at each all-gather.
        weights += int(inner_shard * compute)
    has_own = has_main or (is_freed and num_outer == 1)  # main weights that are nothing else
    kept = 1 - memory_plan.offloaded
    weights -= int(owned * main * memory_plan.offloaded) if has_own else 0
    host = host_bytes(owned, precision, trainable, memory_plan.states)
    parts = {"weights": weights, "gathered": int(whole * compute) if is_freed else 0}
    parts["host"] = int(host * memory_plan.offloaded)
    if not trainable:
        return parts
    # The gradient is kept in its own dtype, or in that of the optimizer, not in both at once.
    gradients = owned * (precision.main_grad.itemsize if memory_plan.decoupled else main)
    state = memory_plan.state_bytes or main * memory_plan.states
    momentum = in_matrices // (axes.inner * axes.outer) * main
    others = owned - in_matrices // (num_inner * num_outer)
    frees_local = level.shards_gradients and num_inner > 1
    waiting = at_once = 0  # for other microbatches, or from the end of a backward to the reduction
    if frees_local:
        at_once = whole * precision.grad_comm.itemsize
    elif num_inner * num_outer > 1 or memory_plan.offloaded:  # else they are the gradient shard
        waiting = whole * precision.main_grad.itemsize
    inner_sum = inner_shard * precision.main_grad.itemsize
    if num_inner > 1 and axes.outer > 1:
        # Below level 2 it is reduced over the outer axis at once.
        waiting += inner_sum if frees_local else 0
        at_once += 0 if frees_local else inner_sum
    return parts | {
        "gradients": int(gradients * kept),
        "optimizer_state": int(others * kept) * state + int(momentum * kept),
        "waiting": waiting,
        "reduced_at_once": at_once,
    }
