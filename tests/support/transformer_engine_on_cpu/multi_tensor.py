# SPDX-License-Identifier: Apache-2.0
"""Kernels on lists of tensors: scales, norms, Adam, and the history of delayed scaling.

Each takes the size of its chunks, a flag that says whether values overflowed, and the lists.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.support.transformer_engine_on_cpu.block_scales import FLOAT32_LARGEST, scale_of
from tests.support.transformer_engine_on_cpu.number_formats import TORCH_DTYPES, largest
from tests.support.transformer_engine_on_cpu.quantization import mx_exponents

Lists = Sequence[Sequence[torch.Tensor]]


def multi_tensor_scale(chunk: int, noop: torch.Tensor, lists: Lists, scale: float) -> None:
    """Write the first list, multiplied, to the second one."""
    for source, target in zip(*lists):
        target.copy_(source.float() * scale)
        if not torch.isfinite(source).all():
            noop.fill_(1)


def multi_tensor_scale_tensor(
    chunk: int, noop: torch.Tensor, lists: Lists, scale: torch.Tensor
) -> None:
    """Write the first list, multiplied by a factor in a tensor, to the second one."""
    multi_tensor_scale(chunk, noop, lists, scale.item())


def multi_tensor_l2norm(
    chunk: int, noop: torch.Tensor, lists: Lists, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of all tensors, and those of each."""
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else torch.empty(0)


def multi_tensor_unscale_l2norm(
    chunk: int, noop: torch.Tensor, lists: Lists, inv_scale: torch.Tensor, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norms of tensors multiplied by a factor."""
    total, norms = multi_tensor_l2norm(chunk, noop, lists, per_tensor)
    return total * inv_scale.reshape(()), norms * inv_scale.reshape(())


def multi_tensor_compute_scale_and_scale_inv(
    chunk: int, noop: torch.Tensor, lists: Lists, limit: float, power_of_two: bool, epsilon: float
) -> None:
    """Write the scales and their inverses that follow from largest values."""
    for amax, scale, scale_inv in zip(*lists):
        scale.copy_(scale_of(amax, limit, power_of_two, epsilon))
        scale_inv.copy_(1 / scale)


def multi_tensor_compute_scale_inv_e8m0(
    chunk: int, noop: torch.Tensor | None, lists: Lists
) -> None:
    """Write the scales of MXFP8 blocks that follow from largest values."""
    for amax, scale_inv in zip(*lists):
        scale_inv.copy_(mx_exponents(amax))


def multi_tensor_adam(
    chunk: int,
    noop: torch.Tensor,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    decoupled: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Update parameters (and master weights, the last list, if it is there) by Adam or AdamW."""
    corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for grad, param, exp_avg, exp_avg_sq, *master in zip(*lists):
        weight = (master[0] if master else param).float()
        grad = grad.float() if decoupled else grad.float() + weight_decay * weight
        first = beta1 * exp_avg.float() + (1 - beta1) * grad
        second = beta2 * exp_avg_sq.float() + (1 - beta2) * grad * grad
        update = (first / corrections[0]) / ((second / corrections[1]).sqrt() + epsilon)
        if decoupled:
            update = update + weight_decay * weight
        exp_avg.copy_(first)
        exp_avg_sq.copy_(second)
        for target in (param, *master):
            target.copy_(weight - lr * update)


def fused_amax_and_scale_update_after_reduction(
    amaxes: torch.Tensor,
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    algorithm: str,
    dtype: int,
    margin: int,
) -> None:
    """Move the history of largest values on by one step, and derive the next scales.

    The first row of a history is for the next step, which starts at zero. `amaxes` has the values
    of this step, the largest of all ranks; 0 stands for the history's own.
    """
    limit = largest(TORCH_DTYPES[dtype]) * 2.0**-margin
    parts = amaxes.split([history.shape[1] for history in histories])
    for latest, history, scale in zip(parts, histories, scales):
        latest = torch.where(latest != 0, latest, history[0])
        amax = latest
        if algorithm == "max" and len(history) > 1:
            amax = torch.maximum(latest, history[1:].amax(dim=0))
        history.copy_(torch.cat((history[1:], latest[None])))
        history[0] = 0
        updated = (limit / amax).clamp(max=FLOAT32_LARGEST)
        scale.copy_(torch.where(torch.isfinite(amax) & (amax > 0), updated, scale))
