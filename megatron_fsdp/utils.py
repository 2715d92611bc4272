# SPDX-License-Identifier: Apache-2.0
"""The mesh of a sharded model. See `megatron.fsdp.mesh`."""

from megatron.fsdp.mesh import FSDPDistributedIndex, contains_submesh, get_mesh_names

__all__ = ["FSDPDistributedIndex", "contains_submesh", "get_mesh_names"]
