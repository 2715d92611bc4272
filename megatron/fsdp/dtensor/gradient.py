# SPDX-License-Identifier: Apache-2.0
"""Gradients of sharded parameters: DTensors whose norms count every element of the model once.

torch computes norms of DTensors mesh by mesh. It can neither combine norms over different meshes
(expert parameters), nor compute an infinity norm if a rank owns nothing. Here every rank computes
the norms of its shards, and one reduction for each norm group combines them. The results are plain
tensors, equal on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.uneven import UnevenDTensor
from megatron.fsdp.engine.collectives import all_reduce_over


@dataclass(frozen=True)
class NormGroup:
    """The ranks over which the norm of a parameter is summed.

    Args:
        groups: process groups that reach all of these ranks if they are used one after the other.
        copies: number of these ranks that have the same shard.
    """

    groups: tuple[dist.ProcessGroup, ...]
    copies: int = 1


class ShardedGradient(UnevenDTensor):
    """The gradient of a sharded parameter."""

    norm_group: NormGroup

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None:
            with torch._C.DisableTorchFunctionSubclass():
                result = replacement(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return super().__torch_function__(func, types, args, kwargs)


@torch.no_grad()
def norms(
    gradients: Sequence[ShardedGradient], order: float = 2.0, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Compute the norm of each whole gradient: 0-d tensors, equal on every rank.

    This is a collective: one all-reduce over each process group of each norm group.

    Args:
        gradients: in the same order on all ranks.
        order: of the norm; positive, may be infinity.
        dtype: of the results. None: the dtype of each gradient, at least float32.
    """
    indices_of: dict[NormGroup, list[int]] = defaultdict(list)
    for index, gradient in enumerate(gradients):
        indices_of[gradient.norm_group].append(index)
    result = [torch.empty(0)] * len(gradients)
    for group, indices in indices_of.items():
        local = torch.stack([_measure(gradients[index]._local_tensor, order) for index in indices])
        if order == inf:
            whole = all_reduce_over(local, group.groups, dist.ReduceOp.MAX)
        else:
            summed = all_reduce_over(local, group.groups, dist.ReduceOp.SUM)
            whole = (summed / group.copies) ** (1 / order)
        for index, norm in zip(indices, whole):
            at_least_float32 = torch.promote_types(gradients[index].dtype, torch.float32)
            result[index] = norm.to(dtype or at_least_float32)
    return result


def _measure(shard: torch.Tensor, order: float) -> torch.Tensor:
    """Return norm ** order of a shard in float64; for the infinity norm, the norm itself.

    The sum over the shards of a tensor is that of the tensor; for the infinity norm, the maximum.
    """
    if not shard.numel():
        return torch.zeros((), dtype=torch.float64, device=shard.device)
    wide = torch.promote_types(shard.dtype, torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(shard, order, dtype=wide).double()
    return norm if order == inf else norm**order


# ---- replacements of torch's functions, with the same arguments
#
# They return NotImplemented for calls that torch handles.


def _are_gradients(tensors: Sequence[torch.Tensor]) -> TypeGuard[Sequence[ShardedGradient]]:
    return all(isinstance(tensor, ShardedGradient) for tensor in tensors)


def _foreach_norm(
    tensors: Sequence[torch.Tensor], ord: float = 2.0, dtype: torch.dtype | None = None
) -> Any:
    if ord <= 0 or not _are_gradients(tensors):
        return NotImplemented
    return norms(tensors, float(ord), dtype)


def _vector_norm(
    x: torch.Tensor,
    ord: float | None = 2.0,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    if dim is not None or keepdim or not isinstance(ord, (int, float)):
        return NotImplemented
    result = _foreach_norm([x], ord, dtype)
    return result if result is NotImplemented else result[0]


def _norm(
    input: torch.Tensor,
    p: Any = 2.0,
    dim: Any = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Any:
    order = 2.0 if p is None or p == "fro" else p
    return _vector_norm(input, order, dim, keepdim, dtype=dtype)


def _foreach_mul_(tensors: Sequence[DTensor], factor: Any) -> Any:
    """Scale by a plain tensor, as clipping does: torch would not mix it with DTensors.

    Return NotImplemented for other factors.
    """
    if not isinstance(factor, torch.Tensor) or isinstance(factor, DTensor):
        return NotImplemented
    torch._foreach_mul_([tensor._local_tensor for tensor in tensors], factor)
    return None


def _mul_(tensor: DTensor, factor: Any) -> Any:
    return NotImplemented if _foreach_mul_([tensor], factor) is NotImplemented else tensor


def _unscale_(
    gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor
) -> Any:
    """Unscale for ``torch.amp.GradScaler``, and share an overflow on any rank with all ranks."""
    if not _are_gradients(gradients):
        return NotImplemented
    shards = [gradient._local_tensor for gradient in gradients]
    torch._amp_foreach_non_finite_check_and_unscale_(shards, found_inf, inverse_scale)
    for groups in dict.fromkeys(gradient.norm_group.groups for gradient in gradients):
        all_reduce_over(found_inf, groups, dist.ReduceOp.MAX)
    return None


_REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch._foreach_norm: _foreach_norm,
    torch.linalg.vector_norm: _vector_norm,
    torch.norm: _norm,
    torch.Tensor.norm: _norm,
    torch._foreach_mul_: _foreach_mul_,
    torch.Tensor.mul_: _mul_,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale_,
}
