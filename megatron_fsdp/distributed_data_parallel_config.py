# SPDX-License-Identifier: Apache-2.0
"""The configuration object of the published package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["DistributedDataParallelConfig"]


@dataclass
class DistributedDataParallelConfig:
    """The settings of a sharded model, with the fields of the published package.

    Megatron-Core's class of this name is accepted as well: fields are read by name, and fields
    of this class alone have their defaults here.

    ``suggested_communication_unit_size`` is a number of bytes: the size up to which small units are
    merged, and the bound of what is gathered ahead. ``fsdp_manual_registration`` leaves the
    registration of ``nccl_ub`` to ``model.manual_buffer_registration()``. Both ``expert_`` fields
    are for expert parameters; None: as for other parameters. ``megatron_fsdp_offload_policy`` and
    ``megatron_fsdp_granularity`` are ``offload_policy`` and ``granularity`` of ``fully_shard``.

    ``bucket_size``, ``gradient_reduce_div_fusion`` and ``fsdp_all_gather_in_start_param_sync`` tune
    a communication scheme that this implementation does not have. They have no effect, nor has
    ``fp8_param_gather``: weights that Transformer Engine stores in FP8 are always gathered so.
    """

    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    check_for_nan_in_grad: bool = False
    bucket_size: int | None = None
    average_in_collective: bool = False
    fp8_param_gather: bool = False
    data_parallel_sharding_strategy: str | int = "no_shard"
    gradient_reduce_div_fusion: bool = True
    suggested_communication_unit_size: int | None = None
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    fsdp_all_gather_in_start_param_sync: bool = True
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    outer_dp_sharding_strategy: str | int = "no_shard"
    disable_symmetric_registration: bool = False
    fsdp_manual_registration: bool = False
    megatron_fsdp_main_params_dtype: torch.dtype | None = torch.float32
    megatron_fsdp_main_grads_dtype: torch.dtype | None = None
    megatron_fsdp_grad_comm_dtype: torch.dtype | None = None
    megatron_fsdp_use_decoupled_grad: bool = False
    megatron_fsdp_cuda_graph_mode: bool = False
    megatron_fsdp_enable_fine_grained_param_gather: bool = False
    megatron_fsdp_max_pool_double_buffer: bool = False
    expert_data_parallel_sharding_strategy: str | int | None = None
    expert_outer_dp_sharding_strategy: str | int | None = None
    embedding_data_parallel_sharding_strategy: str | int | None = None
    megatron_fsdp_offload_policy: Any = None
    megatron_fsdp_granularity: str | int = "prefer_rows"

    @classmethod
    def fully_sharded(cls) -> DistributedDataParallelConfig:
        """Return the configuration of ZeRO level 3 with overlapped communication."""
        return cls(
            data_parallel_sharding_strategy="optim_grads_params",
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        )
