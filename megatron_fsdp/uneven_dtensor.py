# SPDX-License-Identifier: Apache-2.0
"""Functions on uneven DTensors: gathering, checkpoints, validation, splitting, nested state."""

# The docstrings name the functions that may communicate: every rank of the mesh must call them, in
# the same order.

from __future__ import annotations

from ast import literal_eval
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_state_dict as get_torch_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from megatron.fsdp.dtensor.tensor_part import (
    TensorPart,
    as_chunked_tensor,
    axes_of,
    full_tensor,
    is_replicated,
    is_sharded_or_replicated,
    part_of,
    replaced,
)
from megatron.fsdp.dtensor.uneven_dtensor import UnevenDTensor, dtensor_over
from megatron.fsdp.engine.collectives import exchange
from megatron.fsdp.engine.layout import Chunk, FlatRange, row_size
from megatron_fsdp.not_offered import attributes_of

__all__ = [
    "filter_unflattened_state_dict",
    "gather_and_compute_chunk_metadata",
    "gather_uneven_dtensor_to_full_tensor",
    "get_state_dict",
    "get_unflattened_state_dict",
    "make_uneven_dtensor",
    "preprocess_state_dict_for_uneven_dtensor",
    "redistribute_uneven_dtensor_to_replicated",
    "split_dtensor",
    "uneven_dtensor_to_full_tensor",
    "update_uneven_dtensor_chunk_metadata",
    "validate_uneven_dtensor",
]

Coordinate = tuple[int, ...]  # position of a rank in a mesh: one number for each mesh axis

_MADE_ANEW = "make another DTensor over the tensor by make_uneven_dtensor"
__getattr__ = attributes_of(
    __name__,
    {
        "copy_chunk_metadata": "update_uneven_dtensor_chunk_metadata makes any DTensor ready",
        "detach_uneven_dtensor_local_tensor": _MADE_ANEW,
        "rebind_uneven_dtensor_local_tensor": _MADE_ANEW,
    },
)


def make_uneven_dtensor(
    local_tensor: torch.Tensor,
    shape: Sequence[int],
    device_mesh: DeviceMesh,
    placements: Sequence[Placement],
) -> UnevenDTensor:
    """Return a DTensor over a local tensor, without communication.

    Local tensors of successive ranks follow one another, as rows or flat ranges of any size.

    Args:
        local_tensor: this rank's part, whose storage the result shares.
        shape: shape of the whole tensor.
        device_mesh: the mesh.
        placements: a placement for each of its axes.

    Raises:
        ValueError: for another number of placements.
    """
    if len(placements) != device_mesh.ndim:
        raise ValueError(
            f"placements expects one for each of {device_mesh.ndim} mesh axes but got"
            f" {tuple(placements)}"
        )
    return dtensor_over(local_tensor.detach(), device_mesh, tuple(placements), tuple(shape))


# ---- whole tensors


def uneven_dtensor_to_full_tensor(dtensor: DTensor) -> torch.Tensor:
    """Gather the whole tensor on every rank, detached, in new storage."""
    _check_is_dtensor(dtensor)
    return full_tensor(dtensor)


def redistribute_uneven_dtensor_to_replicated(dtensor: DTensor) -> DTensor:
    """Gather the whole tensor as a DTensor that is replicated on its mesh."""
    return gather_uneven_dtensor_to_full_tensor(dtensor)


def gather_uneven_dtensor_to_full_tensor(
    dtensor: DTensor, target_device: torch.device | str | None = None
) -> DTensor:
    """Gather the whole tensor as a replicated DTensor whose local tensors are on another device."""
    _check_is_dtensor(dtensor)
    whole = full_tensor(dtensor)
    mesh = dtensor.device_mesh
    if target_device is not None:
        whole = whole.to(target_device)
    return dtensor_over(whole, mesh, [Replicate()] * mesh.ndim, whole.shape)


# ---- state dicts for torch.distributed.checkpoint


