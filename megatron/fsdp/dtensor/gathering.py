# SPDX-License-Identifier: Apache-2.0
"""DTensors over local tensors of any size, and the gathering of their whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from megatron.fsdp.engine.collectives import all_gather_uneven

AnyDTensor = TypeVar("AnyDTensor", bound=DTensor)


def wrap_local(
    dtensor_class: type[AnyDTensor],
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
) -> AnyDTensor:
    """Return a DTensor of logical ``shape`` over ``local``, whose storage it shares."""
    # `DTensor.from_local` would treat the empty shape of a scalar as no shape.
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    # The wrapper gets its storage offset from the tensor that it is created with, and torch cannot
    # copy or save a wrapper whose offset is not 0. So `local` is assigned afterwards.
    result = dtensor_class(local.new_empty(0), spec, requires_grad=False)
    result._local_tensor = local
    return result


def full_tensor(dtensor: DTensor) -> torch.Tensor:
    """Gather the whole tensor ``[*dtensor.shape]`` on every rank, detached, in new storage.

    This is an all-gather along every mesh axis that divides the tensor. If more than one dim
    besides dim 0 is divided, or a placement is neither ``Shard`` nor ``Replicate``, torch gathers,
    which expects equal parts.

    Raises:
        ValueError: if the local tensors do not make up a tensor of that shape.
    """
    shape, placements, mesh = dtensor.shape, dtensor.placements, dtensor.device_mesh
    local = dtensor._local_tensor.detach()
    sharded_dims = {placement.dim for placement in placements if isinstance(placement, Shard)}
    later_dims = sorted(sharded_dims - {0})
    if len(later_dims) > 1 or not is_sharded_or_replicated(placements):
        return wrap_local(DTensor, local, mesh, placements, shape).full_tensor()
    if shape and (shape.numel() == 0 or not sharded_dims):
        return local.clone().view(shape)
    # Offloaded state is gathered where the mesh is.
    flat = local.reshape(-1).to(mesh.device_type)
    # torch has no sharded scalars, so the placements of a scalar in a state dict are Replicate. But
    # only one rank may have its element, so it is gathered along all axes.
    for axis in reversed(axes_of(placements, 0) if shape else range(len(placements))):
        flat = torch.cat(all_gather_uneven(flat, mesh.get_group(axis)))
    for dim in later_dims:
        for axis in reversed(axes_of(placements, dim)):
            shards = all_gather_uneven(flat, mesh.get_group(axis))
            flat = torch.cat([_as_range_of_dim(each, shape, dim) for each in shards], dim)
            flat = flat.reshape(-1)
    if flat.numel() != shape.numel() and shape:
        raise ValueError(
            f"the parts of all ranks hold {flat.numel()} elements, but shape {tuple(shape)} has"
            f" {shape.numel()}"
        )
    return flat[: shape.numel()].view(shape).to(local.device)


def is_sharded_or_replicated(placements: Sequence[Placement]) -> bool:
    """Return True if all placements are ``Shard`` or ``Replicate``."""
    return all(isinstance(placement, Shard | Replicate) for placement in placements)


def axes_of(placements: Sequence[Placement], dim: int) -> list[int]:
    """List the mesh axes that divide ``dim``."""
    return [
        axis
        for axis, placement in enumerate(placements)
        if isinstance(placement, Shard) and placement.dim == dim
    ]


def _as_range_of_dim(flat: torch.Tensor, shape: torch.Size, dim: int) -> torch.Tensor:
    """View the flat elements of a range of ``dim`` of a tensor of ``shape`` with all its dims."""
    others = shape.numel() // shape[dim]
    if flat.numel() % others:
        raise ValueError(
            f"a part of {flat.numel()} elements is no range of dim {dim} of shape {tuple(shape)}"
        )
    sizes = list(shape)
    sizes[dim] = flat.numel() // others
    return flat.view(sizes)


def is_replicated(dtensor: DTensor) -> bool:
    """Return True if every rank of the mesh has the whole tensor."""
    return all(isinstance(placement, Replicate) for placement in dtensor.placements)
