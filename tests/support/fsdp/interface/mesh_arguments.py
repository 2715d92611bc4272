# SPDX-License-Identifier: Apache-2.0
"""Entries of the walk: modules, meshes, axes and process groups."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    fully_shard_model,
)
from tests.support.fsdp.interface.walk import (
    backward,
    gradient,
    mean_gradient,
    num_on_all_ranks,
    shows,
)
from tests.support.fsdp.meshes import mesh_of
from tests.support.fsdp.models import build_stack
from tests.support.fsdp.reference import close
from tests.support.fsdp.watched_communication import watching_collectives
from tests.support.fsdp.wrong_calls import message_of


@shows("fully_shard_model", "module")
def shows_module() -> None:
    module = build_stack()
    model = fully_shard_model(module)
    assert isinstance(model, MegatronFSDP) and model.module is module
    assert [name for name, _ in model.named_parameters()] == [
        "module." + name for name, _ in build_stack().named_parameters()
    ]


@shows("fully_shard_model", "device_mesh", world_size=4)
@shows("FSDPDistributedIndex", "device_mesh", world_size=4)
def shows_device_mesh() -> None:
    mesh = mesh_of("dp", "other", sizes=(2, 2))
    assert fully_shard_model(nn.Linear(4, 4), mesh["dp"]).get_distributed_index().size == 2
    assert fully_shard_model(nn.Linear(4, 4)).get_distributed_index().size == 4
    assert FSDPDistributedIndex(mesh["dp"]).size == 2
    assert FSDPDistributedIndex().get_root_mesh().size() == 4


@shows("fully_shard_model", "dp_shard_dim", world_size=4)
@shows("FSDPDistributedIndex", "dp_shard_dim", world_size=4)
def shows_dp_shard_dim() -> None:
    mesh = mesh_of("a", "b", sizes=(1, 4))
    mesh["a", "b"]._flatten("both")
    for name, size in (("a", 1), ("b", 4), ("both", 4)):
        assert FSDPDistributedIndex(mesh, name).size == size
        assert num_on_all_ranks(fully_shard_model(nn.Linear(4, 7), mesh, name)) == 35 * 4 // size


@shows(
    "fully_shard_model",
    "dp_outer_dim",
    "hybrid_fsdp_group",
    "outer_dp_sharding_strategy",
    world_size=4,
)
@shows(
    "FSDPDistributedIndex", "dp_outer_dim", "hybrid_fsdp_group", "hsdp_outer_dp_shard", world_size=4
)
def shows_hybrid_sharding() -> None:
    mesh = mesh_of("outer", "shard", sizes=(2, 2))
    group = mesh["outer", "shard"]._flatten("whole").get_group()
    arguments: dict[str, Any] = {
        "dp_shard_dim": "shard",
        "dp_outer_dim": "outer",
        "hybrid_fsdp_group": group,
    }
    sizes = []
    for strategy in (0, 1):
        model = fully_shard_model(
            build_stack(), mesh, **arguments, outer_dp_sharding_strategy=strategy
        )
        backward(model)
        close(gradient(model), mean_gradient(4), "gradient", 1e-5)
        sizes.append(num_on_all_ranks(model))
    assert sizes[0] == 2 * sizes[1]
    index = FSDPDistributedIndex(mesh, **arguments, hsdp_outer_dp_shard=True)
    assert index.get_dp_group() is group and index.get_outer_fsdp_group() is mesh.get_group("outer")
    assert num_on_all_ranks(MegatronFSDP(build_stack(), index)) == sizes[1]
    for without in (fully_shard_model, FSDPDistributedIndex):
        first = (build_stack(),) if without is fully_shard_model else ()
        assert "dp_outer_dim" in message_of(
            ValueError, without, *first, mesh, "shard", hybrid_fsdp_group=group
        )


class WithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](self.dense(x))


@shows(
    "fully_shard_model",
    "expt_device_mesh",
    "hybrid_fsdp_expt_group",
    "fsdp_group_ag",
    "expt_fsdp_group_ag",
    world_size=4,
)
@shows(
    "FSDPDistributedIndex",
    "expt_device_mesh",
    "hybrid_fsdp_expt_group",
    "fsdp_group_ag",
    "expt_fsdp_group_ag",
    world_size=4,
)
def shows_experts_and_gather_groups() -> None:
    mesh, expert_mesh = mesh_of("outer", "dp", sizes=(1, 4)), mesh_of("dp", "ep", sizes=(2, 2))
    gather, pairs = dist.new_group([0, 1, 2, 3]), [dist.new_group([0, 2]), dist.new_group([1, 3])]
    expert_gather = pairs[dist.get_rank() % 2]
    arguments: dict[str, Any] = {
        "dp_shard_dim": "dp",
        "dp_outer_dim": "outer",
        "expt_device_mesh": expert_mesh,
    }
    groups = {
        "hybrid_fsdp_expt_group": expert_gather,
        "fsdp_group_ag": gather,
        "expt_fsdp_group_ag": expert_gather,
    }
    index = FSDPDistributedIndex(mesh, **arguments, **groups)
    assert index.get_root_mesh(is_expert_parallel=True) is expert_mesh
    assert index.get_dp_group(is_expert_parallel=True) is expert_gather
    assert index.get_fsdp_group(independent_all_gather=True) is gather
    assert index.get_fsdp_group(True, independent_all_gather=True) is expert_gather
    assert index.get_fsdp_group(True) is expert_mesh.get_group("dp")
    model = fully_shard_model(WithExperts(), mesh, **arguments, **groups)
    own = {name: parameter.device_mesh.size() for name, parameter in model.named_parameters()}
    assert own == {name: 2 if "experts" in name else 4 for name in own}
    with watching_collectives() as calls:
        model(torch.ones(2, 4)).sum().backward()
    assert {id(group) for kind, group, _ in calls if kind == "gather"} == {
        id(gather),
        id(expert_gather),
    }
    assert {id(group) for kind, group, _ in calls if kind == "reduce"} == {
        id(mesh.get_group("dp")),
        id(expert_mesh.get_group("dp")),
    }


EXPERT_STRATEGIES = {
    "expert_zero_dp_strategy": "expert_data_parallel_sharding_strategy",
    "expert_outer_dp_sharding_strategy": "expert_outer_dp_sharding_strategy",
}
"""The fields of a config by keyword."""


def numbers_of_experts(**keywords: Any) -> tuple[int, int]:
    """Return the elements of dense parameters and of experts, on all of 2 x 2 ranks, both ways."""
    mesh = mesh_of("outer", "dp", sizes=(2, 2))
    arguments = {"dp_shard_dim": "dp", "dp_outer_dim": "outer", "expt_device_mesh": mesh}
    level = {"data_parallel_sharding_strategy": 3}
    config = DistributedDataParallelConfig(
        **level, **{EXPERT_STRATEGIES[name]: value for name, value in keywords.items()}
    )
    models = [
        fully_shard_model(WithExperts(), mesh, **arguments, **keywords),
        MegatronFSDP(WithExperts(), FSDPDistributedIndex(mesh, **arguments), config),
    ]
    (of_function, of_config) = (
        (num_on_all_ranks(model.module.dense), num_on_all_ranks(model.module.experts))
        for model in models
    )
    assert of_function == of_config
    return of_function


@shows("fully_shard_model", *EXPERT_STRATEGIES, world_size=4)
@shows("DistributedDataParallelConfig", *EXPERT_STRATEGIES.values(), world_size=4)
def shows_strategies_of_experts() -> None:
    assert numbers_of_experts() == (40, 40)
    assert numbers_of_experts(expert_zero_dp_strategy="no_shard") == (40, 80)
    assert numbers_of_experts(expert_outer_dp_sharding_strategy=1) == (40, 20)
    for name, value in (("expert_zero_dp_strategy", 4), ("expert_outer_dp_sharding_strategy", 2)):
        assert name in message_of(ValueError, fully_shard_model, build_stack(), **{name: value})
