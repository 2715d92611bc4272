# SPDX-License-Identifier: Apache-2.0
"""The published functions on uneven DTensors.

They accept parameters, gradients, optimizer state and whole state dicts of sharded models, and a
user's own DTensors. Functions that may communicate say so; every rank of the DTensor's mesh must
call them, in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import product
from typing import Any, cast
from zlib import crc32

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_state_dict as get_torch_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from megatron.fsdp.dtensor.chunks import (
    ChunkTable,
    check_placements,
    gather_chunks,
    gather_numbers,
    has_chunks,
    local_chunks,
    local_sizes,
    own_coordinate,
)
from megatron.fsdp.dtensor.gathering import full_tensor, is_replicated
from megatron.fsdp.dtensor.nested_state import (
    filter_unflattened_state_dict,
    get_unflattened_state_dict,
)
from megatron.fsdp.dtensor.splitting import split_dtensor
from megatron.fsdp.dtensor.uneven import dtensor_over
from megatron.fsdp.dtensor.validation import validate_uneven_dtensor
from megatron.fsdp.engine.collectives import agree

__all__ = [
    "filter_unflattened_state_dict",
    "gather_and_compute_chunk_metadata",
    "gather_uneven_dtensor_to_full_tensor",
    "get_state_dict",
    "get_unflattened_state_dict",
    "preprocess_state_dict_for_uneven_dtensor",
    "redistribute_uneven_dtensor_to_replicated",
    "split_dtensor",
    "uneven_dtensor_to_full_tensor",
    "update_uneven_dtensor_chunk_metadata",
    "validate_uneven_dtensor",
]

# ---- whole tensors


def uneven_dtensor_to_full_tensor(dtensor: DTensor) -> torch.Tensor:
    """Gather the whole tensor ``[*dtensor.shape]`` on every rank, detached, in new storage.

    This is an all-gather along every mesh axis that divides the tensor. If more than one dim
    besides dim 0 is divided, or a placement is neither ``Shard`` nor ``Replicate``, torch gathers,
    which expects equal parts.

    Raises:
        ValueError: if the local tensors do not make up a tensor of that shape.
    """
    return full_tensor(dtensor)


def redistribute_uneven_dtensor_to_replicated(dtensor: DTensor) -> DTensor:
    """Gather the whole tensor as a DTensor that is replicated on its mesh.

    This is an all-gather along every mesh axis that divides the tensor.
    """
    return gather_uneven_dtensor_to_full_tensor(dtensor)


def gather_uneven_dtensor_to_full_tensor(
    dtensor: DTensor, target_device: torch.device | str | None = None
) -> DTensor:
    """Gather the whole tensor as a replicated DTensor whose local tensors are on ``target_device``.

    This is an older form of :func:`redistribute_uneven_dtensor_to_replicated`.
    """
    whole = uneven_dtensor_to_full_tensor(dtensor)
    if target_device is not None:
        whole = whole.to(target_device)
    mesh = dtensor.device_mesh
    return dtensor_over(whole, mesh, [Replicate()] * mesh.ndim, whole.shape)


# ---- checkpoints


def update_uneven_dtensor_chunk_metadata(dtensor: DTensor) -> None:
    """Prepare a DTensor for torch.distributed.checkpoint, in place.

    It keeps its storage. Nothing is communicated for sharded parameters, their gradients, tensors
    of our state dicts and replicated tensors. For other tensors the ranks exchange their sizes, by
    a small all-reduce along every mesh axis. DTensors with placements other than ``Shard`` and
    ``Replicate`` are left to torch.

    Raises:
        NotImplementedError: for flat ranges if several dims besides dim 0 are divided.
    """
    _attach_chunks({"": dtensor}, may_differ=False)


def preprocess_state_dict_for_uneven_dtensor(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Prepare every DTensor in nested mappings, lists and tuples, in place, for torch's checkpoint.

    Each is prepared as by :func:`update_uneven_dtensor_chunk_metadata`; all DTensors of a mesh
    share one exchange of sizes.

    Returns:
        ``state_dict`` itself.

    Raises:
        ValueError: on every rank of a mesh, if the ranks do not have the same DTensors.
    """
    paths = filter_unflattened_state_dict(
        state_dict, visit_condition=lambda item: isinstance(item, DTensor)
    )
    named = {}
    for path in sorted(paths, key=str):  # ranks may have put their keys in another order
        named[str(path)] = get_unflattened_state_dict(state_dict, path)
    _attach_chunks(named, may_differ=True)
    return state_dict


