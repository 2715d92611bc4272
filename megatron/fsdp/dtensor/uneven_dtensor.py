# SPDX-License-Identifier: Apache-2.0
"""Functions on DTensors whose local parts are not what torch would choose: parameters, gradients, state dicts.

Functions that may communicate say so; every rank of the DTensor's mesh must call them, in the same
order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any
from zlib import crc32

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from megatron.fsdp.dtensor.chunks import (
    ChunkedTensor,
    ChunkTable,
    as_chunked_tensor,
    check_placements,
    gather_chunks,
    has_chunks,
    local_chunks,
    share,
    sizes_of,
)
from megatron.fsdp.dtensor.sharded_param import RunTensor
from megatron.fsdp.dtensor.uneven import dtensor_over, full_tensor
from megatron.fsdp.engine.collectives import agree
from megatron.fsdp.engine.layout import Box, row_size

# ---- whole tensors
# ---------------------------------------------------------------------------------------------------


def uneven_dtensor_to_full_tensor(dtensor: DTensor) -> torch.Tensor:
    """The whole tensor ``[*dtensor.shape]``, on every rank, detached and with storage of its own.

    A gather along every mesh axis that divides the tensor. Where more than one dim besides dim 0 is
    divided, or a placement is neither ``Shard`` nor ``Replicate``, torch gathers, which expects
    even parts.

    Raises:
        ValueError: where the parts do not make up a tensor of that shape.
    """
    return full_tensor(dtensor)


def redistribute_uneven_dtensor_to_replicated(dtensor: DTensor) -> DTensor:
    """The same tensor, whole on every rank of its mesh; a gather along every axis that divides it."""
    return gather_uneven_dtensor_to_full_tensor(dtensor)


def gather_uneven_dtensor_to_full_tensor(
    dtensor: DTensor, target_device: torch.device | str | None = None
) -> DTensor:
    """Older name of :func:`redistribute_uneven_dtensor_to_replicated`, with a device for the whole tensor."""
    whole = uneven_dtensor_to_full_tensor(dtensor)
    if target_device is not None:
        whole = whole.to(target_device)
    return dtensor_over(
        whole, dtensor.device_mesh, [Replicate()] * dtensor.device_mesh.ndim, whole.shape
    )


# ---- checkpoints
# -----------------------------------------------------------------------------------------------------


def update_uneven_dtensor_chunk_metadata(dtensor: DTensor) -> None:
    """Make a DTensor, in place, one that torch.distributed.checkpoint can save and load; it shares its storage with before.

    Nothing is communicated for sharded parameters, what our state dicts hold, and replicated
    tensors. Otherwise the ranks
    tell each other their sizes: a small all-reduce along every mesh axis. DTensors with placements
    other than ``Shard`` and ``Replicate`` are left to torch.

    Raises:
        NotImplementedError: for runs of elements of a tensor with several dims besides dim 0
            divided.
    """
    _give_places({"": dtensor}, may_differ=False)


def preprocess_state_dict_for_uneven_dtensor(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The same for every DTensor in a nest of mappings, lists and tuples; returns ``state_dict`` itself.

    All DTensors of a mesh share one exchange of sizes.

    Raises:
        ValueError: on every rank of a mesh, where ranks do not have the same DTensors.
    """
    paths = filter_unflattened_state_dict(
        state_dict, visit_condition=lambda item: isinstance(item, DTensor)
    )
    # Ranks may have put their keys in another order.
    _give_places(
        {
            str(path): get_unflattened_state_dict(state_dict, path)
            for path in sorted(paths, key=str)
        },
        may_differ=True,
    )
    return state_dict


def _give_places(named: dict[str, DTensor], may_differ: bool) -> None:
    unknown: dict[DeviceMesh, dict[str, DTensor]] = defaultdict(dict)
    for name, dtensor in named.items():
        place = local_chunks(dtensor)
        if place is not None:
            dtensor._local_tensor = place
        elif has_chunks(dtensor) and dtensor.device_mesh.get_coordinate() is not None:
            unknown[dtensor.device_mesh][name] = dtensor
    for mesh, members in unknown.items():
        if may_differ:
            _check_same_tensors(members, mesh)
        for dtensor, place in zip(members.values(), gather_chunks([*members.values()])):
            dtensor._local_tensor = place


