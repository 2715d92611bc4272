# SPDX-License-Identifier: Apache-2.0
"""The command that verifies checkpoints: sound ones pass, each defect is found."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.commands.formats import open_checkpoint
from megatron.checkpoint.commands.verification import find_problems
from megatron.checkpoint.core.lazy_tensor import in_memory
from tests.support.checkpoint import small_models
from tests.support.checkpoint.changed_checkpoints import (
    TENSOR,
    contradicting,
    flip_a_bit,
    rewritten,
    with_another_momentum,
    without_manifest,
)
from tests.support.checkpoint.command_runs import TO_TORCH_DIST, run, run_json
from tests.support.checkpoint.small_models import shapes_of, state_of


@pytest.mark.parametrize("form", ["torch_dist", "fsdp_dtensor"])
def test_a_good_checkpoint_is_sound_and_the_name_of_another_iteration_is_told(
    form: str, small: dict[str, Path], tmp_path: Path
) -> None:
    path = small[form] / "iter_0000003"
    sound = {"format": form, "sound": True, "problems": []}
    assert run_json("verify", small[form]) == {"directory": str(path), **sound, "notes": []}
    found = run_json("verify", shutil.copytree(path, tmp_path / "iter_0000004"))
    assert found["sound"] and len(found["notes"]) == 1
    assert "iter_0000004 holds iteration 3" in found["notes"][0]


def test_flags_that_leave_nothing_to_verify_are_refused_as_such(small: dict[str, Path]) -> None:
    words = ("verify", small["torch_dist"], "--fast", "--no-verify-integrity")
    assert run(*words, code=1).output.startswith("Error: --fast --no-verify-integrity: nothing")


def spoiled(kind: str, path: Path) -> Path:
    """Write a checkpoint with one thing wrong."""
    state = small_models.state_of(small_models.shapes_of(layers=["gated"]), num_layers=1)
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    if kind in ("NaN", "infinite"):
        tensor = state.weights[name].read()
        tensor[0, 0] = float("nan") if kind == "NaN" else float("inf")
        state.weights[name] = in_memory(tensor)
    elif kind == "negative":
        state.moments[name]["exp_avg_sq"] = in_memory(-torch.ones(8, 12))
    elif kind == "shape":
        state.args.hidden_size = 16
    elif kind == "a moment less":
        del state.moments[name]["exp_avg_sq"]
    elif kind == "unknown parameter":
        state.weights["decoder.layers.0.strange.weight"] = in_memory(torch.ones(2))
    return small_models.write(state, path, "fsdp_dtensor")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("NaN", "1 values are NaN"),
        ("infinite", "1 values are NaN or infinite"),
        ("negative", "96 values .* negative"),
        ("shape", "the arguments of the run make it"),
        ("a moment less", "lacks exp_avg_sq"),
        ("unknown parameter", "no rule knows"),
    ],
)
def test_verify_finds(kind: str, message: str, tmp_path: Path) -> None:
    problems = run_json("verify", spoiled(kind, tmp_path / "bad"), code=1)["problems"]
    assert any(re.search(message, problem) for problem in problems), problems


def test_verify_finds_changed_bytes_and_main_weights_that_contradict(
    small: dict[str, Path], tmp_path: Path
) -> None:
    copy = without_manifest(shutil.copytree(small["torch_dist"], tmp_path / "copy"))
    flip_a_bit(copy / "iter_0000003", "output_layer.weight")
    assert "in output_layer.weight" in str(run_json("verify", copy, code=1)["problems"])
    assert "- " in run("verify", copy, code=1).stdout


def with_an_object_of_no_meaning(path: Path) -> Path:
    written = small_models.write(state_of(shapes_of()), path / "first")
    more = {"rerun_state_machine_state/shard_0.0_1.1": [{}]}
    return rewritten(written, path / "second", lambda content: content.update(more))


SOUND = {
    "with an object that is left out": with_an_object_of_no_meaning,
    "of gated MLPs with quick_geglu": lambda path: small_models.write(
        state_of(shapes_of(), swiglu=False, quick_geglu=True), path
    ),
    "with the momentum of SGD": lambda path: small_models.write(
        with_another_momentum(state_of(shapes_of())), path
    ),
    "with the momentum of SGD, as fsdp_dtensor": lambda path: small_models.write(
        with_another_momentum(state_of(shapes_of())), path, "fsdp_dtensor"
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_good_file_is_sound(name: str, tmp_path: Path) -> None:
    opened = open_checkpoint(SOUND[name](tmp_path))
    notes: list[str] = []
    assert find_problems(opened, lambda count: None, notes) == []
    left_out = [
        "rerun_state_machine_state/shard_0.0_1.1: not a part of training that is known here;"
        " left out"
    ]
    assert notes == (left_out if "left out" in name else [])
    assert run_json("verify", opened.directory)["notes"] == notes


def test_a_file_that_contradicts_itself_is_not_sound(tmp_path: Path) -> None:
    opened = open_checkpoint(contradicting(tmp_path))
    notes: list[str] = []
    (problem,) = find_problems(opened, lambda count: None, notes)
    assert problem.startswith(f"{TENSOR}: its main weight in the optimizer is not its weight")
    assert notes == []
    assert not run_json("verify", opened.directory, code=1)["sound"]


def test_the_fast_verification_compares_files_with_the_manifest(
    small: dict[str, Path], tmp_path: Path
) -> None:
    for form in small:
        copy = shutil.copytree(small[form], tmp_path / form)
        assert run_json("verify", copy, "--fast")["sound"]
        file = copy / "iter_0000003" / "__0_0.distcp"
        data = file.read_bytes()
        # An object, which is early in the file of torch_dist, or what no checksum covers.
        for at in (20, len(data) // 2, len(data) - 1):
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            problems = run_json("verify", copy, "--fast", code=1)["problems"]
            assert len(problems) == 1 and problems[0].startswith("__0_0.distcp "), problems
            assert problems == run_json("verify", copy, code=1)["problems"]
        file.write_bytes(data)
        (copy / "iter_0000003" / "__7_0.distcp").write_bytes(data)
        assert "__7_0.distcp is not listed" in run_json("verify", copy, "--fast", code=1)["error"]
        without_manifest(copy)
        assert run_json("verify", copy)["sound"]
        assert "without --fast" in run_json("verify", copy, "--fast", code=1)["error"]


@pytest.mark.exhaustive
def test_changed_files_are_used_only_without_verification(
    small: dict[str, Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(small["fsdp_dtensor"], tmp_path / "copy")
    key = "model.module.output_layer.weight"
    file = flip_a_bit(copy / "iter_0000003", key, at=3)
    commands: list[list[Any]] = [
        ["print-tensor", copy, key],
        ["diff", copy, copy],
        ["compare-two-checkpoint", copy, copy],
        [TO_TORCH_DIST, copy, tmp_path / "torch_dist"],
        ["modify-state-dict", copy, tmp_path / "modified", "--op", "remove rng_state"],
    ]
    for words in commands:
        error = run_json(*words, code=1)["error"]
        assert f"{file.name} has changed since it was written, in {key}" in error
    assert not {"torch_dist", "modified"} & {path.name for path in tmp_path.iterdir()}
    for words in commands:
        assert "error" not in run_json(*words, "--no-verify-integrity")
    assert run_json("inspect", copy)["format"] == "fsdp_dtensor"  # it reads no file with tensors
    (copy / "iter_0000003" / "manifest.json").write_text("{}")
    assert "manifest.json has changed" in run_json("inspect", copy, code=1)["error"]
    run_json("inspect", copy, "--no-verify-integrity")
