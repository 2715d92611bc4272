# SPDX-License-Identifier: Apache-2.0
"""The configuration object of the published package, and the fields that are not built yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.fsdp.engine.policy import MixedPrecisionPolicy


@dataclass
class DistributedDataParallelConfig:
    """The settings of a sharded model, with the fields of the published package.

    Megatron-Core's class of this name is accepted as well: fields are read by name, and fields
    of this class alone have their defaults here.

    ``suggested_communication_unit_size`` is a number of bytes: the size up to which small units are
    merged, and the bound of what is gathered ahead. ``fsdp_manual_registration`` registers memory
    after the first step, as ``nccl_ub`` always does here.

    ``bucket_size``, ``gradient_reduce_div_fusion`` and ``fsdp_all_gather_in_start_param_sync`` tune
    a communication scheme that this implementation does not have. They have no effect.
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

    @classmethod
    def fully_sharded(cls) -> DistributedDataParallelConfig:
        """Return the configuration of ZeRO level 3 with overlapped communication."""
        return cls(
            data_parallel_sharding_strategy="optim_grads_params",
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        )


def precision_of(config: object) -> MixedPrecisionPolicy:
    """Return the precision policy of a configuration object of either package."""
    return MixedPrecisionPolicy(
        getattr(config, "megatron_fsdp_main_params_dtype", torch.float32),
        getattr(config, "megatron_fsdp_main_grads_dtype", None),
        getattr(config, "megatron_fsdp_grad_comm_dtype", None),
    )


UNBUILT_FIELDS = (
    "fp8_param_gather",
    "keep_fp8_transpose_cache",
)
"""Fields that request a feature that is not built yet if they are set."""


def refuse_unbuilt(**arguments: object) -> None:
    """Raise ``NotImplementedError`` naming every argument that requests an unbuilt feature."""
    given = [f"{name}={value!r}" for name, value in arguments.items() if value]
    if given:
        raise NotImplementedError(
            f"not built yet: {', '.join(given)}; leave them at their defaults"
        )


def refuse_unbuilt_config(config: object) -> None:
    """Raise ``NotImplementedError`` naming every field that requests an unbuilt feature."""
    refuse_unbuilt(**{name: getattr(config, name, None) for name in UNBUILT_FIELDS})
