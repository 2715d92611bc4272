# SPDX-License-Identifier: Apache-2.0
"""Data and runs that the tests of the training program share."""

from pathlib import Path

import pytest

from tests.pretrain.saved_runs import LINE
from tests.pretrain.training_runs import Record, train, write_counting_corpus
from tests.rank_pool import run_ranks


@pytest.fixture(scope="session", autouse=True)
def counting_corpus() -> None:
    write_counting_corpus()


@pytest.fixture(scope="session")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record]:
    """Six steps at level 3 on two ranks, saved at three and six, without dropout."""
    folder = tmp_path_factory.mktemp("fp32")
    return folder, run_ranks(2, train, f"{LINE} --save {folder} --save-interval 3")[0][0]
