# SPDX-License-Identifier: Apache-2.0
"""Commands that are killed, or whose disk fails, at any change of a file, and are started again."""

import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
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
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.integrity.manifest import MANIFEST
from megatron.checkpoint.store.directory import CONVERSION_IDENTITY as IDENTITY
from megatron.checkpoint.store.directory import METADATA, TRACKER, OutputDirectory, new_checkpoint
from tests.support.checkpoint import samples
from tests.support.checkpoint.command_runs import TO_FSDP, TO_TORCH_DIST, run, run_json

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")
"""Audit events of changes, beside `open` for writing. An fsync has none and is patched."""

Strike = Callable[..., None]


class Strikes:
    """A hook on the changes of files below a folder, which strikes at one of them."""

    def __init__(self, folder: Path, strike: Strike, at: int):
        self.folder, self.strike, self.at = str(folder), strike, at
        self.changes = 0
        fsync = os.fsync

        def counted(descriptor: int) -> None:
            self.count()
            fsync(descriptor)

        os.fsync = counted
        sys.addaudithook(self.see)

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        path = arguments[0] if arguments else None
        is_change = event in CHANGES
        if event == "open":
            is_change = isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if is_change and isinstance(path, (str, Path)) and self.is_below(str(path)):
            self.count(str(path))

    def is_below(self, path: str) -> bool:
        # `shutil.rmtree` gives names inside of a directory that it has opened.
        return path.startswith(self.folder) or not os.path.isabs(path)

    def count(self, *name: str) -> None:
        self.changes += 1
        if self.changes == self.at:
            self.strike(*name)


def kill(*name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*name: str) -> None:
    """Fail as a disk does: errors of fsync have no name of a file."""
    raise OSError(errno.EIO, os.strerror(errno.EIO), *name)


def struck(action: Callable[[], str], folder: Path, strike: Strike, at: int) -> dict[str, Any]:
    """Run an action in a forked process that is struck at a change of a file below a folder.

    Returns:
        Its error, and the number of changes; nothing if it was killed.
    """
    told = folder.parent / "told"
    told.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            strikes = Strikes(folder, strike, at)
            error = action()
            strikes.at = 0
            told.write_text(json.dumps({"error": error, "changes": strikes.changes}))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return json.loads(told.read_text()) if told.exists() else {}


def strike_everywhere(
    action: Callable[[Path], str], root: Path, strike: Strike, rest: Callable[[Path], str]
) -> int:
    """Strike an action at each change, and end it by another; return the number of changes.

    Actions are given the folder to work in, and return their error.
    """
    (whole := root / "whole").mkdir()
    changes = struck(lambda: action(whole), whole, strike, 0)["changes"]
    for at in range(1, changes + 1):
        (folder := root / str(at)).mkdir()
        first = struck(lambda folder=folder: action(folder), folder, strike, at)
        if strike is not kill and first["error"]:
            assert "Input/output error: '" in first["error"], (at, first)
        if not first or first["error"]:
            assert rest(folder) == ""
        assert tree(folder) == tree(whole) and are_sound(folder), at
        shutil.rmtree(folder)
    return changes


def tree(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder; of those with an identifier of the save, the names."""
    found = {}
    for path in sorted(folder.rglob("*")):
        has_identifier = path.name in (METADATA, MANIFEST) or path.is_dir()
        content = b"" if has_identifier else path.read_bytes()
        found[path.relative_to(folder).as_posix()] = content
    return found


def are_sound(folder: Path) -> bool:
    """Compare all checkpoints below a folder with their manifests."""
    manifests = list(folder.rglob(MANIFEST))
    return not any(StoredCheckpoint(path.parent).damaged_files() for path in manifests)


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
    assert strike_everywhere(convert_tensors, tmp_path, strike, convert_tensors) > 20
    assert (tmp_path / "whole" / "out" / TRACKER).read_text() == "3"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("words", "source"),
    [
        ([TO_TORCH_DIST], "fsdp_dtensor"),
        (["convert-to-hf", "--max-shard-size", "0.00015", "--template"], "fsdp_dtensor"),
        (["modify-state-dict", "--op", "remove rng_state"], "torch_dist"),
    ],
    ids=["to torch_dist", "to hf", "edit"],
)
def test_a_command_that_is_killed_anywhere_is_ended_by_the_same_command(
    words: list[str], source: str, inputs: dict[str, Path], tmp_path: Path
) -> None:
    if words[-1] == "--template":
        words = [*words, str(inputs["huggingface"])]

    def action(folder: Path) -> str:
        given = [*words, str(inputs[source]), str(folder / "out"), "--quiet"]
        result = CliRunner().invoke(main, given)
        return result.output if result.exit_code else ""

    assert strike_everywhere(action, tmp_path, kill, action) > 15


@pytest.mark.parametrize("damaged", ["data", "result", "identity", "cut off", "missing"])
def test_what_a_kill_has_left_is_compared_before_it_is_used(
    damaged: str, inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["convert-to-hf", inputs["fsdp_dtensor"], "--max-shard-size", "0.00015", "--quiet"]
    run(*words, tmp_path / "whole")
    with monkeypatch.context() as patches:
        patches.setattr(conversion, "_publish", Mock(side_effect=KeyboardInterrupt))
        run(*words, tmp_path / "out", code=1)
    (staging,) = tmp_path.glob(".writing_*")
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
