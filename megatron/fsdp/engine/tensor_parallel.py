# SPDX-License-Identifier: Apache-2.0
"""Attributes by which Megatron-Core marks parameters that tensor parallelism divides."""

from __future__ import annotations

import torch


def get_mcore_tensor_parallel_partition_dim(param: torch.Tensor) -> int | None:
    """Return the dim of a parameter that tensor parallelism divides; None if it does not.

    It is in the attributes ``tensor_model_parallel`` and ``partition_dim`` of parameters of
    Megatron-Core and Transformer Engine, which sharded parameters have too.
    """
    dim: int = getattr(param, "partition_dim", -1)
    return dim if getattr(param, "tensor_model_parallel", False) and dim >= 0 else None


def is_mcore_tensor_model_parallel(param: torch.Tensor) -> bool:
    """Return True if tensor parallelism divides a parameter of Megatron-Core."""
    return get_mcore_tensor_parallel_partition_dim(param) is not None
