# SPDX-License-Identifier: Apache-2.0
"""The ranks over which the norm and the overflow of a model's gradients are found.

Megatron-Core reduces them over the ranks of one optimizer instance. That is wrong in two cases:

- The outer data axis shards optimizer state: an instance has only a part of the gradient, its norm
  would be too small, and clipping would leave gradients too large.
- Nothing is sharded: Megatron-Core 0.18 reduces over model-parallel ranks alone, each of which
  counts all of its gradients. Expert-parallel ranks would then clip shared weights differently.
  Here replicas do not count, so the sum is over the instance, as in older releases.
"""

from __future__ import annotations

import functools

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

GROUP = "_gradient_statistics_group"
"""Attribute of a wrapper whose optimizer reduces over another group than Megatron-Core's."""

_original = DistributedOptimizer.get_grad_stats_parallel_group


def count_over_all_instances(wrapper: nn.Module) -> None:
    """Let the optimizer of a model reduce over all ranks: its outer data axis shards state."""
    _reduce_over(wrapper, dist.group.WORLD)


def count_over_instance(wrapper: nn.Module, pg_collection: ProcessGroupCollection | None) -> None:
    """Let the optimizer of a model reduce over its instance, in which replicas do not count.

    Args:
        wrapper: the model.
        pg_collection: process groups of the model; None: those of ``parallel_state``.
    """
    if pg_collection is not None and hasattr(pg_collection, "intra_dist_opt"):
        group = pg_collection.intra_dist_opt
    else:
        group = parallel_state.get_intra_distributed_optimizer_instance_group()
    _reduce_over(wrapper, group)


def _reduce_over(wrapper: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Set the group of one model; None stands for all ranks."""
    setattr(wrapper, GROUP, group)
    DistributedOptimizer.get_grad_stats_parallel_group = _group


@functools.wraps(_original)
def _group(optimizer: DistributedOptimizer) -> dist.ProcessGroup | None:
    wrapper = optimizer.model_chunks[0]
    return getattr(wrapper, GROUP) if hasattr(wrapper, GROUP) else _original(optimizer)
