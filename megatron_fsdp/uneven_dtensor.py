# SPDX-License-Identifier: Apache-2.0
"""Functions on sharded tensors. See `megatron.fsdp.dtensor.checkpointing`."""

from megatron.fsdp.dtensor.checkpointing import (
    filter_unflattened_state_dict,
    gather_and_compute_chunk_metadata,
    gather_uneven_dtensor_to_full_tensor,
    get_state_dict,
    get_unflattened_state_dict,
    preprocess_state_dict_for_uneven_dtensor,
    redistribute_uneven_dtensor_to_replicated,
    split_dtensor,
    uneven_dtensor_to_full_tensor,
    update_uneven_dtensor_chunk_metadata,
    validate_uneven_dtensor,
)
from megatron.fsdp.dtensor.uneven_dtensor import make_uneven_dtensor
from megatron_fsdp.not_offered import attributes_of

__all__ = [
    "filter_unflattened_state_dict",
    "gather_and_compute_chunk_metadata",
    "gather_uneven_dtensor_to_full_tensor",
    "get_state_dict",
    "get_unflattened_state_dict",
    "make_uneven_dtensor",
    "preprocess_state_dict_for_uneven_dtensor",
    "redistribute_uneven_dtensor_to_replicated",
    "split_dtensor",
    "uneven_dtensor_to_full_tensor",
    "update_uneven_dtensor_chunk_metadata",
    "validate_uneven_dtensor",
]

_MADE_ANEW = "make another DTensor over the tensor by make_uneven_dtensor"
__getattr__ = attributes_of(
    __name__,
    {
        "copy_chunk_metadata": "update_uneven_dtensor_chunk_metadata makes any DTensor ready",
        "detach_uneven_dtensor_local_tensor": _MADE_ANEW,
        "rebind_uneven_dtensor_local_tensor": _MADE_ANEW,
    },
)
