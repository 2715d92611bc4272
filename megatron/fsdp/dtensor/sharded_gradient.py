# SPDX-License-Identifier: Apache-2.0
"""Gradients of sharded parameters: their norms, clipping and unscaling over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import inf
from operator import attrgetter
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.process_link import ProcessLink
from megatron.fsdp.dtensor.uneven_dtensor import GRAD, UnevenDTensor
from megatron.fsdp.engine.buffer import ShardMemory
from megatron.fsdp.engine.collectives import all_reduce_over
from megatron.fsdp.engine.loops_in_c import attributes, concatenated, present
from megatron.fsdp.engine.mesh import NormGroup

# [Note: norms of gradients] torch can neither combine norms over different meshes (expert
# parameters), nor compute an infinity norm if a rank owns nothing. Here one all-reduce over each
# process group combines the norms of all shards into plain tensors, equal on all ranks. No tensor
# is indexed by a list or made of one: for copies of pageable memory the host waits.


class ShardedGradient(UnevenDTensor):
    """The gradient of a sharded parameter; see [Note: norms of gradients]."""

    norm_group: ProcessLink[NormGroup]
    family: ProcessLink[GradientFamily]
    memory: ProcessLink[ShardMemory]


class GradientFamily:
    """The gradients of a model, whose norms are computed together, by one collective."""

    # torch asks for one norm after the other: the first request computes all, each is taken once.

    def __init__(self) -> None:
        self._members: list[ShardedGradient] = []
        # Norms that nobody has taken yet, with the version of the gradient, by order and dtype.
        self._waiting: dict[object, dict[int, tuple[torch.Tensor, int]]] = {}

    def assign(self, gradients: Iterable[ShardedGradient]) -> None:
        """Set the members, with new values, in the same order on all ranks."""
        self._members = list(gradients)
        self._waiting.clear()

    def norm(
        self,
        gradient: ShardedGradient,
        order: float,
        dtype: torch.dtype | None,
    ) -> torch.Tensor:
        """Return the norm of one gradient; the first call computes those of all.

        Args:
            gradient: a member of the family.
            order: of the norm, a positive number or infinity.
            dtype: that of the result; None: at least float32, as in :func:`norms`.
        """
        waiting = self._waiting.setdefault((order, dtype), {})
        if not waiting:
            new_norms = norms(self._members, order, dtype)
            for member, norm in zip(self._members, new_norms):
                waiting[id(member)] = (norm, member._local_tensor._version)
        if id(gradient) in waiting:
            norm, version = waiting.pop(id(gradient))
            if version == gradient._local_tensor._version:
                return norm
        return norms([gradient], order, dtype)[0]


@torch.no_grad()
def norms(
    gradients: Sequence[ShardedGradient],
    order: float = 2.0,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Compute the norm of each whole gradient, 0-d and equal on all ranks; a collective.

    Args:
        gradients: the gradients, in the same order on all ranks.
        order: of the norm, a positive number or infinity.
        dtype: that of the results; None: the gradient's, but at least float32.
    """
    if not gradients:
        return []
    shards = attributes(gradients, "_local_tensor")
    norm_groups = attributes(gradients, "norm_group.target")
    result = _powers(gradients, shards, order)
    if order == inf:
        _all_reduce(result, norm_groups, dist.ReduceOp.MAX)
    else:
        _all_reduce(result, norm_groups, dist.ReduceOp.SUM)
        for rows, norm_group in _runs(norm_groups):
            result[rows].div_(norm_group.copies)
        result = result ** (1 / order)
    if dtype is not None:
        return list(result.to(dtype).unbind())
    wide = {}
    for narrow in set(attributes(shards, "dtype")):
        wide[narrow] = torch.promote_types(narrow, torch.float32)
    if len(set(wide.values())) == 1:
        dtype = wide[shards[0].dtype]
        return list(result.to(dtype).unbind())
    return [norm.to(wide[shard.dtype]) for norm, shard in zip(result, shards)]


def _powers(
    gradients: Sequence[ShardedGradient],
    shards: Sequence[torch.Tensor],
    order: float,
) -> torch.Tensor:
    """Return norm ** order of each shard in float64; for the infinity norm, the norm itself."""
    if order == inf:  # torch has none of an empty tensor
        shards = [_at_least_one_element(shard) for shard in shards]
    wide = torch.float32
    for dtype in set(attributes(shards, "dtype")):
        wide = torch.promote_types(wide, dtype)
    if _are_offloaded(gradients):
        own_norms = []
        for _, shard in zip(_in_turn(gradients), shards):
            norm = torch.linalg.vector_norm(shard, order, dtype=wide)
            own_norms.append(norm.to(shards[0].device))
    else:
        own_norms = list(torch._foreach_norm(list(shards), order, dtype=wide))
    result = torch.stack(own_norms).double()
    if order == inf:
        return result
    return result**order


def _at_least_one_element(shard: torch.Tensor) -> torch.Tensor:
    """Return a shard, or a zero in place of an empty one."""
    if shard.numel():
        return shard
    return shard.new_zeros(1)


def _are_offloaded(gradients: Iterable[ShardedGradient]) -> bool:
    return any(attributes(gradients, "memory.target.is_offloaded"))


def _in_turn(gradients: Iterable[ShardedGradient]) -> Iterator[torch.Tensor]:
    """Yield local tensors, of which those in files take memory in turn."""
    for gradient in gradients:
        yield gradient._local_tensor
        gradient.memory.target.release(gradient._local_tensor)


