# SPDX-License-Identifier: Apache-2.0
"""The norm of all weights, whichever rank holds them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from torch.distributed.tensor import DTensor, Replicate

from megatron.training.ranks import data_parallel_group
from megatron.training.torch_dist_checkpoint import whole_weights


@torch.no_grad()
def params_norm(model: MegatronModule) -> float:
    """The L2 norm of the weights that the optimizer updates: fp32 main weights where there are any."""
    with whole_weights(model):
        pieces, whole = _weights(model)
        square = _square(pieces)
        dist.all_reduce(square, group=data_parallel_group())
        return (square + _square(whole)).sqrt().item()


def _weights(model: MegatronModule) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Weights of which every rank has a part, and weights that every rank has."""
    pieces, whole = [], []
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            replicated = all(isinstance(placement, Replicate) for placement in parameter.placements)
            (whole if replicated else pieces).append(parameter.to_local())
        elif getattr(parameter, "main_param_sharded", False):
            if parameter.main_param is not None:
                pieces.append(parameter.main_param)
        else:
            whole.append(getattr(parameter, "main_param", parameter))
    return pieces, whole


def _square(tensors: list[torch.Tensor]) -> torch.Tensor:
    squares = [torch.linalg.vector_norm(tensor.detach().float()).square() for tensor in tensors if tensor.numel()]
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return torch.stack(squares).sum() if squares else torch.zeros((), device=device)
