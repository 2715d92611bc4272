# SPDX-License-Identifier: Apache-2.0
"""Norm and overflow of gradients whose shards are spread over several optimizer instances.

Megatron-Core reduces gradient statistics over the ranks of one optimizer instance, because its
instances are replicas. If the outer data axis shards optimizer state, an instance has only a part
of the gradient: its norm would be too small, and clipping would leave gradients too large.
"""

from __future__ import annotations

import functools

import torch.distributed as dist
from megatron.core.optimizer import DistributedOptimizer

_original = DistributedOptimizer.get_grad_stats_parallel_group


def count_over_all_instances() -> None:
    """Let optimizers reduce over all ranks if the outer data axis shards their state.

    Optimizers of other models are not affected.
    """
    DistributedOptimizer.get_grad_stats_parallel_group = _group


@functools.wraps(_original)
def _group(optimizer: DistributedOptimizer) -> dist.ProcessGroup | None:
    engine = getattr(optimizer.model_chunks[0], "module", None)
    get_index = getattr(engine, "get_distributed_index", None)
    if get_index is not None and get_index().hsdp_outer_dp_shard:
        return dist.group.WORLD
    return _original(optimizer)
