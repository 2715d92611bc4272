# SPDX-License-Identifier: Apache-2.0
"""Local tensors that tell torch.distributed.checkpoint which chunks of a whole tensor they contain.

A *chunk* is a block of an N-d tensor, given by offsets and sizes. torch's checkpoint computes the
chunks of a DTensor from its placements, which is wrong for uneven ones. However, it first asks the
local tensor, by the three methods with double underscores of :class:`ChunkedTensor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, SupportsIndex

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron.fsdp.engine.layout import Chunk, FlatRange


@dataclass(frozen=True)
class TensorSlice:
    """The slice of a whole tensor that tensor parallelism assigns to this rank.

    It is the whole tensor or a range of one dim.

    Args:
        shape: of the whole tensor.
        dim: the divided dim; None if every tensor-parallel rank has a copy.
        start: of this rank's range along ``dim``.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0

    def chunks(self, flat_range: FlatRange) -> tuple[Chunk, ...]:
        """Return the chunks of the whole tensor that make up a flat range of this slice.

        Args:
            flat_range: of the elements of the slice, in row-major order.
        """
        # Example: the whole tensor has shape (4, 6), and this rank the slice [:, 3:6], of shape
        # (4, 3). Elements 4 to 8 of the slice are the end of its row 1 and its row 2:
        #
        #     within the slice    ((1, 1), (1, 2)), ((2, 0), (1, 3))    offsets and sizes
        #     within the whole    ((1, 4), (1, 2)), ((2, 3), (1, 3))
        return tuple((self._in_whole(offsets), sizes) for offsets, sizes in flat_range.chunks())

    def _in_whole(self, offsets: tuple[int, ...]) -> tuple[int, ...]:
        if self.dim is None:
            return offsets
        return (*offsets[: self.dim], offsets[self.dim] + self.start, *offsets[self.dim + 1 :])

    def of(self, whole: torch.Tensor, size: int) -> torch.Tensor:
        """Return the view of this slice in ``whole``; ``size`` is its length along ``dim``."""
        return whole if self.dim is None else whole.narrow(self.dim, self.start, size)


class ChunkedTensor(torch.Tensor):
    """A local tensor with the chunks of the whole tensor that it contains.

    :func:`as_chunked_tensor` creates it. A flat local tensor may contain several chunks, one after
    the other; a local tensor of one chunk may have any strides. Operations on it return plain
    tensors.

    Attributes:
        chunks: offsets and sizes within the whole tensor.
        whole_shape: the shape of the whole tensor.
        is_flat: the local tensor of some rank is a flat range of elements, not a block, and may
            have several chunks.
    """

    # Operations ignore this class, as torch documents for subclasses that only carry data.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    chunks: tuple[Chunk, ...]
    whole_shape: tuple[int, ...]
    is_flat: bool

    def copy_(self, src: torch.Tensor, non_blocking: bool = False) -> ChunkedTensor:
        """Copy values into the tensor: those of its own chunks, out of a part of a whole tensor.

        torch's ``set_model_state_dict`` with ``broadcast_from_rank0`` hands over the part of the
        whole tensor that this rank would have if the ranks had equal parts.

        Args:
            src: a tensor of the local shape, or a view of a tensor of the whole shape.
            non_blocking: as in torch.
        """
        whole = src._base
        is_part = whole is not None and whole.shape == self.whole_shape
        if whole is not None and is_part and src.stride() == whole.stride() and self.numel():
            parts = [whole.detach()[_box(chunk)].reshape(-1) for chunk in self.chunks]
            src = torch.cat(parts).view(self.shape)
        elif not self.numel():
            return self  # a part of equal size may have elements
        super().copy_(src, non_blocking)
        return self

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in self.chunks
        ]

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self)
        size = torch.Size(self.whole_shape)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        wanted = None if index.offset is None else tuple(index.offset)
        local = self.detach()
        begin = 0
        for offsets, sizes in self.chunks:
            end = begin + prod(sizes)
            if wanted is None or wanted == offsets:
                return local if local.shape == sizes else local.view(-1)[begin:end].view(sizes)
            begin = end
        raise ValueError(f"{index.fqn}: this rank does not hold the chunk at {wanted}")

    def __deepcopy__(self, memo: dict[int, Any]) -> ChunkedTensor:
        local = self.detach().clone()
        return as_chunked_tensor(local, self.chunks, self.whole_shape, self.is_flat)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        local = self.detach().clone()
        return as_chunked_tensor, (local, self.chunks, self.whole_shape, self.is_flat)


def as_chunked_tensor(
    local: torch.Tensor, chunks: Sequence[Chunk], whole_shape: Sequence[int], is_flat: bool = False
) -> ChunkedTensor:
    """Return a tensor over the storage of ``local`` that knows its chunks of the whole tensor.

    Args:
        local: the elements of the chunks, in the order of the chunks.
        chunks: offsets and sizes within the whole tensor.
        whole_shape: the shape of the whole tensor.
        is_flat: see :class:`ChunkedTensor`.
    """
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    tensor = torch.Tensor._make_subclass(ChunkedTensor, local)
    tensor.chunks, tensor.whole_shape = tuple(chunks), tuple(whole_shape)
    tensor.is_flat = is_flat
    return tensor


def _box(chunk: Chunk) -> tuple[slice, ...]:
    """Return the index of a chunk within the whole tensor."""
    offsets, sizes = chunk
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes))


# `torch.load` then accepts state dicts that were saved with `torch.save`.
torch.serialization.add_safe_globals([as_chunked_tensor])
