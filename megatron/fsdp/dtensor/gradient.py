# SPDX-License-Identifier: Apache-2.0
"""Gradients of sharded parameters: DTensors whose norms count every element of the model once.

torch computes norms of DTensors mesh by mesh. It can neither combine norms over different meshes
(expert parameters), nor compute an infinity norm if a rank owns nothing. Here every rank computes
the norms of its shards, and one all-reduce over each process group combines all of them. The
results are plain tensors, equal on all ranks.

Gradients are clipped in every step, so loops over all of them are left to ``map``, which runs in C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, compress, repeat
from math import inf
from operator import attrgetter, is_not
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.uneven import UnevenDTensor
from megatron.fsdp.engine.collectives import all_reduce_over

_grad_of = attrgetter("grad")
_local_tensor_of = attrgetter("_local_tensor")
_version_of = attrgetter("_version")
_version_of_local = attrgetter("_local_tensor._version")
_norm_group_of = attrgetter("norm_group")
_dtype_of = attrgetter("dtype")
_groups_of = attrgetter("groups")
_copies_of = attrgetter("copies")


@dataclass(frozen=True, eq=False)  # its hash is not computed in Python
class NormGroup:
    """The ranks over which the norm of a parameter is summed.

    Args:
        groups: process groups that reach all of these ranks if they are used one after the other.
        copies: number of these ranks that have the same shard.
    """

    groups: tuple[dist.ProcessGroup, ...]
    copies: int = 1


class ShardedGradient(UnevenDTensor):
    """The gradient of a sharded parameter.

    Attributes:
        norm_group: the ranks that share it.
        family: the gradients that it belongs to.
    """

    norm_group: NormGroup
    family: GradientFamily

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


Version = tuple[int, int]


class GradientFamily:
    """The gradients of a model, whose norms are computed together, by one collective.

    Without multi-tensor kernels, as on CPU, torch's ``clip_grad_norm_`` asks for one norm after the
    other. The first request computes all norms, and every gradient takes its own once. All ranks
    ask in the same order, so all find theirs or compute anew.
    """

    def __init__(self) -> None:
        self._members: list[ShardedGradient] = []
        # Norms that nobody has taken yet, with the version of the gradient, by order and dtype.
        self._waiting: dict[object, dict[int, tuple[torch.Tensor, Version]]] = {}

    def assign(self, gradients: Iterable[ShardedGradient]) -> None:
        """Set the members, with new values, in the same order on all ranks."""
        self._members = list(gradients)
        self._waiting.clear()

    def norm(
        self, gradient: ShardedGradient, order: float, dtype: torch.dtype | None
    ) -> torch.Tensor:
        """Return the norm of one gradient; see :func:`norms`."""
        waiting = self._waiting.setdefault((order, dtype), {})
        if not waiting:
            # As `_version` of each, in C.
            versions = zip(map(_version_of, self._members), map(_version_of_local, self._members))
            own_norms = norms(self._members, order, dtype)
            waiting.update(zip(map(id, self._members), zip(own_norms, versions)))
        if id(gradient) in waiting:
            norm, version = waiting.pop(id(gradient))
            if version == _version(gradient):
                return norm
        return norms([gradient], order, dtype)[0]


def _version(gradient: ShardedGradient) -> Version:
    """Return a value that changes when the gradient is changed in place."""
    # An operation on the DTensor does not count as a change of its local tensor.
    return gradient._version, gradient._local_tensor._version


@torch.no_grad()
def norms(
    gradients: Sequence[ShardedGradient], order: float = 2.0, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Compute the norm of each whole gradient: 0-d tensors, equal on every rank.

    This is a collective: one all-reduce over each process group of all norm groups.

    Args:
        gradients: in the same order on all ranks.
        order: of the norm; positive, may be infinity.
        dtype: of the results. None: the dtype of each gradient, at least float32.
    """
    if not gradients:
        return []
    shards = list(map(_local_tensor_of, gradients))
    norm_groups = list(map(_norm_group_of, gradients))
    result = _powers(shards, order)
    if order == inf:
        _all_reduce(result, norm_groups, dist.ReduceOp.MAX)
    else:
        _all_reduce(result, norm_groups, dist.ReduceOp.SUM)
        copies = result.new_tensor(list(map(_copies_of, norm_groups)))
        result = (result / copies) ** (1 / order)
    dtypes = list(map(_dtype_of, shards))
    if dtype is None and len(set(dtypes)) > 1:
        return [norm.to(_at_least_float32(each)) for norm, each in zip(result, dtypes)]
    return list(result.to(dtype or _at_least_float32(dtypes[0])).unbind())


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients of sharded parameters in place, so that their norm is at most a number.

    The result is that of ``torch.nn.utils.clip_grad_norm_``, which works too. This function calls
    the kernels once for all gradients, and not for each one where there is none for several.

    Args:
        parameters: of sharded models, in the same order on all ranks; without a gradient, they are
            skipped.
        max_norm: the largest norm that is left unchanged.
        norm_type: the order of the norm; positive, may be infinity.
        error_if_nonfinite: raise an error if the norm is NaN or Inf.

    Returns:
        The norm of all gradients together before they were scaled, 0-d, the same on every rank.

    Raises:
        RuntimeError: for a norm that is NaN or Inf, with ``error_if_nonfinite``.
        TypeError: for a gradient that is not that of a sharded parameter.
        ValueError: for an order that is not positive.
    """
    with torch._C.DisableTorchFunctionSubclass():
        shown = list(map(_grad_of, parameters))
    gradients = list(compress(shown, map(is_not, shown, repeat(None))))
    if norm_type <= 0:
        raise ValueError(f"norm_type expects a positive number or infinity but got {norm_type!r}")
    if not gradients:
        return torch.tensor(0.0)
    if not _are_gradients(gradients):
        raise TypeError(
            "clip_grad_norm_ expects parameters of a sharded model; use"
            " torch.nn.utils.clip_grad_norm_ for others"
        )
    total: torch.Tensor = torch.linalg.vector_norm(
        torch.stack(norms(gradients, norm_type)), norm_type
    )
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the norm of order {norm_type} of the gradients is {total.item()}")
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    torch._foreach_mul_(list(map(_local_tensor_of, gradients)), factor)
    return total


def _powers(shards: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """Return norm ** order of each shard in float64; for the infinity norm, the norm itself.

    The sum over the shards of a tensor is that of the tensor; for the infinity norm, the maximum.
    """
    sizes = list(map(torch.Tensor.numel, shards))
    filled = list(compress(shards, sizes))  # torch has no infinity norm of nothing
    result = torch.zeros(len(shards), dtype=torch.float64, device=shards[0].device)
    if filled:
        wide = reduce(torch.promote_types, set(map(_dtype_of, filled)), torch.float32)
        norms_ = torch.stack(torch._foreach_norm(filled, order, dtype=wide)).double()
        if order != inf:
            norms_ = norms_**order
        if len(filled) == len(shards):
            return norms_
        result[list(compress(range(len(shards)), sizes))] = norms_
    return result


def _all_reduce(
    values: torch.Tensor, norm_groups: Sequence[NormGroup], op: dist.ReduceOp.RedOpType
) -> None:
    """All-reduce each value over the process groups of its norm group, in place."""
    distinct = list(dict.fromkeys(norm_groups))
    for group in dict.fromkeys(chain.from_iterable(map(_groups_of, distinct))):
        if all(group in norm_group.groups for norm_group in distinct):
            all_reduce_over(values, [group], op)
            continue
        members = [index for index, each in enumerate(norm_groups) if group in each.groups]
        values[members] = all_reduce_over(values[members], [group], op)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# ---- replacements of torch's functions, with the same arguments
#
# They return NotImplemented for calls that torch handles.


def _are_gradients(tensors: Sequence[torch.Tensor]) -> TypeGuard[Sequence[ShardedGradient]]:
    return set(map(type, tensors)) == {ShardedGradient}


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
    out: torch.Tensor | None = None,
) -> Any:
    if dim is not None or keepdim or not isinstance(ord, (int, float)) or ord <= 0:
        return NotImplemented
    if type(x) is not ShardedGradient or out is not None:
        return NotImplemented
    return x.family.norm(x, float(ord), dtype)


def _norm(
    input: torch.Tensor,
    p: Any = 2.0,
    dim: Any = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    *,
    out: torch.Tensor | None = None,
) -> Any:
    order = 2.0 if p is None or p == "fro" else p
    return _vector_norm(input, order, dim, keepdim, dtype=dtype, out=out)


def _foreach_mul_(tensors: Sequence[DTensor], factor: Any) -> Any:
    """Scale by a plain tensor, as clipping does: torch would not mix it with DTensors.

    Return NotImplemented for other factors.
    """
    if not isinstance(factor, torch.Tensor) or isinstance(factor, DTensor):
        return NotImplemented
    torch._foreach_mul_(list(map(_local_tensor_of, tensors)), factor)
    return None


def _mul_(tensor: DTensor, factor: Any) -> Any:
    return NotImplemented if _foreach_mul_([tensor], factor) is NotImplemented else tensor


def _unscale_(
    gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor
) -> Any:
    """Unscale for ``torch.amp.GradScaler``, and share an overflow on any rank with all ranks."""
    if not _are_gradients(gradients):
        return NotImplemented
    shards = list(map(_local_tensor_of, gradients))
    torch._amp_foreach_non_finite_check_and_unscale_(shards, found_inf, inverse_scale)
    distinct = dict.fromkeys(map(_norm_group_of, gradients))
    groups = dict.fromkeys(chain.from_iterable(map(_groups_of, distinct)))
    all_reduce_over(found_inf, list(groups), dist.ReduceOp.MAX)
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
