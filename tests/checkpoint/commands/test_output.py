# SPDX-License-Identifier: Apache-2.0
"""Outputs of conversions: they overwrite nothing, and a changed input starts them anew."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from megatron.checkpoint.commands import conversion
from megatron.checkpoint.commands.command_line import main
from megatron.checkpoint.dcp import dcp_target
from megatron.checkpoint.store import directory
from tests.support.checkpoint import samples, small_models
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


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Export the dense sample as a Hugging Face model."""
    run_json("convert-to-hf", samples.torch_dist(samples.DENSE), tmp_path / "model")
    return tmp_path / "model"


def test_a_conversion_of_changed_files_begins_anew(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_target, "PART_BYTES", 1 << 14)
    note, done = conversion._note, []

    def interrupt(path: Path, result: Any) -> None:
        note(path, result)
        done.append(path)
        if len(done) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "_note", interrupt)
    assert (
        CliRunner()
        .invoke(main, ["convert-from-hf", str(model), str(tmp_path / "out"), "--quiet"])
        .exit_code
        == 1
    )
    assert len(done) == 3 and all(path.exists() for path in done)
    monkeypatch.setattr(conversion, "_note", note)
    tensors = {name: tensor + 1 for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    run_json("convert-from-hf", model, tmp_path / "out")
    assert run_json("diff", model, tmp_path / "out")["same"]
