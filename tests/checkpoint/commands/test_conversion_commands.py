# SPDX-License-Identifier: Apache-2.0
"""The conversion commands: their options, their notes, and what they refuse."""

import json
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.core.lazy_tensor import in_memory
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from tests.support.checkpoint import samples, small_models
from tests.support.checkpoint.command_runs import TO_FSDP, TO_TORCH_DIST, run, run_json

MAP = "--param-to-param-group-map-json"


def test_a_conversion_says_what_it_did(tmp_path: Path) -> None:
    sample = samples.torch_dist(samples.DENSE)
    result = run_json(TO_FSDP, sample, tmp_path / "out")
    assert result["output"] == str(tmp_path / "out" / "iter_0000003")
    assert result["notes"] == []
    assert result["parameters"] == 21
    assert run_json("diff", sample, tmp_path / "out")["same"] is True
    text = run(TO_TORCH_DIST, tmp_path / "out", tmp_path / "back" / "iter_0000003").stdout
    assert "21 parameters with 122,304 elements, optimizer state of 21, iteration 3" in text
    assert (tmp_path / "back" / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert run_json("diff", sample, tmp_path / "back")["same"] is True


def test_a_conversion_overwrites_nothing(small: dict[str, Path], tmp_path: Path) -> None:
    for make in (
        lambda: (tmp_path / "out").write_text("x"),
        lambda: ((tmp_path / "out").unlink(), (tmp_path / "out" / "a").mkdir(parents=True)),
    ):
        make()
        assert "exists" in run_json(TO_FSDP, small["torch_dist"], tmp_path / "out", code=1)["error"]
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "a"]
    error = run_json(TO_FSDP, small["torch_dist"], tmp_path / "iter_0000004", code=1)["error"]
    assert "iter_0000003, not iter_0000004" in error
    assert "exists" in run_json(TO_FSDP, small["torch_dist"], small["torch_dist"], code=1)["error"]


@pytest.mark.parametrize(
    ("command", "form", "hint"),
    [
        (TO_FSDP, "fsdp_dtensor", TO_TORCH_DIST),
        (TO_TORCH_DIST, "torch_dist", TO_FSDP),
        ("convert-from-hf", "torch_dist", TO_FSDP),
    ],
)
def test_the_right_command_is_named(
    command: str, form: str, hint: str, small: dict[str, Path], tmp_path: Path
) -> None:
    assert hint in run_json(command, small[form], tmp_path / "out", code=1)["error"]
    assert not (tmp_path / "out").exists()


def test_gated_or_not_is_found_out(tmp_path: Path) -> None:
    gelu = small_models.write(
        small_models.state_of(small_models.shapes_of(["gelu", "gelu"]), swiglu=False),
        tmp_path / "gelu",
    )
    assert "not gated" in run_json(TO_FSDP, gelu, tmp_path / "refused", "--swiglu", code=1)["error"]
    run(TO_FSDP, gelu, tmp_path / "out")
    keys = StoredCheckpoint(tmp_path / "out" / "iter_0000003").tensors
    assert "model.module.decoder.layers.0.mlp.linear_fc1.weight" in keys
    assert not any(key.endswith("_w") for key in keys)


def test_modules_that_are_named_as_gated_must_be(small: dict[str, Path], tmp_path: Path) -> None:
    source, modules = small["torch_dist"], "--swiglu-modules"
    run(TO_FSDP, source, tmp_path / "out", "--swiglu", modules, "mlp.linear_fc1")
    for wrong, told in (
        ("nothing", "there is no module nothing"),
        ("self_attention.linear_proj", "not the first layer"),
    ):
        error = run_json(TO_FSDP, source, tmp_path / "no", modules, wrong, code=1)["error"]
        assert told in error and not (tmp_path / "no").exists()


def test_prefixes_are_those_that_are_asked_for(small: dict[str, Path], tmp_path: Path) -> None:
    words = "--output-model-weight-prefix model.module.module"
    words += " --output-optimizer-state-prefix optimizer.state.module"
    run(TO_FSDP, small["torch_dist"], tmp_path / "out", *words.split())
    stored = StoredCheckpoint(tmp_path / "out" / "iter_0000003")
    assert {
        "model.module.module.output_layer.weight",
        "optimizer.state.module.output_layer.weight.exp_avg",
    } <= stored.tensors.keys()
    assert "optimizer.param_to_group_meta.module.output_layer.weight.lr" in stored.objects
    assert stored.metadata.planner_data["model.module.module.output_layer.weight"] == (
        "model",
        "module.module.output_layer.weight",
    )
    assert run_json("diff", small["torch_dist"], tmp_path / "out")["same"] is True


