# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's combined 1F1B schedule with FSDP: results have the bits of the plain schedule."""

import pytest

from tests.support.cuda_model.adapter_runs import GATHERS
from tests.support.pretrain.parity import ALLTOALL, Combination
from tests.support.pretrain.training_runs import pretrain
from tests.support.rank_pool import run_ranks

EVALUATED = "--eval-interval 1 --eval-iters 1"  # by the plain schedule, between two steps


def results(command_line: str) -> object:
    """Job: train, and return losses, gradient norms and evaluations."""
    record = pretrain(command_line)
    return record.steps, record.evaluations


CASES = {"zero0": (2, 0), "zero2": (2, 2), "zero3": (2, 3), "zero3-dp2": (4, 3)}


@pytest.mark.parametrize(("ranks", "level"), CASES.values(), ids=CASES)
def test_the_combined_schedule_has_the_bits_of_the_plain_one(ranks: int, level: int) -> None:
    flags = f"{GATHERS} {EVALUATED} --bf16"
    plain, overlapped = (
        run_ranks(ranks, results, Combination(ranks, "ep2", level, ALLTOALL, each).ours)
        for each in (flags, f"{flags} --overlap-moe-expert-parallel-comm")
    )
    assert plain == overlapped
