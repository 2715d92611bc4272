# SPDX-License-Identifier: Apache-2.0
"""The part of a tensor that a rank has, for DTensors and checkpoints."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from math import prod
from typing import Any, NamedTuple, SupportsIndex, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megatron.fsdp.engine.collectives import all_gather_uneven
from megatron.fsdp.engine.layout import Chunk, FlatRange

Shape = tuple[int, ...]
AnyDTensor = TypeVar("AnyDTensor", bound=DTensor)

# [Note: parts of tensors] In the engine, a rank owns a flat range of a parameter. Above it, a local
# tensor contains a TensorPart: chunks, in the order of the local elements. A chunk is a block of
# the whole tensor, given by offsets and sizes. Local tensors have any size, as rows or flat ranges,
# and follow one another along the mesh axes that divide dim 0, the last one fastest.


@dataclass(frozen=True, eq=False)
class TensorPart:
    """The part of a whole tensor that a local tensor contains."""

    shape: Shape  # shape of the whole tensor
    chunks: tuple[Chunk, ...]  # parts of the whole tensor, in the order of the local elements
    is_flat: bool = False  # some rank has a flat range, maybe of several chunks, and not a block
    key: Hashable = None  # equal for tensors that all ranks divide alike; None: nobody knows
    replicas: tuple[dist.ProcessGroup, ...] = ()  # ranks outside of the mesh with the same part

    @property
    def numel(self) -> int:
        """Number of elements of the part."""
        return sum(prod(sizes) for _, sizes in self.chunks)

    @classmethod
    def all_or_nothing(
        cls,
        shape: Shape,
        has_all: bool,
        key: Hashable = None,
    ) -> TensorPart:
        """Return the part of a rank that has the whole tensor, or of one that has none of it.

        Args:
            shape: that of the whole tensor.
            has_all: True on a rank with the whole tensor.
            key: the part's ``key``, the same on all ranks.
        """
        chunks: tuple[Chunk, ...] = ()
        if has_all:
            origin = (0,) * len(shape)
            chunks = ((origin, shape),)
        return cls(shape, chunks, key=key)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the elements of this part of ``whole``, flat."""
        elements = [whole.new_empty(0)]
        for offsets, sizes in self.chunks:
            chunk = whole
            for dim, (start, length) in enumerate(zip(offsets, sizes)):
                chunk = chunk.narrow(dim, start, length)
            elements.append(chunk.reshape(-1))
        return torch.cat(elements)

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorPart, (self.shape, self.chunks, self.is_flat, self.key)


class TensorSlice(NamedTuple):
    """The slice of a whole tensor that tensor parallelism assigns to this rank."""

    shape: Shape  # shape of the whole tensor
    dim: int | None = None  # the divided dim; None if every tensor-parallel rank has a copy
    start: int = 0  # the beginning of this rank's range along `dim`

    @classmethod
    def of_parameter(
        cls,
        parameter: nn.Parameter,
        local: Shape,
        axis: DeviceMesh | None,
    ) -> TensorSlice:
        """Return the slice of a parameter that this rank has.

        Args:
            parameter: a DTensor, whose placements are read, or a local tensor, whose attributes of
                Megatron-Core are read.
            local: the shape of the slice.
            axis: the tensor-parallel axis of the mesh; None without tensor parallelism.
        """
        if axis is None:
            return cls(local)
        if isinstance(parameter, DTensor):
            (placement,) = parameter.placements
            if not isinstance(placement, Shard):
                return cls(local)
            _, offsets = compute_local_shape_and_global_offset(
                parameter.shape,
                parameter.device_mesh,
                parameter.placements,
            )
            dim = placement.dim
            return cls(tuple(parameter.shape), dim, offsets[dim])
        partition_dim = get_mcore_tensor_parallel_partition_dim(parameter)
        if partition_dim is None:
            return cls(local)
        size = local[partition_dim]
        shape = replaced(local, partition_dim, size * axis.size())
        start = size * axis.get_local_rank()
        return cls(shape, partition_dim, start)

    def placements(
        self,
        axis: DeviceMesh | None,
        ndim: int,
        data: Placement,
    ) -> list[Placement]:
        """List the placements of a DTensor on the mesh of a model.

        Args:
            axis: the tensor-parallel axis, the first one of the mesh; None if it has none.
            ndim: the number of axes of the mesh.
            data: the placement along all other axes.
        """
        placements = [data] * ndim
        if axis is not None:
            placements[0] = Replicate()
            if self.dim is not None:
                placements[0] = Shard(self.dim)
        return placements

    def chunks(self, flat_range: FlatRange) -> tuple[Chunk, ...]:
        """Return the chunks of the whole tensor that make up a flat range of this slice."""
        # Elements 4 to 8 of the slice [:, 3:6] of shape (4, 6) are the end of row 1, and row 2:
        # ((1, 1), (1, 2)), ((2, 0), (1, 3)), which are ((1, 4), (1, 2)), ((2, 3), (1, 3)) of all.
        dim = self.dim
        if dim is None:
            return tuple(flat_range.chunks())
        chunks = []
        for offsets, sizes in flat_range.chunks():
            start = offsets[dim] + self.start
            chunks.append((replaced(offsets, dim, start), sizes))
        return tuple(chunks)

    def of(self, whole: torch.Tensor, size: int) -> torch.Tensor:
        """Return the view of this slice in ``whole``; ``size`` is its length along ``dim``."""
        if self.dim is None:
            return whole
        return whole.narrow(self.dim, self.start, size)


