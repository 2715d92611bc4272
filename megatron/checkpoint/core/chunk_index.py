# SPDX-License-Identifier: Apache-2.0
"""A directory of torch.distributed.checkpoint (DCP), opened by one process: any box of any tensor, any object, nothing else.

DCP's own reader unpickles whatever a file holds, reads whole chunks, and does not notice flipped
bits. This one unpickles data only (:mod:`megatron.checkpoint.core.safe_pickle`), reads the rows that are
asked for, and compares the checksum that ``torch.save`` has put beside every tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
)

_Spans = dict[tuple[int, int], dict[tuple[int, int], list[ChunkStorageMetadata]]]
"""Chunks by what they take up of dim 0, and of dim 1."""


def _span(chunk: ChunkStorageMetadata, dim: int) -> tuple[int, int]:
    return (
        (chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim])
        if dim < len(chunk.offsets)
        else (0, 1)
    )


def chunks_overlap(boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether two of some boxes, by offset and size, have an element in common.

    Swept along dim 0.
    """
    active: list[tuple[Sequence[int], Sequence[int]]] = []
    for offsets, sizes in sorted(boxes):
        active = [
            other for other in active if not offsets or other[0][0] + other[1][0] > offsets[0]
        ]
        for start, extent in active:
            if all(a < b + m and b < a + n for a, n, b, m in zip(offsets, sizes, start, extent)):
                return True
        active.append((offsets, sizes))
    return False
