# SPDX-License-Identifier: Apache-2.0
"""Loads of Megatron-LM's loop that go on at another iteration."""

import argparse
from pathlib import Path

import pytest

from megatron.mcore_adapter.megatron_lm import loop_checkpoints
from megatron.mcore_adapter.megatron_lm.loop_checkpoints import at_iteration
from megatron.mcore_adapter.run.errors import RunError
from megatron.mcore_adapter.run.run_state import Progress


def test_the_place_in_the_data_follows_from_the_iteration_where_batches_are_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved = argparse.Namespace(global_batch_size=4)
    monkeypatch.setattr(loop_checkpoints, "stored_arguments", lambda source: saved)
    progress = Progress(6, 24, 2, 8, 1.0)
    assert at_iteration(progress, 2, Path("saved"), 4) == Progress(2, 8, 0, 8, 1.0)
    with pytest.raises(RunError, match="--global-batch-size 4"):
        at_iteration(progress, 2, Path("saved"), 8)
