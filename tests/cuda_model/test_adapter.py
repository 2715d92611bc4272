# SPDX-License-Identifier: Apache-2.0
"""Training Megatron-Core models through the adapter on the model: nothing of ours is reported."""

import pytest

from tests.support.cuda_model.adapter_runs import RUNS, reports_of_run
from tests.support.fsdp.reference import Ranks


@pytest.mark.always("pp2")
@pytest.mark.parametrize("name", RUNS)
def test_no_use_of_memory_is_out_of_order_under_megatron_cores_schedules(
    ranks: Ranks, name: str
) -> None:
    for reports in ranks(RUNS[name].ranks, reports_of_run, name):
        assert not reports, "\n".join(reports)
