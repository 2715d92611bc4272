# SPDX-License-Identifier: Apache-2.0
"""All-gather and reduce-scatter as sends and receives between the ranks of a gloo group.

gloo's reduce-scatter is an all-reduce of a copy of the whole buffer: it sends twice the bytes that
are needed. Here a rank sends each other rank the slice that this rank needs, and nothing else.

[Note: no deadlock] All sends and receives of a collective are issued when it starts, and gloo's own
thread completes them. No rank depends on another one to wait for something, so collectives may be
waited for in any order, and ranks may be at different ones. The messages between two ranks of a
group match in the order of their issue. As everywhere, all ranks start the gathers of a group in
the same order, and its reductions; since these two have different tags, and gloo's own collectives
none of them, nothing else can be taken for one of these messages. A gather of several buffers has a
message for each, in the same order on all ranks.

[Note: order of additions] Slices are added up in the order of ranks, whatever order they arrive in:
((x0 + x1) + x2) + x3 on every rank, in the dtype of the buffer. With two ranks the result is that
of gloo's own reduce-scatter to the last bit.

[Note: gathering in place] At levels 1 and 2 the shard that a rank sends is a slice of the buffer
that it receives. gloo's own all-gather writes its unchanged values to that slice at any time before
the end, which would undo a concurrent write. Messages do not, and neither does NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron.fsdp.engine.collectives import Transport
from megatron.fsdp.engine.device import Collective, Work

_GATHER_TAG = 0x66_73_64_70  # the letters "fsdp"
_REDUCE_TAG = _GATHER_TAG + 1

SMALLEST_ALL_GATHER = 2 * 1024 * 1024
"""Bytes of the whole buffer from which an all-gather into another buffer is made of messages.

Below it neither way is clearly faster, and gloo's own costs the calling thread one call instead of
two for each other rank. Reduce-scatters and gathers in place are faster as messages at every size,
since gloo copies the whole buffer and a shard for them. The measurement is in
``benchmarks/results/point_to_point.md``.
"""


class Exchange:
    """Sends and receives under way.

    Args:
        finish: waits for the receives, and does what is left to do with them.
        sends: the sends.
    """

    def __init__(self, finish: Callable[[], None], sends: Sequence[Work]):
        self._finish = finish
        self._sends = sends

    def wait(self) -> None:
        """Wait until the result is there and the operands may be overwritten or freed."""
        self._finish()
        for send in self._sends:
            send.wait()


class GlooMessages(Transport):
    """All-gathers and reduce-scatters over gloo as messages, where these are faster."""

    def __init__(self) -> None:
        self._sends_by_gloo: dict[dist.ProcessGroup, bool] = {}

    def all_gather(
        self,
        fulls: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
    ) -> Collective:
        """Gather in place and large buffers by messages; see [Note: gathering in place]."""
        if self._uses_gloo(fulls[0], group):
            for full, shard in zip(fulls, shards, strict=True):
                if full.untyped_storage()._cdata == shard.untyped_storage()._cdata:
                    return all_gather(fulls, shards, group)
            if sum(full.nbytes for full in fulls) >= SMALLEST_ALL_GATHER:
                return all_gather(fulls, shards, group)
        return super().all_gather(fulls, shards, group)

    def reduce_scatter(
        self,
        full: torch.Tensor,
        shard: torch.Tensor,
        group: dist.ProcessGroup,
        operation: dist.ReduceOp.RedOpType,
    ) -> Collective:
        """Reduce by messages at every size."""
        if self._uses_gloo(full, group):
            return reduce_scatter(full, shard, group, operation)
        return super().reduce_scatter(full, shard, group, operation)

    def _uses_gloo(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
        """Return True if ``group`` sends ``tensor`` to other ranks through gloo, on a CPU."""
        if not tensor.is_cpu:
            return False
        sends = self._sends_by_gloo.get(group)
        if sends is None:
            # Example: "cpu:gloo,cuda:nccl".
            has_gloo = "cpu:gloo" in dist.get_backend_config(group).split(",")
            sends = self._sends_by_gloo[group] = has_gloo and group.size() > 1
        return sends


def all_gather(
    fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> Collective:
    """Return the collective that fills each of ``fulls`` with the shards of all ranks.

    Args:
        fulls: each ``[world_size * n]``; ``n`` and the dtype may differ.
        shards: for each of them ``[n]``, this rank's shard; may be its slice of the full tensor,
            which is then not written.
        group: of the ranks.
    """

    def start() -> Work:
        rank, num_ranks = group.rank(), group.size()
        others = _other_ranks(rank, num_ranks)
        slices = [full.chunk(num_ranks) for full in fulls]
        receives, sends = [], []
        for other in reversed(others):
            receives += [group.recv([each[other]], other, _GATHER_TAG) for each in slices]
        for other in others:
            sends += [group.send([shard], other, _GATHER_TAG) for shard in shards]
        for each, shard in zip(slices, shards, strict=True):
            if each[rank].data_ptr() != shard.data_ptr():
                with torch.no_grad():  # autograd would reject a copy into a buffer with many views
                    each[rank].copy_(shard)

        def finish() -> None:
            for receive in receives:
                receive.wait()

        return Exchange(finish, sends)

    return _collective(start)


def reduce_scatter(
    full: torch.Tensor,
    shard: torch.Tensor,
    group: dist.ProcessGroup,
    operation: dist.ReduceOp.RedOpType,
) -> Collective:
    """Return the collective that makes ``shard`` this rank's slice of the reduced ``full``.

    The slices of other ranks are received into ``shard`` and into ``world_size - 2`` temporary
    tensors like it. See [Note: order of additions].

    Args:
        full: ``[world_size * n]``; is only read.
        shard: ``[n]``, no part of ``full``.
        group: of the ranks, at least two.
        operation: SUM or AVG.
    """

    def start() -> Work:
        rank, num_ranks = group.rank(), group.size()
        slices = full.chunk(num_ranks)
        others = _other_ranks(rank, num_ranks)
        order = list(range(num_ranks))
        if rank == 0:
            # x0 + x1 is x1 + x0, so this rank too begins with a slice that it receives.
            order[:2] = 1, 0
        temporaries = [torch.empty_like(shard) for _ in others[1:]]
        targets = dict(zip(sorted(others), [shard, *temporaries]))
        receives = {
            other: group.recv([targets[other]], other, _REDUCE_TAG) for other in reversed(others)
        }
        sends = [group.send([slices[other]], other, _REDUCE_TAG) for other in others]

        def finish() -> None:
            receives[order[0]].wait()
            for other in order[1:]:
                if other == rank:
                    shard.add_(slices[rank])
                else:
                    receives[other].wait()
                    shard.add_(targets[other])
            if operation == dist.ReduceOp.AVG:
                shard.div_(num_ranks)

        return Exchange(finish, sends)

    return _collective(start)


def _other_ranks(rank: int, num_ranks: int) -> list[int]:
    """Return the other ranks, the next first, so that not all ranks send to the same one at once.

    In reverse it is the order in which this rank is sent to.
    """
    return [(rank + step) % num_ranks for step in range(1, num_ranks)]


def _collective(start: Callable[[], Work]) -> Collective:
    def run(asynchronous: bool) -> Work | None:
        work = start()
        if asynchronous:
            return work
        work.wait()
        return None

    return run
