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
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DEFAULT_SHARD_AXIS = "dp_shard"


@dataclass(frozen=True)
class Axes:
    """The axes of one kind of parameters, dense or expert.

    Args:
        inner, outer, tensor: one-axis meshes; the last two None where there is no such axis.
        gather: group of the inner ranks for gathers.
        whole: group of all their data ranks, inner x outer; None where the mesh cannot tell.
        root: the mesh that the axes were taken from.
    """

    inner: DeviceMesh
    outer: DeviceMesh | None
    tensor: DeviceMesh | None
    gather: dist.ProcessGroup
    whole: dist.ProcessGroup | None
    root: DeviceMesh

    @property
    def num_data_ranks(self) -> int:
        return self.inner.size() * (self.outer.size() if self.outer is not None else 1)

    def mesh_of_pieces(self, outer_is_sharded: bool) -> DeviceMesh:
        """The mesh of the DTensors of these parameters: tensor axis first, then inner, then outer if it divides them.

        So the placements say what is true: a tensor-parallel slice is divided over the inner axis,
        a part of it over the outer one. The groups are those there are; none is made.
        """
        axes = [
            axis
            for axis in (self.tensor, self.inner, self.outer if outer_is_sharded else None)
            if axis is not None
        ]
        if len(axes) == 1:
            return axes[0]
        names = [axis.mesh_dim_names[0] for axis in axes]
        own = [
            name
            for name, axis in zip(names, axes)
            if axis is not self.outer or _slice(self.root, [name]) is not None
        ]
        ranks = _ranks_of(self.root, own)
        if len(own) < len(names):  # the outer axis of experts may be the dense mesh's
            ranks = _along(ranks, self.outer)
        return DeviceMesh.from_group(
            [axis.get_group() for axis in axes],
            self.root.device_type,
            mesh=ranks,
            mesh_dim_names=tuple(names),
        )


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
            elif _slice(self.device_mesh, [name]) is None:
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
        if _slice(mesh, [name]) is None:
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
            inner = _slice(mesh, [self.dp_shard_dim])
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
        own = _slice(mesh, [self.dp_outer_dim])
        return own if own is not None else _slice(self.device_mesh, [self.dp_outer_dim])

    def _axes(
        self, mesh: DeviceMesh, whole: dist.ProcessGroup | None, gather: dist.ProcessGroup | None
    ) -> Axes:
        inner = _slice(mesh, [self.dp_shard_dim])
        outer = self._outer(mesh)
        if whole is None:
            whole = (
                inner.get_group()
                if outer is None
                else _whole_group(mesh, self.dp_outer_dim, self.dp_shard_dim)
            )
        tensor = _slice(mesh, [self.tp_dim]) if self.tp_dim is not None else None
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
        groups = [self.dense.whole]
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
        found = mesh if mesh.mesh_dim_names == names else _slice(mesh, names)
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
        return axes.gather if independent_all_gather else axes.inner.get_group()

    def get_dp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup:
        """Group of all data ranks of these parameters: inner x outer.

        Raises:
            ValueError: in hybrid sharding of experts whose mesh has no outer axis, without
                ``hybrid_fsdp_expt_group``.
        """
        whole = self.axes(is_expert_parallel).whole
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


def _slice(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh | None:
    """The mesh of some axes, flattened ones too, in their order; None where it has no such axes."""
    if mesh.mesh_dim_names == tuple(names):
        return mesh
    with warnings.catch_warnings():
        # torch plans to want flattened axes from the mesh that flattening returned; users name
        # them.
        warnings.simplefilter("ignore")
        try:
            return mesh[names[0] if len(names) == 1 else tuple(names)]
        except (KeyError, RuntimeError, ValueError, NotImplementedError):
            return None


def _ranks_of(mesh: DeviceMesh, names: Sequence[str]) -> torch.Tensor:
    """Ranks of this rank's slice of ``mesh``, one dimension for each of ``names``, in the order of ``names``."""
    for order in permutations(names):
        found = _slice(mesh, order)
        if found is not None:
            return found.mesh.permute([order.index(name) for name in names])
    raise ValueError(
        f"no mesh of the axes {tuple(names)} can be taken out of one with {mesh.mesh_dim_names}"
    )


def _along(ranks: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """``ranks`` ``[...]`` with a last dimension more: for each of them the ranks of its group on ``axis``, a slice of a mesh."""
    root = axis._get_root_mesh()
    place = root.mesh_dim_names.index(axis.mesh_dim_names[0])
    group_of = {
        rank: row
        for row in root.mesh.movedim(place, -1).reshape(-1, axis.size()).tolist()
        for rank in row
    }
    return torch.tensor(
        [group_of[rank] for rank in ranks.flatten().tolist()], dtype=ranks.dtype
    ).view(*ranks.shape, -1)


def _whole_group(mesh: DeviceMesh, outer: str, inner: str) -> dist.ProcessGroup | None:
    """The group over both data axes, made once for a mesh; None where it does not have both."""
    both = _slice(mesh, [outer, inner])
    both = both if both is not None else _slice(mesh, [inner, outer])
    return both._flatten().get_group() if both is not None else None


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


def get_mesh_names(device_mesh: DeviceMesh | None, only_submesh_dims: bool = False) -> list[str]:
    """Names of the axes that can be taken out of ``device_mesh``; none of a mesh without names.

    Args:
        device_mesh: also a slice of a larger mesh, and then the larger one's axes count.
        only_submesh_dims: only the axes of ``device_mesh`` itself, neither the larger mesh's nor
            flattened ones.
    """
    if device_mesh is None:
        return []
    names = list(device_mesh.mesh_dim_names or ())
    if only_submesh_dims:
        return names
    root = device_mesh._get_root_mesh()
    return list(dict.fromkeys([*names, *(root.mesh_dim_names or ()), *root._flatten_mapping]))


def contains_submesh(
    device_mesh: DeviceMesh | None, submesh_names: str | Sequence[str] | None
) -> bool:
    """Whether every one of ``submesh_names`` (one name or several, at least one) names an axis, also a flattened one."""
    wanted = (submesh_names,) if isinstance(submesh_names, str) else tuple(submesh_names or ())
    return bool(wanted) and set(wanted) <= set(get_mesh_names(device_mesh))
