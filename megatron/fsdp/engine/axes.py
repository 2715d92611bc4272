# SPDX-License-Identifier: Apache-2.0
"""Mesh axes: the ranks that shard a parameter, replicate it, or split it by tensor parallelism.

[Note: the axes of a parameter]
    inner     the ranks that shard it (``dp_shard_dim``)
    outer     in hybrid sharding, the ranks that replicate it, or that shard its optimizer state
              further (``dp_outer_dim``)
    tensor    the ranks that have other slices, or copies, of it in tensor parallelism (``tp_dim``)

Expert parameters have an inner axis of their own, on ``expt_device_mesh``: the ranks that store
shards of the same experts.
"""

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
    """The axes of dense parameters, or of expert parameters.

    Args:
        inner: one-axis mesh of the ranks that shard the parameters.
        outer: one-axis mesh of the outer data axis; None without one.
        tensor: one-axis mesh of the tensor-parallel axis; None without one.
        all_gather_group: the inner ranks, for all-gathers of weights.
        data_group: all data ranks, inner x outer; None if the mesh cannot provide it.
        root: the mesh to which the axes belong.
    """

    inner: DeviceMesh
    outer: DeviceMesh | None
    tensor: DeviceMesh | None
    all_gather_group: dist.ProcessGroup
    data_group: dist.ProcessGroup | None
    root: DeviceMesh

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that compute on different data with these parameters."""
        return self.inner.size() * (self.outer.size() if self.outer is not None else 1)

    def dtensor_mesh(self, outer_is_sharded: bool) -> DeviceMesh:
        """Return the mesh of the DTensors of these parameters.

        Its axes are the tensor axis, the inner axis and, if it shards them, the outer axis, in this
        order. It is the order in which a parameter is divided: a tensor-parallel slice is sharded
        over the inner axis, and that shard over the outer one. No process group is created.
        """
        axes = [self.inner]
        if self.tensor is not None:
            axes.insert(0, self.tensor)
        if self.outer is not None and outer_is_sharded:
            axes.append(self.outer)
        if len(axes) == 1:
            return self.inner
        names = [axis_name(axis) for axis in axes]
        # The outer axis of experts may be that of the dense mesh, and not be part of this root.
        own_names = [
            name
            for name, axis in zip(names, axes)
            if axis is not self.outer or submesh(self.root, [name]) is not None
        ]
        ranks = _ranks_of(self.root, own_names)
        if self.outer is not None and len(own_names) < len(names):
            ranks = _extend_along(ranks, self.outer)
        return DeviceMesh.from_group(
            [axis.get_group() for axis in axes],
            self.root.device_type,
            mesh=ranks,
            mesh_dim_names=tuple(names),
        )


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of the mesh's own axes; an empty tuple if it has no names."""
    return mesh.mesh_dim_names or ()


def axis_name(axis: DeviceMesh) -> str:
    """Return the name of a mesh of one axis."""
    return axis_names(axis)[0]


def submesh(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh | None:
    """Return the mesh of the axes ``names``, which may be flattened ones, in this order.

    Return None if ``mesh`` does not have these axes in this order.
    """
    if mesh.mesh_dim_names == tuple(names):
        return mesh
    with warnings.catch_warnings():
        # torch deprecates slicing a flattened axis out of its root mesh. Our users pass names, so
        # they could not act on the warning.
        warnings.simplefilter("ignore")
        try:
            return mesh[names[0] if len(names) == 1 else tuple(names)]
        except (KeyError, RuntimeError, ValueError, NotImplementedError):
            return None


def _ranks_of(mesh: DeviceMesh, names: Sequence[str]) -> torch.Tensor:
    """Return the ranks of this rank's submesh of ``mesh``, one dim for each name, in their order.

    torch slices axes out of a mesh in the mesh's own order only. Example: the names are (tp, dp),
    and the submesh exists as (dp, tp) only, with the ranks [[0, 1], [2, 3]]. The result is
    [[0, 2], [1, 3]].
    """
    for order in permutations(names):
        found = submesh(mesh, order)
        if found is not None:
            return found.mesh.permute([order.index(name) for name in names])
    raise ValueError(
        f"no mesh of the axes {tuple(names)} can be taken out of one with {mesh.mesh_dim_names}"
    )


def _extend_along(ranks: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """Return ``ranks`` ``[...]`` with a last dim added: the group of each rank on ``axis``.

    Example: for the ranks [0, 1] and an axis with the groups (0, 2) and (1, 3), the result is
    [[0, 2], [1, 3]].
    """
    root = axis._get_root_mesh()
    dim = axis_names(root).index(axis_name(axis))
    group_of: dict[int, list[int]] = {}
    for group in root.mesh.movedim(dim, -1).reshape(-1, axis.size()).tolist():
        group_of.update(dict.fromkeys(group, group))
    groups = [group_of[rank] for rank in ranks.flatten().tolist()]
    return torch.tensor(groups, dtype=ranks.dtype).view(*ranks.shape, -1)


def data_group_of(mesh: DeviceMesh, outer: str, inner: str) -> dist.ProcessGroup | None:
    """Return the group over both data axes, created once per mesh; None if the mesh lacks one."""
    both = submesh(mesh, [outer, inner])
    if both is None:
        both = submesh(mesh, [inner, outer])
    return both._flatten().get_group() if both is not None else None


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