def _check_same_tensors(named: dict[str, DTensor], mesh: DeviceMesh) -> None:
    """Raise on every rank of the mesh where they differ; the exchange of sizes would fail or hang."""
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    shapes = {name: tuple(dtensor.shape) for name, dtensor in named.items()}
    if len(agree([str(crc32(repr(shapes).encode()))], groups)) > 1:
        everybodys = agree([str(item) for item in shapes.items()], groups)
        missing = [item for item in everybodys if item not in map(str, shapes.items())]
        raise ValueError(
            "\n".join(agree([f"some rank does not have {item}" for item in missing], groups))
        )


def gather_and_compute_chunk_metadata(dtensor: DTensor) -> ChunkStorageMetadata:
    """Offsets and sizes of this rank's part in the whole tensor, from the sizes of all parts.

    A small all-reduce along every mesh axis, unless the tensor is replicated or a scalar. Where
    this rank owns nothing, the size in dim 0 is 0; of a scalar that another rank owns, offsets and
    sizes are ``(0,)``.

    Raises:
        NotImplementedError: on every rank, where some rank's part is not one box but a run of
            elements that begins or ends inside a row; :func:`update_uneven_dtensor_chunk_metadata`
            gives those the boxes they need. For placements other than ``Shard`` and ``Replicate``.
    """
    check_placements(dtensor)
    shape, mesh = tuple(dtensor.shape), dtensor.device_mesh
    if not shape or all(isinstance(placement, Replicate) for placement in dtensor.placements):
        held = shape if dtensor._local_tensor.numel() else (0, *shape[1:])
        return ChunkStorageMetadata(torch.Size([0] * len(held)), torch.Size(held))
    places = ChunkTable(shape, dtensor.placements, share(sizes_of(dtensor), mesh))
    boxes = {each: places.boxes(each) for each in product(*map(range, mesh.shape))}
    if max(map(len, boxes.values())) > 1:
        raise NotImplementedError(
            "a rank holds a run of elements, which is more than one chunk:"
            " update_uneven_dtensor_chunk_metadata gives the DTensor a __create_chunk_list__ with"
            " all of them"
        )
    own = tuple(mesh.get_coordinate())
    ((offsets, sizes),) = boxes[own] or [
        ((places.row(own), *[0] * (len(shape) - 1)), (0, *shape[1:]))
    ]
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


# ---- validation
# ------------------------------------------------------------------------------------------------------


def validate_uneven_dtensor(dtensor: DTensor) -> None:
    """Check that the parts of all ranks make up the whole tensor: an all-reduce along every mesh axis.

    Parts that know their place are checked as they say, others as they follow one another.

    Raises:
        ValueError: the same on every rank of the mesh, where chunks overlap, leave a hole, reach
            beyond the shape, are not what the local tensor has, or copies differ.
        NotImplementedError: for placements other than ``Shard`` and ``Replicate``.
    """
    check_placements(dtensor)
    shape, mesh = tuple(dtensor.shape), dtensor.device_mesh
    known = local_chunks(dtensor)
    claims = [] if known is None else known._boxes()
    numbers = [int(known is not None), len(claims)]
    numbers += [number for box in claims for part in box for number in part]
    width = 2 + 2 * len(shape) * max(2 * len(shape) - 1, 1)  # a run is no more boxes than that
    sizes = sizes_of(dtensor)
    table = share([*sizes, *numbers, *[0] * (width - len(numbers))], mesh)
    problems = _problems(shape, dtensor.placements, mesh, table.split([len(sizes), width], -1))
    if problems:
        raise ValueError(
            f"the parts do not make up a tensor of shape {shape}:\n" + "\n".join(problems[:10])
        )


