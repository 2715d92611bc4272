# SPDX-License-Identifier: Apache-2.0
"""Chunks of the whole tensor that the local tensors of any DTensor contain.

[Note: known chunks] The layout determines the chunks of parameters and gradients of sharded models
and of the tensors in their state dicts, and a replicated tensor is one chunk. Of other DTensors
(raw optimizer state, a user's own) a rank knows its local tensor only. The ranks of the mesh then
exchange the sizes of their local tensors once, and every rank computes all offsets: local tensors
along dim 0 follow one another in the order of the ranks, and so do ranges of other dims. A local
tensor with fewer dims than the whole tensor is a flat range of elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from megatron.fsdp.dtensor.chunked_tensor import ChunkedTensor, TensorSlice, as_chunked_tensor
from megatron.fsdp.dtensor.gathering import axes_of, is_replicated, is_sharded_or_replicated
from megatron.fsdp.dtensor.sharded_param import is_linked, sharded_param_of
from megatron.fsdp.engine.collectives import all_reduce_over
from megatron.fsdp.engine.layout import Chunk, FlatRange, row_size

Coordinate = tuple[int, ...]
"""Position of a rank in a mesh: one number for each mesh axis."""


class ChunkTable:
    """The chunks that every rank of a mesh has of one DTensor, from the sizes of all local tensors.

    Args:
        shape: of the DTensor; at least one dim.
        placements: of the DTensor.
        sizes: int64 ``[*mesh, 2 + ndim]``: the result of :func:`local_sizes` of every rank.

    Raises:
        NotImplementedError: for flat ranges if several dims besides dim 0 are divided.
    """

    def __init__(self, shape: Sequence[int], placements: Sequence[Placement], sizes: torch.Tensor):
        self._shape = tuple(shape)
        self._num_elements = sizes[..., 0]
        self.is_flat = bool(sizes[..., 1].any())
        axes = [axes_of(placements, dim) for dim in range(len(shape))]
        if self.is_flat:
            self._locate_flat_ranges(axes)
        else:
            self._locate_blocks(sizes[..., 2:], axes)

    def _locate_blocks(self, sizes: torch.Tensor, axes: list[list[int]]) -> None:
        """Find the offsets of local tensors that have all dims.

        Args:
            sizes: ``[*mesh, ndim]`` of the local tensors.
            axes: the mesh axes that divide each dim.
        """
        starts = [_starts(sizes[..., 0], axes[0])]
        for dim in range(1, len(self._shape)):
            # An empty local tensor may have any width, so the width is that of the others along
            # dim 0.
            starts.append(_starts(_largest(sizes[..., dim], axes[dim]), axes[dim]))
        self._sizes, self._starts = sizes, torch.stack(starts, -1)

    def _locate_flat_ranges(self, axes: list[list[int]]) -> None:
        """Find the first elements of local tensors that are flat ranges of a slice of the tensor.

        Args:
            axes: the mesh axes that divide each dim. Dim 0 may be divided into flat ranges, and one
                other dim into slices.
        """
        self._starts = _starts(self._num_elements, axes[0])
        divided = [dim for dim in range(1, len(self._shape)) if axes[dim]]
        self._slice_dim = divided[0] if divided else None
        if len(divided) > 1:
            raise NotImplementedError(
                f"runs of elements with dims {divided} divided too: divide one of them at most"
            )
        if self._slice_dim is None:
            return
        # The width of a slice follows from its number of elements. Example: shape (6, 8) on a mesh
        # (2, 2), dim 0 divided over axis 0, dim 1 over axis 1: each column of the mesh has one
        # slice. The ranks of each slice have 14 and 10 elements:
        #
        #     self._num_elements  [[14, 14], [10, 10]]
        #     elements of a slice [[24, 24], [24, 24]]    summed over axis 0
        #     self._widths        [[4, 4], [4, 4]]        24 elements in 48 / 8 = 6 rows
        #     self._slice_starts  [[0, 4], [0, 4]]        along axis 1
        slice_size = self._num_elements
        if axes[0]:
            slice_size = slice_size.sum(axes[0], keepdim=True).expand_as(self._num_elements)
        others = max(prod(self._shape) // max(self._shape[self._slice_dim], 1), 1)
        self._widths = -(-slice_size // others)
        self._slice_starts = _starts(self._widths, axes[self._slice_dim])

    def chunks(self, coordinate: Coordinate) -> tuple[Chunk, ...]:
        """Return the chunks of the rank at ``coordinate`` of the mesh, in row-major order."""
        if not self._num_elements[coordinate]:
            return ()
        if not self.is_flat:
            offsets, sizes = self._starts[coordinate].tolist(), self._sizes[coordinate].tolist()
            return ((tuple(offsets), tuple(sizes)),)
        slice_shape, slice_ = list(self._shape), TensorSlice(self._shape)
        if self._slice_dim is not None:
            slice_shape[self._slice_dim] = int(self._widths[coordinate])
            start_of_slice = int(self._slice_starts[coordinate])
            slice_ = TensorSlice(self._shape, self._slice_dim, start_of_slice)
        start = int(self._starts[coordinate])
        stop = start + int(self._num_elements[coordinate])
        return slice_.chunks(FlatRange(tuple(slice_shape), start, stop, by_rows=False))

    def row(self, coordinate: Coordinate) -> int:
        """Return the row of the whole tensor in which the local tensor at ``coordinate`` begins."""
        if self.is_flat:
            return int(self._starts[coordinate]) // row_size(self._shape)
        return int(self._starts[coordinate][0])


def _starts(sizes: torch.Tensor, axes: list[int]) -> torch.Tensor:
    """Return for every rank the sum of the sizes of the ranks before it along mesh axes.

    Args:
        sizes: ``[*mesh]``, like the result.
        axes: mesh axes, the last one fastest.
    """
    # Example of a mesh (2, 2) and sizes [[3, 2], [2, 1]]:
    #
    #     axes [1]      [[0, 3], [0, 2]]     along each row of the mesh
    #     axes [0]      [[0, 0], [3, 2]]     along each column
    #     axes [0, 1]   [[0, 3], [5, 7]]     along all ranks, row by row
    if not axes:
        return torch.zeros_like(sizes)
    others = [axis for axis in range(sizes.ndim) if axis not in axes]
    order = others + axes
    ordered = sizes.permute(order)
    lines = ordered.flatten(start_dim=len(others))
    starts = (lines.cumsum(-1) - lines).view(ordered.shape)
    back = [order.index(axis) for axis in range(sizes.ndim)]
    return starts.permute(back)


def _largest(sizes: torch.Tensor, axes: list[int]) -> torch.Tensor:
    """Return for every rank the largest size among the ranks at its position along ``axes``.

    Args:
        sizes: ``[*mesh]``, like the result.
        axes: mesh axes; the ranks that are compared differ along the other axes.
    """
    # Example of a mesh (2, 2), sizes [[3, 2], [0, 2]] and axes [1]: the largest of each column,
    # [[3, 2], [3, 2]].
    others = [axis for axis in range(sizes.ndim) if axis not in axes]
    return sizes.amax(others, keepdim=True).expand_as(sizes) if others else sizes


def local_sizes(dtensor: DTensor) -> list[int]:
    """Describe the local tensor by ``2 + dtensor.ndim`` numbers.

    They are its number of elements, 1 if it is a flat range of a tensor of more dims, and the sizes
    of its dims, or zeros if it does not have all of them.
    """
    local, ndim = dtensor._local_tensor, dtensor.ndim
    if local.ndim == ndim:
        return [local.numel(), 0, *local.shape]
    return [local.numel(), int(local.numel() > 0), *[0] * ndim]


def gather_numbers(numbers: Sequence[int], mesh: DeviceMesh) -> torch.Tensor:
    """Gather the numbers of every rank by an all-reduce along every mesh axis.

    Args:
        numbers: the same number of them on every rank.
        mesh: a mesh that this rank is part of.

    Returns:
        int64 ``[*mesh, len(numbers)]`` on the CPU.
    """
    table = torch.zeros((*mesh.shape, len(numbers)), dtype=torch.int64)
    table[own_coordinate(mesh)] = torch.tensor(numbers)
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    return all_reduce_over(table.to(mesh.device_type), groups, dist.ReduceOp.SUM).cpu()


def own_coordinate(mesh: DeviceMesh) -> Coordinate:
    """Return this rank's position in a mesh that it is part of."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is not part of the mesh"
    return tuple(coordinate)


