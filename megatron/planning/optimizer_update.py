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
        return max((each.imbalance for each in self.owners), default=1.0)


def plan_update(
    args: argparse.Namespace, machine: Cluster, model: ShardedModule, costs: GptCosts
) -> PlannedUpdate:
    """Plan the update of the rank that a simulation pretends to be.

    Args:
        args: the completed arguments.
        machine: on which the model is trained.
        model: sharded on the meta device.
        costs: of the run.
    """
    matrices = matrices_of(model) if args.optimizer in MUON else []
    states = 1 if args.optimizer == "sgd" else 2
    num_updated = state_bytes = num_bytes = num_elements = 0
    for group in model.groups:
        size = group.layout.shard_size if group.requires_grad else 0
        if group.memory.is_offloaded:
            num_elements += size
            whole = group.layout.shard_size, group.precision, group.requires_grad
            num_bytes += host_bytes(*whole, states)
        else:
            num_updated += size
            state_bytes += size * _state_bytes(args, group.precision.main_param)
    for each in matrices:  # the others' state is not theirs
        shard = each.parameter.to_local()
        num_updated -= shard.numel()
        state_bytes -= shard.numel() * _state_bytes(args, shard.dtype)
    owners = tuple(_plan_owners(args, machine, model, matrices))
    state_bytes += sum(each.momentum_bytes for each in owners)
    on_device = costs.update_seconds(num_updated)
    on_device += sum(each.seconds for each in owners)
    on_host = machine.host_seconds(num_elements * ALL_BY_TORCH) if num_elements else 0.0
    return PlannedUpdate(
        seconds=max(on_device, on_host),
        state_bytes=state_bytes,
        passing_bytes=max(
            (each.round_bytes for each in owners), default=num_updated * _copied_bytes(args)
        ),
        host=HostUse(num_bytes, num_elements, update_seconds=on_host),
        owners=owners,
    )


def _state_bytes(args: argparse.Namespace, main: torch.dtype) -> int:
    """Return the bytes of optimizer state for a weight that no owner of a matrix has."""
    if args.use_precision_aware_optimizer:
        return int(args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize)
    return main.itemsize if args.optimizer == "sgd" else 2 * main.itemsize


def _copied_bytes(args: argparse.Namespace) -> int:
    """Return the bytes of fp32 copies of a weight's moments while FusedAdam updates them."""
    if not args.use_precision_aware_optimizer:
        return 0
    dtypes = args.exp_avg_dtype, args.exp_avg_sq_dtype
    if dtypes == (torch.bfloat16, torch.bfloat16):
        return 0  # its kernel reads these
    return sum(torch.float32.itemsize for each in dtypes if each != torch.float32)


def matrices_of(model: ShardedModule) -> list[ShardedParam]:
    """Return the trained parameters of a sharded model that matrix optimizers update."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return [each for each in map(sharded_param_of, trained) if is_matrix(each.compute)]


def _plan_owners(
    args: argparse.Namespace, machine: Cluster, model: ShardedModule, matrices: list[ShardedParam]
) -> Iterator[OwnerPlan]:
    """Yield the plans of matrices that have the same axes: experts', and all others."""
    found: dict[Axes, list[ShardedParam]] = defaultdict(list)
    for matrix in matrices:
        found[model._mesh.axes(matrix.kind)].append(matrix)
    for axes, own in found.items():
        among = OwnerRanks(axes)
        numbers = dist.get_process_group_ranks(among.group)
        yield plan_owners(
            [matrix.slice.shape for matrix in own],
            [numbers[member] for member in among.members],
            machine,
            steps=args.muon_num_ns_steps,
            num_replicas=axes.num_data_ranks // own[0].group.partition.num_owned,
        )
