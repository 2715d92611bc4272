# SPDX-License-Identifier: Apache-2.0
"""The update of the optimizer: its seconds, and its memory on the device and on the host."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.fsdp import ShardedModule
from megatron.fsdp.dtensor.sharded_param import ShardedParam, sharded_param_of
from megatron.fsdp.engine.mesh import Axes
from megatron.fsdp.optimizer.matrix.matrix_parts import OwnerRanks
from megatron.mcore_adapter.core_optimizers import is_matrix
from megatron.mcore_adapter.run.optimizer_names import MUON
from megatron.planning.costs.update_bytes import ALL_BY_TORCH
from megatron.planning.layer_costs import GptCosts
from megatron.planning.machine import Cluster
from megatron.planning.matrix_owners import OwnerPlan, plan_owners
from megatron.pretrain.memory_estimate import host_bytes


@dataclass(frozen=True)
class HostUse:
    """The part of a rank that is on its host.

    Attributes:
        num_bytes: of main weights, gradients and optimizer state.
        num_elements: that the optimizer updates.
        update_seconds: of clipping and of the update.
    """

    num_bytes: int = 0
    num_elements: int = 0
    update_seconds: float = 0.0


@dataclass(frozen=True)
class PlannedUpdate:
    """The update of the optimizer of one rank.

    Attributes:
        seconds: of the update; the device and the host work at once.
        state_bytes: of optimizer state on the device.
        passing_bytes: on the device during the update: of owners of matrices, or fp32 copies of
            moments.
        host: what is on the host.
        owners: the owners of matrices, first those of experts.
    """

    seconds: float = 0.0
    state_bytes: int = 0
    passing_bytes: int = 0
    host: HostUse = HostUse()
    owners: tuple[OwnerPlan, ...] = ()

    @property
    def imbalance(self) -> float:
        """The work of the owner with the most, in that of the mean."""
        if not self.owners:
            return 1.0
        return max(owner.imbalance for owner in self.owners)


def plan_update(
    args: argparse.Namespace,
    machine: Cluster,
    model: ShardedModule,
    costs: GptCosts,
) -> PlannedUpdate:
    """Plan the update of the rank that a simulation pretends to be.

    Args:
        args: the completed arguments.
        machine: on which the model is trained.
        model: sharded on the meta device.
        costs: of the run.
    """
    num_updated = 0
    state_bytes = 0
    host = _host_use(args, machine, model)
    for group in model.groups:
        if group.requires_grad and not group.memory.is_offloaded:
            size = group.layout.shard_size
            num_updated += size
            state_bytes += size * _state_bytes(args, group.precision.main_param)
    matrices: list[ShardedParam] = []
    if args.optimizer in MUON:
        matrices = matrices_of(model)
    for matrix in matrices:  # the others' state is not theirs
        shard = matrix.parameter.to_local()
        num_updated -= shard.numel()
        state_bytes -= shard.numel() * _state_bytes(args, shard.dtype)
    seconds = costs.update_seconds(num_updated)
    passing_bytes = num_updated * _copied_bytes(args)
    owners = tuple(_plan_owners(args, machine, model, matrices))
    for owner in owners:
        state_bytes += owner.momentum_bytes
        seconds += owner.seconds
    if owners:
        passing_bytes = max(owner.round_bytes for owner in owners)
    return PlannedUpdate(
        seconds=max(seconds, host.update_seconds),
        state_bytes=state_bytes,
        passing_bytes=passing_bytes,
        host=host,
        owners=owners,
    )


def _host_use(
    args: argparse.Namespace,
    machine: Cluster,
    model: ShardedModule,
) -> HostUse:
    """Return the part of a rank that is on its host."""
    states = 1 if args.optimizer == "sgd" else 2
    num_bytes = 0
    num_elements = 0
    for group in model.groups:
        if not group.memory.is_offloaded:
            continue
        size = group.layout.shard_size
        num_bytes += host_bytes(size, group.precision, group.requires_grad, states)
        if group.requires_grad:
            num_elements += size
    if not num_elements:
        return HostUse(num_bytes)
    seconds = machine.host_seconds(num_elements * ALL_BY_TORCH)
    return HostUse(num_bytes, num_elements, seconds)


def _state_bytes(args: argparse.Namespace, main: torch.dtype) -> int:
    """Return the bytes of optimizer state for a weight that no owner of a matrix has."""
    if args.use_precision_aware_optimizer:
        return int(args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize)
    if args.optimizer == "sgd":
        return main.itemsize
    return 2 * main.itemsize


def _copied_bytes(args: argparse.Namespace) -> int:
    """Return the bytes of fp32 copies of a weight's moments while FusedAdam updates them."""
    if not args.use_precision_aware_optimizer:
        return 0
    dtypes = (args.exp_avg_dtype, args.exp_avg_sq_dtype)
    if dtypes == (torch.bfloat16, torch.bfloat16):
        return 0  # its kernel reads these
    num_copies = 2 - dtypes.count(torch.float32)
    return num_copies * torch.float32.itemsize


def matrices_of(model: ShardedModule) -> list[ShardedParam]:
    """Return the trained parameters of a sharded model that matrix optimizers update."""
    found: list[ShardedParam] = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        sharded = sharded_param_of(parameter)
        if is_matrix(sharded.compute):
            found.append(sharded)
    return found


def _plan_owners(
    args: argparse.Namespace,
    machine: Cluster,
    model: ShardedModule,
    matrices: list[ShardedParam],
) -> Iterator[OwnerPlan]:
    """Yield the plans of matrices that have the same axes: experts', and all others."""
    found: dict[Axes, list[ShardedParam]] = defaultdict(list)
    for matrix in matrices:
        found[model._mesh.axes(matrix.kind)].append(matrix)
    for axes, members in found.items():
        among = OwnerRanks(axes)
        numbers = dist.get_process_group_ranks(among.group)
        partition = members[0].group.partition
        yield plan_owners(
            shapes=[matrix.slice.shape for matrix in members],
            ranks=[numbers[rank] for rank in among.members],
            machine=machine,
            steps=args.muon_num_ns_steps,
            num_replicas=axes.num_data_ranks // partition.num_owned,
        )
