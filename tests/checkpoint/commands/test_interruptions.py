# SPDX-License-Identifier: Apache-2.0
"""Commands that are killed, or whose disk fails, at any change of a file, and are started again."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from click.testing import CliRunner

from megatron.checkpoint.commands import conversion
from megatron.checkpoint.commands.command_line import main
from megatron.checkpoint.commands.conversion import ConversionError, convert
from megatron.checkpoint.core.lazy_tensor import in_memory
from megatron.checkpoint.dcp import dcp_target
from megatron.checkpoint.dcp.dcp_target import DcpTarget, whole
from megatron.checkpoint.store.directory import CONVERSION_IDENTITY as IDENTITY
from megatron.checkpoint.store.directory import TRACKER, OutputDirectory, new_checkpoint
from tests.support.checkpoint import samples
from tests.support.checkpoint.command_runs import TO_FSDP, run, run_json
from tests.support.checkpoint.strikes import Strike, fail, kill, strike_everywhere, tree


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, sample = tmp_path_factory.mktemp("inputs"), samples.torch_dist(samples.DENSE)
    model = folder / "model"
    run(TO_FSDP, sample, folder / "fsdp_dtensor")
    run("convert-to-hf", sample, model)
    (model / "tokenizer.json").write_text("{}")
    return {
        "torch_dist": sample,
        "fsdp_dtensor": folder / "fsdp_dtensor",
        "huggingface": model,
    }


def convert_tensors(folder: Path) -> str:
    """Write a checkpoint of two tensors, and return the error."""
    entries = [whole(name, in_memory(torch.arange(100.0))) for name in ("one", "two")]
    try:
        convert(DcpTarget(entries), new_checkpoint(folder / "out", 3), "a", show_progress=False)
    except ConversionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("strike", "num_parts"), [(kill, 2), (fail, 1)], ids=["kill", "fail"])
def test_a_conversion_that_is_struck_anywhere_is_ended_by_the_next(
    strike: Strike, num_parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_target, "PART_BYTES", 800 // num_parts)
    assert strike_everywhere(convert_tensors, tmp_path, strike) > 20
    assert (tmp_path / "whole" / "out" / TRACKER).read_text() == "3"


@pytest.mark.exhaustive
def test_a_command_that_is_killed_anywhere_is_ended_by_the_same_command(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    words = ["convert-to-hf", str(inputs["fsdp_dtensor"]), "--max-shard-size", "0.00015", "--quiet"]
    words += ["--template", str(inputs["huggingface"])]

    def action(folder: Path) -> str:
        result = CliRunner().invoke(main, [*words, str(folder / "out")])
        return result.output if result.exit_code else ""

    assert strike_everywhere(action, tmp_path, kill) > 15


@pytest.mark.parametrize(
    ("step", "damaged"),
    [
        *(("_publish", each) for each in ("data", "result", "identity", "cut off", "missing")),
        *(("_finish", each) for each in ("data", "result")),
    ],
)
def test_what_a_kill_has_left_is_compared_before_it_is_used(
    step: str,
    damaged: str,
    inputs: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["convert-to-hf", inputs["fsdp_dtensor"], "--max-shard-size", "0.00015", "--quiet"]
    run(*words, tmp_path / "whole")
    with monkeypatch.context() as patches:
        patches.setattr(conversion, step, Mock(side_effect=KeyboardInterrupt))
        run(*words, tmp_path / "out", code=1)
    staging = tmp_path / (".writing_out" if step == "_publish" else "out")
    data = sorted(staging.glob("*.safetensors"))[1]
    file = {"result": staging / ".conversion" / data.name, "identity": staging / IDENTITY}
    path = file.get(damaged, data)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content[:-1] if damaged == "cut off" else content)
    if damaged == "missing":
        path.unlink()
    run(*words, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_the_output_of_another_interrupted_command_is_not_overwritten(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["modify-state-dict", inputs["torch_dist"], tmp_path / "out", "--op"]
    with monkeypatch.context() as patches:
        patches.setattr(OutputDirectory, "track", Mock(side_effect=KeyboardInterrupt))
        run(*words, "remove rng_state", code=1)
    before = tree(tmp_path / "out")
    assert not (tmp_path / "out" / TRACKER).exists()
    assert "exists; nothing is" in run_json(*words, "remove optimizer", code=1)["error"]
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert "exists; nothing is" in run_json(*words, "remove rng_state", code=1)["error"]
    (tmp_path / "out" / "notes.txt").unlink()
    assert tree(tmp_path / "out") == before
    run(*words, "remove rng_state")
    assert (tmp_path / "out" / TRACKER).read_text() == "3"
    assert "exists; nothing is" in run_json(*words, "remove rng_state", code=1)["error"]