def update_uneven_dtensor_chunk_metadata(dtensor: DTensor) -> None:
    """Prepare a DTensor for torch's checkpoint, in place; a small collective if parts are unknown.

    Placements other than ``Shard`` and ``Replicate`` are left to torch.
    """
    _check_is_dtensor(dtensor)
    _attach_chunks({"": dtensor})


def preprocess_state_dict_for_uneven_dtensor(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Prepare every DTensor in nested mappings, lists and tuples, in place, for torch's checkpoint.

    Returns ``state_dict`` itself. All DTensors of a mesh share one exchange of sizes. They must be
    the same on its ranks, else each of them raises ``ValueError``.
    """
    paths = filter_unflattened_state_dict(
        state_dict, visit_condition=lambda item: isinstance(item, DTensor)
    )
    paths.sort(key=str)  # ranks may have put their keys in another order
    _attach_chunks({str(path): get_unflattened_state_dict(state_dict, path) for path in paths})
    return state_dict


def get_state_dict(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the result of torch's function of this name, ready for torch's checkpoint.

    Args:
        model: the model, as of torch's function.
        optimizers: one or several optimizers over its parameters.
        submodules: as of torch's function.
        options: as of torch's function.
    """
    found = get_torch_state_dict(model, optimizers, submodules=submodules, options=options)
    model_state, optimizer_state = cast(tuple[dict[str, Any], dict[str, Any]], found)
    preprocess_state_dict_for_uneven_dtensor(model_state)
    preprocess_state_dict_for_uneven_dtensor(optimizer_state)
    return model_state, optimizer_state


def gather_and_compute_chunk_metadata(dtensor: DTensor) -> ChunkStorageMetadata:
    """Compute the offsets and sizes of this rank's chunk from the local sizes of all ranks.

    This is a small collective, unless the tensor is replicated or a scalar. A rank without
    elements has size 0 in dim 0. Several chunks on some rank are a ``NotImplementedError``.
    """
    _check_placements(dtensor)
    shape = tuple(dtensor.shape)
    mesh = dtensor.device_mesh
    if not shape or is_replicated(dtensor):
        sizes = shape
        if not dtensor._local_tensor.numel():
            sizes = (0, *shape[1:])
        return ChunkStorageMetadata(torch.Size([0] * len(sizes)), torch.Size(sizes))
    local_shapes = _exchange(tuple(dtensor._local_tensor.shape), mesh)
    found: dict[Coordinate, tuple[TensorPart, tuple[int, ...]]] = {}
    for rank in local_shapes:
        found[rank] = _part_at(rank, shape, dtensor.placements, local_shapes)
        part, _ = found[rank]
        if len(part.chunks) > 1:
            raise NotImplementedError(
                "a rank holds a run of elements, which is more than one chunk:"
                " update_uneven_dtensor_chunk_metadata gives the DTensor a __create_chunk_list__"
                " with all of them"
            )
    part, offsets = found[tuple(mesh.get_coordinate() or ())]
    if part.chunks:
        _, sizes = part.chunks[0]
    else:
        sizes = (0, *shape[1:])
        offsets = (offsets[0], *[0] * (len(shape) - 1))
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _attach_chunks(named: dict[str, DTensor]) -> None:
    """Replace the local tensors of DTensors, named by their paths, by ones with chunks."""
    parts: dict[str, TensorPart] = {}
    unknown: dict[DeviceMesh, dict[str, DTensor]] = defaultdict(dict)
    for name, dtensor in named.items():
        part = part_of(dtensor)
        mesh = dtensor.device_mesh
        if part is not None:
            parts[name] = part
        elif is_sharded_or_replicated(dtensor.placements) and mesh.get_coordinate() is not None:
            unknown[mesh][name] = dtensor
    for mesh, members in unknown.items():
        parts.update(_exchanged_parts(members, mesh))
    for name, part in parts.items():
        dtensor = named[name]
        dtensor._local_tensor = as_chunked_tensor(dtensor._local_tensor.detach(), part)


def _own_part(dtensor: DTensor) -> TensorPart:
    _check_placements(dtensor)
    return part_of(dtensor) or _exchanged_parts({"": dtensor}, dtensor.device_mesh)[""]


def _exchanged_parts(named: dict[str, DTensor], mesh: DeviceMesh) -> dict[str, TensorPart]:
    """Return this rank's parts of DTensors of one mesh, by their names; a collective."""
    shapes = {
        (name, tuple(dtensor.shape)): tuple(dtensor._local_tensor.shape)
        for name, dtensor in named.items()
    }
    of_ranks = _exchange(shapes, mesh)
    keys = set().union(*of_ranks.values())
    missing = keys - keys.intersection(*of_ranks.values())
    if missing:
        raise ValueError("\n".join(f"some rank does not have {key}" for key in sorted(missing)))
    own_coordinate = tuple(mesh.get_coordinate() or ())
    parts = {}
    for name, shape in shapes:
        local_shapes = {rank: of_rank[name, shape] for rank, of_rank in of_ranks.items()}
        parts[name], _ = _part_at(own_coordinate, shape, named[name].placements, local_shapes)
    return parts


def _exchange(value: Any, mesh: DeviceMesh) -> dict[Coordinate, Any]:
    """Return the values, literals of Python, of all ranks of a mesh by their coordinates."""
    entry = (tuple(mesh.get_coordinate() or ()), value)
    values: dict[Coordinate, Any] = {}
    for text in exchange([repr(entry)], mesh.get_all_groups()):
        coordinate, of_rank = literal_eval(text)
        values[coordinate] = of_rank
    return values


def _part_at(
    own_coordinate: Coordinate,
    shape: tuple[int, ...],
    placements: Sequence[Placement],
    local_shapes: Mapping[Coordinate, tuple[int, ...]],
) -> tuple[TensorPart, tuple[int, ...]]:
    """Return the part that a rank has of a DTensor, and the offsets at which it begins."""
    # A local tensor with another number of dims is a flat range.
    ndim = len(shape)
    is_flat = any(len(local) != ndim and prod(local) for local in local_shapes.values())
    divided = [dim for dim in range(1, ndim) if axes_of(placements, dim)]
    if is_flat and divided:
        raise NotImplementedError(
            f"runs of elements with dims {divided} divided too: divide dim 0 only, or pass the"
            " tensors of a sharded model, whose layout is known"
        )
    offsets: list[int] = []
    for dim in range(1 if is_flat else ndim):
        axes = axes_of(placements, dim)
        others = [axis for axis in range(len(own_coordinate)) if axis not in axes]
        # An empty local tensor may have any width, so a width is the largest at its position.
        sizes: dict[Coordinate, int] = defaultdict(int)
        for coordinate, local in local_shapes.items():
            is_on_line = all(coordinate[axis] == own_coordinate[axis] for axis in others)
            if dim > 0 or is_on_line:
                size = 0
                if is_flat:
                    size = prod(local)
                elif dim < len(local):
                    size = local[dim]
                position = tuple(coordinate[axis] for axis in axes)
                sizes[position] = max(sizes[position], size)
        own_position = tuple(own_coordinate[axis] for axis in axes)
        offsets.append(sum(size for position, size in sizes.items() if position < own_position))
    local = local_shapes[own_coordinate]
    chunks: list[Chunk] = []
    if is_flat:
        flat_range = FlatRange(shape, offsets[0], offsets[0] + prod(local), by_rows=False)
        chunks = flat_range.chunks()
        offsets = [offsets[0] // row_size(shape), *[0] * (ndim - 1)]
    elif prod(local):
        chunks = [(tuple(offsets), local)]
    return TensorPart(shape, tuple(chunks), is_flat), tuple(offsets)


def _check_is_dtensor(value: Any) -> None:
    if not isinstance(value, DTensor):
        raise TypeError(f"expects a DTensor but got {type(value).__name__}")


def _check_placements(dtensor: DTensor) -> None:
    _check_is_dtensor(dtensor)
    if not is_sharded_or_replicated(dtensor.placements):
        raise NotImplementedError(
            f"expects the placements Shard and Replicate but got {dtensor.placements}: redistribute"
            " first"
        )


# ---- validation


def validate_uneven_dtensor(dtensor: DTensor) -> None:
    """Check that the local tensors of all ranks make up the whole tensor; a collective.

    Every rank raises the same ``ValueError`` if chunks overlap, leave a gap, reach beyond the shape
    or do not fit the local tensor, or if copies have different chunks.
    """
    part = _own_part(dtensor)
    mesh = dtensor.device_mesh
    shape = tuple(dtensor.shape)
    # Ranks whose coordinates differ only along replicating axes have copies.
    copies = []
    for placement, position in zip(dtensor.placements, mesh.get_coordinate() or ()):
        copies.append(0 if isinstance(placement, Replicate) else position)
    own_entry = (tuple(copies), dist.get_rank(), dtensor._local_tensor.numel(), part.chunks)
    problems = _problems(sorted(_exchange(own_entry, mesh).values()), shape)
    if problems:
        raise ValueError(
            f"the parts do not make up a tensor of shape {shape}:\n" + "\n".join(problems[:10])
        )


def _problems(ranks: list[Any], shape: tuple[int, ...]) -> list[str]:
    """List problems of all ranks, given as key shared with copies, number, local size, chunks."""
    problems: list[str] = []
    first_of: dict[Any, tuple[int, tuple[Chunk, ...]]] = {}
    for copies, rank, numel, chunks in ranks:
        claimed = sum(prod(sizes) for _, sizes in chunks)
        if numel != claimed:
            problems.append(f"rank {rank} holds {numel} elements, but its chunks {claimed}")
        for chunk in chunks:
            if any(at < 0 or at + size > limit for at, size, limit in zip(*chunk, shape)):
                problems.append(f"rank {rank}: {_text(chunk)} reaches beyond the shape")
        first, chunks_of_first = first_of.setdefault(copies, (rank, chunks))
        if chunks_of_first != chunks and shape:
            problems.append(
                f"rank {rank} does not hold the same chunks as rank {first}, whose copy it should"
                " be"
            )
        # Only one rank may have the element of a scalar, which is called Replicate.
        first_of[copies] = (first, chunks_of_first or chunks)
    everything: list[Chunk] = []
    for _, of_copies in first_of.values():
        everything += of_copies
    everything.sort()
    if shape:
        problems += _overlaps(everything)
    missing = prod(shape) - sum(prod(sizes) for _, sizes in everything)
    if not problems and missing > 0:
        problems.append(f"{missing} elements are held by no rank")
    return problems


def _overlaps(chunks: list[Chunk]) -> Iterator[str]:
    """Yield a problem for each two of the sorted chunks that share elements."""
    for index, left in enumerate(chunks):
        for right in islice(chunks, index + 1, None):
            if right[0][0] >= left[0][0] + left[1][0]:
                break  # all others begin in later rows
            if all(
                a < b + size_b and b < a + size_a for a, size_a, b, size_b in zip(*left, *right)
            ):
                yield f"{_text(left)} and {_text(right)} overlap"


def _text(chunk: Chunk) -> str:
    """Format a chunk as an index, such as [0:2, 3:5]."""
    return f"[{', '.join(f'{offset}:{offset + size}' for offset, size in zip(*chunk))}]"


# ---- splitting


def split_dtensor(
    dtensor: DTensor,
    split_size_or_sections: int | Sequence[int],
    dim: int = 0,
    update_uneven_dtensor_chunk_meta: bool = False,
) -> Iterator[DTensor]:
    """Split a DTensor along ``dim`` into DTensors, like ``torch.split``; detached, sharing storage.

    A rank keeps its elements, so it may have none of a part. If ranks do not know their parts, this
    call is a small collective.

    Args:
        dtensor: any DTensor with the placements ``Shard`` and ``Replicate``.
        split_size_or_sections: size of every part but the last, or the size of each.
        dim: dim of the whole tensor.
        update_uneven_dtensor_chunk_meta: makes no difference: the parts are always ready for
            torch's checkpoint.

    Raises:
        NotImplementedError: for flat ranges and dims other than 0.
    """
    _check_is_dtensor(dtensor)
    parts = torch.empty(dtensor.shape, device="meta").split(split_size_or_sections, dim)
    dim %= dtensor.ndim
    lengths = [meta_part.shape[dim] for meta_part in parts]
    part = _own_part(dtensor)
    if part.is_flat and dim > 0:
        raise NotImplementedError(
            f"split along dim {dim}: ranks hold runs of elements that begin or end inside a row,"
            " and would hold strips of them; split along dim 0, or split the result of"
            " uneven_dtensor_to_full_tensor"
        )
    starts = accumulate(lengths, initial=0)
    return (_cut(dtensor, part, dim, start, length) for start, length in zip(starts, lengths))


def _cut(
    dtensor: DTensor,
    part: TensorPart,
    dim: int,
    start: int,
    length: int,
) -> DTensor:
    """Return the range ``[start, start + length)`` of ``dim`` as a DTensor."""
    # A block: of rows 2 to 5 of a matrix, ((2, 0), (4, 3)), the range of rows 3 to 8 has rows 1 to
    # 3 of the local tensor, the chunk ((0, 0), (3, 3)) of the range.
    # A flat range: elements 2 to 10 of shape (4, 3) are ((0, 2), (1, 1)), ((1, 0), (2, 3)) and
    # ((3, 0), (1, 2)). Row 2 comes after 1 element and a row of 3: [4:7] of the local tensor.
    shape = replaced(tuple(dtensor.shape), dim, length)
    local = dtensor._local_tensor.detach()
    cut = local.new_empty((0, *shape[1:]))
    chunks: list[Chunk] = []
    first = position = 0  # of the range, and of the chunk, in the flat local tensor
    for offsets, sizes in part.chunks:
        low = max(offsets[dim], start)
        high = min(offsets[dim] + sizes[dim], start + length)
        if low < high:
            if not chunks:
                first = position + (low - offsets[0]) * row_size(sizes)
            chunks.append((replaced(offsets, dim, low - start), replaced(sizes, dim, high - low)))
            if part.is_flat:
                numel = sum(prod(sizes) for _, sizes in chunks)
                cut = local.reshape(-1)[first : first + numel]
            else:
                cut = local.narrow(dim, low - offsets[dim], high - low)
        position += prod(sizes)
    cut = as_chunked_tensor(cut, TensorPart(shape, tuple(chunks), part.is_flat))
    return dtensor_over(cut, dtensor.device_mesh, dtensor.placements, shape)


# ---- paths in nested state dicts


def filter_unflattened_state_dict(
    state_dict: Any,
    key_chain: list[Any] = [],  # noqa: B006  # the published default; it is not changed here
    visit_condition: Callable[[Any], bool] = lambda x: False,
) -> list[list[Any]]:
    """Return the paths of items of nested state that meet a condition.

    Args:
        state_dict: nested mappings, lists and tuples.
        key_chain: path of ``state_dict`` itself, with which the results begin.
        visit_condition: called with every item that is not nested further.
    """
    if isinstance(state_dict, list | tuple):
        state_dict = dict(enumerate(state_dict))
    if not isinstance(state_dict, Mapping):
        if visit_condition(state_dict):
            return [[*key_chain]]
        return []
    paths: list[list[Any]] = []
    for key, value in state_dict.items():
        paths += filter_unflattened_state_dict(value, [*key_chain, key], visit_condition)
    return paths


def get_unflattened_state_dict(
    state_dict: Any,
    key_chain: list[Any] = [],  # noqa: B006  # the published default; it is not changed here
) -> Any:
    """Return the item at a path of keys and positions; ``state_dict`` itself at the empty path."""
    for key in key_chain:
        state_dict = state_dict[key]
    return state_dict
