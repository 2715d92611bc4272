# SPDX-License-Identifier: Apache-2.0
"""Mesh axes: which ranks a parameter is sharded over, which replicate it, which hold other slices of it.

[Note: the axes of a parameter]
    inner   the ranks that divide it (``dp_shard_dim``)
    outer   in hybrid sharding the ranks that replicate it, or that divide its optimizer state
    further (``dp_outer_dim``) tensor  the ranks that hold other slices, or copies, of it in tensor
    parallelism (``tp_dim``)
Expert parameters have an inner axis of their own, on ``expt_device_mesh``: the ranks that hold the
same experts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.fsdp.engine.axes import Axes, data_group, submesh

DEFAULT_SHARD_AXIS = "dp_shard"


class FSDPDistributedIndex:
    """The mesh of a sharded model and the names of its axes.

    Args:
        device_mesh: mesh with named axes; None: one axis over all ranks, on the accelerator there
            is, else cpu.
        dp_shard_dim: axis to shard over, also a flattened one; may be left out with a one-axis
            mesh.
        dp_outer_dim: outer data axis of hybrid sharding.
        tp_dim: tensor-parallel axis.
        hybrid_fsdp_group: group over outer x shard; derived from the mesh if it is not given.
        hybrid_fsdp_expt_group: the same for expert parameters.
        hsdp_outer_dp_shard: the outer axis divides optimizer state too.
        expt_device_mesh: mesh of expert parameters, with axes of the same names. Without the outer
            axis of its own, the dense one's is taken.
        fsdp_group_ag, expt_fsdp_group_ag: groups of the ranks of the shard axis for gathers alone.

    Raises:
        ValueError: listing everything that is wrong with the mesh, the names and the groups.
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
        self.dp_shard_dim = dp_shard_dim
        self.dp_outer_dim = dp_outer_dim
        self.tp_dim = tp_dim
        self.hsdp_outer_dp_shard = hsdp_outer_dp_shard
        self._check_names(hybrid_fsdp_group, hybrid_fsdp_expt_group, expt_fsdp_group_ag)
        if self.dp_shard_dim is None:
            self.dp_shard_dim = self.device_mesh.mesh_dim_names[0]
        self._check_groups(
            hybrid_fsdp_group, hybrid_fsdp_expt_group, fsdp_group_ag, expt_fsdp_group_ag
        )
        self.dense = self._axes(self.device_mesh, hybrid_fsdp_group, fsdp_group_ag)
        self.expert = None
        if expt_device_mesh is not None:
            self.expert = self._axes(expt_device_mesh, hybrid_fsdp_expt_group, expt_fsdp_group_ag)

    # ---- checks
    # --------------------------------------------------------------------------------------------------

    def _check_names(self, hybrid: object, hybrid_expert: object, gather_expert: object) -> None:
        problems = _problems_of_mesh("device_mesh", self.device_mesh)
        if self.expt_device_mesh is not None:
            problems += _problems_of_mesh("expt_device_mesh", self.expt_device_mesh)
        if problems:
            raise ValueError("\n".join(problems))
        names = self.device_mesh.mesh_dim_names
        if self.dp_shard_dim is None and len(names) > 1:
            problems.append(
                f"dp_shard_dim is required with a mesh of several axes: one of {names}, or a"
                " flattened one"
            )
        given = {
            "dp_shard_dim": self.dp_shard_dim,
            "dp_outer_dim": self.dp_outer_dim,
            "tp_dim": self.tp_dim,
        }
        given = {argument: name for argument, name in given.items() if name is not None}
        for argument, name in given.items():
            if not isinstance(name, str):
                problems.append(
                    f"{argument} expects the name of an axis but got {name!r}: of several axes name"
                    " the flattened one"
                )
            elif submesh(self.device_mesh, [name]) is None:
                problems.append(
                    f"{argument}={name!r} is not an axis of the device mesh, which has {names}:"
                    " name one of its (or flattened) axes"
                )
        if len(set(map(str, given.values()))) < len(given):
            problems.append(
                f"{', '.join(f'{argument}={name!r}' for argument, name in given.items())}: the axes"
                " must differ"
            )
        if hybrid is not None and self.dp_outer_dim is None:
            problems.append("hybrid_fsdp_group needs dp_outer_dim, the name of the outer data axis")
        if self.hsdp_outer_dp_shard and self.dp_outer_dim is None:
            problems.append(
                "sharding over the outer axis needs dp_outer_dim, the name of the outer data axis"
            )
        problems += self._problems_of_experts(hybrid_expert, gather_expert)
        if problems:
            raise ValueError("\n".join(problems))

    def _problems_of_experts(self, hybrid: object, gather: object) -> list[str]:
        mesh = self.expt_device_mesh
        if mesh is None:
            given = {"hybrid_fsdp_expt_group": hybrid, "expt_fsdp_group_ag": gather}
            return [
                f"{name} needs expt_device_mesh"
                for name, group in given.items()
                if group is not None
            ]
        problems = []
        if hybrid is not None and self.dp_outer_dim is None:
            problems.append(
                "hybrid_fsdp_expt_group needs dp_outer_dim, the name of the outer data axis"
            )
        name = self.dp_shard_dim or self.device_mesh.mesh_dim_names[0]
        if submesh(mesh, [name]) is None:
            problems.append(
                f"expt_device_mesh needs the shard axis {name!r} too, but has {mesh.mesh_dim_names}"
            )
        if mesh.device_type != self.device_mesh.device_type:
            problems.append(
                f"expt_device_mesh is on {mesh.device_type}, device_mesh on"
                f" {self.device_mesh.device_type}"
            )
        return problems

    def _check_groups(
        self, hybrid: object, hybrid_expert: object, gather: object, gather_expert: object
    ) -> None:
        problems = []
        for mesh, whole, gatherer, kind in (
            (self.device_mesh, hybrid, gather, ""),
            (self.expt_device_mesh, hybrid_expert, gather_expert, "expt_"),
        ):
            if mesh is None:
                continue
            inner = submesh(mesh, [self.dp_shard_dim])
            outer = self._outer(mesh)
            size = inner.size() * (outer.size() if outer is not None else 1)
            name = f"hybrid_fsdp_{kind}group"
            if whole is not None and not isinstance(whole, dist.ProcessGroup):
                problems.append(
                    f"{name} expects a torch.distributed.ProcessGroup but got"
                    f" {type(whole).__name__}"
                )
            elif whole is not None and whole.size() != size:
                problems.append(
                    f"{name} has {whole.size()} ranks, but the outer and the shard axis together"
                    f" {size}"
                )
            elif whole is not None:
                ranks = dist.get_process_group_ranks(whole)
                axes = [axis.get_group() for axis in (inner, outer) if axis is not None]
                wanted = {rank for group in axes for rank in dist.get_process_group_ranks(group)}
                if not wanted <= set(ranks):
                    problems.append(
                        f"{name} has the ranks {ranks}, which leave out some of the outer and the"
                        f" shard axis: {sorted(wanted)}"
                    )
            name = f"{kind}fsdp_group_ag"
            if gatherer is not None and not isinstance(gatherer, dist.ProcessGroup):
                problems.append(
                    f"{name} expects a torch.distributed.ProcessGroup but got"
                    f" {type(gatherer).__name__}"
                )
            elif gatherer is not None:
                ranks, wanted = (
                    dist.get_process_group_ranks(group) for group in (gatherer, inner.get_group())
                )
                if ranks != wanted:
                    problems.append(
                        f"{name} has the ranks {ranks}, but the shard axis {wanted}: they must be"
                        " the same"
                    )
        if problems:
            raise ValueError("\n".join(problems))

    # ---- axes
    # ----------------------------------------------------------------------------------------------------

    def _outer(self, mesh: DeviceMesh) -> DeviceMesh | None:
        if self.dp_outer_dim is None:
            return None
        own = submesh(mesh, [self.dp_outer_dim])
        return own if own is not None else submesh(self.device_mesh, [self.dp_outer_dim])

    def _axes(
        self, mesh: DeviceMesh, whole: dist.ProcessGroup | None, gather: dist.ProcessGroup | None
    ) -> Axes:
        inner = submesh(mesh, [self.dp_shard_dim])
        outer = self._outer(mesh)
        if whole is None:
            whole = (
                inner.get_group()
                if outer is None
                else data_group(mesh, self.dp_outer_dim, self.dp_shard_dim)
            )
        tensor = submesh(mesh, [self.tp_dim]) if self.tp_dim is not None else None
        return Axes(
            inner, outer, tensor, gather if gather is not None else inner.get_group(), whole, mesh
        )

    def axes(self, is_expert_parallel: bool = False) -> Axes:
        """The axes of dense or of expert parameters.

        Raises:
            ValueError: for expert parameters without ``expt_device_mesh``.
        """
        if is_expert_parallel and self.expert is None:
            raise ValueError(
                "expert parameters need expt_device_mesh, the mesh of the ranks that hold the same"
                " experts"
            )
        return self.expert if is_expert_parallel else self.dense

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The axis that dense parameters are sharded over."""
        return self.dense.inner

    @property
    def rank(self) -> int:
        """This rank's place on the shard axis."""
        return self.dense.inner.get_local_rank()

    @property
    def size(self) -> int:
        """Ranks on the shard axis."""
        return self.dense.inner.size()

    @property
    def device(self) -> torch.device:
        """Where the parameters of this rank live."""
        kind = self.device_mesh.device_type
        return (
            torch.device(kind)
            if kind in ("cpu", "meta")
            else torch.device(kind, torch.accelerator.current_device_index())
        )

    def all_groups(self) -> list[dist.ProcessGroup]:
        """Groups through which this rank reaches every rank of the mesh, one after the other."""
        groups = [self.dense.data_group]
        return groups + ([self.dense.tensor.get_group()] if self.dense.tensor is not None else [])

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh:
        """The mesh that was given."""
        return self.axes(is_expert_parallel).root

    def get_submesh(
        self, names: str | Sequence[str], is_expert_parallel: bool = False
    ) -> DeviceMesh:
        """The mesh of one or several axes.

        Raises:
            ValueError: for names that the mesh does not have.
        """
        mesh = self.get_root_mesh(is_expert_parallel)
        names = (names,) if isinstance(names, str) else tuple(names)
        found = mesh if mesh.mesh_dim_names == names else submesh(mesh, names)
        if found is None:
            raise ValueError(
                f"the device mesh has the axes {mesh.mesh_dim_names}, not {names}: name one of its"
                " (or flattened) axes"
            )
        return found

    def get_fsdp_group(
        self, is_expert_parallel: bool = False, independent_all_gather: bool = False
    ) -> dist.ProcessGroup:
        """Group of the ranks that a parameter is sharded over; the one for gathers alone if there is one and it is asked for."""
        axes = self.axes(is_expert_parallel)
        return axes.all_gather_group if independent_all_gather else axes.inner.get_group()

    def get_dp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup:
        """Group of all data ranks of these parameters: inner x outer.

        Raises:
            ValueError: in hybrid sharding of experts whose mesh has no outer axis, without
                ``hybrid_fsdp_expt_group``.
        """
        whole = self.axes(is_expert_parallel).data_group
        if whole is None:
            raise ValueError("expt_device_mesh has no outer axis: pass hybrid_fsdp_expt_group")
        return whole

    def get_outer_fsdp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup | None:
        """Group of the outer data axis; None without one."""
        outer = self.axes(is_expert_parallel).outer
        return outer.get_group() if outer is not None else None


def _problems_of_mesh(argument: str, mesh: object) -> list[str]:
    if not isinstance(mesh, DeviceMesh):
        return [f"{argument} expects a torch DeviceMesh but got {type(mesh).__name__}"]
    if not mesh.mesh_dim_names:
        return [f"{argument} expects named axes (mesh_dim_names): dp_shard_dim names one of them"]
    return []


def default_mesh() -> DeviceMesh:
    """One axis over all ranks, on the accelerator there is, else cpu.

    Raises:
        RuntimeError: outside torch.distributed.
    """
    if not dist.is_initialized() and "RANK" not in os.environ:
        raise RuntimeError(
            "fully_shard needs torch.distributed: start the program with torchrun, or call"
            " torch.distributed.init_process_group first"
        )
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    kind = accelerator.type if accelerator else "cpu"
    if not dist.is_initialized():
        dist.init_process_group()
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=(DEFAULT_SHARD_AXIS,))
