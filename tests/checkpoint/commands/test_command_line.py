# SPDX-License-Identifier: Apache-2.0
"""The checkpoint command line: help, wrong usage, errors, and the commands that only look."""

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.commands import conversion_commands
from megatron.checkpoint.commands.command_line import main
from tests.support.checkpoint import small_models
from tests.support.checkpoint.changed_checkpoints import without_manifest
from tests.support.checkpoint.command_runs import TO_FSDP, TO_TORCH_DIST, run, run_json
from tests.support.checkpoint.crafted_files import archive, touch

COMMANDS = f"""inspect print-tensor print-torch-dcp-in-json verify compare-two-checkpoint diff
    modify-state-dict {TO_FSDP} {TO_TORCH_DIST} convert-to-hf convert-from-hf""".split()


def test_every_command_has_help() -> None:
    for command in COMMANDS:
        text = run(command, "--help").stdout
        assert "--json" in text and "--enable-msc" in text and len(text.splitlines()) > 5, command


def test_all_commands_are_there() -> None:
    assert sorted(main.commands) == sorted(COMMANDS)
    published = {
        TO_FSDP: """swiglu swiglu_modules param_to_param_group_map_json rename_mtp_keys enable_msc
            output_optimizer_state_prefix output_model_weight_prefix oom_traceback""",
        "inspect": "not_ignore_param_to_group_meta enable_msc",
        "modify-state-dict": "operations enable_msc",
    }
    for command, options in published.items():
        names = {parameter.name for parameter in main.commands[command].params}
        assert set(options.split()) <= names


@pytest.mark.parametrize(
    "words", ["nothing", "inspect", "diff one", "inspect x --unknown", "inspect x --enable-msc"]
)
def test_wrong_usage_ends_with_2(words: str) -> None:
    assert "Error" in run(*words.split(), code=2).output