def get_state_dict(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dicts of a model and its optimizers, ready for torch's checkpoint.

    This is torch's function of this name (arguments and result are its), followed by
    :func:`preprocess_state_dict_for_uneven_dtensor`.
    """
    found = get_torch_state_dict(model, optimizers, submodules=submodules, options=options)
    model_state, optimizer_state = cast(tuple[dict[str, Any], dict[str, Any]], found)
    preprocess_state_dict_for_uneven_dtensor(model_state)
    preprocess_state_dict_for_uneven_dtensor(optimizer_state)
    return model_state, optimizer_state


def _attach_chunks(named: dict[str, DTensor], may_differ: bool) -> None:
    """Replace the local tensors of DTensors by ones with chunks; see [Note: known chunks].

    Args:
        named: DTensors by their paths.
        may_differ: check that all ranks have the same DTensors.
    """
    unknown: dict[DeviceMesh, dict[str, DTensor]] = defaultdict(dict)
    for name, dtensor in named.items():
        known = local_chunks(dtensor)
        if known is not None:
            dtensor._local_tensor = known
        elif has_chunks(dtensor) and dtensor.device_mesh.get_coordinate() is not None:
            unknown[dtensor.device_mesh][name] = dtensor
    for mesh, members in unknown.items():
        if may_differ:
            _check_same_tensors(members, mesh)
        dtensors = list(members.values())
        for dtensor, local in zip(dtensors, gather_chunks(dtensors)):
            dtensor._local_tensor = local


def _check_same_tensors(named: dict[str, DTensor], mesh: DeviceMesh) -> None:
    """Compare names and shapes on all ranks of the mesh.

    If they differed, the exchange of sizes would fail or hang.

    Raises:
        ValueError: on every rank, if they differ.
    """
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    shapes = {name: tuple(dtensor.shape) for name, dtensor in named.items()}
    if len(agree([str(crc32(repr(shapes).encode()))], groups)) == 1:
        return
    own = [str(item) for item in shapes.items()]
    missing = [item for item in agree(own, groups) if item not in own]
    problems = agree([f"some rank does not have {item}" for item in missing], groups)
    raise ValueError("\n".join(problems))


def gather_and_compute_chunk_metadata(dtensor: DTensor) -> ChunkStorageMetadata:
    """Compute the offsets and sizes of this rank's chunk from the local sizes of all ranks.

    This is a small all-reduce along every mesh axis, unless the tensor is replicated or a scalar.

    Returns:
        The offsets and sizes of the chunk. If this rank owns nothing, the size of dim 0 is 0. For a
        scalar that another rank owns, offsets and sizes are ``(0,)``.

    Raises:
        NotImplementedError: on every rank, if some rank has several chunks, a flat range that
            begins or ends inside a row; :func:`update_uneven_dtensor_chunk_metadata` prepares such
            tensors. Also for placements other than ``Shard`` and ``Replicate``.
    """
    check_placements(dtensor)
    shape, mesh = tuple(dtensor.shape), dtensor.device_mesh
    if not shape or is_replicated(dtensor):
        local_shape = shape if dtensor._local_tensor.numel() else (0, *shape[1:])
        return _metadata((0,) * len(local_shape), local_shape)
    table = ChunkTable(shape, dtensor.placements, gather_numbers(local_sizes(dtensor), mesh))
    coordinates = product(*map(range, mesh.shape))
    chunks_of = {coordinate: table.chunks(coordinate) for coordinate in coordinates}
    if max(map(len, chunks_of.values())) > 1:
        raise NotImplementedError(
            "a rank holds a run of elements, which is more than one chunk:"
            " update_uneven_dtensor_chunk_metadata gives the DTensor a __create_chunk_list__ with"
            " all of them"
        )
    own = own_coordinate(mesh)
    if chunks_of[own]:
        offsets, sizes = chunks_of[own][0]
    else:
        others = shape[1:]
        offsets, sizes = (table.row(own), *[0] * len(others)), (0, *others)
    return _metadata(offsets, sizes)


def _metadata(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
