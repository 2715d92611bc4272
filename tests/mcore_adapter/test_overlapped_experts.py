# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's combined 1F1B schedule with FSDP: results have the bits of the plain schedule."""

import pytest

from tests.support.cuda_model.adapter_runs import GATHERS
from tests.support.pretrain.parity import ALLTOALL, Combination
from tests.support.pretrain.training_runs import pretrain
from tests.support.rank_pool import run_ranks


def reported(command_line: str) -> str:
    """Job: train, and return what the run reported of losses and gradient norms."""
    return str(pretrain(command_line))


@pytest.mark.parametrize("level", [1, 3], ids=["zero1", "zero3"])
def test_the_combined_schedule_has_the_bits_of_the_plain_one(level: int) -> None:
    plain, overlapped = (
        run_ranks(
            2, reported, Combination(2, "ep2", level, ALLTOALL, f"{GATHERS} --bf16 {more}").ours
        )
        for more in ("", "--overlap-moe-expert-parallel-comm")
    )
    assert plain == overlapped
