# SPDX-License-Identifier: Apache-2.0
"""The published class of meshes: :class:`megatron.fsdp.Mesh` by its published names."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.backends.rendezvous import default_mesh
from megatron.fsdp.engine.mesh import Axes, Mesh, submesh
from megatron.fsdp.engine.policy import ParameterKind
from megatron_fsdp.translation import published_names


class FSDPDistributedIndex(Mesh):
    """The mesh of a sharded model and the names of its axes.

    Args:
        device_mesh: mesh with named axes. None: one axis over all ranks, on the accelerator if
            there is one, otherwise on the CPU.
        dp_shard_dim: axis to shard over, which may be a flattened one. It may be left out if the
            mesh has one axis.
        dp_outer_dim: outer data axis of hybrid sharding.
        tp_dim: tensor-parallel axis.
        hybrid_fsdp_group: group over outer x shard; derived from the mesh if it is not given.
        hybrid_fsdp_expt_group: ``hybrid_fsdp_group`` of expert parameters.
        hsdp_outer_dp_shard: shard optimizer state over the outer axis too.
        expt_device_mesh: mesh of expert parameters, with axes of the same names. If it has no outer
            axis of its own, the outer axis of the dense mesh is used.
        fsdp_group_ag: second group of the ranks of the shard axis, for all-gathers only, which then
            do not queue behind reductions.
        expt_fsdp_group_ag: ``fsdp_group_ag`` of expert parameters.

    Raises:
        ValueError: lists every problem of the mesh, the names and the groups.
        RuntimeError: without a mesh, if the program was not started for torch.distributed.
    """

    hsdp_outer_dp_shard: bool

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
        if device_mesh is None:
            device_mesh = default_mesh()
        object.__setattr__(self, "hsdp_outer_dp_shard", hsdp_outer_dp_shard)
        with published_names():
            if hsdp_outer_dp_shard and dp_outer_dim is None:
                raise ValueError(
                    "hsdp_outer_dp_shard needs dp_outer_dim, the name of the outer data axis"
                )
            super().__init__(
                device_mesh=device_mesh,
                inner=dp_shard_dim,
                outer=dp_outer_dim,
                tensor=tp_dim,
                data_group=hybrid_fsdp_group,
                gather_group=fsdp_group_ag,
                expert_mesh=expt_device_mesh,
                expert_data_group=hybrid_fsdp_expt_group,
                expert_gather_group=expt_fsdp_group_ag,
            )

    @property
    def dp_shard_dim(self) -> str | None:
        """Name of the shard axis."""
        return self.inner

    @property
    def dp_outer_dim(self) -> str | None:
        """Name of the outer data axis; None without one."""
        return self.outer

    @property
    def tp_dim(self) -> str | None:
        """Name of the tensor-parallel axis; None without one."""
        return self.tensor

    @property
    def expt_device_mesh(self) -> DeviceMesh | None:
        """The mesh of expert parameters; None without one."""
        return self.expert_mesh

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The axis that dense parameters are sharded over."""
        return self.dense.inner

    @property
    def rank(self) -> int:
        """Coordinate of this rank on the shard axis."""
        return self.dense.inner.get_local_rank()

    @property
    def size(self) -> int:
        """Number of ranks on the shard axis."""
        return self.dense.inner.size()

    def axes(self, kind: ParameterKind | bool = ParameterKind.DENSE) -> Axes:
        """Return the axes of a kind of parameters; see :class:`Mesh`.

        Args:
            kind: the kind, or True for expert parameters and False for all others.
        """
        if not isinstance(kind, ParameterKind):
            kind = ParameterKind.EXPERT if kind else ParameterKind.DENSE
        with published_names():
            return super().axes(kind)

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh:
        """Return the mesh that the user passed, of dense or of expert parameters."""
        return self.axes(is_expert_parallel).root

    def get_submesh(
        self,
        names: str | Sequence[str],
        is_expert_parallel: bool = False,
    ) -> DeviceMesh:
        """Return the mesh of one or several axes.

        Raises:
            ValueError: for names that the mesh does not have.
        """
        mesh = self.get_root_mesh(is_expert_parallel)
        if isinstance(names, str):
            names = (names,)
        names = tuple(names)
        found = submesh(mesh, names)
        if found is None:
            raise ValueError(
                f"the device mesh has the axes {mesh.mesh_dim_names}, not {names}: name one of its"
                " (or flattened) axes"
            )
        return found

    def get_fsdp_group(
        self,
        is_expert_parallel: bool = False,
        independent_all_gather: bool = False,
    ) -> dist.ProcessGroup:
        """Return the group of the ranks that a parameter is sharded over.

        Args:
            is_expert_parallel: return the group of expert parameters.
            independent_all_gather: return the group for all-gathers only, if there is one.
        """
        axes = self.axes(is_expert_parallel)
        if independent_all_gather:
            return axes.all_gather_group
        return axes.inner.get_group()

    def get_dp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup:
        """Return the group of all data ranks of these parameters: inner x outer.

        Raises:
            ValueError: if hybrid sharding is on, the expert mesh has no outer axis, and
                ``hybrid_fsdp_expt_group`` was not given.
        """
        group = self.axes(is_expert_parallel).data_group
        if group is None:
            raise ValueError("expt_device_mesh has no outer axis: pass hybrid_fsdp_expt_group")
        return group

    def get_outer_fsdp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup | None:
        """Return the group of the outer data axis; None without one."""
        outer = self.axes(is_expert_parallel).outer
        if outer is None:
            return None
        return outer.get_group()
