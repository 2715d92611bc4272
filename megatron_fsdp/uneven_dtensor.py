# SPDX-License-Identifier: Apache-2.0
"""Functions on sharded parameters, gradients and state. See `megatron.fsdp.uneven_dtensor`."""

from megatron.fsdp.uneven_dtensor import (
    gather_uneven_dtensor_to_full_tensor,
    redistribute_uneven_dtensor_to_replicated,
    uneven_dtensor_to_full_tensor,
)

__all__ = [
    "gather_uneven_dtensor_to_full_tensor",
    "redistribute_uneven_dtensor_to_replicated",
    "uneven_dtensor_to_full_tensor",
]
