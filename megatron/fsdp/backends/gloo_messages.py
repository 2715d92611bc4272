# SPDX-License-Identifier: Apache-2.0
"""All-gather and reduce-scatter as sends and receives between the ranks of a gloo group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron.fsdp.backends.messages import FIRST_TAG, PeerMessages
from megatron.fsdp.engine.collectives import Transport
from megatron.fsdp.engine.device import Pending, Work

# [Note: no deadlock] All sends and receives of a collective are issued when it starts, and gloo's
# own thread completes them. So collectives may be waited for in any order. The messages between two
# ranks match in the order of their issue: all ranks start the gathers of a group in the same order,
# and its reductions. These two have different tags, and gloo's own collectives have none of them.
_GATHER_TAG = FIRST_TAG
_REDUCE_TAG = FIRST_TAG + 1


class GlooMessages(Transport):
    """All-gathers and reduce-scatters over gloo as messages, at every size.

    See docs/decisions/messages_on_gloo.md.
    """

    def __init__(self) -> None:
        self._sends_by_gloo: dict[dist.ProcessGroup, bool] = {}

    def all_gather(
        self,
        fulls: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        async_op: bool,
    ) -> Work | None:
        """All-gather by messages at every size.

        Args:
            fulls: buffers of all ranks' shards, contiguous. This rank's slice is not written if it
                is the shard.
            shards: this rank's shard of each buffer.
            group: the process group.
            async_op: return the work instead of waiting for it.
        """
        # If the shard is a slice of the buffer (see `Transport`), gloo's own all-gather writes its
        # unchanged values there at any time before the end, which would undo a concurrent write.
        # Messages do not, and neither does NCCL. And gloo's own would end the process where another
        # rank gathers a buffer of another size.
        if not self._uses_gloo(fulls[0], group):
            return super().all_gather(fulls, shards, group, async_op)
        rank = group.rank()
        num_ranks = group.size()
        others = _other_ranks(rank, num_ranks)
        messages = PeerMessages(group, _GATHER_TAG)
        for other in reversed(others):
            for full in fulls:
                messages.receive(_slice(full, other, num_ranks), other)
        for other in others:
            for shard in shards:
                messages.send(shard, other)
        for full, shard in zip(fulls, shards, strict=True):
            own_slice = _slice(full, rank, num_ranks)
            if own_slice.data_ptr() != shard.data_ptr():
                own_slice.copy_(shard)
        return _work(messages.wait, async_op)

    def reduce_scatter(
        self,
        full: torch.Tensor,
        shard: torch.Tensor,
        group: dist.ProcessGroup,
        operation: dist.ReduceOp.RedOpType,
        async_op: bool,
    ) -> Work | None:
        """Reduce-scatter by messages at every size.

        Args:
            full: this rank's values for all ranks, contiguous; only read.
            shard: gets the reduced values of this rank's slice.
            group: the process group.
            operation: SUM or AVG.
            async_op: return the work instead of waiting for it.
        """
        if not self._uses_gloo(full, group):
            return super().reduce_scatter(full, shard, group, operation, async_op)
        rank = group.rank()
        num_ranks = group.size()
        others = _other_ranks(rank, num_ranks)
        # Slices are added up in the order of ranks, whatever order they arrive in, in the dtype of
        # the buffer: ((x0 + x1) + x2) + x3 on every rank. With two ranks the result is that of
        # gloo's own reduce-scatter to the last bit.
        order = list(range(num_ranks))
        if rank == 0:
            # x0 + x1 is x1 + x0, so this rank too begins with a slice that it receives.
            order[:2] = [1, 0]
        messages = PeerMessages(group, _REDUCE_TAG)
        targets = {}
        receives = {}
        for other in reversed(others):
            target = shard
            if other != order[0]:
                target = torch.empty_like(shard)
            targets[other] = target
            receives[other] = messages.receive(target, other)
        for other in others:
            messages.send(_slice(full, other, num_ranks), other)

        def add_slices() -> None:
            messages.wait_for(receives[order[0]])
            for other in order[1:]:
                if other == rank:
                    shard.add_(_slice(full, rank, num_ranks))
                else:
                    messages.wait_for(receives[other])
                    shard.add_(targets[other])
            if operation == dist.ReduceOp.AVG:
                shard.div_(num_ranks)
            messages.wait()

        return _work(add_slices, async_op)

    def _uses_gloo(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
        """Return True if ``group`` sends ``tensor`` to other ranks through gloo, on a CPU."""
        if not tensor.is_cpu:
            return False
        sends = self._sends_by_gloo.get(group)
        if sends is None:
            # Example: "cpu:gloo,cuda:nccl".
            has_gloo = "cpu:gloo" in dist.get_backend_config(group).split(",")
            sends = has_gloo and group.size() > 1
            self._sends_by_gloo[group] = sends
        return sends


def _slice(
    full: torch.Tensor,
    rank: int,
    num_ranks: int,
) -> torch.Tensor:
    """Return the part of a flat tensor that is the shard of a rank."""
    size = full.numel() // num_ranks
    return full.narrow(0, rank * size, size)


def _other_ranks(rank: int, num_ranks: int) -> list[int]:
    # The next rank comes first, so that not all ranks send to the same one at once. In reverse this
    # is the order in which other ranks send to this one.
    return [(rank + step) % num_ranks for step in range(1, num_ranks)]


def _work(finish: Callable[[], None], async_op: bool) -> Work | None:
    """Return the work that ``finish`` ends, or end it now and return None."""
    pending = Pending(finish)
    if async_op:
        return pending
    pending.wait()
    return None
