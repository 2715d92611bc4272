# SPDX-License-Identifier: Apache-2.0
"""Functions on DTensors whose local parts are not what torch would choose: parameters, gradients, state dicts."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate

from megatron.fsdp.sharded_param import dtensor_over, full_tensor


def uneven_dtensor_to_full_tensor(dtensor: DTensor) -> torch.Tensor:
    """The whole tensor, on every rank; a collective over the DTensor's mesh."""
    return full_tensor(dtensor)


def redistribute_uneven_dtensor_to_replicated(dtensor: DTensor) -> DTensor:
    """The same tensor, whole on every rank of its mesh; a collective."""
    return gather_uneven_dtensor_to_full_tensor(dtensor)


def gather_uneven_dtensor_to_full_tensor(dtensor: DTensor, target_device: torch.device | str | None = None) -> DTensor:
    """Older name of :func:`redistribute_uneven_dtensor_to_replicated`, with a device for the whole tensor."""
    whole = full_tensor(dtensor)
    if target_device is not None:
        whole = whole.to(target_device)
    return dtensor_over(whole, dtensor.device_mesh, [Replicate()] * dtensor.device_mesh.ndim, whole.shape)
