# SPDX-License-Identifier: Apache-2.0
"""Placements of the second generation of the published interface, as strategies of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from megatron.fsdp.config.settings import Strategy
from megatron.fsdp.dtensor.sharded_param import is_linked
from megatron.fsdp.engine.mesh import Mesh, axis_names

# Placements of parameter, gradient and optimizer on one axis, by ZeRO level.
LEVELS: list[tuple[Placement, ...]] = [
    (Replicate(), Replicate(), Replicate()),
    (Replicate(), Replicate(), Shard(0)),
    (Replicate(), Shard(0), Shard(0)),
    (Shard(0), Shard(0), Shard(0)),
]


@dataclass(frozen=True)
class Placements:
    """The state of a module that each axis of a mesh shards or replicates.

    Args:
        dp_axes: names or indices of the axes of the mesh with other data on each rank.
        parameter: a placement for each of these axes, ``Shard(0)`` or ``Replicate()``: of the
            weights between their uses.
        gradient: of gradients after a backward.
        optimizer: of main weights and optimizer state.

    On one axis the four ZeRO levels are possible: nothing sharded, the optimizer, gradients too,
    parameters too. Axes with equal placements act as one. A further axis may replicate everything
    (HSDP), or, where the first one shards everything, shard the optimizer (HFSDP).

    Raises:
        ValueError: for other numbers of placements, and other placements.
    """

    dp_axes: Sequence[str | int]
    parameter: Sequence[Placement]
    gradient: Sequence[Placement]
    optimizer: Sequence[Placement]

    def __post_init__(self) -> None:
        for name in ("dp_axes", "parameter", "gradient", "optimizer"):
            value = getattr(self, name)
            if isinstance(value, (str, int, Placement)) or not isinstance(value, Sequence):
                raise ValueError(f"{name} expects a list, one entry an axis, but got {value!r}")
            if len(value) != len(self.dp_axes) or not value:
                raise ValueError(
                    f"{name} has {len(value)} entries and dp_axes {len(self.dp_axes)}: expects as"
                    " many, and at least one"
                )
        for axis, placed in zip(self.dp_axes, self._by_axis()):
            if placed not in LEVELS:
                raise ValueError(
                    f"axis {axis!r}: parameter, gradient and optimizer expect all Replicate(), or"
                    f" Shard(0) for the optimizer, then for gradients, then for parameters too, but"
                    f" got {', '.join(map(str, placed))}"
                )

    def _by_axis(self) -> list[tuple[Placement, ...]]:
        return list(zip(self.parameter, self.gradient, self.optimizer))

    def axes_by_level(self, mesh: DeviceMesh) -> dict[int, list[str]]:
        """Return the names of the axes of each ZeRO level, in the order of a mesh with names."""
        names = axis_names(mesh)
        level_of: dict[str, int] = {}
        for axis, placed in zip(self.dp_axes, self._by_axis()):
            name = axis
            if isinstance(axis, int) and axis in range(len(names)):
                name = names[axis]
            if not isinstance(name, str) or name not in names or name in level_of:
                raise ValueError(
                    "placements.dp_axes expects different axes of the mesh, by name or by index,"
                    f" but got {list(self.dp_axes)}; the mesh has {names}"
                )
            level_of[name] = LEVELS.index(placed)
        axes: dict[int, list[str]] = {}
        for name in names:
            if name in level_of:
                axes.setdefault(level_of[name], []).append(name)
        return axes


def sharded_axes(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Placements,
    has_experts: bool,
) -> tuple[Mesh, Strategy]:
    """Return the mesh and the strategy of the engine for placements on the axes of a mesh."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh expects a torch DeviceMesh but got {type(mesh).__name__}")
    if not isinstance(placements, Placements):
        raise ValueError(f"placements expects Placements but got {type(placements).__name__}")
    named = mesh
    if not axis_names(mesh):  # the same groups by names
        groups = mesh.get_all_groups()
        named = DeviceMesh.from_group(
            groups if mesh.ndim > 1 else groups[0],
            mesh.device_type,
            mesh=mesh.mesh,
            mesh_dim_names=tuple(f"axis{number}" for number in range(mesh.ndim)),
        )
    by_level = placements.axes_by_level(named)
    levels = sorted(by_level)
    if len(levels) > 2 or (len(levels) == 2 and levels[0] != 0 and levels != [1, 3]):
        raise ValueError(
            f"placements have the levels {levels} on {by_level}: next to an axis that shards, a"
            " second one may replicate everything, or shard the optimizer if the first one shards"
            " everything"
        )
    flat: dict[int, str] = {}
    for level, axes in by_level.items():
        flat[level] = "_".join(axes)
        if len(axes) > 1:
            named[tuple(axes)]._flatten(flat[level])  # torch makes it once
    others = set(axis_names(named)).difference(*by_level.values())
    tensor = None
    parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
    for parameter in parameters:
        if isinstance(parameter, DTensor) and not is_linked(parameter):
            tensor = next(iter(others.intersection(axis_names(parameter.device_mesh))), tensor)
    axes_of_engine = Mesh(
        device_mesh=named,
        inner=flat[levels[-1]],
        outer=flat[levels[0]] if len(levels) == 2 else None,
        tensor=tensor,
        expert_mesh=named if has_experts else None,
    )
    outer = levels[0] if len(levels) == 2 else 0
    return axes_of_engine, Strategy(level=levels[-1], outer=outer, one_unit=True)
