# SPDX-License-Identifier: Apache-2.0
"""The collectives of weights and gradients, and the division of reduced gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from megatron.fsdp.engine.device import Collective, Pending, Streams, Work, all_of
from megatron.fsdp.engine.layout import Partition
from megatron.fsdp.engine.observe import GATHER, REDUCE, observed, observing

# torch 2.13 renamed both and warns about the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# [Note: one launch for several gathers] The groups of a unit have a buffer each, since they differ
# in dtype or trainability (LoRA: frozen weights and trained adapters). Those that are sharded over
# the same ranks are gathered in one collective: NCCL enqueues them as one group, and gloo sends one
# buffer, or messages that are all issued at once. Backends want one dtype in it: bytes.


class Gather(NamedTuple):
    """The all-gather of one flat buffer.

    Args:
        full: ``[inner_size * n]``, which is filled with the shards of all inner ranks.
        shard: ``[n]``, this rank's shard; may be a slice of ``full``.
        filled: the cast or host copy that fills this rank's shard, for which the all-gather waits.
        owned: ``[n / outer_size]``, this rank's owned shard. If given, ``shard`` is first filled
            with the owned shards of the outer ranks.
    """

    full: torch.Tensor
    shard: torch.Tensor
    filled: Pending
    owned: torch.Tensor | None = None


class Transport:
    """The collectives that move shards; the default is the process group's own."""

    # The shard may be a slice of the full tensor: at levels 1 and 2, and at level 3 where each
    # all-gather casts. At levels 1 and 2 other code may write to that slice meanwhile, so a
    # transport must not.

    def all_gather(
        self,
        fulls: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        async_op: bool,
    ) -> Work | None:
        """Fill the full tensors with the shards of all ranks.

        Args:
            fulls: tensors ``[world_size * n]``; ``n`` and the dtype may differ between them.
            shards: this rank's shard ``[n]`` of every full tensor, which may be a slice of it.
            group: the ranks.
            async_op: return the work instead of waiting for it.
        """
        work: Work | None = None
        if len(fulls) == 1:
            work = _all_gather_single(fulls[0], shards[0], group=group, async_op=async_op)
            return work
        # The manager only collects the calls inside of it, and issues them when it ends.
        with _coalescing_manager(group, async_ops=async_op) as coalesced:
            for full, shard in zip(fulls, shards, strict=True):
                _all_gather_single(
                    full.view(torch.uint8),
                    shard.view(torch.uint8),
                    group=group,
                )
        if async_op:
            work = coalesced
        return work

    def reduce_scatter(
        self,
        full: torch.Tensor,
        shard: torch.Tensor,
        group: dist.ProcessGroup,
        operation: dist.ReduceOp.RedOpType,
        async_op: bool,
    ) -> Work | None:
        """Reduce ``full`` over the ranks; ``shard`` becomes this rank's slice of the result.

        Args:
            full: ``[world_size * n]``, which may be overwritten.
            shard: ``[n]``, no part of ``full``.
            group: the ranks.
            operation: sum or average.
            async_op: return the work instead of waiting for it.
        """
        work: Work | None = _reduce_scatter_single(
            shard,
            full,
            op=operation,
            group=group,
            async_op=async_op,
        )
        return work


