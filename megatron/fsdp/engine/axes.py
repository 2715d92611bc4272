# SPDX-License-Identifier: Apache-2.0
"""Mesh axes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


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
    all_gather_group: dist.ProcessGroup
    data_group: dist.ProcessGroup | None
    root: DeviceMesh

    @property
    def num_data_ranks(self) -> int:
        return self.inner.size() * (self.outer.size() if self.outer is not None else 1)

    def dtensor_mesh(self, outer_is_sharded: bool) -> DeviceMesh:
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
            if axis is not self.outer or submesh(self.root, [name]) is not None
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


def submesh(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh | None:
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
        found = submesh(mesh, order)
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


def data_group(mesh: DeviceMesh, outer: str, inner: str) -> dist.ProcessGroup | None:
    """The group over both data axes, made once for a mesh; None where it does not have both."""
    both = submesh(mesh, [outer, inner])
    both = both if both is not None else submesh(mesh, [inner, outer])
    return both._flatten().get_group() if both is not None else None


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
