# SPDX-License-Identifier: Apache-2.0
"""A check that the local tensors of a DTensor make up the whole tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch.distributed.tensor import DTensor, Replicate

from megatron.fsdp.dtensor.chunks import (
    ChunkTable,
    Coordinate,
    check_placements,
    gather_numbers,
    local_chunks,
    local_sizes,
)
from megatron.fsdp.engine.layout import Chunk


def validate_uneven_dtensor(dtensor: DTensor) -> None:
    """Check that the local tensors of all ranks make up the whole tensor.

    This is an all-reduce along every mesh axis. Local tensors that know their chunks are checked
    against them. The chunks of other local tensors are computed from the sizes of all ranks.

    Raises:
        ValueError: the same on every rank of the mesh, if chunks overlap, leave a gap, reach beyond
            the shape or do not fit the local tensor, or if copies have different chunks.
        NotImplementedError: for placements other than ``Shard`` and ``Replicate``.
    """
    check_placements(dtensor)
    shape = tuple(dtensor.shape)
    sizes, claim = local_sizes(dtensor), _claim(dtensor)
    numbers = gather_numbers([*sizes, *claim], dtensor.device_mesh)
    tables = torch.split(numbers, [len(sizes), len(claim)], dim=-1)
    problems = _problems(_shards(dtensor, *tables), shape)
    if problems:
        raise ValueError(
            f"the parts do not make up a tensor of shape {shape}:\n" + "\n".join(problems[:10])
        )


# ---- the chunks of all ranks


@dataclass(frozen=True)
class RankChunks:
    """The chunks of one rank of the mesh.

    Args:
        rank: of the default process group.
        numel: elements of its local tensor.
        chunks: offsets and sizes within the whole tensor.
        first_copy: mesh coordinate of the first rank that must have the same chunks.
        first_rank: the rank at that coordinate.
    """

    rank: int
    numel: int
    chunks: tuple[Chunk, ...]
    first_copy: Coordinate
    first_rank: int


def _claim(dtensor: DTensor) -> list[int]:
    """Encode the known chunks of the local tensor as numbers, equally many on every rank.

    The numbers are 1 or 0 (chunks are known or not), the number of chunks, the offsets and sizes of
    each chunk, and zeros after them.
    """
    # Example: chunks ((0, 2), (1, 4)) and ((1, 0), (3, 6)) of a matrix give
    # 1, 2, 0, 2, 1, 4, 1, 0, 3, 6 and then 2 + 2 * 2 * 3 - 10 = 4 zeros: a flat range of a matrix
    # has 3 chunks at most.
    known = local_chunks(dtensor)
    chunks = () if known is None else known.chunks
    numbers = [int(known is not None), len(chunks)]
    for offsets, sizes in chunks:
        numbers += [*offsets, *sizes]
    most_chunks = max(2 * dtensor.ndim - 1, 1)
    length = 2 + 2 * dtensor.ndim * most_chunks
    return numbers + [0] * (length - len(numbers))


def _chunks_of_claim(claim: Sequence[int], ndim: int) -> tuple[Chunk, ...]:
    """Decode the result of :func:`_claim`."""
    chunks = []
    for number in range(claim[1]):
        begin = 2 + 2 * number * ndim
        middle, end = begin + ndim, begin + 2 * ndim
        chunks.append((tuple(claim[begin:middle]), tuple(claim[middle:end])))
    return tuple(chunks)


def _shards(dtensor: DTensor, sizes: torch.Tensor, claims: torch.Tensor) -> Iterator[RankChunks]:
    """Yield the chunks of every rank of the mesh.

    Args:
        dtensor: on any rank.
        sizes: ``[*mesh, 2 + ndim]``, of :func:`local_sizes`.
        claims: ``[*mesh, n]``, of :func:`_claim`.
    """
    mesh, placements = dtensor.device_mesh, dtensor.placements
    table = None
    if not claims[..., 0].all():
        table = ChunkTable(dtensor.shape, placements, sizes)
    for coordinate in product(*map(range, mesh.shape)):
        if table is None or claims[coordinate][0]:
            chunks = _chunks_of_claim(claims[coordinate].tolist(), dtensor.ndim)
        else:
            chunks = table.chunks(coordinate)
        first = list(coordinate)
        for axis, placement in enumerate(placements):
            if isinstance(placement, Replicate):
                first[axis] = 0
        yield RankChunks(
            rank=int(mesh.mesh[coordinate]),
            numel=int(sizes[coordinate][0]),
            chunks=chunks,
            first_copy=tuple(first),
            first_rank=int(mesh.mesh[tuple(first)]),
        )


# ---- problems


def _problems(shards: Iterator[RankChunks], shape: tuple[int, ...]) -> list[str]:
    """List the problems of the chunks of all ranks; a scalar has no chunks to compare."""
    problems: list[str] = []
    chunks_of: dict[Coordinate, tuple[Chunk, ...]] = {}
    for shard in shards:
        problems += _problems_of_rank(shard, shape)
        chunks_of_copy = chunks_of.setdefault(shard.first_copy, shard.chunks)
        if chunks_of_copy != shard.chunks and shape:
            problems.append(
                f"rank {shard.rank} does not hold the same chunks as rank {shard.first_rank}, whose"
                " copy it should be"
            )
        # The placements of a scalar are Replicate, but only one rank may have its element.
        chunks_of[shard.first_copy] = chunks_of_copy or shard.chunks
    everything: list[Chunk] = []
    for chunks in chunks_of.values():
        everything += chunks
    if shape:
        problems += [f"{_text(a)} and {_text(b)} overlap" for a, b in _overlaps(everything)]
    missing = prod(shape) - sum(prod(sizes) for _, sizes in everything)
    if not problems and missing > 0:
        problems.append(f"{missing} elements are held by no rank")
    return problems


def _problems_of_rank(shard: RankChunks, shape: tuple[int, ...]) -> list[str]:
    problems = []
    claimed = sum(prod(sizes) for _, sizes in shard.chunks)
    if shard.numel != claimed:
        problems.append(f"rank {shard.rank} holds {shard.numel} elements, but its chunks {claimed}")
    for chunk in shard.chunks:
        if _is_beyond(chunk, shape):
            problems.append(f"rank {shard.rank}: {_text(chunk)} reaches beyond the shape")
    return problems


def _is_beyond(chunk: Chunk, shape: tuple[int, ...]) -> bool:
    return any(offset < 0 or offset + size > limit for offset, size, limit in zip(*chunk, shape))


def _overlaps(chunks: list[Chunk]) -> Iterator[tuple[Chunk, Chunk]]:
    """Yield the pairs of chunks, of at least one dim, that have elements in common."""
    # Chunks are visited in the order of their first rows. Chunks that end before the first row of
    # the visited one overlap neither it nor any later one.
    active: list[Chunk] = []
    for chunk in sorted(chunks):
        first_row = chunk[0][0]
        active = [other for other in active if other[0][0] + other[1][0] > first_row]
        for other in active:
            if _overlap(other, chunk):
                yield other, chunk
        active.append(chunk)


def _overlap(left: Chunk, right: Chunk) -> bool:
    """Return True if the ranges of two chunks overlap in every dim."""
    return all(
        left_start < right_start + right_size and right_start < left_start + left_size
        for left_start, left_size, right_start, right_size in zip(*left, *right)
    )


def _text(chunk: Chunk) -> str:
    """Format a chunk as an index, such as [0:2, 3:5]."""
    ranges = [f"{offset}:{offset + size}" for offset, size in zip(*chunk)]
    return f"[{', '.join(ranges)}]"
