# SPDX-License-Identifier: Apache-2.0
"""Both generations of the interface train alike: --megatron-fsdp-version 1 and 2."""

import pytest

from tests.support.pretrain.training_runs import SMALL, Record, pretrain
from tests.support.rank_pool import run_ranks

LINE = f"{SMALL} --use-megatron-fsdp --train-iters 4 --eval-iters 1 --eval-interval 2"


def run_of(version: int, ranks: int, flags: str) -> Record:
    line = f"{LINE} --megatron-fsdp-version {version} {flags}"
    return run_ranks(ranks, pretrain, line)[0]


@pytest.mark.always("zero3-*", "zero1-*")
@pytest.mark.parametrize(
    "ranks, flags",
    [
        pytest.param(2, "--overlap-grad-reduce --overlap-param-gather", id="zero3-overlap"),
        pytest.param(
            *(2, "--bf16 --data-parallel-sharding-strategy optim --overlap-grad-reduce"),
            id="zero1-bf16",
        ),
        pytest.param(4, "--pipeline-model-parallel-size 2 --overlap-grad-reduce", id="pipeline"),
    ],
)
def test_losses_norms_and_evaluations_are_the_same(ranks: int, flags: str) -> None:
    first, second = (run_of(version, ranks, flags) for version in (1, 2))
    assert len(first.losses) == 4 and first.losses[-1] != first.losses[0]
    assert second.losses == first.losses
    assert second.column("grad-norm") == first.column("grad-norm")
    assert second.evaluations == first.evaluations
