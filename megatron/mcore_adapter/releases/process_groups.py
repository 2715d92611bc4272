# SPDX-License-Identifier: Apache-2.0
"""Process groups that releases of Megatron-Core create, keep and pass in different ways."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

from megatron.fsdp.engine.collectives import local_group

_made: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""Data-parallel group -> the group of the same ranks that was made for all-gathers."""


def initialize_model_parallel(*, create_all_gather_group: bool, **settings: Any) -> None:
    """Create the process groups of ``parallel_state``.

    Args:
        create_all_gather_group: with a separate group for all-gathers. Megatron-Core 0.18 no longer
            creates it here: there :func:`all_gather_group` does.
        settings: keyword arguments of ``parallel_state.initialize_model_parallel``.
    """
    initialize = parallel_state.initialize_model_parallel
    if accepts(initialize, "create_all_gather_group"):
        settings["create_all_gather_group"] = create_all_gather_group
    initialize(**settings)


def all_gather_group(
    pg_collection: ProcessGroupCollection | None, data_parallel: dist.ProcessGroup
) -> dist.ProcessGroup:
    """Return the separate group for all-gathers of weights, which is made if it is missing.

    That is a collective over the ranks of ``data_parallel``, the group for reduce-scatters.
    """
    group = getattr(pg_collection, "dp_cp_ag", None)
    if group is not None:
        return group
    if accepts(parallel_state.get_data_parallel_group, "independent_all_gather"):
        return parallel_state.get_data_parallel_group(
            with_context_parallel=True, independent_all_gather=True
        )
    if data_parallel not in _made:
        _made[data_parallel] = local_group(
            dist.get_process_group_ranks(data_parallel),
            pg_options=_nccl_options_of(data_parallel),
            group_desc="DATA_PARALLEL_GROUP_WITH_CP_AG",
        )
    return _made[data_parallel]


def _nccl_options_of(group: dist.ProcessGroup) -> Any:
    """Return NCCL's settings of a group, as new ones; None for other backends."""
    # Not yet run on a GPU.
    if "cuda:nccl" not in dist.get_backend_config(group).split(","):  # gloo may be another
        return None
    original: Any = group._get_backend(torch.device("cuda")).options
    options = dist.ProcessGroupNCCL.Options(
        is_high_priority_stream=original.is_high_priority_stream
    )
    options.config = original.config
    return options


def batch_on_this_rank(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's two chunks of every sequence in a batch without packed sequences.

    Args:
        batch: tensors ``[batch, sequence]``, masks ``[batch, 1, sequence, sequence]``.
    """
    group = parallel_state.get_context_parallel_group()
    settings: dict[str, Any] = {}
    if accepts(get_batch_on_this_cp_rank, "is_hybrid_cp"):
        settings["is_hybrid_cp"] = False  # 0.18: sequences of different lengths may have own groups
    return get_batch_on_this_cp_rank(batch, cp_group=group, **settings)


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Return True if the function takes an argument of this name."""
    parameters = inspect.signature(function).parameters
    if name in parameters:
        return True
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
