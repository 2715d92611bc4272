# SPDX-License-Identifier: Apache-2.0
"""Buffers of tensors over a mesh: each change of placements keeps the tensors."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from megatron_fsdp.experimental import DBuffer
from tests.support.fsdp.meshes import mesh_of
from tests.support.fsdp.reference import on_ranks

R, S = Replicate(), Shard(0)


def tensors() -> list[Tensor]:
    shapes = [(7, 3), (2, 5), (7,), (), (0, 4)]
    return [torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in shapes]


def assert_whole(buffer: DBuffer, expected: list[Tensor], factor: float = 1.0) -> None:
    for index, tensor in enumerate(expected):
        torch.testing.assert_close(buffer.get_tensor(index), tensor * factor)


@on_ranks(4)
def test_shards_of_two_axes_are_gathered_and_taken_again() -> None:
    mesh, expected = mesh_of("outer", "inner", sizes=(2, 2)), tensors()
    shards = DBuffer.distribute_tensors(expected, mesh, [S, S])
    assert len(shards.local_buffer) * 4 == shards.layout.size
    assert shards.offset == dist.get_rank() * len(shards.local_buffer)
    rows = [0] * len(expected)
    for index, tensor in enumerate(expected):
        part = shards.get_tensor(index)
        assert part.shape[1:] == tensor.shape[1:] and part.is_contiguous()
        rows[index] = part.numel()
    dist.all_reduce(counts := torch.tensor(rows))
    assert counts.tolist() == [tensor.numel() for tensor in expected]
    half = shards.allgather(1)
    assert half.placements == (S, R) and half.layout == shards.layout
    whole = half.allgather(0)
    assert_whole(whole, expected)
    again = whole.scatter(0, S).scatter(1, S)
    assert torch.equal(again.local_buffer, shards.local_buffer)
    own = whole.scatter(0, S)
    start = own.offset * own.local_buffer.element_size()
    assert own.local_buffer.data_ptr() == whole.local_buffer.data_ptr() + start
    for placements in ([R, S], [S, R], [R, R]):
        moved = shards.redistribute(placements)
        assert moved.placements == tuple(placements)
        assert_whole(moved.redistribute([R, R]), expected)
        out = DBuffer(mesh, placements, shards.layout.tensor_shapes, torch.float32)
        assert shards.redistribute(placements, out=out) is out
        assert torch.equal(out.local_buffer, moved.local_buffer)
    with pytest.raises(ValueError, match="later axes first"):
        shards.allgather(0)


@on_ranks(2)
def test_partial_sums_are_reduced() -> None:
    mesh = mesh_of("dp")
    expected = tensors()
    own = [tensor * (dist.get_rank() + 1) for tensor in expected]
    for kind, factor in ((Partial(), 3.0), (Partial("avg"), 1.5)):
        partial = DBuffer.distribute_tensors(own, mesh, [kind])
        assert_whole(partial.allreduce(0), expected, factor)
        assert_whole(partial, expected, dist.get_rank() + 1)
        assert_whole(partial.reduce_scatter(0, S).allgather(0), expected, factor)
    with pytest.raises(ValueError, match=r"expects Shard\(dim=0\) but has Partial"):
        partial.allgather(0)
    with pytest.raises(ValueError, match=r"expects Partial\(\) but has"):
        partial.allreduce(0).allreduce(0)


@on_ranks(2)
def test_dtensors_and_local_memory_are_shared() -> None:
    mesh, expected = mesh_of("dp"), tensors()
    shards = DBuffer.distribute_tensors(expected, mesh, [S])
    dtensor = shards.get_dtensor(0)
    assert dtensor.shape == expected[0].shape
    torch.testing.assert_close(dtensor.full_tensor(), expected[0])
    other = DBuffer.from_local(shards.local_buffer, mesh, [S], shards.layout.tensor_shapes)
    other.local_buffer.mul_(2)
    assert_whole(shards.allgather(0), expected, 2.0)
    with pytest.raises(ValueError, match="local_buffer expects"):
        DBuffer.from_local(shards.local_buffer[1:], mesh, [S], shards.layout.tensor_shapes)
    with pytest.raises(ValueError, match="for each of 1 axes"):
        DBuffer(mesh, [S, R], [(2, 3)], torch.float32)
