# SPDX-License-Identifier: Apache-2.0
"""The placement of uneven DTensors: torch's Shard(0) that knows the part of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from megatron.fsdp.dtensor.tensor_part import TensorPart
from megatron.fsdp.engine.collectives import all_gather_uneven


class UnevenShard(Shard):
    """A placement that compares equal to ``Shard(0)`` and allows shards of any size.

    They are cut by rows or anywhere.

    A DTensor that torch makes with it of local tensors has this part of the whole tensor, and what
    torch has divided evenly is gathered rightly too.
    """

    part: TensorPart

    def __new__(cls, part: TensorPart) -> UnevenShard:
        """Return a placement for dim 0, which torch's constructor takes."""
        return super().__new__(cls, 0)  # type: ignore[call-arg]  # it is in C++

    def __init__(self, part: TensorPart):
        super().__init__(0)
        self.part = part

    def _to_replicate_tensor(
        self,
        local_tensor: torch.Tensor,
        mesh: DeviceMesh,
        mesh_dim: int,
        current_logical_shape: Sequence[Any],
    ) -> torch.Tensor:
        group = mesh.get_group(mesh_dim)
        parts = all_gather_uneven(local_tensor.reshape(-1), group)
        flat = torch.cat(parts)
        shape = tuple(current_logical_shape)
        # Between two axes that divide dim 0, parts need not be whole rows.
        if flat.numel() != prod(shape):
            return flat
        return flat.view(shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnevenShard:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Shard, (0,)  # pickled tensors know their parts themselves


class ScalarOfOneRank(Replicate):
    """``Replicate()``, to which it is equal, for a sharded scalar: one rank has its element."""

    part: TensorPart

    def __init__(self, part: TensorPart):
        super().__init__()
        self.part = part

    def __new__(cls, part: TensorPart) -> ScalarOfOneRank:
        """Return a placement, as torch's constructor does."""
        return super().__new__(cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> ScalarOfOneRank:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Replicate, ()


def part_in(placements: Sequence[Any] | None) -> TensorPart | None:
    """Return the part that placements contain, or None."""
    if placements is None:
        return None
    for placement in placements:
        if isinstance(placement, UnevenShard | ScalarOfOneRank):
            return placement.part
    return None
