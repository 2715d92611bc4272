# SPDX-License-Identifier: Apache-2.0
"""The command that verifies checkpoints: sound ones pass, each defect is found."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.commands.formats import open_checkpoint
from megatron.checkpoint.commands.verification import find_problems
from megatron.checkpoint.core.lazy_tensor import in_memory
from megatron.checkpoint.core.stored_checkpoint import StoredCheckpoint
from tests.checkpoint import small_models
from tests.checkpoint.changed_checkpoints import (
    TENSOR,
    contradicting,
    rewritten,
    with_another_momentum,
)
from tests.checkpoint.command_runs import run, run_json
from tests.checkpoint.small_models import shapes_of, state_of


@pytest.mark.parametrize("form", ["torch_dist", "fsdp_dtensor"])
def test_a_good_checkpoint_is_sound(form: str, small: dict[str, Path]) -> None:
    assert run_json("verify", small[form]) == {
        "directory": str(small[form] / "iter_0000003"),
        "format": form,
        "sound": True,
        "problems": [],
        "notes": [],
    }


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
    copy = shutil.copytree(small["torch_dist"], tmp_path / "copy")
    stored = StoredCheckpoint(copy / "iter_0000003")
    payload = stored._payload(
        "output_layer.weight", stored.tensors["output_layer.weight"].chunks[0]
    )
    data = bytearray(payload.file.read_bytes())
    data[payload.offset] ^= 1
    payload.file.write_bytes(data)
    assert "checksum" in str(run_json("verify", copy, code=1)["problems"])
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
    assert (
        problem.startswith(f"{TENSOR}: its main weight in the optimizer is not its weight")
        and notes == []
    )
    assert not run_json("verify", opened.directory, code=1)["sound"]
