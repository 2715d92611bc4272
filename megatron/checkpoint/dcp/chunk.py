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
        """Convert torch's description of a chunk."""
        return cls(tuple(stored.offsets), tuple(stored.sizes))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def span(self, dim: int) -> _Span:
        """Return first element and end along a dim; a dim that the tensor lacks has one element."""
        if dim >= len(self.sizes):
            return 0, 1
        start = self.offsets[dim]
        return start, start + self.sizes[dim]

    def rows(
        self,
        start: int,
        stop: int,
        dim: int = 0,
    ) -> Chunk:
        """Return a part of the chunk along one dim.

        Args:
            start: first element of the part, counted from the start of the chunk.
            stop: end of the part, counted likewise.
            dim: the dim that is cut; the chunk is kept whole along the others.
        """
        offsets = [*self.offsets]
        sizes = [*self.sizes]
        offsets[dim] += start
        sizes[dim] = stop - start
        return Chunk(tuple(offsets), tuple(sizes))

    def overlap(self, other: Chunk) -> Chunk | None:
        """Return the elements that both have; None without any."""
        offsets = []
        sizes = []
        for dim in range(len(self.sizes)):
            start, end = self.span(dim)
            other_start, other_end = other.span(dim)
            offsets.append(max(start, other_start))
            sizes.append(min(end, other_end) - offsets[dim])
            if sizes[dim] <= 0:
                return None
        return Chunk(tuple(offsets), tuple(sizes))

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Return the index of the chunk in a tensor whose first element is at ``origin``."""
        index = []
        for offset, size, first in zip(self.offsets, self.sizes, origin):
            start = offset - first
            index.append(slice(start, start + size))
        return tuple(index)


class ChunkIndex:
    """The chunks of a tensor, grouped by their spans along the first two dims.

    A tensor that stacks layers and experts has thousands of chunks, and what is read lies in one
    layer and expert. Groups with other spans are passed over as a whole.
    """

    def __init__(self, chunks: Iterable[Chunk]):
        self._groups: dict[_Span, dict[_Span, list[Chunk]]] = {}
        for chunk in chunks:
            group = self._groups.setdefault(chunk.span(0), {})
            alike = group.setdefault(chunk.span(1), [])
            alike.append(chunk)

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
    start, end = one
    other_start, other_end = other
    return start < other_end and other_start < end


def chunks_overlap(chunks: Iterable[Chunk]) -> bool:
    """Return True if any two of the chunks have an element in common.

    Chunks are visited in the order of their offset along dim 0, and compared with those before them
    that have not ended there.
    """
    active: list[Chunk] = []
    for chunk in sorted(chunks):
        start, _ = chunk.span(0)
        still_active = [chunk]
        for other in active:
            _, end = other.span(0)
            if end <= start:
                continue
            if chunk.overlap(other) is not None:
                return True
            still_active.append(other)
        active = still_active
    return False
