# SPDX-License-Identifier: Apache-2.0
"""Graphs of units and of iterations have the bits of trainings without; nothing is reported."""

import pytest
import torch

from tests.support.cuda_model.graph_runs import trained
from tests.support.fsdp.reference import Ranks
from tests.support.pairwise import pairwise

REPLAYS = {"units": 3 * 3 * 2, "iteration": 3}
"""Of three steps."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.always("level=3-units-*")
@pytest.mark.parametrize(
    ("level", "captures", "dtype_name"),
    pairwise(level=[0, 1, 2, 3], captures=REPLAYS, dtype_name=DTYPES),
)
def test_graphs_have_the_bits_of_a_training_without(
    ranks: Ranks, captures: str, level: int, dtype_name: str
) -> None:
    dtype = DTYPES[dtype_name]
    settings = {"zero_dp_strategy": level, "cuda_graph_mode": True}
    plain = ranks(2, trained, "", "flat", dtype, **settings)
    graphed = ranks(2, trained, captures, "flat", dtype, **settings)
    for (losses, weights, none, _), (others, other_weights, replays, reports) in zip(
        plain, graphed, strict=True
    ):
        assert not reports, "\n".join(reports)
        assert (none, replays) == (0, REPLAYS[captures])
        assert all(map(torch.equal, losses, others))
        assert all(map(torch.equal, weights, other_weights))


@pytest.mark.exhaustive
def test_weights_without_fixed_addresses_are_reported(ranks: Ranks) -> None:
    message = "uses memory that was released since the capture"
    with pytest.raises(Exception, match=message):
        ranks(2, trained, "units", "flat", torch.float32, zero_dp_strategy=3)
