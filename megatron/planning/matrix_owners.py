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
from itertools import chain

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
        return self.most_flops / self.mean_flops if self.mean_flops else 1.0


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
    flops, momentum = Counter[int](), Counter[int]()
    for index, owner in chain.from_iterable(rounds):
        flops[owner] += costs[index].flops
        momentum[owner] += costs[index].num_bytes
    sizes = [max(costs[index].num_bytes for index, _ in pairs) for pairs in rounds]
    inner = ranks[: len(ranks) // num_replicas]
    arrivals = [machine.exchange_seconds(2 * size, inner) for size in sizes]
    returns = [machine.exchange_seconds(num_replicas * size, ranks) for size in sizes]
    per_second = machine.flops * machine.compute_efficiency
    seconds = arrivals[0] + returns[-1]
    for number, pairs in enumerate(rounds):
        messages = sum(arrivals[number + 1 : number + 2])
        messages += returns[number - 1] if number else 0.0
        products = max(costs[index].flops for index, _ in pairs) / per_second
        seconds += max(products, messages)
    received = 2 * sum(sizes) * (len(inner) - 1) // len(inner)
    sent = num_replicas * sum(sizes) * (len(ranks) - 1) // len(ranks)
    return OwnerPlan(
        most_flops=max(flops.values()),
        mean_flops=sum(flops.values()) / len(ranks),
        momentum_bytes=max(momentum.values()),
        round_bytes=2 * max(map(sum, zip(sizes, [*sizes[1:], 0]))),
        message_bytes=received + sent,
        seconds=seconds,
    )
