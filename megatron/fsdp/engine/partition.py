# SPDX-License-Identifier: Apache-2.0
"""The shards into which a group is divided, and the shard of this rank.

[Note: shards and owned shards] The ranks of the inner axis divide a group's flat buffer into
shards, one each. In hybrid sharding the outer axis usually replicates a shard. If the outer axis
shards optimizer state too, each shard is divided once more among its outer ranks, and every rank
owns a different part. Example: a buffer of 12 elements, 2 inner and 3 outer ranks.

    element          0   1   2   3   4   5 | 6   7   8   9  10  11
    shard of         inner rank 0          | inner rank 1
    owned shard of   outer 0 outer 1 outer 2 outer 0 outer 1 outer 2
    number           0       1       2       3       4       5

Both levels are contiguous, so all-gathers over the outer axis fill a shard and all-gathers over the
inner axis fill the buffer, without a copy. The layout of the group counts owned shards.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.fsdp.engine.collectives import Communicator
from megatron.fsdp.engine.policy import ShardingStrategy


@dataclass(frozen=True)
class Partition:
    """The number of shards, and the index of the one that this rank owns.

    Args:
        num_inner: shards of the flat buffer; 1 if every rank updates all parameters.
        num_outer: owned shards of a shard; 1 unless the outer axis shards optimizer state.
        inner_rank: the index of this rank's shard.
        outer_rank: the index of this rank's owned shard within its shard.
        shards_outer: the outer axis shards optimizer state.
    """

    num_inner: int
    num_outer: int
    inner_rank: int
    outer_rank: int
    shards_outer: bool

    @classmethod
    def of(
        cls, communicator: Communicator, strategy: ShardingStrategy, shards_outer: bool
    ) -> Partition:
        """Return the partition of a group whose ranks are those of ``communicator``."""
        shards_inner = strategy.shards_optimizer
        return cls(
            num_inner=communicator.inner_size if shards_inner else 1,
            num_outer=communicator.outer_size if shards_outer else 1,
            inner_rank=communicator.inner_rank if shards_inner else 0,
            outer_rank=communicator.outer_rank if shards_outer else 0,
            shards_outer=shards_outer,
        )

    @property
    def num_owned(self) -> int:
        """Number of owned shards in the whole buffer."""
        return self.num_inner * self.num_outer

    @property
    def rank(self) -> int:
        """Index of this rank's owned shard among all of them."""
        return self.inner_rank * self.num_outer + self.outer_rank
