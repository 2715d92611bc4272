# SPDX-License-Identifier: Apache-2.0
"""The example from scratch computes what `fully_shard` and the unsharded model compute."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from examples.fsdp_from_scratch import Residual, Schedule, build_model, loss_of, train
from megatron_fsdp import fully_shard
from tests.support.rank_pool import run_ranks

STEPS = 6


def mean_over_ranks(loss: torch.Tensor) -> float:
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


def losses_of_fully_shard() -> list[float]:
    module = build_model()
    model, optimizer = fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=1e-2),
        fsdp_unit_modules=[Residual, nn.Embedding, nn.Linear],
    )
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step, dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses


def losses_of_one_process(ranks: int) -> list[float]:
    """Train the unsharded model on the batches of all ranks."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = sum(loss_of(model, step, rank) for rank in range(ranks)) / ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def memory_of_a_step() -> tuple[int, int, int]:
    """Return the most units that are whole at a time, those that are whole after it, and all."""
    most = 0

    class WatchedSchedule(Schedule):
        def use(self, number: int, following: int) -> None:
            nonlocal most
            super().use(number, following)
            most = max(most, self.whole())

        def whole(self) -> int:
            return sum(unit.flat.untyped_storage().size() > 0 for unit in self.units)

    model = build_model()
    schedule = WatchedSchedule(model)
    loss_of(model, 0, dist.get_rank()).backward()
    schedule.finish_reductions()
    return most, schedule.whole(), len(schedule.units)


@pytest.mark.always("2")
@pytest.mark.parametrize("ranks", [2, 3])  # three leave padding at the end of a flat buffer
def test_the_losses_are_those_of_fully_shard_and_of_the_unsharded_model(ranks: int) -> None:
    scratch = run_ranks(ranks, train, STEPS)
    assert scratch[0] == scratch[1] and scratch[0][-1] < scratch[0][0]
    sharded = torch.tensor(run_ranks(ranks, losses_of_fully_shard)[0])
    torch.testing.assert_close(torch.tensor(scratch[0]), sharded, rtol=1e-6, atol=0)
    unsharded = torch.tensor(losses_of_one_process(ranks))
    torch.testing.assert_close(torch.tensor(scratch[0]), unsharded, rtol=1e-5, atol=0)


def test_two_units_are_whole_at_a_time_and_none_between_steps() -> None:
    assert run_ranks(2, memory_of_a_step) == [(2, 0, 6)] * 2