def get_mcore_tensor_parallel_partition_dim(param: torch.Tensor) -> int | None:
    """Return the dim of a parameter that tensor parallelism divides; None if it does not."""
    # Parameters of Megatron-Core and Transformer Engine have these attributes, and so do the
    # sharded parameters that are made of them.
    dim: int = getattr(param, "partition_dim", -1)
    if dim < 0 or not getattr(param, "tensor_model_parallel", False):
        return None
    return dim


def replaced(
    values: Shape,
    position: int,
    value: int,
) -> Shape:
    """Return a shape or offsets with another value at one position.

    Args:
        values: the shape or offsets, which are not changed.
        position: the dim whose value is replaced.
        value: the new value.
    """
    return (*values[:position], value, *values[position + 1 :])


# ---- torch.distributed.checkpoint


class ChunkedTensor(torch.Tensor):
    """A local tensor from which torch.distributed.checkpoint reads which chunks it contains."""

    # torch asks for chunks by three methods with double underscores before it computes equal ones.
    # Operations ignore this class, as torch documents for subclasses that only carry data.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    part: TensorPart

    def copy_(self, src: torch.Tensor, non_blocking: bool = False) -> ChunkedTensor:
        """Copy a tensor of the local shape, or this part of a view of the whole one."""
        # torch's `set_model_state_dict` with `broadcast_from_rank0` passes an equal part.
        if not self.numel():
            return self  # a part of equal size may have elements
        whole = src._base
        if whole is not None and whole.shape == self.part.shape:
            is_view_of_whole = src.stride() == whole.stride()
            if is_view_of_whole:
                src = self.part.of(whole.detach()).view(self.shape)
        super().copy_(src, non_blocking)
        return self

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        chunks = []
        for offsets, sizes in self.part.chunks:
            chunk = ChunkStorageMetadata(
                offsets=torch.Size(offsets),
                sizes=torch.Size(sizes),
            )
            chunks.append(chunk)
        return chunks

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self)
        size = torch.Size(self.part.shape)
        items = []
        for chunk in ChunkedTensor.__create_chunk_list__(self):
            data = TensorWriteData(
                chunk=chunk,
                properties=properties,
                size=size,
            )
            item = WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=data,
            )
            items.append(item)
        return items

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        wanted: Shape | None = None
        if index.offset is not None:
            wanted = tuple(index.offset)
        local = self.detach()
        start = 0
        for offsets, sizes in self.part.chunks:
            stop = start + prod(sizes)
            if wanted is None or wanted == offsets:
                if local.shape == sizes:
                    return local
                return local.view(-1)[start:stop].view(sizes)
            start = stop
        raise ValueError(f"{index.fqn}: this rank does not have the chunk at {wanted}")

    def __deepcopy__(self, memo: dict[int, Any]) -> ChunkedTensor:
        return as_chunked_tensor(self.detach().clone(), self.part)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return as_chunked_tensor, (self.detach().clone(), self.part)


