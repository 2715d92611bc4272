# SPDX-License-Identifier: Apache-2.0
"""DTensors of parameters, and the names of buffers that are not offered."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from megatron.fsdp.dtensor.sharded_param import is_linked, sharded_param_of
from megatron.fsdp.dtensor.tensor_part import TensorSlice
from megatron.fsdp.dtensor.uneven_dtensor import UnevenDTensor
from megatron.fsdp.engine.mesh import Mesh
from megatron.fsdp.engine.policy import ParameterKind
from megatron.fsdp.engine.tensor_parallel import local_tensor as local_of
from megatron_fsdp.not_offered import attributes_of
from megatron_fsdp.uneven_dtensor import (
    make_uneven_dtensor,
    update_uneven_dtensor_chunk_metadata,
    validate_uneven_dtensor,
)

__all__ = ["make_fsdp_dtensor"]

_BUFFERS = "a sharded model makes its flat buffers itself; its main weights are model.parameters()"
__getattr__ = attributes_of(
    __name__,
    {
        "AllGatherPipeline": "call model.start_param_sync() and model.synchronize_param_gather()",
        "BucketingPolicy": "pass fsdp_unit_modules and suggested_communication_unit_size",
        "DataParallelBuffer": _BUFFERS,
        "GradReducePipeline": "call model.start_grad_sync() and model.finish_grad_sync()",
        "ParamAndGradBuffer": _BUFFERS,
        "ParameterGroup": _BUFFERS,
    },
)


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
    """Return a DTensor of ``param``'s whole shape over this rank's part, sharing its storage.

    Args:
        local_tensor: rows, or a flat range of elements, of this rank's tensor-parallel slice.
        param: the parameter, with the attributes or placements of tensor parallelism.
        dist_index: the mesh, as ``model.get_distributed_index()`` returns it.
        is_sharded_param: the data ranks divide the parameter; False: each has a copy.
        is_expert_param: use the mesh of expert parameters.
        run_check: raise ``ValueError`` if parts overlap or leave a hole; a collective.
        update_uneven_dtensor_chunk_meta: make it ready for torch's checkpoint; a collective.
        force_sync_tp_duplicated_param: not built (``NotImplementedError``).
    """
    if force_sync_tp_duplicated_param:
        raise NotImplementedError(
            "not built yet: force_sync_tp_duplicated_param; broadcast the tensor over the"
            " tensor-parallel group before"
        )
    kind = ParameterKind.EXPERT if is_expert_param else ParameterKind.DENSE
    axes = dist_index.axes(kind)
    mesh = axes.dtensor_mesh(getattr(dist_index, "hsdp_outer_dp_shard", False))
    if is_linked(param):
        slice_ = sharded_param_of(param).slice
    else:
        slice_ = TensorSlice.of_parameter(param, tuple(local_of(param).shape), axes.tensor)
    data: Placement = Replicate()
    if is_sharded_param:
        data = Shard(0)  # ranks may have any numbers of rows
    placements = slice_.placements(axes.tensor, mesh.ndim, data)
    dtensor = make_uneven_dtensor(local_tensor, slice_.shape or (1,), mesh, placements)
    if run_check:
        validate_uneven_dtensor(dtensor)
    if update_uneven_dtensor_chunk_meta:
        update_uneven_dtensor_chunk_metadata(dtensor)
    return dtensor
