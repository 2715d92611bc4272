# SPDX-License-Identifier: Apache-2.0
"""Comparisons of checkpoints: what differs is reported, what is the same is not."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron.checkpoint.commands.comparison import compare_states
from megatron.checkpoint.core.lazy_tensor import in_memory
from tests.support.checkpoint import small_models
from tests.support.checkpoint.changed_checkpoints import (
    TENSOR,
    contradicting,
    with_another_momentum,
)
from tests.support.checkpoint.command_runs import TO_FSDP, run, run_json
from tests.support.checkpoint.small_models import shapes_of, state_of


def test_a_checkpoint_is_the_same_as_itself_and_as_its_conversion(small: dict[str, Path]) -> None:
    for form in small:
        assert run_json("compare-two-checkpoint", small[form], small[form])["same"] is True
        assert "there is no difference" in run("diff", small[form], small[form]).stdout
    assert run_json("diff", *small.values())["same"] is True
    result = run_json("compare-two-checkpoint", *small.values(), code=1)
    assert result["same"] is False and result["only_first"] and result["only_second"]


PAIRS: dict[str, tuple[Any, Any, str]] = {
    "another value": (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), "values"),
    "one bit": (
        torch.tensor([1.0]),
        torch.nextafter(torch.tensor([1.0]), torch.tensor([2.0])),
        "values",
    ),
    "minus zero": (torch.tensor([0.0]), torch.tensor([-0.0]), "values"),
    "NaN and a number": (torch.tensor([float("nan")]), torch.tensor([1.0]), "values"),
    "infinity and a number": (torch.tensor([float("inf")]), torch.tensor([1.0]), "values"),
    "two infinities": (torch.tensor([float("inf")]), torch.tensor([float("-inf")]), "values"),
    "0-d": (torch.tensor(1.0), torch.tensor(2.0), "values"),
    "0-d and 1-d": (torch.tensor(1.0), torch.tensor([1.0]), "kinds"),
    "dtype": (torch.ones(2), torch.ones(2, dtype=torch.bfloat16), "kinds"),
    "shape": (torch.ones(2, 3), torch.ones(3, 2), "kinds"),
    "empty of another shape": (torch.empty(0, 2), torch.empty(0, 3), "kinds"),
    "tensor and object": (torch.ones(1), "text", "kinds"),
    "complex": (torch.tensor([1 + 1j]), torch.tensor([1 - 1j]), "values"),
    "flags": (torch.tensor([True]), torch.tensor([False]), "values"),
    "large integers": (torch.tensor([2**60]), torch.tensor([2**60 + 1]), "values"),
    "objects": ({"x": 1}, {"x": 2}, "objects"),
    "a list less": ([1, 2], [1], "objects"),
}

EQUAL = {
    "NaN": torch.tensor([float("nan"), 1.0]),
    "empty": torch.empty(0, 2),
    "no columns": torch.empty(2, 0),
    "0-d": torch.tensor(float("nan")),
    "object with NaN": float("nan"),
    "complex": torch.tensor([1j]),
    "infinity": torch.tensor([float("-inf")]),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_what_differs_is_told(kind: str, plain: Callable[..., Path]) -> None:
    first, second, where = PAIRS[kind]
    paths = plain("first", entry=first, other=1), plain("second", entry=second, other=1)
    result = run_json("compare-two-checkpoint", *paths, code=1)
    assert result["same"] is False
    told = {
        name for name in ("values", "kinds", "objects", "only_first", "only_second") if result[name]
    }
    assert told == {where} or (where == "objects" and told <= {"only_first", "objects"}), result
    assert "the checkpoints differ" in run("compare-two-checkpoint", *paths, code=1).stdout


@pytest.mark.parametrize("kind", EQUAL)
def test_what_is_the_same_is_not_told(kind: str, plain: Callable[..., Path]) -> None:
    paths = plain("first", entry=EQUAL[kind]), plain("second", entry=EQUAL[kind])
    assert run_json("compare-two-checkpoint", *paths)["same"] is True


def test_the_largest_differences_come_first(tmp_path: Path, small: dict[str, Path]) -> None:
    state = small_models.state_of(small_models.shapes_of(layers=["gated"]), num_layers=1)
    changes = {
        "output_layer.weight": 0.5,
        "decoder.final_layernorm.weight": 4.0,
        "embedding.word_embeddings.weight": float("nan"),
    }
    for name, change in changes.items():
        tensor = state.weights[name].read()
        tensor.view(-1)[3] += change
        state.weights[name] = in_memory(tensor)
    state.args.seed, state.groups[0].fields["lr"], state.iteration = 5, 0.5, 3
    small_models.write(state, tmp_path / "other", "fsdp_dtensor")
    paths = small["torch_dist"], tmp_path / "other"
    result = run_json("diff", *paths, code=1)
    names = [f"{name} (weight)" for name in reversed(changes)]
    assert [value["name"] for value in result["values"]] == names
    assert [value["count"] for value in result["values"]] == [1, 1, 1]
    assert result["values"][0]["absolute"] == "NaN"  # JSON has none
    assert abs(result["values"][1]["absolute"] - 4) < 1e-6
    assert result["only_second"] == ["args.seed"]
    assert any(line.startswith("output_layer.weight: lr: 0.25, 0.5") for line in result["objects"])
    text = run("diff", *paths, "--rows", 1, code=1).stdout
    assert "1 of 256" in text and "largest difference" in text and "… and" in text
    assert run_json("diff", "--weights-only", *paths, code=1)["objects"] == []


def test_a_difference_in_the_state_of_another_optimizer_is_seen() -> None:
    first, second = (with_another_momentum(state_of(shapes_of())) for _ in range(2))
    assert not compare_states(first, second, weights_only=False).differs
    second.moments[TENSOR] = {
        "momentum_buffer": in_memory(second.moments[TENSOR]["momentum_buffer"].read() + 1)
    }
    found = compare_states(first, second, weights_only=False)
    assert [each.name for each in found.values] == [f"{TENSOR} (momentum_buffer)"]


def test_a_file_that_contradicts_itself_says_what_its_right_conversion_says(tmp_path: Path) -> None:
    path = contradicting(tmp_path)
    run_json(TO_FSDP, path, tmp_path / "there")
    found = run_json("diff", path, tmp_path / "there")
    assert found["same"] and found["equal"] > 0


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (io.BytesIO(b"abc"), io.BytesIO(b"abd")),
        (numpy.array([1.0, float("nan")]), numpy.array([2.0, float("nan")])),
    ],
    ids=["bytes of a file", "an array with NaN"],
)
def test_an_object_is_the_same_as_itself(
    value: Any, other: Any, plain: Callable[..., Path]
) -> None:
    first = plain("first", tensor=torch.ones(2), object=[value])
    second = plain("second", tensor=torch.ones(2), object=[other])
    assert run_json("compare-two-checkpoint", first, first)["equal"] == 2
    assert len(run_json("compare-two-checkpoint", first, second, code=1)["objects"]) == 1
