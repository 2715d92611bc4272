# SPDX-License-Identifier: Apache-2.0
"""The mesh of a sharded model: which of its axes shard, replicate and split parameters."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.engine.policy import ParameterKind, raise_problems

# [Note: the axes of a parameter]
#     inner     the ranks that shard it; on `expert_mesh`, those that have the same experts
#     outer     in hybrid sharding, the ranks that replicate it or shard its optimizer state further
#     tensor    the ranks that have other slices, or copies, of it in tensor parallelism


AXES = ("inner", "outer", "tensor")
"""The fields of :class:`Mesh` that name an axis."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Mesh:
    """The mesh of a sharded model and the names of its axes.

    Args:
        device_mesh: mesh with named axes.
        inner: name of the axis to shard over, which may be a flattened one. It may be left out if
            the mesh has one axis.
        outer: name of the outer data axis of hybrid sharding.
        tensor: name of the tensor-parallel axis.
        data_group: group over outer x inner; derived from the mesh if it is not given.
        gather_group: second group of the ranks of the inner axis, for all-gathers only, which then
            do not queue behind reductions.
        expert_mesh: mesh of expert parameters, with axes of the same names. If it has no outer
            axis of its own, the outer axis of the dense mesh is used.
        expert_data_group: ``data_group`` of expert parameters.
        expert_gather_group: ``gather_group`` of expert parameters.

    Raises:
        ValueError: lists every problem of the mesh, the names and the groups.
    """

    device_mesh: DeviceMesh
    inner: str | None = None
    outer: str | None = None
    tensor: str | None = None
    data_group: dist.ProcessGroup | None = None
    gather_group: dist.ProcessGroup | None = None
    expert_mesh: DeviceMesh | None = None
    expert_data_group: dist.ProcessGroup | None = None
    expert_gather_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        # Each check relies on those before it.
        problems = _problems_of_mesh("Mesh.device_mesh", self.device_mesh)
        if self.expert_mesh is not None:
            problems += _problems_of_mesh("Mesh.expert_mesh", self.expert_mesh)
        raise_problems(problems)
        raise_problems(self._problems_of_names() + self._problems_of_outer_and_experts())
        if self.inner is None:
            object.__setattr__(self, "inner", axis_names(self.device_mesh)[0])
        problems = self._problems_of_groups("device_mesh", "data_group", "gather_group")
        if self.expert_mesh is not None:
            problems += self._problems_of_groups(
                "expert_mesh",
                "expert_data_group",
                "expert_gather_group",
            )
        raise_problems(problems)
        _ = self.dense, self.expert  # flattened axes are created now, on all ranks

    # ---- axes and groups

    @cached_property
    def dense(self) -> Axes:
        """The axes of parameters that are no experts'."""
        return self._axes_of(self.device_mesh, self.data_group, self.gather_group)

    @cached_property
    def expert(self) -> Axes | None:
        """The axes of expert parameters; None without ``expert_mesh``."""
        if self.expert_mesh is None:
            return None
        return self._axes_of(self.expert_mesh, self.expert_data_group, self.expert_gather_group)

    def axes(self, kind: ParameterKind = ParameterKind.DENSE) -> Axes:
        """Return the axes of a kind of parameters.

        Raises:
            ValueError: for expert parameters of a mesh without ``expert_mesh``.
        """
        if kind is not ParameterKind.EXPERT:
            return self.dense
        if self.expert is None:
            raise ValueError(
                "expert parameters need Mesh.expert_mesh, the mesh of the ranks that have the same"
                " experts"
            )
        return self.expert

    @property
    def device(self) -> torch.device:
        """The device of this rank's parameters."""
        device_type = self.device_mesh.device_type
        if device_type in ("cpu", "meta"):
            return torch.device(device_type)
        return torch.device(device_type, torch.accelerator.current_device_index())

    def all_groups(self) -> list[dist.ProcessGroup]:
        """Return groups that reach every rank of the mesh if they are used one after the other."""
        # If the mesh has no group of its data ranks: all ranks of the program.
        groups = [self.dense.data_group or dist.distributed_c10d._get_default_group()]
        if self.dense.tensor is not None:
            groups.append(self.dense.tensor.get_group())
        return groups

    def _axis(self, mesh: DeviceMesh, name: str | None) -> DeviceMesh | None:
        """Return an axis of dense or expert parameters; None if it has no name."""
        if name is None:
            return None
        axis = submesh(mesh, [name])
        if axis is None and name == self.outer:  # experts may use the outer axis of the dense mesh
            return submesh(self.device_mesh, [name])
        return axis

    def _axes_of(
        self,
        mesh: DeviceMesh,
        data_group: dist.ProcessGroup | None,
        gather_group: dist.ProcessGroup | None,
    ) -> Axes:
        inner = self._axis(mesh, self.inner)
        assert inner is not None and self.inner is not None  # checked with the names
        if data_group is None and self.outer is None:
            data_group = inner.get_group()
        elif data_group is None and self.outer is not None:
            both = submesh(mesh, [self.outer, self.inner])
            if both is None:
                both = submesh(mesh, [self.inner, self.outer])
            if both is not None:
                data_group = both._flatten().get_group()  # created once per mesh
        if gather_group is None:
            gather_group = inner.get_group()
        return Axes(
            inner=inner,
            outer=self._axis(mesh, self.outer),
            tensor=self._axis(mesh, self.tensor),
            all_gather_group=gather_group,
            data_group=data_group,
            root=mesh,
        )

    # ---- checks

    def _problems_of_names(self) -> list[str]:
        problems = []
        names = axis_names(self.device_mesh)
        if self.inner is None and len(names) > 1:
            problems.append(
                f"Mesh.inner is required with a mesh of several axes: one of {names}, or a"
                " flattened one"
            )
        given: dict[str, str] = {}
        for field in AXES:
            name = getattr(self, field)
            if name is not None:
                given[f"Mesh.{field}"] = name
        for field, name in given.items():
            if not isinstance(name, str):
                problems.append(
                    f"{field} expects the name of an axis but got {name!r}: of several axes name"
                    " the flattened one"
                )
            elif submesh(self.device_mesh, [name]) is None:
                problems.append(
                    f"{field}={name!r} is not an axis of the device mesh, which has {names}:"
                    " name one of its (or flattened) axes"
                )
        if len({str(name) for name in given.values()}) < len(given):
            listed = ", ".join(f"{field}={name!r}" for field, name in given.items())
            problems.append(f"{listed}: the axes must differ")
        return problems

    def _problems_of_outer_and_experts(self) -> list[str]:
        problems = []
        for field in ("data_group", "expert_data_group"):
            if getattr(self, field) is not None and self.outer is None:
                problems.append(f"Mesh.{field} needs Mesh.outer, the name of the outer data axis")
        if self.expert_mesh is None:
            for field in ("expert_data_group", "expert_gather_group"):
                if getattr(self, field) is not None:
                    problems.append(f"Mesh.{field} needs Mesh.expert_mesh")
            return problems
        inner = self.inner
        if inner is None:
            inner = axis_names(self.device_mesh)[0]
        if submesh(self.expert_mesh, [inner]) is None:
            problems.append(
                f"Mesh.expert_mesh needs the inner axis {inner!r} too, but has"
                f" {self.expert_mesh.mesh_dim_names}"
            )
        dense_type = self.device_mesh.device_type
        expert_type = self.expert_mesh.device_type
        if dense_type != expert_type:
            problems.append(
                f"Mesh.expert_mesh is on {expert_type}, Mesh.device_mesh on {dense_type}"
            )
        return problems

    def _problems_of_groups(
        self,
        mesh: str,
        data_group: str,
        gather_group: str,
    ) -> list[str]:
        """Return the problems of the axes of a mesh and of its groups, by the names of fields."""
        axes: dict[str, DeviceMesh] = {}
        for field in AXES:
            axis = self._axis(getattr(self, mesh), getattr(self, field))
            if axis is not None:
                axes[field] = axis
        problems = []
        for first, second in combinations(axes, 2):
            # Shards of the one axis would be summed over the other as if they were copies. A
            # flattened axis shares ranks with its parts.
            first_ranks = set(axes[first].mesh.tolist())
            second_ranks = set(axes[second].mesh.tolist())
            if len(first_ranks & second_ranks) > 1:
                problems.append(
                    f"the axes of Mesh.{mesh} Mesh.{first}={axis_names(axes[first])[0]!r} and"
                    f" Mesh.{second}={axis_names(axes[second])[0]!r} share ranks: name axes that"
                    " are no parts of one another"
                )
        inner = axes["inner"].mesh.tolist()
        size = len(inner)
        data_ranks = set(inner)
        if "outer" in axes:
            size *= axes["outer"].size()
            data_ranks.update(axes["outer"].mesh.tolist())
        for name in (data_group, gather_group):
            group = getattr(self, name)
            if group is None:
                continue
            ranks = []
            if isinstance(group, dist.ProcessGroup):
                ranks = dist.get_process_group_ranks(group)
            if name == gather_group:
                is_right = ranks == dist.get_process_group_ranks(axes["inner"].get_group())
                expected = f"inner axis, {inner}"
            else:
                is_right = len(ranks) == size and data_ranks <= set(ranks)
                expected = f"outer and the inner axis, {size} with {sorted(data_ranks)}"
            if not is_right:
                problems.append(
                    f"Mesh.{name} expects a ProcessGroup of the ranks of the {expected}, but got"
                    f" {ranks or type(group).__name__}"
                )
        return problems


