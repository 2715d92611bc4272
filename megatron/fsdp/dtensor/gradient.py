# SPDX-License-Identifier: Apache-2.0
"""What ``param.grad`` holds: a DTensor whose norms count every element of the whole model once.

torch takes the norm of DTensors mesh by mesh, and cannot put together norms of different meshes
(expert parameters) or an infinity norm where a rank owns nothing. Here the pieces are measured
locally and one collective for each kind of parameter puts the measures together; the norms are
plain tensors, equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.uneven import UnevenDTensor
from megatron.fsdp.engine.collectives import all_reduce_over


@dataclass(frozen=True)
class NormGroup:
    """Which ranks hold something of a parameter that counts.

    Args:
        groups: they are reached by reducing over one after the other.
        copies: how many of them hold the same piece.
    """

    groups: tuple[dist.ProcessGroup, ...]
    copies: int = 1


class ShardedGradient(UnevenDTensor):
    """The gradient of a sharded parameter."""

    holders: NormGroup

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        own = _OWN.get(func)
        if own is not None:
            with torch._C.DisableTorchFunctionSubclass():
                result = own(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return super().__torch_function__(func, types, args, kwargs)


@torch.no_grad()
def norms(
    gradients: Sequence[ShardedGradient], order: float = 2.0, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """The norm of each whole gradient, 0-d, on every rank; a collective for each kind of ``holders``."""
    kinds: dict[NormGroup, list[int]] = {}
    for index, gradient in enumerate(gradients):
        kinds.setdefault(gradient.holders, []).append(index)
    result: list[Any] = [None] * len(gradients)
    for holders, indices in kinds.items():
        local = torch.stack([_measure(gradients[index]._local_tensor, order) for index in indices])
        if order == inf:
            whole = all_reduce_over(local, holders.groups, dist.ReduceOp.MAX)
        else:
            whole = (
                all_reduce_over(local, holders.groups, dist.ReduceOp.SUM) / holders.copies
            ) ** (1 / order)
        for index, norm in zip(indices, whole):
            result[index] = norm.to(
                dtype or torch.promote_types(gradients[index].dtype, torch.float32)
            )
    return result


def _measure(piece: torch.Tensor, order: float) -> torch.Tensor:
    """What adds up (for the infinity norm: what has a maximum) over pieces, in float64."""
    if not piece.numel():
        return torch.zeros((), dtype=torch.float64, device=piece.device)
    wide = torch.promote_types(piece.dtype, torch.float32)
    norm = torch.linalg.vector_norm(piece, order, dtype=wide).double()
    return norm if order == inf else norm**order


def _foreach_norm(
    tensors: Sequence[torch.Tensor], ord: float = 2.0, dtype: torch.dtype | None = None
) -> Any:
    if ord <= 0 or not all(isinstance(tensor, ShardedGradient) for tensor in tensors):
        return NotImplemented
    return norms(tensors, float(ord), dtype)


def _vector_norm(
    x: torch.Tensor,
    ord: float | None = 2.0,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Any:
    if dim is not None or keepdim or not isinstance(ord, (int, float)):
        return NotImplemented
    norm = _foreach_norm([x], ord, dtype)
    return norm if norm is NotImplemented else norm[0]


def _norm(
    input: torch.Tensor, p: Any = 2.0, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    return _vector_norm(input, 2.0 if p == "fro" or p is None else p, dim, keepdim, dtype=dtype)


def _foreach_mul_(tensors: Sequence[torch.Tensor], factor: Any) -> Any:
    """Scaling after clipping: the factor is a plain tensor, which torch would not mix with DTensors."""
    if not isinstance(factor, torch.Tensor) or isinstance(factor, DTensor):
        return NotImplemented
    torch._foreach_mul_([tensor._local_tensor for tensor in tensors], factor)
    return None


def _mul_(tensor: torch.Tensor, factor: Any) -> Any:
    return NotImplemented if _foreach_mul_([tensor], factor) is NotImplemented else tensor


def _unscale_(
    gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor
) -> Any:
    """What ``torch.amp.GradScaler`` does to gradients; what one rank finds, all have found."""
    if not all(isinstance(gradient, ShardedGradient) for gradient in gradients):
        return NotImplemented
    pieces = [gradient._local_tensor for gradient in gradients]
    torch._amp_foreach_non_finite_check_and_unscale_(pieces, found_inf, inverse_scale)
    for groups in dict.fromkeys(gradient.holders.groups for gradient in gradients):
        all_reduce_over(found_inf, groups, dist.ReduceOp.MAX)
    return None


_OWN: dict[Callable[..., Any], Callable[..., Any]] = {
    torch._foreach_norm: _foreach_norm,
    torch.linalg.vector_norm: _vector_norm,
    torch.norm: _norm,
    torch.Tensor.norm: _norm,
    torch._foreach_mul_: _foreach_mul_,
    torch.Tensor.mul_: _mul_,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale_,
}
