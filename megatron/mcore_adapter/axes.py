# SPDX-License-Identifier: Apache-2.0
"""The mesh axes of a sharded model, out of Megatron-Core's process groups."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp import FSDPDistributedIndex

SHARD_AXIS = "dp_cp"
OUTER_AXIS = "dp_outer"
TENSOR_AXIS = "tp"


def mesh_axes(
    groups: dict[str, dist.ProcessGroup | None],
    pg_collection: ProcessGroupCollection | None,
    device: torch.device | str | None,
    has_experts: bool,
    outer_is_sharded: bool,
    own_gather_group: bool,
) -> FSDPDistributedIndex:
    """Dense parameters over data x context ranks, experts over the ranks that hold the same experts; a collective.

    Args:
        groups: as ``ProcessGroupCollection.setup_process_groups_for_ddp`` returns them.
        pg_collection: where they came from; None: ``parallel_state``.
        device: of the model; None: the accelerator there is, else cpu.
        has_experts: whether the model has parameters that expert parallelism divides.
        outer_is_sharded: whether the outer axis of hybrid sharding divides optimizer state.
        own_gather_group: whether gathers have a communicator of their own, ``parallel_state``'s.
    """
    kind = _device_type(device)
    tensor, outer = groups["tp_group"], groups["inter_dist_opt_group"]
    tensor_of_experts = expert_tensor_group(pg_collection) if has_experts else None
    is_sliced = any(group is not None and group.size() > 1 for group in (tensor, tensor_of_experts))
    dense = _mesh(kind, tensor if is_sliced else None, groups["intra_dp_cp_group"], outer)
    expert, gather = None, None
    if has_experts:
        expert = _mesh(
            kind, tensor_of_experts if is_sliced else None, groups["intra_expt_dp_group"], outer
        )
    if own_gather_group:
        gather = parallel_state.get_data_parallel_group(
            with_context_parallel=True, independent_all_gather=True
        )
    is_hybrid = outer is not None
    return FSDPDistributedIndex(
        dense,
        dp_shard_dim=SHARD_AXIS,
        dp_outer_dim=OUTER_AXIS if is_hybrid else None,
        tp_dim=TENSOR_AXIS if is_sliced else None,
        hybrid_fsdp_group=groups["dp_cp_group"] if is_hybrid else None,
        hybrid_fsdp_expt_group=groups["expt_dp_group"] if is_hybrid and has_experts else None,
        hsdp_outer_dp_shard=outer_is_sharded,
        expt_device_mesh=expert,
        fsdp_group_ag=gather,
    )


def _device_type(device: torch.device | str | None) -> str:
    if device is not None:
        return torch.device(device).type
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    return accelerator.type if accelerator else "cpu"


def expert_tensor_group(pg_collection: ProcessGroupCollection | None) -> dist.ProcessGroup:
    """The ranks that hold slices of the same experts."""
    if pg_collection is not None and hasattr(pg_collection, "expt_tp"):
        return pg_collection.expt_tp
    return parallel_state.get_expert_tensor_parallel_group()


def _mesh(
    kind: str,
    tensor: dist.ProcessGroup | None,
    inner: dist.ProcessGroup,
    outer: dist.ProcessGroup | None,
) -> DeviceMesh:
    """The axes that there are: tensor, inner, outer."""
    named = {TENSOR_AXIS: tensor, SHARD_AXIS: inner, OUTER_AXIS: outer}
    named = {name: group for name, group in named.items() if group is not None}
    if len(named) == 1:
        return DeviceMesh.from_group(inner, kind, mesh_dim_names=(SHARD_AXIS,))
    groups = list(named.values())
    return DeviceMesh.from_group(
        groups, kind, mesh=_ranks(groups, kind), mesh_dim_names=tuple(named)
    )


def _ranks(groups: list[dist.ProcessGroup], kind: str) -> torch.Tensor:
    """The ranks that this rank reaches through ``groups``, one dimension for each; nobody knows other ranks' groups."""
    ranks = torch.tensor(dist.get_rank(), dtype=torch.int64, device=kind)
    for group in reversed(groups):
        parts = [torch.empty_like(ranks) for _ in range(group.size())]
        dist.all_gather(parts, ranks.contiguous(), group=group)
        ranks = torch.stack(parts)
    return ranks.cpu()
