# SPDX-License-Identifier: Apache-2.0
"""Whole tensors from the shards that tensor-parallel ranks have in their optimizer's buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megatron.checkpoint.core.lazy_tensor import LazyTensor, concatenate
from megatron.checkpoint.torch_dist.buffer_placement import StoredShard
from megatron.checkpoint.torch_dist.registered_model import RegisteredModel


def joined_tensor(
    model: RegisteredModel, name: str, slot: str, shards: Sequence[StoredShard]
) -> LazyTensor:
    """Join the shards of one slot of a parameter.

    Args:
        model: the model.
        name: of the parameter.
        slot: such as ``exp_avg``.
        shards: one for each tensor-parallel rank. Of a parameter that is not split they are copies,
            and the first one is used.

    Raises:
        ValueError: if there are fewer shards than the layout says.
    """
    dim = model.layout.split_dim(name)
    num_shards = 1 if dim is None else model.layout.num_splits(name)
    if num_shards > len(shards):
        raise ValueError(f"{name} is divided among {num_shards} ranks, but {len(shards)} have it")
    shape = model.shard(name).shape
    tensors = [_shard_tensor(shard, slot, shape) for shard in shards[:num_shards]]
    if num_shards == 1:
        return tensors[0]
    if dim == 1:
        return _beside_each_other(tensors)
    if model.has_halves(name):
        return _with_halves_joined(tensors)
    return concatenate(tensors)


def _with_halves_joined(shards: Sequence[LazyTensor]) -> LazyTensor:
    """Join shards that consist of rows of a gate, followed by as many rows that it multiplies.

    With gate rows g0 to g3, other rows u0 to u3 and two ranks::

        rank 0: g0 g1 u0 u1     rank 1: g2 g3 u2 u3     whole: g0 g1 g2 g3 u0 u1 u2 u3
    """
    half = shards[0].num_rows // 2
    gates = [shard.rows(0, half) for shard in shards]
    others = [shard.rows(half, 2 * half) for shard in shards]
    return concatenate([*gates, *others])


def _beside_each_other(shards: Sequence[LazyTensor]) -> LazyTensor:
    """Join matrices along dim 1."""
    rows, columns = shards[0].shape

    def read_rows(start: int, stop: int) -> torch.Tensor:
        return torch.cat([shard.read_rows(start, stop) for shard in shards], dim=1)

    return LazyTensor((rows, columns * len(shards)), shards[0].dtype, read_rows)


def _shard_tensor(shard: StoredShard, slot: str, shape: tuple[int, ...]) -> LazyTensor:
    """Return a shard in its shape; the buffer has its elements row by row."""
    row = math.prod(shape[1:])

    def read_rows(start: int, stop: int) -> torch.Tensor:
        elements = shard.buffer.read(slot, shard.location, start * row, stop * row)
        return elements.reshape(stop - start, *shape[1:])

    return LazyTensor(shape, shard.buffer.slots[slot], read_rows)


def first_of_equal(name: str, slot: str, copies: Sequence[LazyTensor]) -> LazyTensor:
    """Return the first of the copies that pipeline stages have of a parameter's slot.

    Reading it reads the others too, and raises a ValueError if they differ.
    """
    first, *others = copies
    if not others:
        return first

    def read_rows(start: int, stop: int) -> torch.Tensor:
        rows = first.read_rows(start, stop)
        for other in others:
            if not torch.equal(rows, other.read_rows(start, stop)):
                raise ValueError(
                    f"the pipeline stages that share {name} have different copies of its {slot}"
                )
        return rows

    return LazyTensor(first.shape, first.dtype, read_rows)
