# SPDX-License-Identifier: Apache-2.0
"""Kernels on lists of tensors: scales, norms, Adam, and the history of delayed scaling.

Each takes the size of its chunks, a flag (int32, one element) that is set where values overflowed,
and the lists, whose tensors at one index belong together. Sums and updates are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tools.transformer_engine_on_cpu.block_scales import (
    FLOAT32_LARGEST,
    quotient,
    scale_of,
)
from tools.transformer_engine_on_cpu.number_formats import (
    TORCH_DTYPES,
    largest,
    to_float8,
)
from tools.transformer_engine_on_cpu.quantization import mx_exponents

Lists = Sequence[Sequence[torch.Tensor]]


def multi_tensor_scale(
    chunk: int, noop: torch.Tensor, lists: Lists, scale: float | torch.Tensor
) -> None:
    """Write the first list, multiplied, to the second one."""
    for source, target in zip(*lists):
        target.copy_(source.float() * scale)
        noop.masked_fill_(~torch.isfinite(source).all(), 1)  # as the kernel: the host never waits


def multi_tensor_scale_tensor(
    chunk: int, noop: torch.Tensor, lists: Lists, scale: torch.Tensor
) -> None:
    """Write the first list, multiplied by a factor in a tensor, to the second one."""
    multi_tensor_scale(chunk, noop, lists, scale.reshape(()))


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


class AdamStep(NamedTuple):
    """The numbers of one step of Adam, in the order in which the kernels get them."""

    lr: float
    beta1: float
    beta2: float
    epsilon: float
    step: int
    decoupled: int
    bias_correction: int
    weight_decay: float

    def update(
        self, grad: torch.Tensor, weight: torch.Tensor, *averages: torch.Tensor
    ) -> torch.Tensor:
        """Update the averages of a gradient and of its square; return the new weight."""
        corrections = (1.0, 1.0)
        if self.bias_correction:
            corrections = (1 - self.beta1**self.step, 1 - self.beta2**self.step)
        weight, grad = weight.float(), grad.float()
        if not self.decoupled:
            grad = grad + self.weight_decay * weight
        first = self.beta1 * averages[0].float() + (1 - self.beta1) * grad
        second = self.beta2 * averages[1].float() + (1 - self.beta2) * grad * grad
        update = (first / corrections[0]) / ((second / corrections[1]).sqrt() + self.epsilon)
        if self.decoupled:
            update = update + self.weight_decay * weight
        averages[0].copy_(first)
        averages[1].copy_(second)
        return weight - self.lr * update


def multi_tensor_adam(chunk: int, noop: torch.Tensor, lists: Lists, *numbers: Any) -> None:
    """Update parameters, and their master weights if these are the last list."""
    step = AdamStep(*numbers)
    for grad, param, exp_avg, exp_avg_sq, *master in zip(*lists):
        weight = step.update(grad, master[0] if master else param, exp_avg, exp_avg_sq)
        for target in (param, *master):
            target.copy_(weight)


def multi_tensor_adam_param_remainder(
    chunk: int, noop: torch.Tensor, lists: Lists, *numbers: Any
) -> None:
    """Update master weights of which the BF16 parameters have the upper bits.

    The last list has the lower 16. Where these are negative, the parameter is rounded up.
    """
    step = AdamStep(*numbers)
    for grad, param, exp_avg, exp_avg_sq, lower in zip(*lists):
        upper = param.view(torch.int16).int() - (lower < 0).int()
        master = ((upper << 16) | (lower.int() & 0xFFFF)).view(torch.float32)
        bits = step.update(grad, master, exp_avg, exp_avg_sq).view(torch.int32)
        lower.copy_(((bits + 0x8000) & 0xFFFF) - 0x8000)
        param.view(torch.int16).copy_((bits >> 16) + (lower < 0).int())


def multi_tensor_adam_fp8(chunk: int, noop: torch.Tensor, lists: Lists, *numbers: Any) -> None:
    """Update master weights, and cast them to FP8 parameters with delayed scaling."""
    *numbers_of_step, dtype = numbers
    step = AdamStep(*numbers_of_step)
    for grad, data, exp_avg, exp_avg_sq, master, scale, amax, scale_inv in zip(*lists):
        weight = step.update(grad, master, exp_avg, exp_avg_sq)
        master.copy_(weight)
        data.copy_(to_float8(weight * scale, TORCH_DTYPES[dtype]))
        amax.copy_(torch.maximum(amax, weight.abs().max()))
        scale_inv.copy_(1 / scale)


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
        updated = quotient(limit, amax).clamp(max=FLOAT32_LARGEST)
        scale.copy_(torch.where(torch.isfinite(amax) & (amax > 0), updated, scale))
