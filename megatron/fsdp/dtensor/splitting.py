# SPDX-License-Identifier: Apache-2.0
"""``torch.split`` for uneven DTensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod

import torch
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.chunked_tensor import ChunkedTensor, as_chunked_tensor
from megatron.fsdp.dtensor.chunks import check_placements, gather_chunks, local_chunks
from megatron.fsdp.dtensor.uneven import dtensor_over
from megatron.fsdp.engine.layout import Chunk, row_size


def split_dtensor(
    dtensor: DTensor,
    split_size_or_sections: int | Sequence[int],
    dim: int = 0,
    update_uneven_dtensor_chunk_meta: bool = False,
) -> Iterator[DTensor]:
    """Split a DTensor along ``dim`` into DTensors, like ``torch.split``; detached, sharing storage.

    Each part has the mesh and placements of ``dtensor``. A rank keeps the elements that it has of
    ``dtensor``, so it may have none of a part. If the chunks of the local tensor are not known, the
    ranks exchange their sizes in this call, by an all-reduce along every mesh axis.

    Args:
        dtensor: a DTensor of at least one dim.
        split_size_or_sections: the length of all parts, of which the last may be shorter, or a list
            of the lengths of the parts.
        dim: the dim to split; may be negative.
        update_uneven_dtensor_chunk_meta: make the parts ready for torch's checkpoint. It has no
            effect, because they always are: splitting computes their chunks.

    Raises:
        ValueError: for a dim that the tensor does not have, or lengths that do not add up to
            ``dtensor.shape[dim]``.
        NotImplementedError: for a dim other than 0 if ranks have flat ranges, which would be cut
            into many strips, and for placements other than ``Shard`` and ``Replicate``.
    """
    dim, lengths = _lengths(dtensor.shape, split_size_or_sections, dim)
    check_placements(dtensor)
    local = local_chunks(dtensor)
    if local is None:
        (local,) = gather_chunks([dtensor])
    if local.is_flat and dim > 0:
        raise NotImplementedError(
            f"split along dim {dim}: ranks hold runs of elements that begin or end inside a row,"
            " and would hold strips of them; split along dim 0, or split the result of"
            " uneven_dtensor_to_full_tensor"
        )
    starts = accumulate(lengths, initial=0)
    return (_part(dtensor, local, dim, start, length) for start, length in zip(starts, lengths))


def _lengths(
    shape: torch.Size, split_size_or_sections: int | Sequence[int], dim: int
) -> tuple[int, list[int]]:
    """Return the dim as a non-negative number, and the length of every part along it."""
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"expects a dim of shape {tuple(shape)} but got {dim}")
    size = shape[dim]
    if isinstance(split_size_or_sections, int):
        length = split_size_or_sections
        if length < 0 or (length == 0 and size > 0):
            raise ValueError(f"split_size expects at least 1 but got {length}")
        starts = range(0, size, max(length, 1))
        lengths = [min(length, size - start) for start in starts] or [0]
    else:
        lengths = [*split_size_or_sections]
        if sum(lengths) != size or min(lengths, default=0) < 0:
            raise ValueError(
                f"sections expect lengths that add up to {size}, the size of dim {dim}, but got"
                f" {lengths}"
            )
    return dim % len(shape), lengths


def _part(dtensor: DTensor, local: ChunkedTensor, dim: int, start: int, length: int) -> DTensor:
    """Return the range ``[start, start + length)`` of ``dim`` as a DTensor."""
    shape = _replaced(tuple(dtensor.shape), dim, length)
    cut = _cut_of_flat_range if local.is_flat else _cut_of_block
    plain, chunks = cut(local, dim, start, start + length)
    if not chunks:
        plain = local.detach().new_empty((0, *shape[1:]))
    part = as_chunked_tensor(plain, chunks, shape, local.is_flat)
    return dtensor_over(part, dtensor.device_mesh, dtensor.placements, shape)


def _cut_of_block(
    local: ChunkedTensor, dim: int, start: int, stop: int
) -> tuple[torch.Tensor, list[Chunk]]:
    """Cut ``[start, stop)`` of the whole tensor's ``dim`` out of a local tensor of one chunk."""
    # Example: the local tensor is rows 2 to 5 of a matrix, ((2, 0), (4, 3)), and the part is rows
    # 3 to 8. They have rows 3 to 5 in common: rows 1 to 3 of the local tensor, and the chunk
    # ((0, 0), (3, 3)) of the part.
    plain, chunks = local.detach(), []
    for offsets, sizes in local.chunks:
        low, high = max(offsets[dim], start), min(offsets[dim] + sizes[dim], stop)
        if low < high:
            plain = plain.narrow(dim, low - offsets[dim], high - low)
            chunks.append((_replaced(offsets, dim, low - start), _replaced(sizes, dim, high - low)))
    return plain, chunks


def _cut_of_flat_range(
    local: ChunkedTensor, dim: int, start: int, stop: int
) -> tuple[torch.Tensor, list[Chunk]]:
    """Cut the rows ``[start, stop)`` of the whole tensor out of a flat range; ``dim`` is 0.

    The chunks of a flat range follow one another in the order of rows, so the cut is one contiguous
    range of the local tensor.
    """
    # Example: elements 2 to 10 of a matrix of shape (4, 3) are the chunks ((0, 2), (1, 1)),
    # ((1, 0), (2, 3)) and ((3, 0), (1, 2)). Row 2 is the second row of the second chunk. The 1
    # element of the first chunk and a row of 3 come before it, so it is [4:7] of the local tensor.
    chunks: list[Chunk] = []
    begin = end = 0  # of the cut, within the local tensor
    chunk_begin = 0
    for offsets, sizes in local.chunks:
        low, high = max(offsets[0], start), min(offsets[0] + sizes[0], stop)
        if low < high:
            if not chunks:
                begin = end = chunk_begin + (low - offsets[0]) * row_size(sizes)
            part = (high - low, *sizes[1:])
            chunks.append(((low - start, *offsets[1:]), part))
            end += prod(part)
        chunk_begin += prod(sizes)
    return local.detach().reshape(-1)[begin:end], chunks


def _replaced(values: tuple[int, ...], position: int, value: int) -> tuple[int, ...]:
    return (*values[:position], value, *values[position + 1 :])