def as_chunked_tensor(local: torch.Tensor, part: TensorPart) -> ChunkedTensor:
    """Return a tensor over the storage of ``local`` that knows its part of the whole tensor."""
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    if hasattr(local, "__tensor_flatten__"):  # a subclass keeps its class, with the attribute
        tensor = cast(ChunkedTensor, local)
    else:
        tensor = torch.Tensor._make_subclass(ChunkedTensor, local)
    tensor.part = part
    return tensor


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy; classes of quantized state, which cannot be cloned, are copied inside."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.clone()
    names, context = tensor.__tensor_flatten__()
    inside = {}
    for name in names:
        inside[name] = getattr(tensor, name).clone()
    kind: Any = type(tensor)
    return cast(torch.Tensor, kind.__tensor_unflatten__(inside, context))


# `torch.load` then accepts state dicts that were saved with `torch.save`.
torch.serialization.add_safe_globals([as_chunked_tensor, TensorPart])


_prepare_global_plan = HuggingFaceStorageWriter.prepare_global_plan


@wraps(_prepare_global_plan)
def _refuse_lost_blocks(
    writer: HuggingFaceStorageWriter,
    plans: list[SavePlan],
) -> list[SavePlan]:
    # Of a flat range of elements, which is several blocks, the writer would keep the last one.
    lost: set[str] = set()
    for plan in plans:
        found: set[str] = set()
        for item in plan.items:
            name = item.index.fqn
            if name in found:
                lost.add(name)
            found.add(name)
    if lost:
        raise ValueError(
            f"{len(lost)} tensors are divided inside of rows, and {type(writer).__name__} would"
            f" lose most of them: {', '.join(sorted(lost)[:5])}. Shard the model with"
            " granularity='rows', or save whole tensors (full_state_dict=True)"
        )
    return _prepare_global_plan(writer, plans)


# torch passes the writer to no method of tensors, so the writer itself has to refuse.
HuggingFaceStorageWriter.prepare_global_plan = _refuse_lost_blocks  # type: ignore[assignment]


# ---- DTensors over local tensors of any size


def part_of(dtensor: DTensor) -> TensorPart | None:
    """Return the part that a rank has of a DTensor; None, on all ranks alike, if not known."""
    part: TensorPart | None = getattr(dtensor, "part", None)
    if part is not None:
        return part
    local = dtensor._local_tensor
    if isinstance(local, ChunkedTensor):
        return local.part
    shape = tuple(dtensor.shape)
    if shape and not is_replicated(dtensor):
        return None
    return TensorPart.all_or_nothing(shape, has_all=local.numel() > 0)


def wrap_local(
    dtensor_class: type[AnyDTensor],
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
) -> AnyDTensor:
    """Return a DTensor over a local tensor of any size, whose storage it shares.

    Args:
        dtensor_class: the class of the result.
        local: this rank's elements; its shape need not follow from the placements.
        mesh: the mesh of the ranks that have the other elements.
        placements: one for each axis of the mesh.
        shape: that of the whole tensor.
    """
    # `DTensor.from_local` would treat the empty shape of a scalar as no shape.
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    # torch cannot copy or save a wrapper created with a storage offset, which a view may have.
    first = local
    if not hasattr(local, "__tensor_flatten__"):
        first = local.new_empty(0)
    result = dtensor_class(first, spec, requires_grad=False)
    result._local_tensor = local
    return result


def divided_like(
    pattern: DTensor,
    local: torch.Tensor,
    dtensor_class: type[AnyDTensor],
) -> AnyDTensor:
    """Return a DTensor that is divided like another one.

    Args:
        pattern: gives mesh, placements, shape and part.
        local: this rank's elements, whose storage the result shares.
        dtensor_class: the class of the result.
    """
    result = wrap_local(
        dtensor_class,
        local,
        mesh=pattern.device_mesh,
        placements=pattern.placements,
        shape=pattern.shape,
    )
    result.part = getattr(pattern, "part", None)  # type: ignore[attr-defined]
    return result


