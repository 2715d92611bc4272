# SPDX-License-Identifier: Apache-2.0
"""Where the local parts of any DTensor lie in the whole tensor.

[Note: whose place is known] Sharded parameters and what our state dicts hold know their place in
the whole tensor by the layout's arithmetic, and what is replicated needs none. Of other DTensors
(gradients, raw optimizer state, a user's own) a rank sees only its local part; then the ranks of
the mesh tell each other their sizes, once, and every rank works out all
places: parts along dim 0 follow one another in the order of the ranks, and so do ranges of other
dims. A flat local part of a tensor of more dims is a run of elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from megatron.fsdp.dtensor.sharded_param import RunTensor, TensorSlice, with_run
from megatron.fsdp.dtensor.uneven import axes_of
from megatron.fsdp.engine.collectives import all_reduce_over
from megatron.fsdp.engine.layout import Box, Run, row_size


class ChunkedTensor(torch.Tensor):
    """A local part that knows which boxes of the whole tensor it holds, in its own order.

    Operations give plain tensors.

    Unlike a :class:`RunTensor` it says nothing of a layout, and may be one box of any strides.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    boxes: list[Box]
    slice: TensorSlice
    is_flat: bool  # some rank of the mesh holds a run of elements that is no box

    def _boxes(self) -> list[Box]:
        return self.boxes

    # They ask for no more than `_boxes` and the shape of the slice.
    __create_chunk_list__ = RunTensor.__create_chunk_list__
    __create_write_items__ = RunTensor.__create_write_items__

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        local, begin = self.detach(), 0
        for offsets, sizes in self.boxes:
            if index.offset is None or tuple(index.offset) == offsets:
                return (
                    local
                    if local.shape == sizes
                    else local.view(-1)[begin : begin + prod(sizes)].view(sizes)
                )
            begin += prod(sizes)
        raise ValueError(f"{index.fqn}: this rank does not hold the chunk at {tuple(index.offset)}")

    def __deepcopy__(self, memo: dict) -> ChunkedTensor:
        return as_chunked_tensor(self.detach().clone(), self.boxes, self.slice.shape, self.is_flat)

    def __reduce_ex__(self, protocol: int):
        return as_chunked_tensor, (
            self.detach().clone(),
            self.boxes,
            self.slice.shape,
            self.is_flat,
        )


def as_chunked_tensor(
    local: torch.Tensor, boxes: list[Box], shape: Sequence[int], is_flat: bool = False
) -> ChunkedTensor:
    """``local``, sharing storage, as these boxes of a tensor of ``shape``."""
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    tensor = torch.Tensor._make_subclass(ChunkedTensor, local)
    tensor.boxes, tensor.slice, tensor.is_flat = boxes, TensorSlice(tuple(shape)), is_flat
    return tensor


torch.serialization.add_safe_globals(
    [as_chunked_tensor]
)  # so that `torch.load` takes a saved state dict


