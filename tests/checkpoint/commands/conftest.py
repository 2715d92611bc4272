# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that the tests of several commands read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from tests.support.checkpoint import small_models


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write the same run in both formats; return the directories above the iteration."""
    root = tmp_path_factory.mktemp("small")
    state = small_models.state_of(small_models.shapes_of(layers=["gated"]), num_layers=1)
    for form in ("torch_dist", "fsdp_dtensor"):
        small_models.write(state, root / form, form)
    return {form: root / form for form in ("torch_dist", "fsdp_dtensor")}


@pytest.fixture
def plain(tmp_path: Path) -> Callable[..., Path]:
    def save(name: str, **tensors: Any) -> Path:
        dcp.save(tensors, checkpoint_id=tmp_path / name, no_dist=True)
        return tmp_path / name

    return save