@dataclass(frozen=True)
class Axes:
    """The one-axis meshes of dense or of expert parameters. See [Note: the axes of a parameter].

    Args:
        inner: the axis over which the parameters are sharded.
        outer: the outer data axis of hybrid sharding; None without one.
        tensor: the tensor-parallel axis; None without one.
        all_gather_group: group of the inner ranks for all-gathers of weights.
        data_group: group of the inner and outer ranks; None if the mesh cannot provide it.
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
        if self.outer is None:
            return self.inner.size()
        return self.inner.size() * self.outer.size()

    def dtensor_mesh(self, outer_is_sharded: bool) -> DeviceMesh:
        """Return the mesh of the DTensors of these parameters, without creating process groups."""
        # Its axes are in the order in which a parameter is divided: a tensor-parallel slice is
        # sharded over the inner axis, and that shard over the outer one.
        axes = [self.inner]
        if self.tensor is not None:
            axes.insert(0, self.tensor)
        if outer_is_sharded and self.outer is not None:
            axes.append(self.outer)
        if len(axes) == 1:
            return self.inner
        names = [axis_names(axis)[0] for axis in axes]
        # The outer axis of experts may be that of the dense mesh, and not be part of this root.
        if axes[-1] is self.outer and submesh(self.root, names[-1:]) is None:
            ranks = _extend_along(_ranks_of(self.root, names[:-1]), self.outer)
        else:
            ranks = _ranks_of(self.root, names)
        return DeviceMesh.from_group(
            [axis.get_group() for axis in axes],
            self.root.device_type,
            mesh=ranks,
            mesh_dim_names=tuple(names),
        )


@dataclass(frozen=True, eq=False)  # its hash is not computed in Python
class NormGroup:
    """The ranks over which the norm of a parameter is summed.

    Args:
        groups: groups that reach all of these ranks if they are used one after the other.
        copies: number of these ranks that have the same shard.
    """

    groups: tuple[dist.ProcessGroup, ...]
    copies: int = 1


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of the mesh's own axes; an empty tuple if it has no names."""
    return mesh.mesh_dim_names or ()


