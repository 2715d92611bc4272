# SPDX-License-Identifier: Apache-2.0
"""Checks of the meshes, axis names and process groups that a user passes."""

from __future__ import annotations

from itertools import combinations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.engine.axes import axis_name, axis_names, submesh


def raise_all(problems: list[str]) -> None:
    """Raise one ValueError with a line for each problem; do nothing if there are none."""
    if problems:
        raise ValueError("\n".join(problems))


def problems_of_mesh(argument: str, mesh: object) -> list[str]:
    """Return the problems of the mesh that was passed as ``argument``, one sentence each."""
    if not isinstance(mesh, DeviceMesh):
        return [f"{argument} expects a torch DeviceMesh but got {type(mesh).__name__}"]
    if not mesh.mesh_dim_names:
        return [f"{argument} expects named axes (mesh_dim_names): dp_shard_dim names one of them"]
    return []


def problems_of_names(
    mesh: DeviceMesh, shard: str | None, outer: str | None, tensor: str | None
) -> list[str]:
    """Return the problems of the axis names that were passed for ``mesh``."""
    problems = []
    names = axis_names(mesh)
    if shard is None and len(names) > 1:
        problems.append(
            f"dp_shard_dim is required with a mesh of several axes: one of {names}, or a"
            " flattened one"
        )
    arguments = {"dp_shard_dim": shard, "dp_outer_dim": outer, "tp_dim": tensor}
    given = {argument: name for argument, name in arguments.items() if name is not None}
    for argument, name in given.items():
        if not isinstance(name, str):
            problems.append(
                f"{argument} expects the name of an axis but got {name!r}: of several axes name"
                " the flattened one"
            )
        elif submesh(mesh, [name]) is None:
            problems.append(
                f"{argument}={name!r} is not an axis of the device mesh, which has {names}:"
                " name one of its (or flattened) axes"
            )
    if len(set(map(str, given.values()))) < len(given):
        listed = ", ".join(f"{argument}={name!r}" for argument, name in given.items())
        problems.append(f"{listed}: the axes must differ")
    return problems


def problems_of_outer(outer: str | None, hybrid_group: object, outer_is_sharded: bool) -> list[str]:
    """Return a problem for each argument that needs ``dp_outer_dim`` where it was not given."""
    if outer is not None:
        return []
    problems = []
    if hybrid_group is not None:
        problems.append("hybrid_fsdp_group needs dp_outer_dim, the name of the outer data axis")
    if outer_is_sharded:
        problems.append(
            "sharding over the outer axis needs dp_outer_dim, the name of the outer data axis"
        )
    return problems


def problems_of_experts(
    expert_mesh: DeviceMesh | None,
    mesh: DeviceMesh,
    shard: str | None,
    outer: str | None,
    hybrid_group: object,
    all_gather_group: object,
) -> list[str]:
    """Return the problems of the mesh and the groups of expert parameters."""
    if expert_mesh is None:
        given = {
            "hybrid_fsdp_expt_group": hybrid_group,
            "expt_fsdp_group_ag": all_gather_group,
        }
        return [
            f"{name} needs expt_device_mesh" for name, group in given.items() if group is not None
        ]
    problems = []
    if hybrid_group is not None and outer is None:
        problems.append(
            "hybrid_fsdp_expt_group needs dp_outer_dim, the name of the outer data axis"
        )
    name = shard or axis_name(mesh)
    if submesh(expert_mesh, [name]) is None:
        problems.append(
            f"expt_device_mesh needs the shard axis {name!r} too, but has"
            f" {expert_mesh.mesh_dim_names}"
        )
    if expert_mesh.device_type != mesh.device_type:
        problems.append(
            f"expt_device_mesh is on {expert_mesh.device_type}, device_mesh on {mesh.device_type}"
        )
    return problems


def problems_of_overlap(argument: str, axes: dict[str, DeviceMesh | None]) -> list[str]:
    """Return a problem for each two axes that share ranks, as a flattened axis does with its parts.

    Shards of the one axis would be summed over the other as if they were copies of one shard.

    Args:
        argument: name of the argument that has the axes.
        axes: axis by the argument that names it; None where there is none.
    """
    given = {name: axis for name, axis in axes.items() if axis is not None}
    return [
        f"the axes of {argument} {first}={axis_name(given[first])!r} and"
        f" {second}={axis_name(given[second])!r} share ranks: name axes that are no parts of one"
        " another"
        for first, second in combinations(given, 2)
        if len(set(given[first].mesh.tolist()) & set(given[second].mesh.tolist())) > 1
    ]


def problems_of_hybrid_group(
    name: str, group: object, inner: DeviceMesh, outer: DeviceMesh | None
) -> list[str]:
    """Return the problems of a group that should contain the ranks of both data axes.

    Args:
        name: of the argument.
        group: None is valid: the group is then derived from the mesh.
        inner: the shard axis.
        outer: the outer data axis; None without one.
    """
    if group is None:
        return []
    if not isinstance(group, dist.ProcessGroup):
        return [f"{name} expects a torch.distributed.ProcessGroup but got {type(group).__name__}"]
    axes = [inner] if outer is None else [inner, outer]
    size = inner.size() * (outer.size() if outer is not None else 1)
    if group.size() != size:
        return [
            f"{name} has {group.size()} ranks, but the outer and the shard axis together {size}"
        ]
    ranks = dist.get_process_group_ranks(group)
    wanted: set[int] = set()
    for axis in axes:
        wanted.update(dist.get_process_group_ranks(axis.get_group()))
    if not wanted <= set(ranks):
        return [
            f"{name} has the ranks {ranks}, which leave out some of the outer and the"
            f" shard axis: {sorted(wanted)}"
        ]
    return []


def problems_of_all_gather_group(name: str, group: object, inner: DeviceMesh) -> list[str]:
    """Return the problems of a group for all-gathers; its ranks should be those of ``inner``."""
    if group is None:
        return []
    if not isinstance(group, dist.ProcessGroup):
        return [f"{name} expects a torch.distributed.ProcessGroup but got {type(group).__name__}"]
    ranks = dist.get_process_group_ranks(group)
    wanted = dist.get_process_group_ranks(inner.get_group())
    if ranks != wanted:
        return [f"{name} has the ranks {ranks}, but the shard axis {wanted}: they must be the same"]
    return []
