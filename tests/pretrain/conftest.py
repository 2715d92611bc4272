# SPDX-License-Identifier: Apache-2.0
"""What every test of the training program needs."""

import pytest

from tests.pretrain.training_runs import write_counting_corpus


@pytest.fixture(scope="session", autouse=True)
def counting_corpus() -> None:
    write_counting_corpus()
