# SPDX-License-Identifier: Apache-2.0
"""The mesh of a sharded model. See `megatron.fsdp.engine.mesh`."""

from megatron.fsdp.engine.axes import contains_submesh, get_mesh_names
from megatron.fsdp.engine.mesh import FSDPDistributedIndex

__all__ = ["FSDPDistributedIndex", "contains_submesh", "get_mesh_names"]
