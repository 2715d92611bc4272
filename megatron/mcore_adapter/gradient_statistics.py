# SPDX-License-Identifier: Apache-2.0
"""Norm and overflow of gradients where several optimizer instances hold different parts of them.

Megatron-Core reduces gradient statistics over the ranks of one optimizer instance, as instances are
replicas there. Where the outer data axis divides optimizer state, an instance has a part only, and
every clipped gradient would be too large.
"""

from __future__ import annotations

import functools

import torch.distributed as dist
from megatron.core.optimizer import DistributedOptimizer

_original = DistributedOptimizer.get_grad_stats_parallel_group


def count_over_all_instances() -> None:
    """From now on, optimizers of models whose outer data axis divides optimizer state reduce over all ranks."""
    DistributedOptimizer.get_grad_stats_parallel_group = _group


@functools.wraps(_original)
def _group(optimizer: DistributedOptimizer) -> dist.ProcessGroup:
    engine = getattr(optimizer.model_chunks[0], "module", None)
    index = engine.get_distributed_index() if hasattr(engine, "get_distributed_index") else None
    return (
        dist.group.WORLD
        if index is not None and index.hsdp_outer_dp_shard
        else _original(optimizer)
    )
