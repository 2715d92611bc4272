# SPDX-License-Identifier: Apache-2.0
"""Parameters that tensor parallelism divides and that are DTensors of torch."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, and any other tensor itself."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor


def has_uneven_slices(parameter: nn.Parameter) -> bool:
    """Return True if tensor parallelism has divided ``parameter`` into slices of unequal sizes."""
    if not isinstance(parameter, DTensor):
        return False
    for placement, size in zip(parameter.placements, parameter.device_mesh.shape):
        if isinstance(placement, Shard) and parameter.shape[placement.dim] % size:
            return True
    return False


def set_local_tensor(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Make ``value`` the data of a parameter, or the local tensor of one that is a DTensor."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = value
    else:
        parameter.data = value


def local_grad(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient that autograd left on ``parameter``, for its local tensor, dense."""
    grad = parameter.grad
    assert grad is not None  # checked by the caller
    if isinstance(grad, DTensor):
        assert isinstance(parameter, DTensor)
        # Autograd may leave partial sums of a parameter that tensor parallelism replicates.
        if grad.placements != parameter.placements:
            grad = grad.redistribute(placements=parameter.placements)
        grad = grad.to_local()
    if grad.is_sparse:
        return grad.to_dense()
    return grad
