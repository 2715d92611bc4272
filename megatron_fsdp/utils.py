# SPDX-License-Identifier: Apache-2.0
"""The mesh of a sharded model, and questions about models and parameters.

See `megatron.fsdp.engine.mesh`, `megatron.fsdp.engine.tensor_parallel` and `megatron.fsdp.model`.
"""

from megatron.fsdp.engine.axes import contains_submesh, get_mesh_names
from megatron.fsdp.engine.mesh import FSDPDistributedIndex
from megatron.fsdp.engine.tensor_parallel import (
    get_mcore_tensor_parallel_partition_dim,
    is_mcore_tensor_model_parallel,
)
from megatron.fsdp.model import find_megatron_fsdp
from megatron_fsdp.not_offered import attributes_of

__all__ = [
    "FSDPDistributedIndex",
    "contains_submesh",
    "find_megatron_fsdp",
    "get_mcore_tensor_parallel_partition_dim",
    "get_mesh_names",
    "is_mcore_tensor_model_parallel",
]

_SLOTS = "memory at fixed addresses is fsdp_double_buffer=True, its bytes model.memory_slots"
__getattr__ = attributes_of(
    __name__, {"GlobalMemoryBuffer": _SLOTS, "get_global_memory_buffer": _SLOTS}
)