def _problems(
    shape: tuple[int, ...],
    placements: Sequence[Placement],
    mesh: DeviceMesh,
    tables: Sequence[torch.Tensor],
) -> list[str]:
    sizes, claims = tables
    places = None if claims[..., 0].all() else ChunkTable(shape, placements, sizes)
    parts: dict[tuple[int, ...], list[Box]] = {}
    problems = []
    for coordinate in product(*map(range, mesh.shape)):
        claim = claims[coordinate].tolist()
        boxes = _boxes_in(claim, len(shape)) if claim[0] else places.boxes(coordinate)
        numel, said = int(sizes[coordinate][0]), sum(prod(size) for _, size in boxes)
        rank = f"rank {int(mesh.mesh[coordinate])}"
        if numel != said:
            problems.append(f"{rank} holds {numel} elements, but its chunks {said}")
        problems += [
            f"{rank}: {_text(box)} reaches beyond the shape"
            for box in boxes
            if _is_beyond(box, shape)
        ]
        first = tuple(
            0 if isinstance(placement, Replicate) else at
            for at, placement in zip(coordinate, placements)
        )
        if parts.setdefault(first, boxes) != boxes and shape:
            problems.append(
                f"{rank} does not hold the same chunks as rank {int(mesh.mesh[first])}, whose copy"
                " it should be"
            )
        parts[first] = parts[first] or boxes  # one rank may hold a scalar
    everything = [box for boxes in parts.values() for box in boxes]
    problems += (
        [f"{_text(left)} and {_text(right)} overlap" for left, right in _overlaps(everything)]
        if shape
        else []
    )
    covered = sum(prod(size) for _, size in everything)
    if not problems and covered < prod(shape):
        problems.append(f"{prod(shape) - covered} elements are held by no rank")
    return problems


def _boxes_in(claim: list[int], ndim: int) -> list[Box]:
    """Boxes from the numbers that :func:`validate_uneven_dtensor` writes: known, count, then offsets and sizes."""
    parts = [tuple(claim[2 + i * ndim : 2 + (i + 1) * ndim]) for i in range(2 * claim[1])]
    return list(zip(parts[::2], parts[1::2]))


def _is_beyond(box: Box, shape: tuple[int, ...]) -> bool:
    return any(offset < 0 or offset + size > limit for offset, size, limit in zip(*box, shape))


def _overlaps(boxes: list[Box]) -> Iterator[tuple[Box, Box]]:
    """Pairs with elements in common; boxes are of at least one dim."""
    active: list[Box] = []
    for box in sorted(boxes):
        active = [other for other in active if other[0][0] + other[1][0] > box[0][0]]
        for other in active:
            if all(a < b + m and b < a + n for a, n, b, m in zip(*box, *other)):
                yield other, box
        active.append(box)


def _text(box: Box) -> str:
    return f"[{', '.join(f'{offset}:{offset + size}' for offset, size in zip(*box))}]"


# ---- splitting
# -------------------------------------------------------------------------------------------------------


def split_dtensor(
    dtensor: DTensor,
    split_size_or_sections: int | Sequence[int],
    dim: int = 0,
    update_uneven_dtensor_chunk_meta: bool = False,
) -> Iterator[DTensor]:
    """DTensors that lie one behind the other along ``dim``, like ``torch.split``; detached, sharing storage.

    Each has the mesh and placements of ``dtensor``; this rank holds of it what it holds of
    ``dtensor``, maybe nothing. Where the place of the local part is not known, the ranks tell each
    other their sizes now, not when the result is iterated.

    Args:
        dtensor: of at least one dim.
        split_size_or_sections: length of all parts but a shorter last one, or of every part.
        update_uneven_dtensor_chunk_meta: make the parts ready for torch's checkpoint. They always
            are: to split, places must be known, and what is known is kept.

    Raises:
        ValueError: for a dim that there is not, or lengths that do not make up
            ``dtensor.shape[dim]``.
        NotImplementedError: along other dims than 0 where ranks hold runs of elements: they would
            be torn into strips. For placements other than ``Shard`` and ``Replicate``.
    """
    dim, lengths = _lengths(dtensor.shape, split_size_or_sections, dim)
    check_placements(dtensor)
    known = local_chunks(dtensor)
    local = known if known is not None else gather_chunks([dtensor])[0]
    is_flat = local.is_flat if isinstance(local, ChunkedTensor) else not local.run.by_rows
    if is_flat and dim > 0:
        raise NotImplementedError(
            f"split along dim {dim}: ranks hold runs of elements that begin or end inside a row,"
            " and would hold strips of them; split along dim 0, or split the result of"
            " uneven_dtensor_to_full_tensor"
        )
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    return (
        _part(dtensor, local, is_flat, dim, start, length) for start, length in zip(starts, lengths)
    )


