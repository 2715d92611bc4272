# SPDX-License-Identifier: Apache-2.0
"""Mesh axes: which ranks a parameter is sharded over."""

from __future__ import annotations

import os
from typing import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DEFAULT_SHARD_AXIS = "dp_shard"


class FSDPDistributedIndex:
    """The mesh of a sharded model and the names of its axes.

    Args:
        device_mesh: mesh with named axes; None: one axis over all ranks, on the accelerator there is, else cpu.
        dp_shard_dim: axis to shard over, also a flattened one; may be left out with a one-axis mesh.
        tp_dim: tensor-parallel axis, of size 1 in this version.

    Raises:
        ValueError: listing everything that is wrong with the mesh and the names.
        NotImplementedError: for axes that this version cannot serve.
    """

    def __init__(
        self,
        device_mesh: DeviceMesh | None = None,
        dp_shard_dim: str | None = None,
        dp_outer_dim: str | None = None,
        tp_dim: str | None = None,
        hybrid_fsdp_group: dist.ProcessGroup | None = None,
        hybrid_fsdp_expt_group: dist.ProcessGroup | None = None,
        hsdp_outer_dp_shard: bool = False,
        expt_device_mesh: DeviceMesh | None = None,
        fsdp_group_ag: dist.ProcessGroup | None = None,
        expt_fsdp_group_ag: dist.ProcessGroup | None = None,
    ):
        _refuse_unbuilt_axes(
            device_mesh,
            tp_dim,
            dp_outer_dim=dp_outer_dim,
            hybrid_fsdp_group=hybrid_fsdp_group,
            hybrid_fsdp_expt_group=hybrid_fsdp_expt_group,
            hsdp_outer_dp_shard=hsdp_outer_dp_shard or None,
            expt_device_mesh=expt_device_mesh,
            fsdp_group_ag=fsdp_group_ag,
            expt_fsdp_group_ag=expt_fsdp_group_ag,
        )
        self.device_mesh = device_mesh if device_mesh is not None else default_mesh()
        self.tp_dim = tp_dim
        self.dp_shard_dim = dp_shard_dim or self._only_axis()
        self.shard_mesh = self.get_submesh(self.dp_shard_dim)

    @property
    def rank(self) -> int:
        """This rank's place on the shard axis."""
        return self.shard_mesh.get_local_rank()

    @property
    def size(self) -> int:
        """Ranks on the shard axis."""
        return self.shard_mesh.size()

    @property
    def device(self) -> torch.device:
        """Where the parameters of this rank live."""
        kind = self.device_mesh.device_type
        return torch.device(kind) if kind in ("cpu", "meta") else torch.device(kind, torch.accelerator.current_device_index())

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh:
        """The mesh that was given."""
        _refuse_experts(is_expert_parallel)
        return self.device_mesh

    def get_submesh(self, names: str | Sequence[str], is_expert_parallel: bool = False) -> DeviceMesh:
        """The mesh of one or several axes.

        Raises:
            ValueError: for names that the mesh does not have.
        """
        _refuse_experts(is_expert_parallel)
        names = (names,) if isinstance(names, str) else tuple(names)
        if self.device_mesh.mesh_dim_names == names:
            return self.device_mesh
        try:
            return self.device_mesh[names if len(names) > 1 else names[0]]
        except (KeyError, RuntimeError) as error:
            have = self.device_mesh.mesh_dim_names
            raise ValueError(f"the device mesh has the axes {have}, not {names}: name one of its (or flattened) axes") from error

    def get_fsdp_group(self, is_expert_parallel: bool = False, independent_all_gather: bool = False) -> dist.ProcessGroup:
        """Group of the ranks that a parameter is sharded over."""
        _refuse_experts(is_expert_parallel)
        if independent_all_gather:
            raise NotImplementedError("a separate communicator for gathers (fsdp_group_ag) is not built yet")
        return self.shard_mesh.get_group()

    def get_dp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup:
        """Group of all data ranks; without an outer axis the one that parameters are sharded over."""
        return self.get_fsdp_group(is_expert_parallel)

    def get_outer_fsdp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup | None:
        """Group of the outer data axis: None, as hybrid sharding is not built yet."""
        _refuse_experts(is_expert_parallel)
        return None

    def _only_axis(self) -> str:
        names = self.device_mesh.mesh_dim_names
        if not names:
            raise ValueError("device_mesh expects named axes (mesh_dim_names): dp_shard_dim names one of them")
        if len(names) > 1:
            raise ValueError(f"dp_shard_dim is required with a mesh of several axes: one of {names}, or a flattened one")
        return names[0]


def default_mesh() -> DeviceMesh:
    """One axis over all ranks, on the accelerator there is, else cpu.

    Raises:
        RuntimeError: outside torch.distributed.
    """
    if not dist.is_initialized() and "RANK" not in os.environ:
        raise RuntimeError(
            "fully_shard needs torch.distributed: start the program with torchrun, or call torch.distributed.init_process_group first"
        )
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = accelerator.type if accelerator else "cpu"
    if not dist.is_initialized():
        dist.init_process_group()
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=(DEFAULT_SHARD_AXIS,))


def get_mesh_names(device_mesh: DeviceMesh | None, only_submesh_dims: bool = False) -> list[str]:
    """Names of the axes that can be taken out of ``device_mesh``; none of a mesh without names.

    Args:
        device_mesh: also a slice of a larger mesh, and then the larger one's axes count.
        only_submesh_dims: only the axes of ``device_mesh`` itself, neither the larger mesh's nor flattened ones.
    """
    if device_mesh is None:
        return []
    names = list(device_mesh.mesh_dim_names or ())
    if only_submesh_dims:
        return names
    root = device_mesh._get_root_mesh()
    return list(dict.fromkeys([*names, *(root.mesh_dim_names or ()), *root._flatten_mapping]))


def contains_submesh(device_mesh: DeviceMesh | None, submesh_names: str | Sequence[str] | None) -> bool:
    """Whether every one of ``submesh_names`` (one name or several, at least one) names an axis, also a flattened one."""
    wanted = (submesh_names,) if isinstance(submesh_names, str) else tuple(submesh_names or ())
    return bool(wanted) and set(wanted) <= set(get_mesh_names(device_mesh))


def _refuse_unbuilt_axes(device_mesh: DeviceMesh | None, tp_dim: str | None, **unbuilt: object) -> None:
    given = [name for name, value in unbuilt.items() if value is not None]
    if given:
        raise NotImplementedError(f"{', '.join(given)}: hybrid sharding, expert meshes and gather groups are not built yet")
    names = (device_mesh.mesh_dim_names or ()) if device_mesh is not None else ()
    if tp_dim is not None and tp_dim not in names:
        raise ValueError(f"tp_dim={tp_dim!r} is not an axis of the device mesh, which has {tuple(names)}")
    if tp_dim is not None and device_mesh[tp_dim].size() > 1:
        raise NotImplementedError(f"tp_dim={tp_dim!r} has size {device_mesh[tp_dim].size()}: tensor parallelism is not built yet")


def _refuse_experts(is_expert_parallel: bool) -> None:
    if is_expert_parallel:
        raise NotImplementedError("expert parallelism is not built yet")