class ChunkTable:
    """Which boxes every rank of a mesh holds, worked out from the sizes of all local parts.

    Args:
        shape, placements: of the DTensor; of at least one dim.
        table: int64 ``[*mesh, 2 + ndim]``, what :func:`sizes_of` says on every rank.

    Raises:
        NotImplementedError: for runs of elements where several dims besides dim 0 are divided.
    """

    def __init__(self, shape: Sequence[int], placements: Sequence[Placement], table: torch.Tensor):
        self._shape = tuple(shape)
        self._numel, self.is_flat, sizes = table[..., 0], bool(table[..., 1].any()), table[..., 2:]
        axes = [axes_of(placements, dim) for dim in range(len(shape))]
        if not self.is_flat:
            # Ranks with nothing may not say how wide they are.
            widths = [_largest(sizes[..., dim], axes[dim]) for dim in range(1, len(shape))]
            starts = [_starts(size, along) for size, along in zip([sizes[..., 0], *widths], axes)]
            self._sizes, self._starts = sizes, torch.stack(starts, -1)
            return
        sliced = [dim for dim in range(1, len(shape)) if axes[dim]]
        if len(sliced) > 1:
            raise NotImplementedError(
                f"runs of elements with dims {sliced} divided too: divide one of them at most"
            )
        self._dim = sliced[0] if sliced else 0
        self._starts = _starts(self._numel, axes[0])
        slice_numel = (
            self._numel.sum(axes[0], keepdim=True).expand_as(self._numel)
            if axes[0]
            else self._numel
        )
        others = max(prod(shape) // max(shape[self._dim], 1), 1)
        self._width = -(-slice_numel // others)
        self._slice_starts = _starts(self._width, axes[self._dim])

    def boxes(self, coordinate: tuple[int, ...]) -> list[Box]:
        """What the rank at ``coordinate`` of the mesh holds, in row-major order."""
        if not self._numel[coordinate]:
            return []
        if not self.is_flat:
            return [
                (tuple(self._starts[coordinate].tolist()), tuple(self._sizes[coordinate].tolist()))
            ]
        start, shape, slice_ = int(self._starts[coordinate]), self._shape, TensorSlice(self._shape)
        if self._dim:
            width = int(self._width[coordinate])
            shape = tuple(width if dim == self._dim else size for dim, size in enumerate(shape))
            slice_ = TensorSlice(self._shape, self._dim, int(self._slice_starts[coordinate]))
        run = Run(shape, start, start + int(self._numel[coordinate]), by_rows=False)
        return [(slice_.in_whole(offsets), sizes) for offsets, sizes in run.boxes()]

    def row(self, coordinate: tuple[int, ...]) -> int:
        """Where that rank's part begins along dim 0."""
        return (
            int(self._starts[coordinate]) // row_size(self._shape)
            if self.is_flat
            else int(self._starts[coordinate][0])
        )


def _starts(sizes: torch.Tensor, axes: list[int]) -> torch.Tensor:
    """For every rank the sum of ``sizes`` ``[*mesh]`` over the ranks before it along ``axes``."""
    order = [axis for axis in range(sizes.ndim) if axis not in axes] + axes
    moved = sizes.permute(order)
    lines = moved.reshape(*moved.shape[: sizes.ndim - len(axes)], -1)
    starts = (lines.cumsum(-1) - lines).view(moved.shape)
    return starts.permute([order.index(axis) for axis in range(sizes.ndim)])


def _largest(sizes: torch.Tensor, axes: list[int]) -> torch.Tensor:
    """For every rank the largest of ``sizes`` ``[*mesh]`` among ranks that differ from it along other axes only."""
    others = [axis for axis in range(sizes.ndim) if axis not in axes]
    return sizes.amax(others, keepdim=True).expand_as(sizes) if others else sizes


def sizes_of(dtensor: DTensor) -> list[int]:
    """Number of elements of the local part, whether it is a flat run, and its sizes if it has all dims."""
    local, ndim = dtensor._local_tensor, dtensor.ndim
    if local.ndim == ndim:
        return [local.numel(), 0, *local.shape]
    return [local.numel(), int(local.numel() > 0), *[0] * ndim]


def share(numbers: Sequence[int], mesh: DeviceMesh) -> torch.Tensor:
    """The ``numbers`` of every rank, int64 ``[*mesh, len(numbers)]``: an all-reduce along every axis."""
    table = torch.zeros((*mesh.shape, len(numbers)), dtype=torch.int64)
    table[tuple(mesh.get_coordinate())] = torch.tensor(numbers)
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    return all_reduce_over(table.to(mesh.device_type), groups, dist.ReduceOp.SUM).cpu()


def local_chunks(dtensor: DTensor) -> RunTensor | ChunkedTensor | None:
    """The local part with its place, as far as this rank can tell alone; on all ranks or on none."""
    local, shape = dtensor._local_tensor, tuple(dtensor.shape)
    if isinstance(local, RunTensor | ChunkedTensor):
        return local
    member = getattr(dtensor, "_fsdp_sharded", None)
    if member is not None and shape == member.slice.shape:
        return with_run(local.detach(), member.run, member.slice)
    if member is not None:  # a scalar, which the optimizer sees as a vector
        return with_run(
            local.detach(), Run(shape, member.run.start, member.run.stop, by_rows=False)
        )
    if not shape or all(isinstance(placement, Replicate) for placement in dtensor.placements):
        whole = [((0,) * len(shape), shape)] if local.numel() else []
        return as_chunked_tensor(local.detach(), whole, shape)
    return None


def gather_chunks(dtensors: Sequence[DTensor]) -> list[ChunkedTensor]:
    """Local parts of DTensors of one mesh with their places: an all-reduce along every axis for all of them."""
    mesh = dtensors[0].device_mesh
    sizes = [sizes_of(dtensor) for dtensor in dtensors]
    tables = share(sum(sizes, []), mesh).split([len(each) for each in sizes], -1)
    result = []
    for dtensor, table in zip(dtensors, tables):
        places = ChunkTable(dtensor.shape, dtensor.placements, table)
        boxes = places.boxes(tuple(mesh.get_coordinate()))
        result.append(
            as_chunked_tensor(dtensor._local_tensor.detach(), boxes, dtensor.shape, places.is_flat)
        )
    return result


def has_chunks(dtensor: DTensor) -> bool:
    return all(isinstance(placement, Shard | Replicate) for placement in dtensor.placements)


def check_placements(dtensor: DTensor) -> None:
    if not has_chunks(dtensor):
        raise NotImplementedError(
            f"expects the placements Shard and Replicate but got {dtensor.placements}: redistribute"
            " first"
        )
