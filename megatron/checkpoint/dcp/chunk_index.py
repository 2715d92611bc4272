# SPDX-License-Identifier: Apache-2.0
"""Chunks of a stored tensor by their position, to find those that a region of the tensor needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

_Range = tuple[int, int]


@dataclass(frozen=True)
class ChunkOverlap:
    """The elements that a chunk and a region have in common.

    Attributes:
        chunk: of the stored tensor.
        offsets: of these elements, in the tensor.
        sizes: along each dim.
    """

    chunk: ChunkStorageMetadata
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class ChunkIndex:
    """The chunks of a tensor, grouped by their ranges along the first two dims.

    A tensor that stacks layers and experts has thousands of chunks, and a region in one layer and
    expert overlaps a few of them. Groups with other ranges are passed over as a whole.
    """

    def __init__(self, chunks: Iterable[ChunkStorageMetadata]):
        self._groups: dict[_Range, dict[_Range, list[ChunkStorageMetadata]]] = {}
        for chunk in chunks:
            group = self._groups.setdefault(_range(chunk.offsets, chunk.sizes, dim=0), {})
            group.setdefault(_range(chunk.offsets, chunk.sizes, dim=1), []).append(chunk)

    def overlaps(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[ChunkOverlap]:
        """Yield the overlap of each chunk that has some elements of a region.

        Args:
            offsets: first element of the region along each dim.
            sizes: number of elements along each dim.
        """
        for chunk in self._near(offsets, sizes):
            starts: list[int] = []
            lengths: list[int] = []
            for start, size, chunk_start, chunk_size in zip(
                offsets, sizes, chunk.offsets, chunk.sizes
            ):
                first = max(start, chunk_start)
                starts.append(first)
                lengths.append(min(start + size, chunk_start + chunk_size) - first)
            if all(length > 0 for length in lengths):
                yield ChunkOverlap(chunk, tuple(starts), tuple(lengths))

    def _near(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[ChunkStorageMetadata]:
        """Yield all chunks that overlap a region along the first two dims."""
        first, second = _range(offsets, sizes, dim=0), _range(offsets, sizes, dim=1)
        for range_0, group in self._groups.items():
            if _ranges_overlap(range_0, first):
                for range_1, chunks in group.items():
                    if _ranges_overlap(range_1, second):
                        yield from chunks


def _range(offsets: Sequence[int], sizes: Sequence[int], dim: int) -> _Range:
    """Return first element and end along a dim; a dim that the tensor lacks has one element."""
    return (offsets[dim], offsets[dim] + sizes[dim]) if dim < len(offsets) else (0, 1)


def _ranges_overlap(one: _Range, other: _Range) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def chunks_overlap(chunks: Iterable[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return True if any two of the chunks have an element in common.

    Chunks are visited in the order of their offset along dim 0, and compared with those before them
    that have not ended there.

    Args:
        chunks: offsets and sizes of each.
    """
    active: list[tuple[Sequence[int], Sequence[int]]] = []
    for offsets, sizes in sorted(chunks):
        if offsets:
            active = [other for other in active if other[0][0] + other[1][0] > offsets[0]]
        for other_offsets, other_sizes in active:
            if all(
                _ranges_overlap(
                    _range(offsets, sizes, dim), _range(other_offsets, other_sizes, dim)
                )
                for dim in range(len(offsets))
            ):
                return True
        active.append((offsets, sizes))
    return False
