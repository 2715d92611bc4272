# SPDX-License-Identifier: Apache-2.0
"""Device meshes over all ranks of a job."""

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support.fsdp.random_models import ExpertPlaces


def device_type() -> str:
    """Return the device of this job: GPUs where its backend is NCCL."""
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"


def mesh_of(*axes: str, sizes: tuple[int, ...] = ()) -> DeviceMesh:
    """Return a mesh with all ranks on the first axis unless `sizes` says otherwise."""
    sizes = sizes or (dist.get_world_size(),) + (1,) * (len(axes) - 1)
    return init_device_mesh(device_type(), sizes, mesh_dim_names=axes or None)


def shard_mesh() -> DeviceMesh:
    """Return a mesh of one axis. Make one per job: every mesh costs process groups."""
    return init_device_mesh(device_type(), (dist.get_world_size(),), mesh_dim_names=("dp_shard",))


class Meshes:
    """The meshes of one job, each made when a case first asks for it.

    Kinds: "flat"; "default", none given; "gather_group"; "outer2", hybrid with two outer ranks;
    "cp2", the shard axis flattened from two; "ep2", expert parallelism of two; "hybrid1" and
    "hybrid2", two outer ranks, and a mesh of experts with expert parallelism of one or two.
    """

    def __init__(self) -> None:
        self._made: dict[str, dict[str, Any]] = {}

    def arguments(self, kind: str) -> dict[str, Any]:
        """Return the arguments of `fully_shard` for a kind of mesh."""
        if kind not in self._made:
            self._made[kind] = self._make(kind)
        return self._made[kind]

    def _make(self, kind: str) -> dict[str, Any]:
        world_size = dist.get_world_size()
        name, size = kind.rstrip("0123456789"), int(kind.lstrip("abcdefghijklmnopqrstuvwxyz_") or 1)
        if name == "default":
            return {}
        if name == "outer":
            mesh = init_device_mesh(
                device_type(), (size, world_size // size), mesh_dim_names=("dp_outer", "dp_shard")
            )
            return {"device_mesh": mesh, "dp_shard_dim": "dp_shard", "dp_outer_dim": "dp_outer"}
        if name == "cp":
            mesh = init_device_mesh(
                device_type(), (world_size // size, size), mesh_dim_names=("dp_shard", "cp")
            )
            mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
            return {"device_mesh": mesh, "dp_shard_dim": "dp_shard_cp"}
        if name == "hybrid":
            sizes, axes = (2, world_size // 2 // size, size), ("dp_outer", "dp_shard", "ep")
            experts = init_device_mesh(device_type(), sizes, mesh_dim_names=axes)
            return {**self.arguments("outer2"), "expt_device_mesh": experts}
        flat = {"device_mesh": shard_mesh(), "dp_shard_dim": "dp_shard"}
        if name == "gather_group":
            return {**flat, "fsdp_group_ag": dist.new_group(list(range(world_size)))}
        if name == "ep":
            experts = init_device_mesh(
                device_type(), (world_size // size, size), mesh_dim_names=("dp_shard", "ep")
            )
            return {**flat, "expt_device_mesh": experts}
        return flat

    def expert_places(self, kind: str) -> ExpertPlaces:
        experts = self.arguments(kind).get("expt_device_mesh")
        if experts is None:
            return ExpertPlaces()
        return ExpertPlaces(
            experts.get_local_rank("ep"), experts["ep"].size(), experts["ep"].get_group()
        )
