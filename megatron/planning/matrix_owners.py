# SPDX-License-Identifier: Apache-2.0
"""The update of whole matrices by their owners: its balance, its memory and its seconds.

[Note: rounds of owners] In each round every rank updates at most one matrix. Its owner receives
gradient and weight from the other ranks of its replica, and sends all ranks of all replicas their
parts of the new weight. The messages of the next round and the new weights of the last one travel
meanwhile, so that a round lasts as long as the slower of its matrix products and these messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.fsdp.optimizer.matrix.owners import NEWTON_SCHULZ_STEPS, assign, cost_of
from megatron.planning.machine import Cluster


@dataclass(frozen=True)
class OwnerPlan:
    """The update of the matrices of one mesh.

    Attributes:
        most_flops: of the rank with the most.
        mean_flops: of a rank.
        momentum_bytes: of the rank with the most.
        round_bytes: of two rounds, each with a whole weight and its gradient.
        message_bytes: that the owners of all rounds receive and send, each at its busiest.
        seconds: of the update.
    """

    most_flops: int = 0
    mean_flops: float = 0.0
    momentum_bytes: int = 0
    round_bytes: int = 0
    message_bytes: int = 0
    seconds: float = 0.0

    @property
    def imbalance(self) -> float:
        """The work of the rank with the most, in that of the mean."""
        if not self.mean_flops:
            return 1.0
        return self.most_flops / self.mean_flops


def plan_owners(
    shapes: Sequence[Sequence[int]],
    ranks: Sequence[int],
    machine: Cluster,
    num_replicas: int = 1,
    itemsize: int = 4,
    steps: int = NEWTON_SCHULZ_STEPS,
) -> OwnerPlan:
    """Plan the update of matrices.

    Args:
        shapes: of whole matrices.
        ranks: among which they have owners.
        machine: on which the model is trained.
        num_replicas: of all weights among these ranks: 1 if all of them shard, at level 0 as many
            as there are ranks.
        itemsize: bytes of an element of weights, gradients and momentum.
        steps: Newton-Schulz iterations.
    """
    if not shapes:
        return OwnerPlan()
    costs = [cost_of(shape, itemsize, steps) for shape in shapes]
    rounds, _ = assign(costs, [ranks] * len(costs))
    inner = ranks[: len(ranks) // num_replicas]
    per_second = machine.flops * machine.compute_efficiency
    flops = Counter[int]()
    momentum = Counter[int]()
    sizes: list[int] = []
    products: list[float] = []
    arrivals: list[float] = []
    returns: list[float] = []
    for pairs in rounds:
        most_flops = 0
        size = 0
        for index, owner in pairs:
            cost = costs[index]
            flops[owner] += cost.flops
            momentum[owner] += cost.num_bytes
            most_flops = max(most_flops, cost.flops)
            size = max(size, cost.num_bytes)
        sizes.append(size)
        products.append(most_flops / per_second)
        arrivals.append(machine.exchange_seconds(2 * size, inner))
        returns.append(machine.exchange_seconds(num_replicas * size, ranks))
    of_next = [*arrivals[1:], 0.0]
    of_last = [0.0, *returns[:-1]]
    seconds = arrivals[0] + returns[-1]
    for computing, arriving, returning in zip(products, of_next, of_last):
        seconds += max(computing, arriving + returning)
    all_sizes = sum(sizes)
    received = 2 * all_sizes * (len(inner) - 1) // len(inner)
    sent = num_replicas * all_sizes * (len(ranks) - 1) // len(ranks)
    return OwnerPlan(
        most_flops=max(flops.values()),
        mean_flops=sum(flops.values()) / len(ranks),
        momentum_bytes=max(momentum.values()),
        round_bytes=_bytes_of_two_rounds(sizes),
        message_bytes=received + sent,
        seconds=seconds,
    )


def _bytes_of_two_rounds(sizes: Sequence[int]) -> int:
    """Return the most bytes of a round and the next one, each with a weight and its gradient."""
    most = 0
    for size, next_size in zip(sizes, [*sizes[1:], 0]):
        most = max(most, 2 * (size + next_size))
    return most
