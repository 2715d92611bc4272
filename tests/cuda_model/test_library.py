# SPDX-License-Identifier: Apache-2.0
"""Training by `fully_shard` on the model of a CUDA device: nothing is reported."""

import pytest

from tests.support.cuda_model.scenarios import SCENARIOS, reports_of
from tests.support.fsdp.reference import Ranks


@pytest.mark.always(
    "level3", "level1 bf16", "slots", "objects by gloo, owners", "high priority level3"
)
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_use_of_memory_is_out_of_order(ranks: Ranks, name: str) -> None:
    for reports in ranks(SCENARIOS[name].num_ranks, reports_of, [name]):
        assert not reports[name], "\n".join(reports[name])
