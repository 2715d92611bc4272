# SPDX-License-Identifier: Apache-2.0
"""The mesh of a sharded model: which of its axes shard, replicate and split parameters."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.fsdp.backends import rendezvous
from megatron.fsdp.engine.axes import Axes, axis_name, data_group_of, submesh
from megatron.fsdp.engine.mesh_checks import (
    problems_of_all_gather_group,
    problems_of_experts,
    problems_of_hybrid_group,
    problems_of_mesh,
    problems_of_names,
    problems_of_outer,
    problems_of_overlap,
    raise_all,
)

DEFAULT_SHARD_AXIS = "dp_shard"


class FSDPDistributedIndex:
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
        self.device_mesh = device_mesh if device_mesh is not None else default_mesh()
        self.expt_device_mesh = expt_device_mesh
        self.dp_outer_dim = dp_outer_dim
        self.tp_dim = tp_dim
        self.hsdp_outer_dp_shard = hsdp_outer_dp_shard
        problems = problems_of_mesh("device_mesh", self.device_mesh)
        if expt_device_mesh is not None:
            problems += problems_of_mesh("expt_device_mesh", expt_device_mesh)
        raise_all(problems)
        raise_all(
            [
                *problems_of_names(self.device_mesh, dp_shard_dim, dp_outer_dim, tp_dim),
                *problems_of_outer(dp_outer_dim, hybrid_fsdp_group, hsdp_outer_dp_shard),
                *problems_of_experts(
                    expt_device_mesh,
                    self.device_mesh,
                    dp_shard_dim,
                    dp_outer_dim,
                    hybrid_fsdp_expt_group,
                    expt_fsdp_group_ag,
                ),
            ]
        )
        self.dp_shard_dim = dp_shard_dim or axis_name(self.device_mesh)
        problems = self._problems_of_groups("", self.device_mesh, hybrid_fsdp_group, fsdp_group_ag)
        if expt_device_mesh is not None:
            problems += self._problems_of_groups(
                "expt_", expt_device_mesh, hybrid_fsdp_expt_group, expt_fsdp_group_ag
            )
        raise_all(problems)
        self.dense = self._axes_of(self.device_mesh, hybrid_fsdp_group, fsdp_group_ag)
        self.expert: Axes | None = None
        if expt_device_mesh is not None:
            self.expert = self._axes_of(
                expt_device_mesh, hybrid_fsdp_expt_group, expt_fsdp_group_ag
            )

    # ---- construction

    def _problems_of_groups(
        self, prefix: str, mesh: DeviceMesh, hybrid_group: object, all_gather_group: object
    ) -> list[str]:
        inner, outer = self._inner_of(mesh), self._outer_of(mesh)
        axes = {
            "dp_shard_dim": inner,
            "dp_outer_dim": outer,
            "tp_dim": self._tensor_of(mesh),
        }
        return [
            *problems_of_overlap(f"{prefix}device_mesh", axes),
            *problems_of_hybrid_group(f"hybrid_fsdp_{prefix}group", hybrid_group, inner, outer),
            *problems_of_all_gather_group(f"{prefix}fsdp_group_ag", all_gather_group, inner),
        ]

    def _inner_of(self, mesh: DeviceMesh) -> DeviceMesh:
        inner = submesh(mesh, [self.dp_shard_dim])
        assert inner is not None  # checked with the names
        return inner

    def _outer_of(self, mesh: DeviceMesh) -> DeviceMesh | None:
        if self.dp_outer_dim is None:
            return None
        own = submesh(mesh, [self.dp_outer_dim])
        return own if own is not None else submesh(self.device_mesh, [self.dp_outer_dim])

    def _tensor_of(self, mesh: DeviceMesh) -> DeviceMesh | None:
        return submesh(mesh, [self.tp_dim]) if self.tp_dim is not None else None

    def _axes_of(
        self,
        mesh: DeviceMesh,
        hybrid_group: dist.ProcessGroup | None,
        all_gather_group: dist.ProcessGroup | None,
    ) -> Axes:
        inner = self._inner_of(mesh)
        if hybrid_group is not None:
            data_group: dist.ProcessGroup | None = hybrid_group
        elif self.dp_outer_dim is None:
            data_group = inner.get_group()
        else:
            data_group = data_group_of(mesh, self.dp_outer_dim, self.dp_shard_dim)
        return Axes(
            inner=inner,
            outer=self._outer_of(mesh),
            tensor=self._tensor_of(mesh),
            all_gather_group=all_gather_group
            if all_gather_group is not None
            else inner.get_group(),
            data_group=data_group,
            root=mesh,
        )

    # ---- axes, meshes and groups

    def axes(self, is_expert_parallel: bool = False) -> Axes:
        """Return the axes of dense or of expert parameters.

        Raises:
            ValueError: for expert parameters without ``expt_device_mesh``.
        """
        if not is_expert_parallel:
            return self.dense
        if self.expert is None:
            raise ValueError(
                "expert parameters need expt_device_mesh, the mesh of the ranks that hold the same"
                " experts"
            )
        return self.expert

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

    @property
    def device(self) -> torch.device:
        """The device of this rank's parameters."""
        device_type = self.device_mesh.device_type
        if device_type in ("cpu", "meta"):
            return torch.device(device_type)
        return torch.device(device_type, torch.accelerator.current_device_index())

    def all_groups(self) -> list[dist.ProcessGroup]:
        """Return groups that reach every rank of the mesh if they are used one after the other."""
        data_group = self.dense.data_group
        if data_group is None:  # the mesh cannot tell: all ranks of the program
            data_group = dist.distributed_c10d._get_default_group()
        groups = [data_group]
        if self.dense.tensor is not None:
            groups.append(self.dense.tensor.get_group())
        return groups

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh:
        """Return the mesh that the user passed, of dense or of expert parameters."""
        return self.axes(is_expert_parallel).root

    def get_submesh(
        self, names: str | Sequence[str], is_expert_parallel: bool = False
    ) -> DeviceMesh:
        """Return the mesh of one or several axes.

        Raises:
            ValueError: for names that the mesh does not have.
        """
        mesh = self.get_root_mesh(is_expert_parallel)
        names = (names,) if isinstance(names, str) else tuple(names)
        found = submesh(mesh, names)
        if found is None:
            raise ValueError(
                f"the device mesh has the axes {mesh.mesh_dim_names}, not {names}: name one of its"
                " (or flattened) axes"
            )
        return found

    def get_fsdp_group(
        self, is_expert_parallel: bool = False, independent_all_gather: bool = False
    ) -> dist.ProcessGroup:
        """Return the group of the ranks that a parameter is sharded over.

        Args:
            is_expert_parallel: return the group of expert parameters.
            independent_all_gather: return the group for all-gathers only, if there is one.
        """
        axes = self.axes(is_expert_parallel)
        return axes.all_gather_group if independent_all_gather else axes.inner.get_group()

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
        return outer.get_group() if outer is not None else None


def default_mesh() -> DeviceMesh:
    """Return a one-axis mesh over all ranks, on the accelerator if there is one, else on the CPU.

    Initializes torch.distributed if only its environment variables are set.

    Raises:
        RuntimeError: if the program was not started for torch.distributed.
    """
    if not dist.is_initialized() and "RANK" not in os.environ:
        raise RuntimeError(
            "fully_shard needs torch.distributed: start the program with torchrun, or call"
            " torch.distributed.init_process_group first"
        )
    device_type = "cpu"
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        device_type = accelerator.type if accelerator is not None else "cpu"
    if not dist.is_initialized():
        dist.init_process_group(init_method=rendezvous.INIT_METHOD)
    return init_device_mesh(
        device_type, (dist.get_world_size(),), mesh_dim_names=(DEFAULT_SHARD_AXIS,)
    )
