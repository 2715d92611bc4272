# SPDX-License-Identifier: Apache-2.0
"""Tensors in one flat buffer over a mesh, of which axes have shards, copies or partial sums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from megatron.fsdp.engine.collectives import Transport
from megatron.fsdp.engine.layout import ROWS, plan, row_size
from megatron_fsdp.uneven_dtensor import make_uneven_dtensor

__all__ = ["BufferLayout", "DBuffer"]

OPERATIONS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}


@dataclass(frozen=True)
class BufferLayout:
    """The positions of whole tensors in a buffer, in elements; no rank's part cuts a row.

    Args:
        tensor_shapes: shapes of the tensors.
        tensor_to_offset: position of the first element of each of them.
        size: number of elements of the buffer, padding included.
    """

    tensor_shapes: tuple[torch.Size, ...]
    tensor_to_offset: tuple[int, ...]
    size: int


class DBuffer:
    """Tensors in one flat buffer, which each axis of a mesh shards, replicates or has yet to sum.

    Shards are contiguous and of equal size: the first axis with ``Shard(0)`` divides the buffer,
    the next one these parts. The layout depends on shapes and the size of the mesh alone.

    Args:
        mesh: the mesh.
        placements: ``Shard(0)``, ``Replicate()`` or ``Partial()`` for each of its axes.
        tensor_shapes: shapes of the whole tensors.
        dtype: dtype of all tensors.
        device: device of this rank's part, which is zeros at first. None: the mesh's.

    Raises:
        ValueError: for other placements.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: Iterable[Placement],
        tensor_shapes: Iterable[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ):
        self.mesh = mesh
        self.placements = tuple(placements)
        shapes = tuple(torch.Size(shape) for shape in tensor_shapes)
        known = (Replicate(), Shard(0), Partial("sum"), Partial("avg"))
        if len(self.placements) != mesh.ndim or not set(self.placements) <= set(known):
            raise ValueError(
                f"placements expects Shard(0), Replicate() or Partial() for each of {mesh.ndim}"
                f" axes but got {self.placements}"
            )
        layout = plan(shapes, mesh.size(), ROWS)
        starts = tuple(position.start for position in layout.positions)
        self.layout = BufferLayout(shapes, starts, layout.numel)
        self.offset = 0
        size = layout.numel
        for axis in self._sharded_axes():
            size //= mesh.size(axis)
            self.offset += size * mesh.get_local_rank(axis)
        if device is None:
            device = mesh.device_type
        self.local_buffer = torch.zeros(size, dtype=dtype, device=device)

    @classmethod
    def from_local(
        cls,
        local_buffer: torch.Tensor,
        mesh: DeviceMesh,
        placements: Iterable[Placement],
        tensor_shapes: Iterable[Sequence[int]],
    ) -> DBuffer:
        """Return a buffer over this rank's part, without a copy.

        Args:
            local_buffer: flat tensor of this rank's elements, whose storage the result shares.
            mesh: the mesh.
            placements: a placement for each of its axes.
            tensor_shapes: shapes of the whole tensors.
        """
        buffer = cls(mesh, placements, tensor_shapes, local_buffer.dtype, "meta")
        if local_buffer.shape != buffer.local_buffer.shape:
            raise ValueError(
                f"local_buffer expects {len(buffer.local_buffer)} elements but got"
                f" {tuple(local_buffer.shape)}"
            )
        buffer.local_buffer = local_buffer
        return buffer

    @classmethod
    def distribute_tensors(
        cls,
        tensors: Sequence[torch.Tensor],
        mesh: DeviceMesh,
        placements: Iterable[Placement],
    ) -> DBuffer:
        """Return a buffer with this rank's part of whole tensors.

        Args:
            tensors: the whole tensors, of one dtype, the same on all ranks.
            mesh: the mesh.
            placements: a placement for each of its axes.
        """
        shapes = [tensor.shape for tensor in tensors]
        buffer = cls(mesh, placements, shapes, tensors[0].dtype)
        for index, tensor in enumerate(tensors):
            if tensor.ndim:
                start, stop = buffer._rows_of(index)
                tensor = tensor[start:stop]
            buffer.get_tensor(index).copy_(tensor)
        return buffer

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all tensors."""
        return self.local_buffer.dtype

    def get_tensor(self, index: int) -> torch.Tensor:
        """Return this rank's rows of a tensor, maybe none, as a view of the buffer."""
        shape = self.layout.tensor_shapes[index]
        start, stop = self._rows_of(index)
        if start == stop:
            return self.local_buffer[:0].view(0, *shape[1:])
        begin = self.layout.tensor_to_offset[index] + start * row_size(shape) - self.offset
        flat = self.local_buffer.narrow(0, begin, (stop - start) * row_size(shape))
        if not shape:
            return flat.view(())
        return flat.view(stop - start, *shape[1:])

    def get_dtensor(self, index: int) -> DTensor:
        """Return the whole tensor as a DTensor over :meth:`get_tensor`."""
        shape = tuple(self.layout.tensor_shapes[index])
        return make_uneven_dtensor(self.get_tensor(index), shape, self.mesh, self.placements)

    # ---- changes of the placement on one axis

    def allgather(self, axis: int, out: DBuffer | None = None) -> DBuffer:
        """All-gather the shards of an axis; they must be those that no other axis divides."""
        result = self._placed(axis, Shard(0), Replicate(), out)
        group = self.mesh.get_group(axis)
        Transport().all_gather(
            fulls=[result.local_buffer],
            shards=[self.local_buffer],
            group=group,
            async_op=False,
        )
        return result

    def scatter(
        self,
        axis: int,
        placement: Placement,
        out: DBuffer | None = None,
    ) -> DBuffer:
        """Return this rank's shard of copies.

        Args:
            axis: axis of the mesh that has copies.
            placement: the placement of the result on it.
            out: receives the shard. None: the result shares the memory of the copies.
        """
        result = self._placed(axis, Replicate(), placement, out, allocates=False)
        part = self.local_buffer.chunk(self.mesh.size(axis))[self.mesh.get_local_rank(axis)]
        if out is None:
            return self.from_local(part, self.mesh, result.placements, self.layout.tensor_shapes)
        out.local_buffer.copy_(part)
        return out

    def allreduce(self, axis: int, out: DBuffer | None = None) -> DBuffer:
        """All-reduce the partial sums of an axis into copies."""
        result = self._placed(axis, self.placements[axis], Replicate(), out)
        result.local_buffer.copy_(self.local_buffer)
        dist.all_reduce(result.local_buffer, self._operation(axis), self.mesh.get_group(axis))
        return result

    def reduce_scatter(
        self,
        axis: int,
        placement: Placement,
        out: DBuffer | None = None,
    ) -> DBuffer:
        """Reduce-scatter the partial sums of an axis.

        Args:
            axis: axis of the mesh that has partial sums.
            placement: the placement of the result on it.
            out: receives the result. None: a new buffer.
        """
        result = self._placed(axis, self.placements[axis], placement, out)
        Transport().reduce_scatter(
            full=self.local_buffer,
            shard=result.local_buffer,
            group=self.mesh.get_group(axis),
            operation=self._operation(axis),
            async_op=False,
        )
        return result

    def redistribute(self, placements: Iterable[Placement], out: DBuffer | None = None) -> DBuffer:
        """Return the same tensors with other placements, but for partial ones."""
        wanted = tuple(placements)
        current = self
        for axis in reversed(range(self.mesh.ndim)):
            if isinstance(current.placements[axis], Partial):
                current = current.allreduce(axis)
            elif current.placements[axis] != Replicate():
                current = current.allgather(axis)
        for axis in range(self.mesh.ndim):
            if wanted[axis] != Replicate():
                current = current.scatter(axis, wanted[axis])
        if out is None:
            return current
        if out.placements != wanted:
            raise ValueError(f"out expects the placements {wanted} but has {out.placements}")
        out.local_buffer.copy_(current.local_buffer)
        return out

    # ---- parts

    def _sharded_axes(self) -> list[int]:
        return [
            axis for axis, placement in enumerate(self.placements) if isinstance(placement, Shard)
        ]

    def _rows_of(self, index: int) -> tuple[int, int]:
        """Return the range of rows of a tensor that this rank has; a scalar is one row."""
        shape = self.layout.tensor_shapes[index]
        num_rows = shape[0] if shape else 1
        size = row_size(shape)
        start = self.offset - self.layout.tensor_to_offset[index]  # of this rank's part
        begin = min(max(start // size, 0), num_rows)
        end = min(max((start + len(self.local_buffer)) // size, 0), num_rows)
        return begin, end

    def _operation(self, axis: int) -> dist.ReduceOp.RedOpType:
        placement = self.placements[axis]
        if not isinstance(placement, Partial):
            raise ValueError(f"axis {axis} expects Partial() but has {placement!r}")
        return OPERATIONS[placement.reduce_op]

    def _placed(
        self,
        axis: int,
        before: Placement,
        after: Placement,
        out: DBuffer | None,
        allocates: bool = True,
    ) -> DBuffer:
        """Return the buffer for a result: ``out``, or a new one; check the placements."""
        if self.placements[axis] != before:
            raise ValueError(f"axis {axis} expects {before!r} but has {self.placements[axis]!r}")
        if Shard(0) in (before, after) and any(other > axis for other in self._sharded_axes()):
            raise ValueError(f"axis {axis}: gather the shards of later axes first")
        placements = (*self.placements[:axis], after, *self.placements[axis + 1 :])
        if out is not None:
            if out.placements != placements or out.layout != self.layout:
                raise ValueError(f"out expects the placements {placements} and the same layout")
            return out
        device = self.local_buffer.device if allocates else "meta"
        return DBuffer(self.mesh, placements, self.layout.tensor_shapes, self.dtype, device)