@dataclass
class Communicator:
    """The collectives of dense or of expert parameters, over an inner and an outer axis.

    Args:
        inner: group of the ranks that shard the parameters.
        outer: group of the ranks that replicate the shards or shard them further, or None.
        all_gather_group: group of the inner ranks for all-gathers of weights; may be ``inner``.
        divisor: the divisor of a summed gradient: the number of data ranks for a mean, 1 for a sum.
        average_in_collective: let the process groups average. Expert parameters are reduced over
            fewer ranks than there are data ranks; the rest of the divisor is then applied here.
        streams: the streams that the collectives run on.
        transport: the all-gathers and reduce-scatters of shards.
    """

    inner: dist.ProcessGroup
    outer: dist.ProcessGroup | None
    all_gather_group: dist.ProcessGroup
    divisor: int
    average_in_collective: bool
    streams: Streams
    transport: Transport

    def __post_init__(self) -> None:
        self.inner_size = dist.get_world_size(self.inner)
        self.inner_rank = dist.get_rank(self.inner)
        self.outer_size = 1
        self.outer_rank = 0
        groups = [self.inner, self.all_gather_group]
        if self.outer is not None:
            self.outer_size = dist.get_world_size(self.outer)
            self.outer_rank = dist.get_rank(self.outer)
            groups.append(self.outer)
        self.is_hybrid = self.outer_size > 1
        self.has_collectives = self.num_ranks > 1
        self.gather_groups = (self.all_gather_group, self.outer)  # groups that gather weights
        self.streams.serve(groups)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of both axes."""
        return self.inner_size * self.outer_size

    def partition(self, shards_inner: bool, shards_outer: bool) -> Partition:
        """Return the shards of a buffer that one or both axes divide, and this rank's."""
        # An axis that does not shard counts as one shard, which every one of its ranks owns.
        num_inner = 1
        num_outer = 1
        inner_rank = 0
        outer_rank = 0
        if shards_inner:
            num_inner = self.inner_size
            inner_rank = self.inner_rank
        if shards_outer:
            num_outer = self.outer_size
            outer_rank = self.outer_rank
        return Partition(
            num_inner=num_inner,
            num_outer=num_outer,
            inner_rank=inner_rank,
            outer_rank=outer_rank,
        )

    # ---- weights

    def all_gather(self, gathers: Sequence[Gather]) -> Pending:
        """Start all-gathers together, in one collective over each axis with something to gather."""
        fulls: list[torch.Tensor] = []
        shards: list[torch.Tensor] = []
        outer_shards: list[torch.Tensor] = []  # shards that the outer axis fills first
        owned_shards: list[torch.Tensor] = []
        for gather in gathers:
            fulls.append(gather.full)
            shards.append(gather.shard)
            if gather.owned is not None:
                outer_shards.append(gather.shard)
                owned_shards.append(gather.owned)
        collectives = []
        if owned_shards and self.outer is not None:
            over_outer = self._all_gather_over(outer_shards, owned_shards, self.outer)
            collectives.append(over_outer)
        if self.inner_size > 1:
            over_inner = self._all_gather_over(fulls, shards, self.all_gather_group)
            collectives.append(over_inner)
        copies = all_of([gather.filled for gather in gathers])
        return self.streams.launch("gather", *collectives, after=copies)

    def _all_gather_over(
        self,
        fulls: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
    ) -> Collective:
        start = partial(self.transport.all_gather, fulls, shards, group)
        return observed(GATHER, "all_gather", fulls, group, start)

    def broadcast(
        self,
        tensor: torch.Tensor,
        over_inner: bool = True,
        over_outer: bool = True,
    ) -> None:
        """Broadcast from the first rank of one or both axes, synchronously.

        Args:
            tensor: any tensor, which is overwritten on the other ranks.
            over_inner: broadcast over the inner axis.
            over_outer: broadcast over the outer axis, if there is one, afterwards.
        """
        if over_inner:
            broadcast_over(tensor, [self.inner])
        if over_outer and self.outer is not None:
            broadcast_over(tensor, [self.outer])

    # ---- gradients
    #
    # [Note: the divisor] A reduced gradient is the sum over the ranks, divided by ``divisor``.
    # The divisor is chosen here; only an averaging collective divides elsewhere:
    #     before the collective    in float16, where the sum could overflow
    #     inside the collective    if the process group is asked to average (NCCL, in float16 too)
    #     on the result            otherwise, because it is the smallest tensor

    def reduce_scatter(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        """Reduce ``full`` over the inner axis; ``shard`` becomes this rank's slice, divided.

        The shapes are ``[inner_size * n]`` and ``[n]``; ``full`` may be overwritten.
        """
        reduction = self._reduce_scatter_over(full, shard, self.inner)
        return self._divide(full, shard, reduction)

    def _reduce_scatter_over(
        self,
        full: torch.Tensor,
        shard: torch.Tensor,
        group: dist.ProcessGroup,
    ) -> Collective:
        operation = self._operation(full)
        start = partial(self.transport.reduce_scatter, full, shard, group, operation)
        return observed(REDUCE, "reduce_scatter", (full,), group, start)

    def all_reduce(self, full: torch.Tensor) -> Pending:
        """Reduce ``full`` in place over the inner axis, and divide; see [Note: the divisor]."""
        reduction = None
        if self.inner_size > 1:
            reduction = self._all_reduce_over(full, self.inner)
        return self._divide(full, full, reduction)

    def _all_reduce_over(
        self,
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None,
    ) -> Collective:
        operation = self._operation(tensor)
        start = partial(dist.all_reduce, tensor, operation, group)
        return observed(REDUCE, "all_reduce", (tensor,), group, start)

    def reduce_scatter_outer(self, shard: torch.Tensor, owned: torch.Tensor) -> Pending:
        """Reduce ``shard`` over the outer axis; ``owned`` becomes this rank's slice of the result.

        The shapes are ``[outer_size * n]``, already divided, and ``[n]``.
        """
        assert self.outer is not None
        reduction = self._reduce_scatter_over(shard, owned, self.outer)
        return self.streams.launch("reduce", reduction)

    def all_reduce_outer(self, shard: torch.Tensor) -> Pending:
        """Reduce ``shard`` in place over the outer axis; it is already divided."""
        reduction = self._all_reduce_over(shard, self.outer)
        return self.streams.launch("reduce", reduction)

    def _operation(self, operand: torch.Tensor) -> dist.ReduceOp.RedOpType:
        # NCCL divides before it adds, gloo after: on a CPU a sum of float16 could overflow.
        overflows = operand.dtype == torch.float16 and operand.is_cpu
        if self.average_in_collective and not overflows:
            return dist.ReduceOp.AVG
        return dist.ReduceOp.SUM

    def _divide(
        self,
        operand: torch.Tensor,
        result: torch.Tensor,
        collective: Collective | None,
    ) -> Pending:
        """Launch the reduction over the inner axis, and divide: see [Note: the divisor]."""
        # Without a collective, the operand is the sum already. Only an averaging outer collective
        # divides as well; otherwise it adds up terms of the mean.
        divisor: float = self.divisor
        if self._operation(operand) == dist.ReduceOp.AVG:
            # Example: 8 data ranks; experts have 2 inner and 2 outer ranks. The two collectives
            # divide by 4, which leaves a divisor of 2.
            divisor = self.divisor / self.num_ranks
        divides_first = operand.dtype == torch.float16 and divisor > 1
        if divides_first:
            operand.div_(divisor)
        pending = Pending()
        if collective is not None:
            pending = self.streams.launch("reduce", collective)
        if divides_first or divisor == 1:
            return pending

        def wait_and_divide() -> None:
            pending.wait()
            result.div_(divisor)

        return Pending(wait_and_divide)


def local_group(ranks: Sequence[int], **settings: Any) -> dist.ProcessGroup:
    """Create a process group, which is a collective of its own ranks only.

    Args:
        ranks: its ranks, as numbers in the program.
        settings: further arguments of ``torch.distributed.new_group``.
    """
    # With a device bound to all ranks, torch would split their communicator (ncclCommSplit). That
    # is a collective of all of them, and would wait for ranks outside, which do not call.
    world = dist.distributed_c10d._get_default_group()
    device = world.bound_device_id
    world.bound_device_id = None
    try:
        group: dist.ProcessGroup = dist.new_group(
            ranks,
            use_local_synchronization=True,
            **settings,
        )
        return group
    finally:
        world.bound_device_id = device


def connect(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Create NCCL's communicators of groups, one by one; a collective of the ranks of each."""
    # NCCL connects the ranks of a group at its first collective of tensors on the device. Object
    # collectives do not count: with the backend "cpu:gloo,cuda:nccl" they use gloo.
    operand = torch.zeros(1, device=device)
    for group in groups:
        with observing("all_reduce", operand, group):
            dist.all_reduce(operand, group=group)


def agree(
    problems: Iterable[str],
    groups: Sequence[dist.ProcessGroup | None] = (None,),
) -> list[str]:
    """Return the problems of all ranks, sorted, so that every rank raises the same error.

    Args:
        problems: the problems of this rank.
        groups: groups that together reach every rank; None for all ranks of the program.
    """
    known = sorted(set(problems))
    for group in groups:
        if dist.get_world_size(group) <= 1:
            continue
        if not have_equal(known, group):
            known = exchange(known, [group])
    return known


def exchange(
    texts: Iterable[str],
    groups: Sequence[dist.ProcessGroup | None] = (None,),
) -> list[str]:
    """Return the texts of all ranks, sorted, each once; for those that differ in any case.

    Args:
        texts: the texts of this rank.
        groups: groups that together reach every rank; None for all ranks of the program.
    """
    known = set(texts)
    for group in groups:
        of_all_ranks: list[set[str]] = [set()] * dist.get_world_size(group)
        with observing("all_gather_object", None, group):
            dist.all_gather_object(of_all_ranks, known, group=group)
        known = set().union(*of_all_ranks)
    return sorted(known)


def have_equal(texts: Sequence[str], group: dist.ProcessGroup | None) -> bool:
    """Return True if all ranks of a group have the same sorted texts; a collective."""
    # Nearly always they have. A digest of them takes as long for 8,192 ranks as for 8, where every
    # rank would unpickle the objects of all others.
    text = ascii(texts).encode()
    digest = hashlib.sha256(text).digest()
    # Words of seven bytes, so that an int64 has both them and their negatives.
    first = int.from_bytes(digest[:7], "big")
    second = int.from_bytes(digest[7:14], "big")
    # The largest words of all ranks, and the smallest with their signs changed.
    extremes = torch.tensor(
        [[first, second], [-first, -second]],
        dtype=torch.int64,
        device=dist.distributed_c10d._get_object_coll_device(group),
    )
    all_reduce_over(extremes, [group], dist.ReduceOp.MAX)
    return torch.equal(extremes[0], -extremes[1])


def all_reduce_over(
    tensor: torch.Tensor,
    groups: Sequence[dist.ProcessGroup | None],
    op: dist.ReduceOp.RedOpType,
) -> torch.Tensor:
    """All-reduce ``tensor`` in place over one group after the other, and return it.

    Args:
        tensor: any tensor.
        groups: groups that together reach the wanted ranks; those of one rank are left out. None
            is the group of all ranks.
        op: sum, maximum or another associative operation.
    """
    for group in groups:
        if dist.get_world_size(group) > 1:
            with observing("all_reduce", tensor, group):
                dist.all_reduce(tensor, op=op, group=group)
    return tensor


def broadcast_over(tensor: torch.Tensor, groups: Iterable[dist.ProcessGroup]) -> None:
    """Broadcast ``tensor`` in place from the first rank of each group, one by one."""
    for group in groups:
        if dist.get_world_size(group) > 1:
            with observing("broadcast", tensor, group):
                dist.broadcast(tensor, group=group, group_src=0)


def all_gather_uneven(shard: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return the flat ``shard`` of every rank, in rank order; the sizes may differ."""
    # Two all-gathers: one of the sizes, and one of the shards, padded to the longest.
    num_ranks = dist.get_world_size(group)
    sizes = torch.empty(num_ranks, dtype=torch.int64, device=shard.device)
    size = sizes.new_tensor([shard.numel()])
    with observing("all_gather", sizes, group):
        _all_gather_single(sizes, size, group=group)
    longest = int(sizes.max())
    padded = shard.new_zeros(longest)
    padded[: shard.numel()] = shard
    gathered = shard.new_empty(num_ranks * longest)
    with observing("all_gather", gathered, group):
        _all_gather_single(gathered, padded, group=group)
    shards = []
    for row, num_elements in zip(gathered.view(num_ranks, longest), sizes.tolist()):
        shards.append(row[:num_elements])
    return shards