def _lengths(shape: torch.Size, wanted: int | Sequence[int], dim: int) -> tuple[int, list[int]]:
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"expects a dim of shape {tuple(shape)} but got {dim}")
    size = shape[dim]
    if isinstance(wanted, int):
        if wanted < 0 or (wanted == 0 and size > 0):
            raise ValueError(f"split_size expects at least 1 but got {wanted}")
        lengths = [min(wanted, size - start) for start in range(0, size, max(wanted, 1))] or [0]
    else:
        lengths = [*wanted]
        if sum(lengths) != size or min(lengths, default=0) < 0:
            raise ValueError(
                f"sections expect lengths that add up to {size}, the size of dim {dim}, but got"
                f" {lengths}"
            )
    return dim % len(shape), lengths


def _part(
    dtensor: DTensor,
    local: RunTensor | ChunkedTensor,
    is_flat: bool,
    dim: int,
    start: int,
    length: int,
) -> DTensor:
    shape = [length if each == dim else size for each, size in enumerate(dtensor.shape)]
    boxes, begin, numel = [], None, 0
    plain, passed = local.detach(), 0
    for offsets, sizes in local._boxes():
        low = max(offsets[dim], start)
        high = max(min(offsets[dim] + sizes[dim], start + length), low)
        if high > low:
            part = _replaced(sizes, dim, high - low)
            boxes.append((_replaced(offsets, dim, low - start), part))
            begin = passed + (low - offsets[dim]) * row_size(sizes) if begin is None else begin
            numel += prod(part)
            if not is_flat:
                plain = plain.narrow(dim, low - offsets[dim], high - low)
        passed += prod(sizes)
    if not boxes:
        plain = plain.new_empty((0, *shape[1:]))
    elif is_flat:  # boxes follow one another in rows, so what lies between two rows is one range
        plain = plain.reshape(-1)[begin : begin + numel]
    return dtensor_over(
        as_chunked_tensor(plain, boxes, shape, is_flat),
        dtensor.device_mesh,
        dtensor.placements,
        shape,
    )


def _replaced(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


# ---- nested state dicts
# ----------------------------------------------------------------------------------------------


def filter_unflattened_state_dict(
    state_dict: Any,
    key_chain: list[Any] = [],
    visit_condition: Callable[[Any], bool] = lambda x: False,
) -> list[list[Any]]:
    """Paths of the items in a nest of mappings, lists and tuples for which ``visit_condition`` holds.

    A path is the list of keys (and positions) that leads to an item, behind ``key_chain``, the path
    of ``state_dict``. Mappings, lists and tuples are looked into, not asked for.
    """
    if isinstance(state_dict, Mapping):
        items = list(state_dict.items())
    elif isinstance(state_dict, list | tuple):
        items = list(enumerate(state_dict))
    else:
        return [[*key_chain]] if visit_condition(state_dict) else []
    return [
        path
        for key, value in items
        for path in filter_unflattened_state_dict(value, [*key_chain, key], visit_condition)
    ]


def get_unflattened_state_dict(state_dict: Any, key_chain: list[Any] = []) -> Any:
    """The item at a path of keys and positions; ``state_dict`` itself at the empty one.

    Raises:
        KeyError: or ``IndexError``, where there is none.
    """
    for key in key_chain:
        state_dict = state_dict[key]
    return state_dict
