# SPDX-License-Identifier: Apache-2.0
"""The dtypes of fully sharded training in Megatron-Core's data-parallel config.

They are fields ``megatron_fsdp_*_dtype`` since 0.17. Before, there is ``preserve_fp32_weights``,
and programs may set the newer names as attributes.
"""

from __future__ import annotations

import torch
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig


def main_params_dtype(ddp_config: DistributedDataParallelConfig) -> torch.dtype | None:
    """Return the dtype of main weights; None: that of the compute weights."""
    older = torch.float32 if getattr(ddp_config, "preserve_fp32_weights", True) else None
    return getattr(ddp_config, "megatron_fsdp_main_params_dtype", older)


def main_grads_dtype(ddp_config: DistributedDataParallelConfig) -> torch.dtype | None:
    """Return the dtype in which gradients accumulate; None: that of the compute weights.

    Without a dtype of its own it is fp32 if the gradients of Megatron-Core's own wrapper would be.
    """
    usual = torch.float32 if ddp_config.grad_reduce_in_fp32 else None
    return getattr(ddp_config, "megatron_fsdp_main_grads_dtype", None) or usual


def grad_comm_dtype(ddp_config: DistributedDataParallelConfig) -> torch.dtype | None:
    """Return the dtype in which gradients travel; None: that of the compute weights."""
    own = getattr(ddp_config, "megatron_fsdp_grad_comm_dtype", None)
    return own or main_grads_dtype(ddp_config)
