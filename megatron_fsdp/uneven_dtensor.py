# SPDX-License-Identifier: Apache-2.0
"""Functions on sharded tensors. See `megatron.fsdp.dtensor.uneven_dtensor`."""

from megatron.fsdp.dtensor.uneven_dtensor import (
    filter_unflattened_state_dict,
    gather_and_compute_chunk_metadata,
    gather_uneven_dtensor_to_full_tensor,
    get_unflattened_state_dict,
    preprocess_state_dict_for_uneven_dtensor,
    redistribute_uneven_dtensor_to_replicated,
    split_dtensor,
    uneven_dtensor_to_full_tensor,
    update_uneven_dtensor_chunk_metadata,
    validate_uneven_dtensor,
)

__all__ = [
    "filter_unflattened_state_dict",
    "gather_and_compute_chunk_metadata",
    "gather_uneven_dtensor_to_full_tensor",
    "get_unflattened_state_dict",
    "preprocess_state_dict_for_uneven_dtensor",
    "redistribute_uneven_dtensor_to_replicated",
    "split_dtensor",
    "uneven_dtensor_to_full_tensor",
    "update_uneven_dtensor_chunk_metadata",
    "validate_uneven_dtensor",
]
