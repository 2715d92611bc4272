# SPDX-License-Identifier: Apache-2.0
"""DTensors that code makes from the part of a tensor that each rank has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from megatron.fsdp.dtensor.sharded_param import is_linked, sharded_param_of, tensor_slice
from megatron.fsdp.dtensor.uneven import UnevenDTensor, dtensor_over
from megatron.fsdp.dtensor.uneven_dtensor import update_uneven_dtensor_chunk_metadata
from megatron.fsdp.dtensor.validation import validate_uneven_dtensor
from megatron.fsdp.engine.mesh import Mesh


def make_uneven_dtensor(
    local_tensor: torch.Tensor,
    shape: Sequence[int],
    device_mesh: DeviceMesh,
    placements: Sequence[Placement],
) -> UnevenDTensor:
    """Return a DTensor over ``local_tensor``, whose storage it shares; nothing is communicated.

    Args:
        local_tensor: this rank's part. Parts of successive ranks follow one another, as rows or as
            flat ranges of elements, of any size.
        shape: of the whole tensor.
        device_mesh: the mesh of the ranks.
        placements: one for each mesh axis.

    Raises:
        ValueError: for a number of placements other than that of the mesh axes.
    """
    if len(placements) != device_mesh.ndim:
        raise ValueError(
            f"placements expects one for each of {device_mesh.ndim} mesh axes but got"
            f" {tuple(placements)}"
        )
    return dtensor_over(local_tensor.detach(), device_mesh, tuple(placements), tuple(shape))


def make_fsdp_dtensor(
    local_tensor: torch.Tensor,
    param: nn.Parameter,
    dist_index: Mesh,
    is_sharded_param: bool = True,
    is_expert_param: bool = False,
    run_check: bool = False,
    update_uneven_dtensor_chunk_meta: bool = False,
    force_sync_tp_duplicated_param: bool = False,
) -> UnevenDTensor:
    """Return a DTensor of a parameter's whole shape over this rank's part, sharing its storage.

    Args:
        local_tensor: rows, or a flat range of elements, of this rank's tensor-parallel slice.
        param: the parameter: its shape, and the attributes or placements of tensor parallelism.
        dist_index: the mesh, as ``model.get_distributed_index()`` returns it.
        is_sharded_param: the data ranks divide the parameter; False: each has a copy.
        is_expert_param: use the mesh of expert parameters.
        run_check: check that the parts make up the whole; a collective.
        update_uneven_dtensor_chunk_meta: make it ready for torch.distributed.checkpoint; a
            collective.
        force_sync_tp_duplicated_param: not built: copies of tensor-parallel ranks are not
            exchanged.

    Raises:
        NotImplementedError: for ``force_sync_tp_duplicated_param``.
        ValueError: with ``run_check``, for parts that overlap or leave a hole.
    """
    if force_sync_tp_duplicated_param:
        raise NotImplementedError(
            "not built yet: force_sync_tp_duplicated_param; broadcast the tensor over the"
            " tensor-parallel group before"
        )
    axes = dist_index.axes(is_expert_param)
    mesh = axes.dtensor_mesh(getattr(dist_index, "hsdp_outer_dp_shard", False))
    is_of_model = is_linked(param)
    slice_ = sharded_param_of(param).slice if is_of_model else tensor_slice(param, axes.tensor)
    placements: list[Placement] = []
    if axes.tensor is not None:
        placements.append(Replicate() if slice_.dim is None else Shard(slice_.dim))
    data: Placement = Shard(0) if is_sharded_param else Replicate()
    placements += [data] * (mesh.ndim - len(placements))
    dtensor = make_uneven_dtensor(local_tensor, slice_.shape or (1,), mesh, placements)
    if run_check:
        validate_uneven_dtensor(dtensor)
    if update_uneven_dtensor_chunk_meta:
        update_uneven_dtensor_chunk_metadata(dtensor)
    return dtensor
