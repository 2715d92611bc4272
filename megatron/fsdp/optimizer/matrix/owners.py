# SPDX-License-Identifier: Apache-2.0
"""Owners of matrices: the optimizers that have them, and their assignment to ranks."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from megatron.fsdp.config.warnings_once import warn
from megatron.fsdp.dtensor.sharded_param import is_linked, sharded_param_of
from megatron.fsdp.engine.loops_in_c import concatenated
from megatron.fsdp.optimizer.optimizer_state import OptimizerClass, elementwise_class


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_ORTHOGONALIZED = "emerging_optimizers.orthogonalized_optimizers."

# Classes whose `step` updates one matrix after the other, and the entries of state, like the
# parameter, that it creates as zeros. Without entries, the first step creates the state.
_KNOWN: dict[str, tuple[str, ...]] = {
    _full_name(torch.optim.Muon): ("momentum_buffer",),
    _ORTHOGONALIZED + "orthogonalized_optimizer.OrthogonalizedOptimizer": ("momentum_buffer",),
    _ORTHOGONALIZED + "adaptive_muon.AdaptiveMuon": (),
    "emerging_optimizers.soap.soap.SOAP": (),
}

NEWTON_SCHULZ_STEPS = 5  # unless the settings of an optimizer have another number
IMBALANCE = 1.1  # most work of a rank, of that of balanced owners, for which nothing is sent


def matrix_class(kind: OptimizerClass) -> OptimizerClass | None:
    """Return the known matrix optimizer of which ``kind`` inherits the update, or None."""
    for base in kind.__mro__:
        if _full_name(base) in _KNOWN:
            known: Any = base
            if inspect.unwrap(kind.step) is inspect.unwrap(known.step):
                return known  # type: ignore[no-any-return]
            return None
    return None


def first_entries(kind: OptimizerClass) -> tuple[str, ...]:
    """Return the names of the state that the first step of ``kind`` would create as zeros."""
    known = matrix_class(kind)
    if known is None:
        return ()
    return _KNOWN[_full_name(known)]


def steps_whole_matrices(kind: Any) -> Any:
    """Declare, as a decorator or a call, that an optimizer class updates each matrix by itself.

    Its ``step`` may read ``param_groups``, the gradients of parameters and ``state[parameter]``,
    and must not combine several parameters: it runs on the owner of each matrix.

    Raises:
        ValueError: if ``kind`` is no optimizer class, or is element-wise.
    """
    is_optimizer = isinstance(kind, type) and issubclass(kind, Optimizer)
    if not is_optimizer or elementwise_class(kind) is not None:
        raise ValueError(f"expects a torch Optimizer that is not element-wise but got {kind!r}")
    _KNOWN[_full_name(kind)] = ()
    return kind


# ---- checks


def refuse_vectors(optimizer: Optimizer) -> None:
    """Raise ``ValueError`` that lists all parameters of a matrix optimizer that are no matrices."""
    kind = type(optimizer)
    if matrix_class(kind) is None:
        return
    others = []
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter.ndim == 2:
                continue
            name = f"param_groups[{number}]['params'][{position}]"
            if is_linked(parameter):
                name = sharded_param_of(parameter).name
            others.append(f"{name} {tuple(parameter.shape)}")
    if others:
        raise ValueError(
            f"{kind.__name__} updates matrices, but got {len(others)} other parameters:"
            f" {', '.join(others)}. Give them to another optimizer, such as AdamW, in"
            " fully_shard(model, [optimizer, other])"
        )


# ---- assignment


@dataclass(frozen=True, order=True)
class UpdateCost:
    """The cost of an update; costs are compared, and add up, field by field."""

    flops: int
    num_bytes: int

    def __add__(self, other: UpdateCost) -> UpdateCost:
        return UpdateCost(
            flops=self.flops + other.flops,
            num_bytes=self.num_bytes + other.num_bytes,
        )


def cost_of(
    shape: Sequence[int],
    itemsize: int,
    steps: int = NEWTON_SCHULZ_STEPS,
) -> UpdateCost:
    """Return the cost of an update whose matrix products are those of Newton-Schulz iterations.

    Args:
        shape: that of the whole matrix, (rows, columns).
        itemsize: bytes of an element of the main weight.
        steps: the number of iterations.
    """
    small, large = sorted(shape)
    # X X^T and B X are 2 m m n operations each for X of shape (m, n), A A of (m, m) is 2 m m m.
    flops_of_step = 4 * small**2 * large + 2 * small**3
    return UpdateCost(
        flops=steps * flops_of_step,
        num_bytes=small * large * itemsize,
    )


# [Note: rounds] Matrices are updated in rounds, in each of which a rank updates at most one. They
# are sorted by cost, so those of one round cost about the same, and no rank waits for another one
# in the middle. The heaviest matrix of a round goes to the rank with the least to do so far.
#
#     cost          9  8  8 | 5  4  2 | 2        three ranks
#     rank          0  1  2 | 1  2  0 | 0        in all: 13, 13, 12


Rounds = list[list[tuple[int, int]]]  # pairs of the index of a matrix and the rank that owns it


def choose_owners(
    costs: Sequence[UpdateCost],
    able: Sequence[Sequence[int]],
    ranks: Sequence[int],
) -> Rounds:
    """Return the rounds, whose owners have all of their matrices where this balances the work.

    Args:
        costs: the cost of each matrix.
        able: for each matrix, the ranks whose shard has all of it, to which nothing is sent; may
            be empty.
        ranks: all ranks that can be owners.
    """
    rounds, most = assign(costs, [owners or ranks for owners in able])
    balanced, least = assign(costs, [ranks] * len(costs))
    if most > IMBALANCE * least:
        rounds = balanced
        most = least
    num_sent = 0
    num_bytes = 0
    for index, owner in concatenated(rounds):
        if owner not in able[index]:
            num_sent += 1
            num_bytes += costs[index].num_bytes
    total = sum(costs, start=UpdateCost(0, 0))
    mean = max(total.flops, 1) / len(ranks)
    warn(
        f"{num_sent} of {len(costs)} matrices are put together on their owners in each step,"
        f" {num_bytes / 1e6:.1f} MB; an owner has up to {most / mean:.2f} times the mean work",
        level=logging.INFO,
    )
    return rounds


def assign(
    costs: Sequence[UpdateCost],
    able: Sequence[Sequence[int]],
) -> tuple[Rounds, int]:
    """Assign each matrix to one of the ranks that may own it; see [Note: rounds].

    Returns the rounds, and the operations of the busiest rank.
    """
    # Sorting is stable, in reverse too: the first of equal matrices comes first.
    waiting = sorted(
        range(len(costs)),
        key=lambda index: costs[index],
        reverse=True,
    )
    loads = {rank: UpdateCost(0, 0) for rank in concatenated(able)}
    rounds = []
    while waiting:
        owners: dict[int, int] = {}  # owners in this round, by matrix
        for index in waiting:
            if len(owners) == len(loads):
                break
            free = set(able[index]).difference(owners.values())
            if free:
                owner = min(free, key=lambda rank: (loads[rank], rank))
                owners[index] = owner
                loads[owner] += costs[index]
        waiting = [index for index in waiting if index not in owners]
        rounds.append(list(owners.items()))
    busiest = max(loads.values())
    return rounds, busiest.flops
