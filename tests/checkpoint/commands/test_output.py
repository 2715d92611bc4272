# SPDX-License-Identifier: Apache-2.0
"""Outputs of conversions: they overwrite nothing, and continue what the same command began."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from megatron.checkpoint.commands.command_line import main
from megatron.checkpoint.dcp import dcp_target
from megatron.checkpoint.store import directory, durable
from tests.support.checkpoint import samples, small_models
from tests.support.checkpoint.command_runs import TO_FSDP, TO_TORCH_DIST, run_json
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


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_target, "PART_BYTES", 1 << 14)


@contextmanager
def recorded_parts(interrupted_after: int | None = None) -> Iterator[list[str]]:
    """List the parts that conversions finish in this context; interrupt them after some."""
    write, parts = durable.write_bytes, []

    def write_and_list(path: Path, content: bytes) -> None:
        write(path, content)
        if path.parent.name == directory.CONVERSION_JOURNAL and not path.name.startswith("."):
            parts.append(path.name)
            if len(parts) == interrupted_after:
                raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "write_bytes", write_and_list)
        yield parts


def interrupted(*words: str | Path) -> list[str]:
    """Run a command that is interrupted after three parts, and return their names."""
    with recorded_parts(interrupted_after=3) as parts:
        assert CliRunner().invoke(main, [*map(str, words), "--quiet"]).exit_code == 1
    assert len(parts) == 3
    return parts


def finished(*words: str | Path) -> list[str]:
    """Run a command and return the names of the parts that it has written."""
    with recorded_parts() as parts:
        run_json(*words)
    return parts


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write the dense sample in every format."""
    sample, folder = samples.torch_dist(samples.DENSE), tmp_path_factory.mktemp("converted")
    run_json("convert-to-hf", sample, folder / "model")
    run_json(TO_FSDP, sample, folder / "fsdp_dtensor")
    return {
        "torch_dist": sample,
        "fsdp_dtensor": folder / "fsdp_dtensor",
        "huggingface": folder / "model",
    }


@pytest.fixture
def inputs(converted: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """Copy the model of Hugging Face, which a test may change."""
    model = shutil.copytree(converted["huggingface"], tmp_path / "model")
    return {**converted, "huggingface": model}


@pytest.mark.always("to hf")
@pytest.mark.parametrize(
    ("command", "source", "options"),
    [
        (TO_FSDP, "torch_dist", []),
        (TO_TORCH_DIST, "fsdp_dtensor", []),
        ("convert-to-hf", "fsdp_dtensor", ["--max-shard-size", "0.00001"]),
        ("convert-from-hf", "huggingface", []),
        ("modify-state-dict", "torch_dist", ["--op", "remove rng_state"]),
    ],
    ids=["to fsdp_dtensor", "to torch_dist", "to hf", "from hf", "edit"],
)
def test_an_interrupted_command_continues(
    command: str, source: str, options: list[str], inputs: dict[str, Path], tmp_path: Path
) -> None:
    words = [command, inputs[source], tmp_path / "out", *options]
    done = interrupted(*words)
    assert [path.name for path in (tmp_path / "out").parent.glob("out/iter*")] == []
    rest = finished(*words)
    whole = finished(command, inputs[source], tmp_path / "whole", *options)
    assert rest and sorted(done + rest) == sorted(whole)
    assert not list(tmp_path.glob("**/.writing*")) and not list(tmp_path.glob("**/.conversion"))
    of_whole = {path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*")}
    assert {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*")} == (
        of_whole
    )
    for name in of_whole:
        if name.suffix in (".distcp", ".safetensors"):
            assert (tmp_path / "out" / name).read_bytes() == (
                tmp_path / "whole" / name
            ).read_bytes()
    if command != "convert-to-hf":
        assert run_json("verify", tmp_path / "out")["sound"]


@pytest.mark.seldom("options0")
@pytest.mark.parametrize("options", [["--params-dtype", "fp16"], ["--format", "torch_dist"]])
def test_a_command_with_other_arguments_begins_anew(
    options: list[str], inputs: dict[str, Path], tmp_path: Path
) -> None:
    interrupted("convert-from-hf", inputs["huggingface"], tmp_path / "out")
    after = finished("convert-from-hf", inputs["huggingface"], tmp_path / "out", *options)
    whole = finished("convert-from-hf", inputs["huggingface"], tmp_path / "whole", *options)
    assert after == whole
    assert run_json("diff", tmp_path / "out", tmp_path / "whole")["same"]


def test_a_conversion_of_changed_files_begins_anew(inputs: dict[str, Path], tmp_path: Path) -> None:
    model = inputs["huggingface"]
    interrupted("convert-from-hf", model, tmp_path / "out")
    tensors = {name: tensor + 1 for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    run_json("convert-from-hf", model, tmp_path / "out")
    assert run_json("diff", model, tmp_path / "out")["same"]


@pytest.mark.exhaustive
def test_a_template_that_has_changed_begins_anew(inputs: dict[str, Path], tmp_path: Path) -> None:
    template = inputs["huggingface"]
    words = ["convert-to-hf", inputs["torch_dist"], tmp_path / "out", "--template", template]
    words += ["--max-shard-size", "0.00001"]
    done = interrupted(*words)
    (template / "tokenizer.json").write_text("{}")
    assert set(done) < set(finished(*words))
