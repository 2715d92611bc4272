# SPDX-License-Identifier: Apache-2.0
"""Chunks, the parts of a tensor that ranks have and files store, and an index to find them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

_Span = tuple[int, int]


class Chunk(NamedTuple):
    """A part of a tensor: the elements ``[offset, offset + size)`` along every dim.

    Attributes:
        offsets: first element along each dim.
        sizes: number of elements along each dim.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, stored: ChunkStorageMetadata) -> Chunk:
        """Return what torch's own type says."""
        return cls(tuple(stored.offsets), tuple(stored.sizes))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def span(self, dim: int) -> _Span:
        """Return first element and end along a dim; a dim that the tensor lacks has one element."""
        if dim >= len(self.sizes):
            return 0, 1
        return self.offsets[dim], self.offsets[dim] + self.sizes[dim]

    def rows(self, start: int, stop: int, dim: int = 0) -> Chunk:
        """Return the part ``[start, stop)`` along a dim, counted from the start of the chunk."""
        offsets, sizes = [*self.offsets], [*self.sizes]
        offsets[dim] += start
        sizes[dim] = stop - start
        return Chunk(tuple(offsets), tuple(sizes))

    def overlap(self, other: Chunk) -> Chunk | None:
        """Return the elements that both have; None if there are none."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = [min(self.span(dim)[1], other.span(dim)[1]) for dim in range(len(offsets))]
        sizes = tuple(end - offset for offset, end in zip(offsets, ends))
        return Chunk(offsets, sizes) if all(size > 0 for size in sizes) else None

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Return the index of the chunk in a tensor whose first element is at ``origin``."""
        starts = [offset - first for offset, first in zip(self.offsets, origin)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes))


class ChunkIndex:
    """The chunks of a tensor, grouped by their spans along the first two dims.

    A tensor that stacks layers and experts has thousands of chunks, and what is read lies in one
    layer and expert. Groups with other spans are passed over as a whole.
    """

    def __init__(self, chunks: Iterable[Chunk]):
        self._groups: dict[_Span, dict[_Span, list[Chunk]]] = {}
        for chunk in chunks:
            group = self._groups.setdefault(chunk.span(0), {})
            group.setdefault(chunk.span(1), []).append(chunk)

    def overlaps(self, wanted: Chunk) -> Iterator[tuple[Chunk, Chunk]]:
        """Yield each chunk that has some of the wanted elements, and which of them it has."""
        for span, group in self._groups.items():
            if not _spans_overlap(span, wanted.span(0)):
                continue
            for span_1, chunks in group.items():
                if not _spans_overlap(span_1, wanted.span(1)):
                    continue
                for chunk in chunks:
                    overlap = chunk.overlap(wanted)
                    if overlap is not None:
                        yield chunk, overlap


def _spans_overlap(one: _Span, other: _Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def chunks_overlap(chunks: Iterable[Chunk]) -> bool:
    """Return True if any two of the chunks have an element in common.

    Chunks are visited in the order of their offset along dim 0, and compared with those before them
    that have not ended there.
    """
    active: list[Chunk] = []
    for chunk in sorted(chunks):
        active = [other for other in active if other.span(0)[1] > chunk.span(0)[0]]
        if any(chunk.overlap(other) for other in active):
            return True
        active.append(chunk)
    return False
