# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's process groups on warm ranks, some forty per layout, made once for each."""

from argparse import Namespace
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.mcore_adapter.run.model_parallel import initialize_model_parallel

GLOBALS = [name for name in vars(parallel_state) if name.startswith("_") and name.isupper()] + [
    "_global_process_group_list"
]
ONE_AXIS = Namespace(
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    virtual_pipeline_model_parallel_size=None,
    context_parallel_size=1,
    hierarchical_context_parallel_sizes=None,
    expert_model_parallel_size=1,
    expert_tensor_parallel_size=1,
    num_distributed_optimizer_instances=1,
    use_tp_pp_dp_mapping=False,
    enable_gloo_process_groups=True,
    create_all_gather_group=False,
    distributed_timeout_minutes=10,
    use_sharp=False,
    sharp_enabled_group=None,
    nccl_communicator_config_path=None,
    high_priority_stream_groups=[],
)
_NOTHING = {name: getattr(parallel_state, name) for name in GLOBALS}

_kept: dict[str, dict[str, Any]] = {}
_world: Any = None


def initialize_data_parallel() -> None:
    """`parallel_state` with nothing but a data axis."""
    initialize(ONE_AXIS)


def initialize(args: Any) -> None:
    """Set `parallel_state` for the layout of `args`; reuse the groups of earlier jobs."""
    global _world
    if _world is not dist.group.WORLD:
        _kept.clear()
        _world = dist.group.WORLD
    layout = repr([getattr(args, name) for name in vars(ONE_AXIS)])
    vars(parallel_state).update(_NOTHING)
    if layout in _kept:
        vars(parallel_state).update(_kept[layout])
        return
    initialize_model_parallel(args)
    _level_group_counts()
    _kept[layout] = {name: getattr(parallel_state, name) for name in GLOBALS}


def forget_groups() -> None:
    """Let the next job make new groups. Copies over gloo are destroyed after a job."""
    _kept.clear()


def _level_group_counts() -> None:
    """Add groups to ranks that are in fewer than others: unequal ranks would end the world."""
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, len(dist.distributed_c10d._world.pg_map))
    for rank, count in enumerate(counts):
        for _ in range(max(counts) - count):
            dist.new_group([rank])
