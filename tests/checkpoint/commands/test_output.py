# SPDX-License-Identifier: Apache-2.0
"""Outputs of conversions overwrite nothing."""

from pathlib import Path

import pytest

from megatron.checkpoint.store import directory
from tests.support.checkpoint import small_models
from tests.support.checkpoint.command_runs import TO_FSDP, run_json
from tests.support.checkpoint.small_models import shapes_of, state_of


@pytest.mark.parametrize("command", [TO_FSDP, "modify-state-dict"])
def test_an_existing_run_keeps_its_tracker(command: str, tmp_path: Path) -> None:
    path = small_models.write(state_of(shapes_of()), tmp_path / "in")
    (tmp_path / "run" / "iter_0000005").mkdir(parents=True)
    tracker = tmp_path / "run" / directory.TRACKER
    tracker.write_text("5")
    operations = ["--op", "remove rng_state"] if command == "modify-state-dict" else []
    error = run_json(command, path, tmp_path / "run" / "iter_0000003", *operations, code=1)["error"]
    assert f"{tracker} exists" in error
    assert tracker.read_text() == "5" and not (tmp_path / "run" / "iter_0000003").exists()


@pytest.mark.parametrize(
    "inside", [".", "out", "out/iter_0000003"], ids=["itself", "inside", "an iteration inside"]
)
def test_an_output_inside_of_the_input_is_refused(inside: str, tmp_path: Path) -> None:
    path = small_models.write(state_of(shapes_of()), tmp_path / "in")
    before = sorted(path.rglob("*"))
    error = run_json(TO_FSDP, path, path / inside, code=1)["error"]
    assert ("exists" if inside == "." else "is inside of the checkpoint that is converted") in error
    assert sorted(path.rglob("*")) == before