def test_param_groups_come_from_a_map_where_one_is_given(
    small: dict[str, Path], tmp_path: Path
) -> None:
    names = small_models.shapes_of(layers=["gated"])
    turned = {
        f"model.module.{name}": int(len(shape) > 1) for name, shape in names.items()
    }  # the other way round
    (tmp_path / "map.json").write_text(json.dumps(turned))
    run(TO_FSDP, small["torch_dist"], tmp_path / "out", MAP, tmp_path / "map.json")
    stored = StoredCheckpoint(tmp_path / "out" / "iter_0000003")
    start = "optimizer.param_to_group_meta.module.module.module."
    for name in (name for name, shape in names.items() if len(shape) > 1):
        assert stored.read_object(f"{start}{name}.wd_mult") == 0.0, name
    assert stored.read_object(f"{start}decoder.final_layernorm.weight.wd_mult") == 1.0
    (tmp_path / "part.json").write_text(json.dumps({"module.module.output_layer.weight": 1}))
    run(TO_FSDP, small["torch_dist"], tmp_path / "part", MAP, tmp_path / "part.json")
    stored = StoredCheckpoint(tmp_path / "part" / "iter_0000003")
    found = {
        name: stored.read_object(f"{start}{name}.wd_mult")
        for name in ("output_layer.weight", "embedding.word_embeddings.weight")
    }
    assert found == {"output_layer.weight": 0.0, "embedding.word_embeddings.weight": 1.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "should hold one JSON object"),
        ("{", "cannot be read"),
        ('{"model.module.output_layer.weight": "a"}', "numbers of groups"),
        ('{"model.module.output_layer.weight": -1}', "numbers of groups"),
        ('{"model.module.output_layer.weight": 9}', "the map names group 9"),
        ('{"model.module.other.weight": 0}', "no parameter of this checkpoint"),
        (None, "map.json"),
    ],
)
def test_a_wrong_map_is_refused(
    content: str | None, message: str, small: dict[str, Path], tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "map.json").write_text(content)
    words = [TO_FSDP, small["torch_dist"], tmp_path / "out", MAP, tmp_path / "map.json"]
    assert message in run_json(*words, code=1)["error"]
    assert not (tmp_path / "out").exists()


@pytest.mark.always("transformer_layer")
@pytest.mark.parametrize("module_name", ["transformer_layer", "mtp_model_layer"])
def test_layers_that_predict_further_tokens_are_called_as_loaders_want(
    module_name: str, tmp_path: Path
) -> None:
    """From files of every release."""
    state = small_models.state_of(
        small_models.shapes_of(["gated"], predicting=True), num_layers=1, mtp_num_layers=1
    )
    path = small_models.write(state, tmp_path / "in")
    if module_name != "transformer_layer":
        operation = rf"rename (?<=\.)transformer_layer {module_name}"
        run("modify-state-dict", path, tmp_path / "renamed", "--op", operation)
        path = tmp_path / "renamed"
    run(TO_FSDP, path, tmp_path / "out")
    run(TO_FSDP, path, tmp_path / "as modules", "--no-rename-mtp-keys")
    for name, inner in (("out", "transformer_layer"), ("as modules", "mtp_model_layer")):
        tensors = StoredCheckpoint(tmp_path / name / "iter_0000003").tensors
        assert f"model.module.mtp.layers.0.{inner}.mlp.linear_fc2.weight" in tensors
        assert run_json("diff", tmp_path / "in", tmp_path / name)["same"] is True


def test_unknown_keys_are_refused_or_carried_over_by_name(tmp_path: Path) -> None:
    state = small_models.state_of(small_models.shapes_of(["gated"]), num_layers=1)
    state.weights["vision.patch.weight"] = in_memory(torch.arange(6.0).reshape(2, 3))
    state.compute_dtype["vision.patch.weight"] = torch.bfloat16
    path = small_models.write(state, tmp_path / "in")
    error = run_json(TO_FSDP, path, tmp_path / "out", code=1)["error"]
    assert "vision.patch.weight" in error and "--allow-unknown-keys" in error
    notes = run_json(TO_FSDP, path, tmp_path / "out", "--allow-unknown-keys")["notes"]
    assert notes == ["vision.patch.weight: no rule knows it; carried over as it is"]
    printed = run_json("print-tensor", tmp_path / "out", "model.module.vision.patch.weight")
    assert printed["value"] == [[0, 1, 2], [3, 4, 5]]
    back = run_json(TO_TORCH_DIST, tmp_path / "out", tmp_path / "back", "--allow-unknown-keys")
    assert len(back["notes"]) == 1
    assert run_json("diff", path, tmp_path / "back", "--allow-unknown-keys")["same"] is True
