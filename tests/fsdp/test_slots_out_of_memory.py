# SPDX-License-Identifier: Apache-2.0
"""Memory slots that do not fit in memory are an error with the bytes, unless that is allowed."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron.fsdp.module import builder
from tests.fsdp.test_double_buffer import NUM_LAYERS, SLOTS, sharded_chain, train, weights_of
from tests.support.fsdp.reference import Ranks
from tests.support.fsdp.wrong_calls import message_of


def run_out_of_memory_on_rank_1(**settings: Any) -> str | list[torch.Tensor]:
    """Train where the second rank cannot allocate slots; return the error or the weights."""
    failing = mock.patch.object(builder, "allocate_slots", side_effect=RuntimeError("no memory"))
    if dist.get_rank() == 1:
        failing.start()
    try:
        model, optimizer = sharded_chain(**settings)
        if "fsdp_db_use_persist_buf_on_alloc_fail" not in settings:
            return message_of(RuntimeError, train, model, optimizer, range(NUM_LAYERS))
        train(model, optimizer, *[range(NUM_LAYERS)] * 3)
        return weights_of(model)
    finally:
        mock.patch.stopall()


def test_slots_that_one_rank_cannot_allocate_are_an_error_on_every_rank(ranks: Ranks) -> None:
    messages = ranks(2, run_out_of_memory_on_rank_1, **SLOTS)
    assert messages[0] == messages[1]
    assert "gathered weights cannot be allocated: 2 of 320, 320 bytes, 640 in all" in messages[0]
    assert "local gradients cannot be allocated: 1 of 320 bytes, 320 in all" in messages[0]


def train_on_after_the_error() -> tuple[list[str], list[int], list[torch.Tensor]]:
    """Go on after the error of slots, as loops that skip a batch do, until there is memory."""
    allocate = builder.allocate_slots
    num_failures = 3 * dist.get_rank()  # of weights and of gradients, and then of weights alone

    def fail_at_first(device: torch.device, sizes: Sequence[int]) -> list[torch.Tensor]:
        nonlocal num_failures
        num_failures -= 1
        if num_failures >= 0:
            raise RuntimeError("no memory")
        return allocate(device, sizes)

    with mock.patch.object(builder, "allocate_slots", fail_at_first):
        model, optimizer = sharded_chain(**SLOTS)
    messages = []
    for _ in range(2):
        messages.append(message_of(RuntimeError, train, model, optimizer, range(NUM_LAYERS)))
        optimizer.zero_grad()
    train(model, optimizer, range(NUM_LAYERS))
    return messages, [len(sizes) for sizes in model.memory_slots.values()], weights_of(model)


def repeat_a_step() -> list[torch.Tensor]:
    model, optimizer = sharded_chain()
    for _ in range(3):
        train(model, optimizer, range(NUM_LAYERS))
    return weights_of(model)


def test_no_rank_trains_on_without_slots_after_the_error(ranks: Ranks) -> None:
    for (messages, slots, weights), expected in zip(
        ranks(2, train_on_after_the_error), ranks(2, repeat_a_step)
    ):
        assert all("gathered weights cannot be allocated: 2 of 320" in each for each in messages)
        assert ["local gradients" in each for each in messages] == [True, False]
        assert slots == [2, 1]
        assert all(map(torch.equal, weights, expected))


def train_plainly() -> list[torch.Tensor]:
    model, optimizer = sharded_chain()
    train(model, optimizer, *[range(NUM_LAYERS)] * 3)
    return weights_of(model)


def test_a_rank_without_memory_for_slots_trains_with_storage_of_its_own(ranks: Ranks) -> None:
    allowing = SLOTS | {"fsdp_db_use_persist_buf_on_alloc_fail": True}
    for weights, expected in zip(
        ranks(2, run_out_of_memory_on_rank_1, **allowing), ranks(2, train_plainly)
    ):
        assert all(map(torch.equal, weights, expected))
