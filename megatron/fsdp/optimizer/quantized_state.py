# SPDX-License-Identifier: Apache-2.0
"""The update of local tensors by optimizers that quantize their state in blocks, as torchao's."""

# [Note: state in blocks] These optimizers quantize the moments of a large parameter in blocks of
# elements, each with a scale. No shard boundary cuts a block, so a shard has the codes and scales
# that the whole parameter would have. Whether moments are quantized depends on the whole parameter
# too: their first values are made here, and the optimizer's own step finds them.

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import lcm, prod
from typing import Any

import torch
from torch.optim import Optimizer

from megatron.fsdp.config.settings import Settings
from megatron.fsdp.dtensor.sharded_param import ShardedParam, is_linked, sharded_param_of
from megatron.fsdp.engine.layout import row_size
from megatron.fsdp.engine.planner import cuts_are_aligned
from megatron.fsdp.engine.tensor_parallel import local_tensor
from megatron.fsdp.optimizer.flat_update import run_step
from megatron.fsdp.optimizer.matrix.owners import matrix_class
from megatron.fsdp.optimizer.optimizer_state import (
    GroupSettings,
    OptimizerClass,
    ParamState,
    parameters_of,
)

SMALLEST = 4096  # elements of a parameter whose moments torchao quantizes


def quantizes_state(kind: type) -> bool:
    """Return True for a class of optimizers that quantizes state as torchao's do."""
    return hasattr(kind, "_subclass_zeros")


def with_fitting_boundaries(
    settings: Settings,
    optimizers: Sequence[Any],
) -> Settings:
    """Return settings whose shard boundaries cut no block, and if it costs little no matrix."""
    boundaries = settings.strategy.boundaries
    sizes = []
    have_matrices = False
    for optimizer in optimizers:
        kind = type(optimizer)
        if matrix_class(kind) is not None:
            have_matrices = True
        # Where the block size is no number, the optimizer quantizes nothing.
        if quantizes_state(kind) and isinstance(optimizer.block_size, int):
            sizes.append(optimizer.block_size)
    if sizes:
        if isinstance(boundaries, int):
            sizes.append(boundaries)
        boundaries = lcm(*sizes)
    elif boundaries == "prefer_rows" and have_matrices:
        boundaries = "prefer_tensors"
    strategy = replace(settings.strategy, boundaries=boundaries)
    return replace(settings, strategy=strategy)


class LocalUpdate:
    """The update of one optimizer on the local tensors of its parameters."""

    def __init__(self, optimizer: Any, kind: OptimizerClass):
        self._step = inspect.unwrap(kind.step)
        self._size: int = optimizer.block_size
        cut = []
        for parameter in parameters_of(optimizer):
            if is_linked(parameter):
                sharded_param = sharded_param_of(parameter)
                if self._is_cut(sharded_param):
                    cut.append(sharded_param.name)
        if cut:
            raise ValueError(
                f"{kind.__name__} quantizes its state in blocks of {self._size} elements, and shard"
                f" boundaries cut blocks of {', '.join(cut[:5])}: shard the model with"
                f" Strategy.boundaries={self._size}, or both with fully_shard(model, optimizer)"
            )

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> None:
        """Update all parameters of ``optimizer`` that have a gradient."""
        params = []
        state: defaultdict[torch.Tensor, ParamState] = defaultdict(dict)
        for group in optimizer.param_groups:
            group_params = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                local = local_tensor(parameter).detach()
                param_state = optimizer.state[parameter]
                if is_linked(parameter):
                    if not param_state:  # it was frozen before
                        sharded_param = sharded_param_of(parameter)
                        first_state = self._first_state(optimizer, group, sharded_param)
                        param_state.update(first_state)
                    if not local.numel():
                        param_state["step"] += 1
                        continue
                    local_state = {}
                    for name, value in param_state.items():
                        local_state[name] = local_tensor(value)
                    param_state = local_state
                state[local] = param_state
                gradient = local_tensor(parameter.grad)
                local.grad = gradient.to(local.dtype)
                group_params.append(local)
            params.append(group_params)
        run_step(self._step, optimizer, params, state)

    def prepare(self, optimizer: Optimizer) -> None:
        """Create the state of parameters that have none, and quantize moments that were loaded."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                if not is_linked(parameter):
                    continue
                sharded_param = sharded_param_of(parameter)
                param_state = self._first_state(optimizer, group, sharded_param)
                for name, value in optimizer.state[parameter].items():
                    local = local_tensor(value)
                    first = local_tensor(param_state.get(name, value))
                    if type(local) is type(first):
                        param_state[name] = value
                    else:
                        first.copy_(local)
                optimizer.state[parameter] = param_state

    def _first_state(
        self,
        optimizer: Any,
        group: GroupSettings,
        sharded_param: ShardedParam,
    ) -> ParamState:
        local = local_tensor(sharded_param.parameter).detach()
        names = ["exp_avg", "exp_avg_sq"]
        if group["amsgrad"]:
            names.append("max_exp_avg_sq")
        param_state: ParamState = {"step": torch.tensor(0.0)}
        for name in names:
            if local.numel() and self._has_blocks(sharded_param):
                moment = optimizer._subclass_zeros(local, name == "exp_avg", self._size)
            else:
                moment = torch.zeros_like(local)
            param_state[name] = sharded_param.over(moment)
        return param_state

    def _has_blocks(self, sharded_param: ShardedParam) -> bool:
        numel = prod(sharded_param.flat_range.shape)
        if numel < SMALLEST:
            return False
        return numel % self._size == 0

    def _is_cut(self, sharded_param: ShardedParam) -> bool:
        if not self._has_blocks(sharded_param):
            return False
        layout = sharded_param.group.layout
        position = layout.positions[sharded_param.index]
        are_aligned = cuts_are_aligned(
            lcm(row_size(position.shape), self._size),
            start=position.start,
            numel=position.numel,
            shard=layout.shard_size,
        )
        return not are_aligned
