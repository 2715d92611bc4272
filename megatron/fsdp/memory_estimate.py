# SPDX-License-Identifier: Apache-2.0
"""The memory of a rank, from a model on the meta device and the sizes of its mesh axes.

Units, groups and layouts are those of the engine: the functions that make them are called, without
process groups. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from torch import nn

from megatron.fsdp.builder import names_of_groups
from megatron.fsdp.checks import resolve_unit_modules
from megatron.fsdp.engine.layout import PREFER_ROWS, Granularity, plan
from megatron.fsdp.engine.policy import MixedPrecisionPolicy, Precision, ShardingStrategy
from megatron.fsdp.engine.tensor_parallel import local_tensor
from megatron.fsdp.engine.unit_choice import (
    assign_parameters,
    find_units,
    is_expert_parameter,
    merge_small_units,
)

Estimate = TypeVar("Estimate", bound="MemoryEstimate")


@dataclass(frozen=True)
class AxisSizes:
    """Ranks over which some parameters are sharded, and which hold copies of the shards."""

    inner: int
    outer: int = 1


@dataclass(frozen=True)
class MemoryPlan:
    """The settings of a sharded model, for :func:`estimate_memory`.

    Args:
        unit_modules: modules, classes or import paths of units.
        strategy: the ZeRO level.
        precision: of main weights and gradients.
        dense: the axes of parameters that are no experts'.
        expert: the axes of expert parameters; None: those of the others.
        shards_outer: the outer axis shards optimizer state.
        states: tensors of optimizer state for each weight, such as 2 for Adam.
        fine_grained: make units inside units too.
        prefetch_bytes: see ``Overlap``; it bounds the root's unit too.
        granularity: of all parameters.
    """

    unit_modules: Sequence[type | nn.Module | str]
    strategy: ShardingStrategy
    precision: MixedPrecisionPolicy
    dense: AxisSizes
    expert: AxisSizes | None = None
    shards_outer: bool = False
    states: int = 2
    fine_grained: bool = False
    prefetch_bytes: int | None = None
    granularity: Granularity = PREFER_ROWS


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank, by part.

    ``weights``, ``gradients`` and ``optimizer_state`` exist between steps. ``gathered`` is what two
    units have gathered at once, one in use and one ahead, and ``local_gradients`` what gradients
    need before they are reduced, in a step of several microbatches; both are peaks within a step.
    """

    weights: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    gathered: int = 0
    local_gradients: int = 0

    def __add__(self: Estimate, other: Estimate) -> Estimate:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return type(self)(**sums)

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True)
class _UnitMemory(MemoryEstimate):
    """Bytes of one unit or group; ``local_gradients`` are those that wait for other microbatches.

    ``reduced_at_once`` is what its gradients need from the end of its backward to the reduction.
    """

    reduced_at_once: int = 0


def estimate_memory(model: nn.Module, memory_plan: MemoryPlan) -> MemoryEstimate:
    """Return the bytes of a model's weights, gradients and optimizer state on one rank.

    Args:
        model: the part of the model that this rank has, on any device.
        memory_plan: how it is sharded.
    """
    wanted = resolve_unit_modules(memory_plan.unit_modules)
    units = find_units(model, wanted, fine_grained=memory_plan.fine_grained)
    parameters_of = assign_parameters(units)
    if not memory_plan.fine_grained:
        merge_small_units(units, parameters_of, memory_plan.prefetch_bytes)
    of_units = []
    for parameters in parameters_of.values():
        of_unit = _UnitMemory()
        for key, names in names_of_groups(parameters, memory_plan.expert is not None).items():
            axes = memory_plan.expert if key.is_expert and memory_plan.expert else memory_plan.dense
            precision = memory_plan.precision.resolve(key.dtype, key.trainable)
            shapes = [tuple(local_tensor(parameters[name]).shape) for name in names]
            of_unit += _of_group(shapes, axes, precision, key.trainable, memory_plan)
        of_units.append(of_unit)
    return _at_once(of_units)


def experts_in(model: nn.Module) -> bool:
    """Return True if a model has expert parameters, which have a mesh of their own."""
    return any(is_expert_parameter(*named) for named in model.named_parameters())


def _of_group(
    shapes: list[tuple[int, ...]],
    axes: AxisSizes,
    precision: Precision,
    trainable: bool,
    memory_plan: MemoryPlan,
) -> _UnitMemory:
    """Return the bytes of one group; see [Note: the weights of a group] for its tensors."""
    strategy = memory_plan.strategy
    num_inner = axes.inner if strategy.shards_optimizer else 1
    num_outer = axes.outer if memory_plan.shards_outer else 1
    layout = plan(shapes, num_inner * num_outer, memory_plan.granularity)
    whole, inner_shard, owned = layout.numel, layout.numel // num_inner, layout.shard_size
    compute, main = precision.compute.itemsize, precision.main_param.itemsize
    is_freed = strategy.shards_parameters and num_inner > 1
    has_main = precision.main_param != precision.compute
    weights = owned * main if has_main else 0
    if not is_freed:
        weights += whole * compute
    elif not has_main or num_outer > 1:
        weights += inner_shard * compute  # else the compute shard is cast at each all-gather
    gathered = whole * compute if is_freed else 0
    if not trainable:
        return _UnitMemory(weights, gathered=gathered)
    # The gradient is kept in its own dtype, or in that of the optimizer, not in both at once.
    gradients = owned * main
    states = gradients * memory_plan.states
    frees_local = strategy.shards_gradients and num_inner > 1
    waiting = at_once = 0
    if frees_local:
        at_once = whole * precision.grad_comm.itemsize
    elif num_inner * num_outer > 1:  # else they accumulate in the tensor of the gradient shard
        waiting = whole * precision.main_grad.itemsize
    inner_sum = inner_shard * precision.main_grad.itemsize
    if num_inner > 1 and axes.outer > 1:
        # Below level 2 it is reduced over the outer axis at once.
        waiting += inner_sum if frees_local else 0
        at_once += 0 if frees_local else inner_sum
    return _UnitMemory(weights, gradients, states, gathered, waiting, at_once)


def _at_once(of_units: list[_UnitMemory]) -> MemoryEstimate:
    """Add the parts of units; of what is freed after its use, add the two largest."""

    def largest(sizes: list[int]) -> int:
        return sum(sorted(sizes)[-2:])

    return MemoryEstimate(
        sum(unit.weights for unit in of_units),
        sum(unit.gradients for unit in of_units),
        sum(unit.optimizer_state for unit in of_units),
        largest([unit.gathered for unit in of_units]),
        sum(unit.local_gradients for unit in of_units)
        + largest([unit.reduced_at_once for unit in of_units]),
    )
