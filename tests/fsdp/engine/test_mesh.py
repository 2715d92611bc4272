# SPDX-License-Identifier: Apache-2.0
"""Wrong meshes, axes and process groups are refused alike on every rank."""

from tests.support.fsdp.meshes import mesh_of
from tests.support.fsdp.reference import Ranks
from tests.support.fsdp.wrong_calls import WrongCall, check_refusals, on_mesh, with_arguments

HYBRID = {
    "names": ("dp_outer", "dp_shard"),
    "sizes": (2, 2),
    "world_size": 4,
    "dp_shard_dim": "dp_shard",
}


WRONG_CALLS: dict[str, WrongCall] = {
    "mesh is text": with_arguments(
        "device_mesh expects a torch DeviceMesh but got str", device_mesh="cpu"
    ),
    "mesh is a number": with_arguments(
        "device_mesh expects a torch DeviceMesh but got int", device_mesh=2
    ),
    "mesh without names": on_mesh("device_mesh expects named axes", "mesh_dim_names", names=()),
    "axis not given": on_mesh("dp_shard_dim is required", "('dp', 'cp')", names=("dp", "cp")),
    "axis unknown": on_mesh(
        "dp_shard_dim='data'", "('dp', 'cp')", names=("dp", "cp"), dp_shard_dim="data"
    ),
    "axis is a number": on_mesh(
        "dp_shard_dim expects the name of an axis but got 0", names=("dp", "cp"), dp_shard_dim=0
    ),
    "axis is a tuple": on_mesh(
        "dp_shard_dim", "flattened", names=("dp", "cp"), dp_shard_dim=("dp", "cp")
    ),
    "outer axis unknown": on_mesh(
        "dp_outer_dim='outer'", names=("dp", "cp"), dp_shard_dim="dp", dp_outer_dim="outer"
    ),
    "tensor axis unknown": on_mesh(
        "tp_dim='tp'", names=("dp", "cp"), dp_shard_dim="dp", tp_dim="tp"
    ),
    "axes equal": on_mesh(
        "dp_shard_dim='dp'",
        "tp_dim='dp'",
        "must differ",
        names=("dp", "cp"),
        dp_shard_dim="dp",
        tp_dim="dp",
    ),
    "shard axis contains the outer axis": on_mesh(
        "dp_shard_dim='all'",
        "dp_outer_dim='dp_outer'",
        "share ranks",
        names=("dp_outer", "dp_shard"),
        dp_shard_dim=lambda mesh: mesh._flatten("all").mesh_dim_names[0],
        dp_outer_dim="dp_outer",
    ),
    "shard axis of experts contains the outer axis": on_mesh(
        "the axes of expt_device_mesh",
        "dp_shard_dim='dp_shard'",
        "dp_outer_dim='dp_outer'",
        "share ranks",
        names=("dp_outer", "dp_shard"),
        dp_shard_dim="dp_shard",
        dp_outer_dim="dp_outer",
        expt_device_mesh=lambda mesh: mesh_of("dp_shard"),
    ),
    "hybrid group without outer axis": on_mesh(
        "hybrid_fsdp_group needs dp_outer_dim",
        names=("dp", "cp"),
        dp_shard_dim="dp",
        hybrid_fsdp_group=lambda mesh: mesh.get_group("dp"),
    ),
    "hybrid group of wrong size": on_mesh(
        "hybrid_fsdp_group expects a ProcessGroup of the ranks of the outer and the inner axis, 4",
        **HYBRID,
        dp_outer_dim="dp_outer",
        hybrid_fsdp_group=lambda mesh: mesh.get_group("dp_shard"),
    ),
    "hybrid group of other ranks": on_mesh(
        "hybrid_fsdp_group expects a ProcessGroup of the ranks of the outer and the inner axis, 2",
        "but got [",
        names=("dp_outer", "dp_shard", "tp"),
        sizes=(2, 1, 2),
        world_size=4,
        dp_shard_dim="dp_shard",
        dp_outer_dim="dp_outer",
        tp_dim="tp",
        hybrid_fsdp_group=lambda mesh: mesh.get_group("tp"),
    ),
    "hybrid group is a mesh": on_mesh(
        "hybrid_fsdp_group expects a ProcessGroup",
        "but got DeviceMesh",
        **HYBRID,
        dp_outer_dim="dp_outer",
        hybrid_fsdp_group=lambda mesh: mesh,
    ),
    "expert hybrid group without expert mesh": on_mesh(
        "hybrid_fsdp_expt_group needs expt_device_mesh",
        names=("dp",),
        hybrid_fsdp_expt_group=lambda mesh: mesh.get_group("dp"),
    ),
    "gather group of other ranks": on_mesh(
        "fsdp_group_ag expects a ProcessGroup of the ranks of the inner axis, [",
        **HYBRID,
        fsdp_group_ag=lambda mesh: mesh.get_group("dp_outer"),
    ),
    "gather group is text": on_mesh(
        "fsdp_group_ag expects a ProcessGroup",
        "but got str",
        names=("dp",),
        fsdp_group_ag="dp",
    ),
    "expert gather group without expert mesh": on_mesh(
        "expt_fsdp_group_ag needs expt_device_mesh",
        names=("dp",),
        expt_fsdp_group_ag=lambda mesh: mesh.get_group("dp"),
    ),
    "expert mesh is text": with_arguments(
        "expt_device_mesh expects a torch DeviceMesh but got str", expt_device_mesh="ep"
    ),
    "expert mesh without the shard axis": on_mesh(
        "expt_device_mesh needs the inner axis 'dp'",
        "('ep', 'tp')",
        names=("dp",),
        expt_device_mesh=lambda mesh: mesh_of("ep", "tp"),
    ),
}


def test_wrong_calls_are_refused_alike_on_every_rank(ranks: Ranks) -> None:
    check_refusals(ranks, __name__)