@pytest.mark.parametrize(
    "words", ["--help", "inspect --help", "inspect PATH", "verify PATH --json"]
)
def test_standard_output_on_a_full_disk_is_one_message(
    words: str, plain: Callable[..., Path], tmp_path: Path
) -> None:
    path = plain("checkpoint", tensor=torch.ones(2))
    child = os.fork()
    if child == 0:
        try:
            errors = (tmp_path / "errors").open("w")
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
            os.dup2(errors.fileno(), 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            try:
                main(words.replace("PATH", str(path)).split())
            except SystemExit as end:
                sys.stdout.flush()  # as the end of the process does
                errors.write(f"exit code {end.code}")
                errors.flush()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    text = (tmp_path / "errors").read_text()
    assert text.count("No space left on device: 'standard output'") == 1 and "Trace" not in text
    assert text.endswith("exit code 1")


def arguments(command: str, path: Path, out: Path) -> list[Any]:
    """Of a command that reads ``path``."""
    more = {
        "print-tensor": ["key"],
        "modify-state-dict": [out, "--op", "remove x"],
        "diff": [path],
        "compare-two-checkpoint": [path],
    }
    return [command, path, *more.get(command, [out] if command.startswith("convert") else [])]


BROKEN: dict[str, Callable[[Path], Any]] = {
    "absent": lambda path: None,
    "a file": lambda path: path.write_text("x"),
    "empty": lambda path: path.mkdir(),
    "no pickle": lambda path: write_metadata(path, b"x"),
    "hostile": lambda path: write_metadata(path, touch(path / "executed")),
    "another pickle": lambda path: write_metadata(path, pickle.dumps([1])),
    "unreadable": lambda path: path.symlink_to(path),
}


def write_metadata(path: Path, content: bytes) -> None:
    path.mkdir()
    (path / ".metadata").write_bytes(content)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_checkpoint_ends_with_1_and_one_object(command: str, tmp_path: Path) -> None:
    for kind, make in BROKEN.items():
        path = tmp_path / kind
        make(path)
        result = run_json(*arguments(command, path, tmp_path / "out"), code=1)
        assert set(result) == {"error"} and len(result["error"]) > 20, kind
        assert not (tmp_path / "out").exists() and not (path / "executed").exists(), kind


def test_without_json_the_error_goes_to_stderr(tmp_path: Path) -> None:
    result = run("verify", tmp_path / "absent", code=1)
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert str(tmp_path / "absent") in result.stderr


@pytest.mark.parametrize(
    "command", [TO_FSDP, "verify", "diff", "compare-two-checkpoint", "convert-to-hf"]
)
def test_a_hostile_common_file_is_refused_by_name(
    command: str, small: dict[str, Path], tmp_path: Path
) -> None:
    copy, marker = shutil.copytree(small["torch_dist"], tmp_path / "copy"), tmp_path / "executed"
    (without_manifest(copy) / "iter_0000003" / "common.pt").write_bytes(archive(touch(marker)))
    result = run_json(*arguments(command, copy, tmp_path / "out"), code=1)
    assert "posix.system" in str(result) and "common.pt" in str(result)
    assert not marker.exists() and not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_files_that_may_not_be_read_are_an_error(small: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(small["torch_dist"], tmp_path / "copy")
    (copy / "iter_0000003" / "__0_0.distcp").chmod(0)
    assert "PermissionError" in run_json(TO_FSDP, copy, tmp_path / "out", code=1)["error"]


def test_an_unexpected_kind_of_content_is_one_message(
    small: dict[str, Path], tmp_path: Path
) -> None:
    copy = without_manifest(shutil.copytree(small["torch_dist"], tmp_path / "copy"))
    torch.save(
        {"optimizer": {"optimizer": {"param_groups": 7}}, "args": 3},
        copy / "iter_0000003" / "common.pt",
    )
    for words in ([TO_FSDP, copy, tmp_path / "out"], ["diff", copy, copy]):
        assert "Traceback" not in run_json(*words, code=1)["error"]


def test_memory_that_runs_out_is_one_message(
    small: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*args: Any, **options: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(conversion_commands.fsdp_dtensor, "target", exhausted)
    assert "memory" in run_json(TO_FSDP, small["torch_dist"], tmp_path / "out", code=1)["error"]
    assert (
        "Traceback"
        in run(TO_FSDP, small["torch_dist"], tmp_path / "out", "--oom-traceback", code=1).stderr
    )


def test_inspect_lists_keys_shapes_dtypes_and_sizes(small: dict[str, Path]) -> None:
    text = run("inspect", small["torch_dist"]).stdout
    assert "format torch_dist" in text
    row = next(
        line
        for line in text.splitlines()
        if line.startswith("decoder.layers.mlp.linear_fc1.weight")
    )
    assert "bfloat16" in row and "[1, 24, 8]" in row
    result = run_json("inspect", small["fsdp_dtensor"])
    entries = {entry["key"]: entry for entry in result["entries"]}
    assert result["format"] == "fsdp_dtensor"
    entry = entries["model.module.decoder.layers.0.mlp.linear_fc1.weight_w"]
    assert (entry["dtype"], entry["shape"]) == ("float32", [12, 8]) and entry["bytes"] > 384
    assert entries["args"]["dtype"] == "object" and entries["args"]["shape"] is None
    assert not any("param_to_group_meta" in key for key in entries)
    everything = run_json("inspect", small["fsdp_dtensor"], "--not-ignore-param-to-group-meta")[
        "entries"
    ]
    assert sum("param_to_group_meta" in entry["key"] for entry in everything) > 100


def test_print_tensor_prints_tensors_and_objects(small: dict[str, Path]) -> None:
    path = small["fsdp_dtensor"]
    expected = small_models.values("output_layer.weight", (32, 8))
    result = run_json("print-tensor", path, "model.module.output_layer.weight")
    assert torch.equal(torch.tensor(result["value"]), expected)
    assert result["max"] == expected.max().item() and result["shape"] == [32, 8]
    assert "shape [32, 8]" in run("print-tensor", path, "model.module.output_layer.weight").stdout
    assert run_json("print-tensor", path, "opt_param_scheduler.max_lr")["value"] == 0.5
    assert "Namespace" in run("print-tensor", path, "args").stdout
    assert "Namespace" in run_json("print-tensor", path, "args")["value"]
    step = run_json(
        "print-tensor", path, "optimizer.state.module.module.module.output_layer.weight.step"
    )
    assert step["value"] == 3.0 and step["shape"] == []
    missing = run_json("print-tensor", path, "output_layer", code=1)["error"]
    assert "did you mean" in missing and "model.module.output_layer.weight" in missing


def test_print_tensor_prints_every_kind(plain: Callable[..., Path]) -> None:
    path = plain(
        "odd",
        empty=torch.empty(0, 2),
        nan=torch.tensor([float("nan"), float("inf")]),
        flags=torch.tensor([True]),
        complex=torch.tensor([1 + 2j]),
        half=torch.ones(2, dtype=torch.bfloat16),
        none=None,
        odd=[{(1, 2): 1.0}],
    )
    for key in ("empty", "nan", "flags", "complex", "half", "none"):
        assert run_json("print-tensor", path, key)["key"] == key
        run("print-tensor", path, key)
    assert run_json("print-tensor", path, "nan")["value"] == ["NaN", "Infinity"]


def test_the_map_of_param_groups_is_written_as_json(plain: Callable[..., Path]) -> None:
    path = plain("map", **{"module.module.a.weight": 0, "module.module.b.bias": 1})
    expected = {"model.module.a.weight": 0, "model.module.b.bias": 1}
    assert run_json("print-torch-dcp-in-json", path)["content"] == expected
    assert json.loads((path / "param_to_param_group_map.json").read_text()) == expected
    error = run_json("print-torch-dcp-in-json", plain("other", a="text"), code=1)["error"]
    assert "no map of param groups" in error
