# SPDX-License-Identifier: Apache-2.0
"""Conversions to torch_dist: frozen layers, steps, random states, releases and names."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.commands import conversion
from megatron.checkpoint.commands.formats import open_checkpoint
from megatron.checkpoint.core.spelling import choose_spelling
from megatron.checkpoint.store import directory
from megatron.checkpoint.store.directory import new_checkpoint
from megatron.checkpoint.torch_dist import checkpoint as torch_dist
from tests.support.checkpoint import samples, small_models
from tests.support.checkpoint.changed_checkpoints import TENSOR, rewritten
from tests.support.checkpoint.command_runs import TO_FSDP, TO_TORCH_DIST, run_json
from tests.support.checkpoint.small_models import shapes_of, state_of


def test_frozen_layers_get_zeros_beside_layers_that_learn(tmp_path: Path) -> None:
    state = state_of(shapes_of())
    frozen = [name for name in state.weights if name.startswith("decoder.layers.0.")]
    for group in state.groups:
        group.names = [name for name in group.names if name not in frozen]
    for name in frozen:
        del state.moments[name]
    small_models.write(state, tmp_path / "in", "fsdp_dtensor")
    notes = run_json(TO_TORCH_DIST, tmp_path / "in", tmp_path / "out")["notes"]
    assert [note for note in notes if "zeros are written" in note] == notes
    assert len(notes) == len(frozen)
    back = small_models.read(tmp_path / "out")
    for name in frozen:
        assert not any(tensor.read().any() for tensor in back.moments[name].values())
    for name, slots in state.moments.items():
        expected = {slot: tensor.read() for slot, tensor in slots.items()}
        assert samples.differing(back.moments[name], expected) == []
    assert run_json("verify", tmp_path / "out")["sound"]


@pytest.mark.always("experts")
@pytest.mark.parametrize("kind", ["gated", "experts"])
def test_parameters_of_several_steps_get_the_last_one_and_notes(kind: str, tmp_path: Path) -> None:
    state = state_of(shapes_of([kind, kind]))
    behind = [name for name in state.weights if name.startswith("decoder.layers.1.")]
    state.steps = dict.fromkeys(behind, 1.0)
    if kind == "experts":  # those of a whole group too, which is an optimizer of its own
        behind += (others := [name for name in state.weights if ".layers.0.mlp.experts." in name])
        state.steps |= dict.fromkeys(others, 1.0)
    small_models.write(state, tmp_path / "in", "fsdp_dtensor")
    notes = run_json(TO_TORCH_DIST, tmp_path / "in", tmp_path / "out")["notes"]
    assert sorted(notes) == sorted(
        f"{name}: its moments have seen 1 steps; torch_dist has 3 for all" for name in behind
    )
    opened = open_checkpoint(tmp_path / "out")
    optimizer = torch_dist.read_common(opened.stored)["optimizer"]
    optimizers = [optimizer] if "optimizer" in optimizer else list(optimizer.values())
    assert len(optimizers) == (2 if kind == "experts" else 1)
    for each in optimizers:
        assert {group["step"] for group in each["optimizer"]["param_groups"]} == {3.0}


def test_layers_of_other_widths_are_not_stacked(tmp_path: Path) -> None:
    shapes = shapes_of()
    shapes["decoder.layers.1.mlp.linear_fc1.weight"], shapes[TENSOR] = (12, 8), (8, 6)
    state = state_of(shapes)
    small_models.write(state, tmp_path / "in", "fsdp_dtensor")
    run_json(TO_TORCH_DIST, tmp_path / "in", tmp_path / "out")
    opened = open_checkpoint(tmp_path / "out")
    assert opened.stored.shape(TENSOR) == (8, 6)
    assert "decoder.layers.mlp.linear_fc2.weight" not in opened.stored.tensors
    weights = {name: tensor.read() for name, tensor in state.weights.items()}
    assert samples.differing(opened.state().weights, weights) == []


@pytest.mark.parametrize(
    ("expert_ranks", "expected"),
    [
        (1, {"rng_state/shard_0.0_1.1": 2}),
        (2, {"rng_state/shard_0.0.0_1.1.2": 1, "rng_state/shard_0.0.1_1.1.2": 1}),
    ],
    ids=["one entry", "one of each with expert parallelism"],
)
def test_random_states_of_data_ranks_are_where_a_load_looks(
    expert_ranks: int, expected: dict[str, int], tmp_path: Path
) -> None:
    state = state_of(shapes_of(), expert_model_parallel_size=expert_ranks)
    second = {**small_models.GENERATORS, "torch_rng_state": torch.zeros(16, dtype=torch.uint8)}
    state.random_states = {(0, 0): [small_models.GENERATORS, second]}
    small_models.write(state, tmp_path / "in", "fsdp_dtensor")
    run_json(TO_TORCH_DIST, tmp_path / "in", tmp_path / "out")
    stored = open_checkpoint(tmp_path / "out").stored
    keys = [key for key in stored.objects if key.startswith("rng_state")]
    assert {key: len(stored.read_object(key)[0]) for key in keys} == expected


def test_a_release_stays_a_release(tmp_path: Path) -> None:
    state = state_of(shapes_of(), with_optimizer=False)
    state.iteration = 0
    release = new_checkpoint(tmp_path / "in", directory.RELEASE)
    conversion.convert(
        torch_dist.target(state, choose_spelling(state)), release, show_progress=False
    )
    run_json(TO_FSDP, tmp_path / "in", tmp_path / "there")
    run_json(TO_TORCH_DIST, tmp_path / "there", tmp_path / "back")
    for name in ("there", "back"):
        assert {path.name for path in (tmp_path / name).iterdir()} == {"release", directory.TRACKER}
        assert directory.read_tracker(tmp_path / name) == directory.RELEASE


def test_a_file_without_arguments_is_taken_for_fp32_and_that_is_said(tmp_path: Path) -> None:
    path = small_models.write(state_of(shapes_of()), tmp_path / "in", "fsdp_dtensor")
    bare = rewritten(path, tmp_path / "bare", lambda content: content.pop("args"))
    (note,) = run_json(TO_TORCH_DIST, bare, tmp_path / "out")["notes"]
    assert note == (
        "args: not in the file, so the dtype of the model's computations is not known; fp32 is"
        " assumed"
    )
    assert open_checkpoint(tmp_path / "out").stored.dtype("output_layer.weight") == torch.float32


@pytest.mark.always("later")
@pytest.mark.parametrize(
    ("flag", "inner"),
    [("--rename-mtp-keys", "transformer_layer"), ("--no-rename-mtp-keys", "mtp_model_layer")],
    ids=["up to 0.16", "later"],
)
def test_the_layer_inside_of_a_predicting_layer_is_called_as_the_release_wants_it(
    flag: str, inner: str, tmp_path: Path
) -> None:
    state = state_of(shapes_of(predicting=True))
    small_models.write(state, tmp_path / "in", "fsdp_dtensor")
    run_json(TO_TORCH_DIST, tmp_path / "in", tmp_path / "out", flag)
    opened = open_checkpoint(tmp_path / "out")
    layers = {
        key.split(".")[3]
        for key in opened.stored.tensors
        if ".linear_" in key and key.startswith("mtp.")
    }
    assert layers == {inner}
    assert set(opened.state().weights) == set(state.weights)


@pytest.mark.always("experts")
@pytest.mark.parametrize(
    ("layers", "options"),
    [
        (("gated", "gated"), {}),
        (("experts", "experts"), {"moe_grouped_gemm": False}),
        (("gated", "experts"), {"moe_layer_freq": [0, 1]}),
    ],
    ids=["dense", "experts", "layers that differ"],
)
def test_scales_of_delayed_scaling_stay_with_their_modules(
    layers: tuple[str, str], options: dict[str, Any], tmp_path: Path
) -> None:
    """Those of a linear layer with a norm inside are easily taken for the norm's."""
    shapes = shapes_of(layers, predicting=True)
    engine = {"transformer_impl": "transformer_engine", "fp8": "hybrid", **options}
    state = state_of(shapes, **engine)
    modules = [name.removesuffix(".weight") for name in shapes if ".linear_" in name]
    state.extra_states = {
        f"{module}._extra_state": module.encode() for module in modules if "bias" not in module
    }
    small_models.write(state, tmp_path / "in", "fsdp_dtensor")
    run_json(TO_TORCH_DIST, tmp_path / "in", tmp_path / "there")
    run_json(TO_FSDP, tmp_path / "there", tmp_path / "back")
    for folder in ("in", "there", "back"):
        assert small_models.read(tmp_path / folder).extra_states == state.extra_states
    stored = open_checkpoint(tmp_path / "there").stored
    (norm,) = stored.read_object("decoder.final_layernorm._extra_state/shard_0_1")
    assert norm is None
