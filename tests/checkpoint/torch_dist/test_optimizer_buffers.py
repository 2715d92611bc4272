# SPDX-License-Identifier: Apache-2.0
"""Shards are found in stored buffers where the worked examples of the documentation say."""

from types import SimpleNamespace

import pytest
import torch

from megatron.checkpoint.dcp.chunk import Chunk
from megatron.checkpoint.torch_dist.optimizer_buffers import (
    BufferLocation,
    GatheredBuffer,
    LayoutMismatchError,
    ParameterShard,
    ShardedBuffer,
)


def shards_of(*sizes: int) -> list[ParameterShard]:
    """Return shards in the order of registration, for sizes in the order of the buffer."""
    shards = [ParameterShard(f"parameter {at}", (size,)) for at, size in enumerate(sizes)]
    return shards[::-1]


def sharded(*buckets: list[tuple[int, int]]) -> ShardedBuffer:
    """Make a buffer whose buckets have chunks at these ranges, with elements that are numbered."""
    chunks = {
        f"bucket {number}": [Chunk((start,), (stop - start,)) for start, stop in ranges]
        for number, ranges in enumerate(buckets)
    }
    lengths = {
        key: max(chunk.offsets[0] + chunk.sizes[0] for chunk in chunks[key]) for key in chunks
    }

    def read_chunk(key: str, chunk: Chunk) -> torch.Tensor:
        return torch.arange(lengths[key])[chunk.slices((0,))]

    stored = SimpleNamespace(
        chunks=chunks,
        shape=lambda key: (lengths[key],),
        dtype=lambda key: torch.float32,
        read_chunk=read_chunk,
    )
    return ShardedBuffer(stored, "torch.bfloat16", [{"param": key} for key in chunks])


def gathered(numel: int, bucket_size: int | None) -> GatheredBuffer:
    content = {"numel_unpadded": numel, "param": torch.arange(numel)}
    return GatheredBuffer(lambda: content, "torch.bfloat16", bucket_size)


def offsets(buffer: ShardedBuffer | GatheredBuffer, *sizes: int) -> list[tuple[int, int]]:
    """Return bucket and offset of each shard, in the order of the buffer."""
    locations = buffer.locate(shards_of(*sizes))[::-1]
    return [(location.bucket, location.offset) for location in locations]


def test_shards_begin_at_aligned_positions_of_their_buckets() -> None:
    buffer = sharded([(0, 100), (128, 228)], [(0, 60)])
    assert offsets(buffer, 100, 100, 60) == [(0, 0), (0, 128), (1, 0)]
    assert buffer.read("param", BufferLocation(0, 128), 2, 5).tolist() == [130, 131, 132]


def test_a_bucket_may_end_with_the_gap_before_the_next_parameter() -> None:
    assert offsets(sharded([(0, 100), (100, 128)], [(0, 30)]), 100, 30) == [(0, 0), (1, 0)]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((100, 101, 60), "is not at 128 to 229 of bucket 0, which has 228"),
        ((100, 90, 60), "is not at 128 to 218"),
        ((100, 100), "buckets from 1 on"),
        ((100, 100, 60, 1), "comes after the last bucket"),
    ],
)
def test_shards_that_do_not_fill_the_buckets_are_refused(
    sizes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(LayoutMismatchError, match=message):
        offsets(sharded([(0, 100), (128, 228)], [(0, 60)]), *sizes)


def test_gathered_buckets_follow_one_another_without_padding() -> None:
    buffer = gathered(242, bucket_size=150)
    assert offsets(buffer, 100, 30, 60, 20) == [(0, 0), (0, 128), (0, 158), (0, 222)]
    assert buffer.read("param", BufferLocation(0, 158), 1, 3).tolist() == [159, 160]
    assert offsets(gathered(212 + 64, None), 100, 30, 60, 20)[-1] == (0, 256)
    with pytest.raises(LayoutMismatchError, match="fill 242 of its 250 elements"):
        offsets(gathered(250, bucket_size=150), 100, 30, 60, 20)