def _runs(norm_groups: Iterable[NormGroup]) -> Iterator[tuple[slice, NormGroup]]:
    """Yield the positions of neighbours with equal norm groups, and one of these."""
    stop = 0
    for _, equal in groupby(norm_groups, attrgetter("groups", "copies")):
        members = list(equal)
        start = stop
        stop += len(members)
        yield slice(start, stop), members[0]


def _all_reduce(
    values: torch.Tensor,
    norm_groups: Sequence[NormGroup],
    op: dist.ReduceOp.RedOpType,
) -> None:
    distinct = list(dict.fromkeys(norm_groups))
    groups = concatenated(attributes(distinct, "groups"))
    for group in dict.fromkeys(groups):
        if all(group in norm_group.groups for norm_group in distinct):
            all_reduce_over(values, [group], op)
            continue
        parts = []
        sizes = []
        for rows, norm_group in _runs(norm_groups):
            if group in norm_group.groups:
                parts.append(values[rows])
                sizes.append(rows.stop - rows.start)
        reduced = all_reduce_over(torch.cat(parts), [group], op)
        torch._foreach_copy_(parts, list(reduced.split(sizes)))


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients of sharded parameters in place, so that their norm is at most a number.

    The result, the norm of all gradients before scaling, 0-d and equal on every rank, is that of
    ``torch.nn.utils.clip_grad_norm_``, which works too, but calls a kernel for each gradient.

    Args:
        parameters: parameters of sharded models, in the same order on all ranks.
        max_norm: the largest norm that is left unchanged.
        norm_type: the order of the norm; positive, may be infinity.
        error_if_nonfinite: raise ``RuntimeError`` if the norm is NaN or Inf.

    Raises:
        ValueError: if ``norm_type`` is not positive.
        TypeError: for gradients of parameters that are not sharded.
    """
    with torch._C.DisableTorchFunctionSubclass():
        gradients = present(attributes(parameters, GRAD))
    if norm_type <= 0:
        raise ValueError(f"norm_type expects a positive number or infinity but got {norm_type!r}")
    if not gradients:
        return torch.tensor(0.0)
    if not _are_gradients(gradients):
        raise TypeError(
            "clip_grad_norm_ expects parameters of a sharded model; use"
            " torch.nn.utils.clip_grad_norm_ for others"
        )
    own_norms = torch.stack(norms(gradients, norm_type))
    total: torch.Tensor = torch.linalg.vector_norm(own_norms, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}: skip this step, or"
            " pass error_if_nonfinite=False"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    if _are_offloaded(gradients):
        for shard in _in_turn(gradients):
            shard.mul_(factor.to(shard.device))
    else:
        shards = attributes(gradients, "_local_tensor")
        torch._foreach_mul_(shards, factor)
    return total


# ---- replacements of torch's functions; NotImplemented for calls that torch handles


def _are_gradients(
    tensors: Sequence[torch.Tensor],
) -> TypeGuard[Sequence[ShardedGradient]]:
    return set(map(type, tensors)) == {ShardedGradient}


def _foreach_norm(
    tensors: Sequence[torch.Tensor],
    ord: float = 2.0,
    dtype: torch.dtype | None = None,
) -> Any:
    if ord <= 0 or not _are_gradients(tensors):
        return NotImplemented
    return norms(tensors, float(ord), dtype)


def _norm(
    gradient: torch.Tensor,
    order: Any = 2.0,
    dim: Any = None,
    keepdim: bool = False,
    *,
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    **named_order: Any,
) -> Any:
    """Stand for ``torch.norm``, whose order is called ``p``, and ``vector_norm`` with ``ord``."""
    if named_order:
        (order,) = named_order.values()
    if order is None or order == "fro":
        order = 2.0
    if dim is not None or keepdim or out is not None:
        return NotImplemented
    if not isinstance(order, int | float) or order <= 0:
        return NotImplemented
    if type(gradient) is not ShardedGradient:
        return NotImplemented
    return gradient.family.target.norm(gradient, float(order), dtype)


def _mul_(tensor: DTensor, factor: Any) -> Any:
    """Scale by a 0-d tensor, as clipping does for every gradient, without checks of the parts."""
    if not isinstance(factor, torch.Tensor) or isinstance(factor, DTensor):
        return NotImplemented
    if factor.ndim:
        return NotImplemented
    tensor._local_tensor.mul_(factor)
    return tensor


def _unscale_(
    gradients: Sequence[torch.Tensor],
    found_inf: torch.Tensor,
    inverse_scale: torch.Tensor,
) -> Any:
    """Unscale for ``torch.amp.GradScaler``, and share an overflow on any rank with all ranks."""
    sharded = [gradient for gradient in gradients if type(gradient) is ShardedGradient]
    plain = [gradient for gradient in gradients if type(gradient) is torch.Tensor]
    if len(sharded) + len(plain) < len(gradients):
        return NotImplemented
    shards = attributes(sharded, "_local_tensor") + plain
    torch._amp_foreach_non_finite_check_and_unscale_(shards, found_inf, inverse_scale)
    groups = concatenated(attributes(sharded, "norm_group.target.groups"))
    distinct = list(dict.fromkeys(groups))
    all_reduce_over(found_inf, distinct, dist.ReduceOp.MAX)
    return None


ShardedGradient.replacements = {
    torch._foreach_norm: _foreach_norm,
    torch.linalg.vector_norm: _norm,
    torch.norm: _norm,
    torch.Tensor.norm: _norm,
    torch.Tensor.mul_: _mul_,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale_,
}
