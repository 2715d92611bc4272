# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose optimizer layouts several files of tests read."""

from pathlib import Path

import pytest

from tests.support.checkpoint import samples
from tests.support.checkpoint.torch_dist.stored_optimizers import (
    DISTRIBUTED,
    ZERO,
    File,
    written,
)
from tests.support.pretrain.parity import GPT2, Combination
from tests.support.pretrain.training_runs import write_counting_corpus


@pytest.fixture(scope="session", autouse=True)
def counting_corpus() -> None:
    write_counting_corpus()


@pytest.fixture
def space() -> File:
    return File(samples.torch_dist("v015_dense_tp2_dp2_model_space"))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of two pipeline stages with tied embeddings: as buckets, and as objects."""
    found = {name: tmp_path_factory.mktemp("written") for name in ("buckets", "objects")}
    for name, folder in found.items():
        written(
            Combination(2, "pp2", 0, GPT2, DISTRIBUTED), folder, ZERO if name == "objects" else None
        )
    return found