def local_chunks(dtensor: DTensor) -> ChunkedTensor | None:
    """Return the local tensor with its chunks if this rank knows them without communication.

    Otherwise return None, on all ranks of the mesh alike. See [Note: known chunks].
    """
    local, shape = dtensor._local_tensor, tuple(dtensor.shape)
    if isinstance(local, ChunkedTensor):
        return local
    plain = local.detach()
    if is_linked(dtensor):
        sharded = sharded_param_of(dtensor)
        flat_range = sharded.flat_range
        if shape == sharded.slice.shape:
            return as_chunked_tensor(plain, sharded.chunks, shape, not flat_range.by_rows)
        # A scalar parameter, which is a vector of one element to the optimizer.
        element: list[Chunk] = [((0,), (1,))] if flat_range.numel else []
        return as_chunked_tensor(plain, element, shape, is_flat=True)
    if not shape or is_replicated(dtensor):
        whole: list[Chunk] = [((0,) * len(shape), shape)] if local.numel() else []
        return as_chunked_tensor(plain, whole, shape)
    return None


def gather_chunks(dtensors: Sequence[DTensor]) -> list[ChunkedTensor]:
    """Return the local tensors of DTensors of one mesh with their chunks, computed from all sizes.

    This is one all-reduce along every mesh axis for all of them.
    """
    mesh = dtensors[0].device_mesh
    numbers: list[int] = []
    for dtensor in dtensors:
        numbers += local_sizes(dtensor)
    tables = torch.split(
        gather_numbers(numbers, mesh), [2 + dtensor.ndim for dtensor in dtensors], dim=-1
    )
    result = []
    for dtensor, sizes in zip(dtensors, tables):
        table = ChunkTable(dtensor.shape, dtensor.placements, sizes)
        chunks = table.chunks(own_coordinate(mesh))
        local = dtensor._local_tensor.detach()
        result.append(as_chunked_tensor(local, chunks, dtensor.shape, table.is_flat))
    return result


def has_chunks(dtensor: DTensor) -> bool:
    """Return True if local tensors are chunks of the whole tensor, not partial sums of it."""
    return is_sharded_or_replicated(dtensor.placements)


def check_placements(dtensor: DTensor) -> None:
    """Reject a DTensor whose local tensors are not chunks of the whole tensor.

    Raises:
        NotImplementedError: for placements other than ``Shard`` and ``Replicate``.
    """
    if not has_chunks(dtensor):
        raise NotImplementedError(
            f"expects the placements Shard and Replicate but got {dtensor.placements}: redistribute"
            " first"
        )
