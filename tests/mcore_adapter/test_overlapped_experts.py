# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's combined 1F1B schedule with FSDP: results have the bits of the plain schedule."""

from unittest.mock import patch

import pytest

from megatron_fsdp import MegatronFSDP
from tests.support.cuda_model.adapter_runs import GATHERS
from tests.support.pretrain.parity import ALLTOALL, Combination
from tests.support.pretrain.training_runs import pretrain
from tests.support.rank_pool import run_ranks

EVALUATED = "--eval-interval 1 --eval-iters 1"  # by the plain schedule, between two steps


def results(command_line: str) -> tuple[object, bool]:
    """Job: train; return losses, norms and evaluations, and whether a schedule drove the engine."""
    pre_forward = MegatronFSDP.pre_forward
    with patch.object(MegatronFSDP, "pre_forward", autospec=True, side_effect=pre_forward) as calls:
        record = pretrain(command_line)
    return (record.steps, record.evaluations), calls.called


CASES = {
    "zero0": (2, "ep2", 0),
    "zero2": (2, "ep2", 2),
    "zero3": (2, "ep2", 3),
    "zero3-dp2": (4, "ep2", 3),
    "zero3-vpp2": (4, "pp2 vpp2 ep2", 3),
}


@pytest.mark.parametrize(("ranks", "layout", "level"), CASES.values(), ids=CASES)
def test_the_combined_schedule_has_the_bits_of_the_plain_one(
    ranks: int, layout: str, level: int
) -> None:
    flags = f"{GATHERS} {EVALUATED} --bf16"
    plain, overlapped = (
        run_ranks(ranks, results, Combination(ranks, layout, level, ALLTOALL, each, layers=4).ours)
        for each in (flags, f"{flags} --overlap-moe-expert-parallel-comm")
    )
    for (expected, is_driven), (found, drives) in zip(plain, overlapped, strict=True):
        assert (found, is_driven, drives) == (expected, False, True)
