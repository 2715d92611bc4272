# SPDX-License-Identifier: Apache-2.0
"""The dtypes of fully sharded training in Megatron-Core's data-parallel config.

They are fields ``megatron_fsdp_*_dtype`` since 0.17. Before, there is ``preserve_fp32_weights``,
and programs may set the newer names as attributes.
"""

from __future__ import annotations

import torch
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig

from megatron_fsdp import MixedPrecisionPolicy


def precision_policy(ddp_config: DistributedDataParallelConfig) -> MixedPrecisionPolicy:
    """Return the dtypes of a configuration.

    If ``megatron_fsdp_main_grads_dtype`` is None, gradients accumulate in fp32 where those of
    Megatron-Core's own wrapper would.
    """
    main_params_dtype = None
    if getattr(ddp_config, "preserve_fp32_weights", True):
        main_params_dtype = torch.float32
    main_grads_dtype = getattr(ddp_config, "megatron_fsdp_main_grads_dtype", None)
    if main_grads_dtype is None and ddp_config.grad_reduce_in_fp32:
        main_grads_dtype = torch.float32
    return MixedPrecisionPolicy(
        main_params_dtype=getattr(ddp_config, "megatron_fsdp_main_params_dtype", main_params_dtype),
        main_grads_dtype=main_grads_dtype,
        grad_comm_dtype=getattr(ddp_config, "megatron_fsdp_grad_comm_dtype", None),
    )
