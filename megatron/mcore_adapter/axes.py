# SPDX-License-Identifier: Apache-2.0
"""The mesh axes of a sharded model, made of Megatron-Core's process groups."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.engine.collectives import local_group
from megatron.fsdp.module.unit_choice import belongs_to_expert
from megatron.mcore_adapter.releases.process_groups import all_gather_group
from megatron_fsdp import FSDPDistributedIndex

SHARD_AXIS = "dp_cp"
OUTER_AXIS = "dp_outer"
TENSOR_AXIS = "tp"

Groups = Mapping[str, dist.ProcessGroup | None]
"""Groups by name, as ``ProcessGroupCollection.setup_process_groups_for_ddp`` returns them."""


def mesh_axes(
    module: nn.Module,
    ddp_config: DistributedDataParallelConfig,
    groups: Groups,
    pg_collection: ProcessGroupCollection | None,
    device: torch.device | str | None,
) -> FSDPDistributedIndex:
    """Create the mesh axes that a model needs for dense and expert parameters; a collective.

    Dense parameters are sharded over data x context ranks, experts over the ranks that have the
    same experts.

    Args:
        module: the model.
        ddp_config: ``outer_dp_sharding_strategy`` and ``create_all_gather_group`` are read.
        groups: the process groups of this rank.
        pg_collection: the source of ``groups``; None: ``parallel_state``.
        device: device of the mesh. None: the accelerator if there is one, otherwise the CPU.
    """
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    device_type = torch.device(device).type
    has_experts = any(belongs_to_expert(*named) for named in module.named_parameters())
    outer = groups["inter_dist_opt_group"]
    tensor = groups["tp_group"]
    has_tensor_axis = tensor is not None and tensor.size() > 1
    tensor_of_experts = None
    if has_experts:
        tensor_of_experts = expert_tensor_group(pg_collection)
        has_tensor_axis |= tensor_of_experts.size() > 1
    if not has_tensor_axis:
        tensor = tensor_of_experts = None
    dense = _mesh(device_type, tensor, groups["intra_dp_cp_group"], outer)
    expert = None
    if has_experts:
        expert = _mesh(device_type, tensor_of_experts, groups["intra_expt_dp_group"], outer)
    gather = None
    if getattr(ddp_config, "create_all_gather_group", False):
        data_parallel = groups["dp_cp_group"]
        assert data_parallel is not None  # every model has one
        gather = all_gather_group(pg_collection, data_parallel)
    outer_dim = hybrid_group = hybrid_expert_group = None
    shards_outer = False
    if outer is not None:
        outer_dim = OUTER_AXIS
        shards_outer = ddp_config.outer_dp_sharding_strategy != "no_shard"
        hybrid_group = groups["dp_cp_group"]
        if has_experts:
            hybrid_expert_group = groups["expt_dp_group"]
    return FSDPDistributedIndex(
        dense,
        dp_shard_dim=SHARD_AXIS,
        dp_outer_dim=outer_dim,
        tp_dim=TENSOR_AXIS if has_tensor_axis else None,
        hybrid_fsdp_group=hybrid_group,
        hybrid_fsdp_expt_group=hybrid_expert_group,
        hsdp_outer_dp_shard=shards_outer,
        expt_device_mesh=expert,
        fsdp_group_ag=gather,
    )


SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "expt_tp": "expert_tensor_parallel_size",
}
"""The field of a config with the number of ranks of a group."""


def complete(
    collection: ProcessGroupCollection | None, config: TransformerConfig
) -> ProcessGroupCollection | None:
    """Return a collection with groups of this rank alone where it lacks those of axes of size one.

    Megatron-Core demands the groups of all axes, and names those that are missing otherwise.
    """
    if collection is None:
        return None
    missing = []
    for name, field in SIZES.items():
        is_used = name != "expt_tp" or config.num_moe_experts
        is_of_one = (getattr(config, field, None) or 1) == 1
        if is_used and is_of_one and getattr(collection, name, None) is None:
            missing.append(name)
    if not missing:
        return collection
    completed = copy(collection)
    alone = local_group([dist.get_rank()])
    for name in missing:
        setattr(completed, name, alone)
    return completed


def expert_tensor_group(pg_collection: ProcessGroupCollection | None) -> dist.ProcessGroup:
    """Return the group of the ranks that have slices of the same experts."""
    group = getattr(pg_collection, "expt_tp", None)  # None too where 0.19 has none
    return group or parallel_state.get_expert_tensor_parallel_group()


def instance_group(pg_collection: ProcessGroupCollection | None) -> dist.ProcessGroup:
    """Return the group of the ranks of one optimizer instance, in which replicas do not count."""
    group = getattr(pg_collection, "intra_dist_opt", None)
    return group or parallel_state.get_intra_distributed_optimizer_instance_group()


def _mesh(
    device_type: str,
    tensor: dist.ProcessGroup | None,
    inner: dist.ProcessGroup | None,
    outer: dist.ProcessGroup | None,
) -> DeviceMesh:
    """Create a mesh of the axes that are not None: tensor, inner, outer; a collective."""
    names = []
    groups = []
    for name, group in ((TENSOR_AXIS, tensor), (SHARD_AXIS, inner), (OUTER_AXIS, outer)):
        if group is not None:
            names.append(name)
            groups.append(group)
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=(SHARD_AXIS,))
    ranks = _ranks(groups, device_type)
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(names))


def _ranks(groups: list[dist.ProcessGroup], device_type: str) -> torch.Tensor:
    """Gather the ranks that this rank reaches through ``groups``, one dimension for each.

    This is an all-gather over each group, because no rank knows the groups of other ranks.
    """
    # Example of four ranks in a grid of two groups, tensor {0, 1} and {2, 3}, inner {0, 2} and
    # {1, 3}, on rank 0: 0, then [0, 2] over its inner group, then [[0, 2], [1, 3]] over its tensor
    # group, in which rank 1 has [1, 3].
    own = dist.get_rank()
    if device_type == "meta":  # a simulated run has no other rank, but regular groups
        offsets = torch.tensor(own)
        for group in reversed(groups):
            steps = torch.tensor(dist.get_process_group_ranks(group)) - own
            offsets = steps.view(-1, *[1] * offsets.dim()) + offsets
        return offsets
    ranks = torch.tensor(own, dtype=torch.int64, device=device_type)
    for group in reversed(groups):
        rows = []
        for _ in range(group.size()):
            rows.append(torch.empty_like(ranks))
        dist.all_gather(rows, ranks.contiguous(), group=group)
        ranks = torch.stack(rows)
    return ranks.cpu()
