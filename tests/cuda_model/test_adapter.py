# SPDX-License-Identifier: Apache-2.0
"""Training Megatron-Core models through the adapter on the model: nothing of ours is reported."""

from pathlib import Path

import pytest

from benchmarks.stream_defects.table import DEFECTS
from tests.support.fsdp.reference import Ranks
from tests.support.mcore_adapter.runs_on_cuda_model import (
    RUNS,
    WITH_ENGINE,
    reports_of_run,
    reports_of_unawaited_copies,
    reports_with,
    run_with_the_drop_in,
)
from tests.support.pretrain.training_runs import write_counting_corpus
from tests.support.transformer_engine.ranks import ranks as ranks_with_engine


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RUNS)
def test_no_use_of_memory_is_out_of_order_under_megatron_cores_schedules(
    ranks: Ranks, name: str, tmp_path: Path
) -> None:
    for reports in ranks(RUNS[name].ranks, reports_of_run, name, str(tmp_path)):
        assert not reports, "\n".join(reports)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WITH_ENGINE)
def test_no_use_of_memory_is_out_of_order_with_layers_of_transformer_engine(
    name: str, tmp_path: Path
) -> None:
    write_counting_corpus()
    run = ranks_with_engine(WITH_ENGINE[name].ranks)
    for reports in run(reports_of_run, name, str(tmp_path)):
        assert not reports, "\n".join(reports)


@pytest.mark.exhaustive
def test_a_copy_that_the_optimizer_does_not_wait_for_is_reported(
    ranks: Ranks, tmp_path: Path
) -> None:
    for reports in ranks(2, reports_of_unawaited_copies, str(tmp_path)):
        assert any("staging.py" in report for report in reports)


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", ["optim", "optim_grads_params"])
def test_nor_with_the_drop_in_in_the_stand_in_for_megatron_lms_loop(
    ranks: Ranks, level: str, tmp_path: Path
) -> None:
    settings = {"data_parallel_sharding_strategy": level, "bf16": True}
    for reports, losses, plain in ranks(2, run_with_the_drop_in, str(tmp_path), **settings):
        assert not reports, "\n".join(reports)
        assert losses == plain


@pytest.mark.exhaustive
def test_a_defect_is_reported_there(ranks: Ranks, tmp_path: Path) -> None:
    (defect,) = (each for each in DEFECTS if each.name.startswith("gathers overtake the step"))
    for reports in ranks(2, reports_with, defect, str(tmp_path)):
        assert any("on two streams that nothing orders" in report for report in reports)