def submesh(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh | None:
    """Return the mesh of these axes, also flattened ones; None without one in this order."""
    if mesh.mesh_dim_names == tuple(names):
        return mesh
    with warnings.catch_warnings():
        # torch deprecates slicing a flattened axis out of its root; users could do nothing.
        warnings.simplefilter("ignore")
        try:
            return mesh[tuple(names)]
        except (KeyError, RuntimeError, ValueError, NotImplementedError):
            return None


def _ranks_of(mesh: DeviceMesh, names: Sequence[str]) -> torch.Tensor:
    """Return the ranks of this rank's submesh of ``mesh``, with a dim for each name, in order."""
    # torch slices axes out of a mesh in its own order only. Example: for (tp, dp) there is only
    # (dp, tp), with the ranks [[0, 1], [2, 3]]. The result is [[0, 2], [1, 3]].
    for order in permutations(names):
        found = submesh(mesh, order)
        if found is not None:
            return found.mesh.permute([order.index(name) for name in names])
    raise ValueError(
        f"no mesh of the axes {tuple(names)} can be taken out of one with {mesh.mesh_dim_names}"
    )


def _extend_along(ranks: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """Return ``ranks`` ``[...]`` with a last dim added: the group of each rank on ``axis``."""
    # Example: the ranks [0, 1] and an axis with the groups (0, 2) and (1, 3) give [[0, 2], [1, 3]].
    root = axis._get_root_mesh()
    dim = axis_names(root).index(axis_names(axis)[0])
    group_of: dict[int, list[int]] = {}
    rows = root.mesh.movedim(dim, -1).reshape(-1, axis.size())
    for group in rows.tolist():
        group_of.update(dict.fromkeys(group, group))
    groups = [group_of[rank] for rank in ranks.flatten().tolist()]
    return torch.tensor(groups, dtype=ranks.dtype).view(*ranks.shape, -1)


def _problems_of_mesh(field: str, mesh: object) -> list[str]:
    if not isinstance(mesh, DeviceMesh):
        return [f"{field} expects a torch DeviceMesh but got {type(mesh).__name__}"]
    if not mesh.mesh_dim_names:
        return [f"{field} expects named axes (mesh_dim_names): Mesh.inner names one of them"]
    return []