def own_part(
    pattern: DTensor,
    whole: torch.Tensor,
    dtensor_class: type[AnyDTensor],
) -> AnyDTensor:
    """Copy this rank's part of a whole tensor into a DTensor that is divided like another one.

    Args:
        pattern: gives mesh, placements, shape and part, which must be known.
        whole: a tensor that can be expanded to the shape of ``pattern``, equal on all ranks.
        dtensor_class: the class of the result.
    """
    part = part_of(pattern)
    assert part is not None  # checked by the caller
    elements = part.of(whole.expand(pattern.shape))
    local = elements.view(pattern._local_tensor.shape)
    return divided_like(pattern, local, dtensor_class)


def is_replicated(dtensor: DTensor) -> bool:
    """Return True if every rank of the mesh has the whole tensor."""
    return all(isinstance(placement, Replicate) for placement in dtensor.placements)


def is_sharded_or_replicated(placements: Sequence[Placement]) -> bool:
    """Return True if all placements are ``Shard`` or ``Replicate``."""
    return all(isinstance(placement, Shard | Replicate) for placement in placements)


def axes_of(placements: Sequence[Placement], dim: int) -> list[int]:
    """List the mesh axes that divide ``dim``."""
    axes = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard) and placement.dim == dim:
            axes.append(axis)
    return axes


# ---- whole tensors

_watched_bytes: list[int] | None = None


@contextmanager
def gathered_bytes() -> Iterator[list[int]]:
    """List the bytes of each whole tensor that is gathered inside the context."""
    global _watched_bytes
    before = _watched_bytes
    _watched_bytes = []
    try:
        yield _watched_bytes
    finally:
        _watched_bytes = before


def full_tensor(dtensor: DTensor) -> torch.Tensor:
    """Gather the whole tensor ``[*dtensor.shape]`` on every rank, detached, in new storage.

    Raises:
        ValueError: if the local tensors of all ranks do not make up the shape.
    """
    shape = dtensor.shape
    placements = dtensor.placements
    mesh = dtensor.device_mesh
    local = dtensor._local_tensor.detach()
    if hasattr(local, "__tensor_flatten__"):  # of quantized state, where the rank has any
        local = local.dequantize().to(dtensor.dtype)
    sharded_dims = set()
    for placement in placements:
        if isinstance(placement, Shard):
            sharded_dims.add(placement.dim)
    later_dims = sorted(sharded_dims - {0})
    if len(later_dims) > 1 or not is_sharded_or_replicated(placements):
        # torch gathers, which expects equal parts.
        return wrap_local(DTensor, local, mesh, placements, shape).full_tensor()
    if shape and (shape.numel() == 0 or not sharded_dims):
        return local.clone().view(shape)
    if _watched_bytes is not None:
        _watched_bytes.append(shape.numel() * local.itemsize)
    flat = local.reshape(-1).to(mesh.device_type)  # offloaded state is gathered there
    axes = axes_of(placements, 0)
    if not shape:  # only one rank may have a scalar's element, although its placement is Replicate
        axes = list(range(len(placements)))
    for axis in reversed(axes):
        flat = torch.cat(all_gather_uneven(flat, mesh.get_group(axis)))
    for dim in later_dims:
        any_size = replaced(tuple(shape), dim, -1)
        for axis in reversed(axes_of(placements, dim)):
            shards = all_gather_uneven(flat, mesh.get_group(axis))
            views = [shard.view(any_size) for shard in shards]
            flat = torch.cat(views, dim).reshape(-1)
    if flat.numel() != shape.numel() and shape:
        raise ValueError(
            f"the parts of all ranks have {flat.numel()} elements, but shape {tuple(shape)} has"
            f" {shape.numel()}: the tensor was divided for another mesh, or changed on one rank"
        )
    return flat[: shape.numel()].view(shape).to(local.device)
