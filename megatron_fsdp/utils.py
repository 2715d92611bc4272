# SPDX-License-Identifier: Apache-2.0
"""The mesh of a sharded model, and questions about meshes, models and parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.dtensor.tensor_part import get_mcore_tensor_parallel_partition_dim
from megatron.fsdp.engine.mesh import axis_names
from megatron_fsdp.distributed_index import FSDPDistributedIndex
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.not_offered import attributes_of

__all__ = [
    "FSDPDistributedIndex",
    "contains_submesh",
    "find_megatron_fsdp",
    "get_mcore_tensor_parallel_partition_dim",
    "get_mesh_names",
    "is_mcore_tensor_model_parallel",
]


def find_megatron_fsdp(model: nn.Module) -> MegatronFSDP | None:
    """Return the wrapper in a chain of wrappers that have each other as ``module``; None if none.

    Args:
        model: the outermost of them.
    """
    inner: object = model
    while isinstance(inner, nn.Module) and not isinstance(inner, MegatronFSDP):
        inner = getattr(inner, "module", None)
    return inner if isinstance(inner, MegatronFSDP) else None


def get_mesh_names(device_mesh: DeviceMesh | None, only_submesh_dims: bool = False) -> list[str]:
    """Return the names of the axes that ``device_mesh`` can be sliced by; empty without names.

    Args:
        device_mesh: may be a slice of a larger mesh; the axes of the larger mesh are then included.
        only_submesh_dims: return the axes of ``device_mesh`` itself only, neither those of the
            larger mesh nor flattened ones.
    """
    if device_mesh is None:
        return []
    names = list(axis_names(device_mesh))
    if only_submesh_dims:
        return names
    root = device_mesh._get_root_mesh()
    return list(dict.fromkeys([*names, *axis_names(root), *root._flatten_mapping]))


def contains_submesh(
    device_mesh: DeviceMesh | None, submesh_names: str | Sequence[str] | None
) -> bool:
    """Return True if every one of ``submesh_names`` names an axis, which may be a flattened one.

    Args:
        device_mesh: None contains nothing.
        submesh_names: one name or several; the result is False if there are none.
    """
    wanted = (submesh_names,) if isinstance(submesh_names, str) else tuple(submesh_names or ())
    return bool(wanted) and set(wanted) <= set(get_mesh_names(device_mesh))


def is_mcore_tensor_model_parallel(param: torch.Tensor) -> bool:
    """Return True if tensor parallelism divides a parameter of Megatron-Core."""
    return get_mcore_tensor_parallel_partition_dim(param) is not None


_SLOTS = "memory at fixed addresses is fsdp_double_buffer=True, its bytes model.memory_slots"
__getattr__ = attributes_of(
    __name__, {"GlobalMemoryBuffer": _SLOTS, "get_global_memory_buffer": _SLOTS}
)
