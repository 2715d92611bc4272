# SPDX-License-Identifier: Apache-2.0
"""Conversions to fsdp_dtensor and back return every bit, of samples and of all kinds of models."""

import argparse
import functools
import itertools
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.checkpoint.commands import conversion
from megatron.checkpoint.commands.comparison import FORMAT_ARGUMENTS, compare_states, same
from megatron.checkpoint.commands.formats import Opened, open_checkpoint
from megatron.checkpoint.core.lazy_tensor import in_memory
from megatron.checkpoint.core.spelling import choose_spelling
from megatron.checkpoint.core.training_state import TrainingState
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.fsdp_dtensor import dtensor_writer as fsdp_dtensor
from megatron.checkpoint.store.directory import new_checkpoint
from megatron.checkpoint.torch_dist import checkpoint as torch_dist
from tests.support.checkpoint import samples, small_models
from tests.support.checkpoint.samples import DENSE, EXPERTS, TORCH_DIST, differing

TARGETS = {"torch_dist": torch_dist.target, "fsdp_dtensor": fsdp_dtensor.target}


def converted(source: Path, path: Path, form: str) -> Opened:
    """``source`` in the format ``form``."""
    state = open_checkpoint(source).state()
    output = new_checkpoint(path, state.iteration)
    conversion.convert(TARGETS[form](state, choose_spelling(state)), output, show_progress=False)
    return open_checkpoint(path)


@pytest.fixture(scope="module")
def there_and_back(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a sample: what it says, as fsdp_dtensor, and back."""

    @functools.lru_cache
    def convert(name: str) -> tuple[Opened, Opened, Opened]:
        sample, root = samples.torch_dist(name), tmp_path_factory.mktemp(name)
        there = converted(sample, root / "there", "fsdp_dtensor")
        back = converted(there.directory, root / "back", "torch_dist")
        return open_checkpoint(sample), there, back

    return convert


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TORCH_DIST)
def test_a_sample_says_what_the_ranks_had_in_memory(name: str, there_and_back: Any) -> None:
    expected = samples.expected(samples.torch_dist(name))
    for opened in there_and_back(name):
        state = opened.state()
        assert differing(state.weights, expected["param"]) == []
        for slot in ("exp_avg", "exp_avg_sq"):
            moments = {key: slots[slot] for key, slots in state.moments.items()}
            assert differing(moments, expected[slot]) == []
        assert differing(state.buffers, expected.get("buffers", {})) == []
        assert {state.step_of(key) for key in state.weights} == {3.0}
        assert state.iteration == 3 and state.notes == []


@pytest.mark.always("moe4_swiglu_bf16_ep2_dp2", "dense_gelu_tied_fp32_dp2")
@pytest.mark.parametrize("name", TORCH_DIST)
def test_everything_else_comes_back_too(name: str, there_and_back: Any) -> None:
    first, there, back = (opened.state() for opened in there_and_back(name))
    for other in (there, back):
        for field in ("scheduler", "operations", "iteration", "version", "grad_scaler"):
            assert same(getattr(first, field), getattr(other, field)), field
        assert same(first.random_states, other.random_states)
        assert _arguments(first.args) == _arguments(other.args)
        assert _groups(first) == _groups(other)
    assert first.compute_dtype == back.compute_dtype
    assert first.others == back.others


def _arguments(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name not in FORMAT_ARGUMENTS}


def _groups(state: TrainingState) -> dict[str, dict[str, Any]]:
    """Fields of each parameter. Written for any optimizer, a file has these two more."""
    added = ("bias_correction", "step")
    groups: dict[str, dict[str, Any]] = {}
    for group in state.groups:
        fields = {field: value for field, value in group.fields.items() if field not in added}
        groups |= dict.fromkeys(group.names, fields)
    return groups


@pytest.mark.always("moe4_swiglu_bf16_ep2_dp2")
@pytest.mark.parametrize("name", TORCH_DIST)
def test_the_file_has_the_same_keys_and_tensors_again(name: str, there_and_back: Any) -> None:
    """Compare with Megatron-Core's files, except for optimizer layouts that are not written."""
    first, _, back = there_and_back(name)
    mine, theirs = first.stored, back.stored
    is_optimizer = re.compile(r"^(chained_\d+\.)?optimizer\.|^common_state/")
    layout_is_kept = "dp_reshardable" not in name
    for kind in ("tensors", "objects"):
        before, after = (
            {key for key in getattr(file, kind) if layout_is_kept or not is_optimizer.match(key)}
            for file in (mine, theirs)
        )
        has_common_state = name == samples.WITHOUT_COMMON_FILE and kind == "objects"
        assert before - after == ({"common_state/shard_0_1"} if has_common_state else set())
        assert after - before == set()
    for key in theirs.tensors.keys() & mine.tensors.keys():
        assert (mine.shape(key), mine.dtype(key)) == (theirs.shape(key), theirs.dtype(key)), key
        assert torch.equal(mine.lazy(key).read(), theirs.lazy(key).read()), key


def test_param_groups_are_filed_as_megatron_core_files_them(there_and_back: Any) -> None:
    for name in (DENSE, EXPERTS):
        first, _, back = there_and_back(name)
        mine, theirs = (
            torch_dist.read_common(opened.stored)["optimizer"] for opened in (first, back)
        )
        assert _filed(mine) == _filed(theirs)


def _filed(optimizer: dict[Any, Any]) -> list[Any]:
    parts = [optimizer[number] for number in sorted(optimizer)] if 0 in optimizer else [optimizer]
    return [
        (
            part["param_state_sharding_type"],
            [
                {k: v for k, v in group.items() if k != "bias_correction"}
                for group in part["optimizer"]["param_groups"]
            ],
        )
        for part in parts
    ]


def test_torch_itself_loads_the_converted_files(there_and_back: Any) -> None:
    expected = samples.expected(samples.torch_dist(DENSE))
    _, there, back = there_and_back(DENSE)
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    gate, up = torch.empty(112, 64), torch.empty(112, 64)
    nested = {"model": {f"module.{name}_w": gate, f"module.{name}_v": up}}
    dcp.load(nested, checkpoint_id=there.directory, no_dist=True)
    assert torch.equal(torch.cat([gate, up]), expected["param"][name])
    stacked = torch.empty(3, 224, 64, dtype=torch.bfloat16)
    content = {"decoder.layers.mlp.linear_fc1.weight": stacked}
    dcp.load(content, checkpoint_id=back.directory, no_dist=True)
    assert torch.equal(stacked[1], expected["param"][name].to(torch.bfloat16))


def test_a_converted_sample_differs_from_the_published_file_where_it_must(
    there_and_back: Any,
) -> None:
    """The published file was written with torch's AdamW; ours is for fused optimizers too."""
    ours, theirs = (
        there_and_back("dense_swiglu_bf16_tp1_dp2")[1].stored,
        StoredCheckpoint(samples.iteration(samples.FSDP_DTENSOR)),
    )
    mine = set(ours.metadata.state_dict_metadata)
    published = set(theirs.metadata.state_dict_metadata)
    assert published - mine == set()
    more = mine - published
    assert {key.rpartition(".")[2] for key in more} == {"bias_correction", "step"}
    assert all(key.startswith("optimizer.param_to_group_meta.") for key in more)
    for key, entry in theirs.tensors.items():  # the runs were two, which rounded otherwise
        assert ours.tensors[key].size == entry.size and ours.dtype(key) == theirs.dtype(key), key
        if key.startswith("model."):
            assert torch.allclose(ours.lazy(key).read(), theirs.lazy(key).read(), atol=0.02), key
    paths = theirs.metadata.planner_data
    assert {key: path for key, path in ours.metadata.planner_data.items() if key in paths} == paths
    for key in theirs.objects:
        if key != "args" and not key.startswith("rng_state"):
            assert same(ours.read_object(key), theirs.read_object(key)), key
    args, other = (vars(stored.read_object("args")) for stored in (ours, theirs))
    assert args.keys() >= other.keys() - {"local_rank"}
    assert args["ckpt_format"] == other["ckpt_format"]
    assert args["use_megatron_fsdp"] == other["use_megatron_fsdp"]
    assert args["consumed_train_samples"] == other["consumed_train_samples"]


MODELS: dict[str, dict[str, Any]] = {
    "gated": {},
    "gelu with biases": {"layers": ["gelu", "gelu"], "args": {"swiglu": False}},
    "tied": {"tied": True},
    "experts": {"layers": ["experts", "experts"]},
    "some layers of experts": {"layers": ["gated", "experts"], "args": {"moe_layer_freq": [0, 1]}},
    "predicting further tokens": {"predicting": True, "args": {"mtp_num_layers": 1}},
    "predicting with experts": {
        "predicting": True,
        "layers": ["experts", "experts"],
        "args": {"mtp_num_layers": 1},
    },
    "fp32": {"args": {"bf16": False, "params_dtype": torch.float32}},
    "fp16": {
        "args": {"bf16": False, "fp16": True, "params_dtype": torch.float16},
        "grad_scaler": {"scale": torch.tensor([65536.0])},
    },
    "weights alone": {"with_optimizer": False},
    "transformer engine": {"args": {"transformer_impl": "transformer_engine"}},
    "transformer engine with experts": {
        "layers": ["experts"] * 2,
        "args": {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True},
    },
}


def model_of(kind: str) -> TrainingState:
    settings = dict(MODELS[kind])
    args, optimizer = settings.pop("args", {}), settings.pop("with_optimizer", True)
    scaler = settings.pop("grad_scaler", None)
    state = small_models.state_of(small_models.shapes_of(**settings), optimizer, **args)
    state.grad_scaler = scaler
    if not optimizer:
        state.random_states, state.scheduler = {}, None
    return state


@pytest.mark.always("some layers of experts-torch_dist")
@pytest.mark.parametrize(
    ("kind", "first"),
    [
        *((kind, "torch_dist") for kind in MODELS),
        *((kind, "fsdp_dtensor") for kind in ("gated", "fp16", "experts", "weights alone")),
    ],
)
def test_models_of_every_kind_come_back(kind: str, first: str, tmp_path: Path) -> None:
    state = model_of(kind)
    # Without main weights, a torch_dist file has what the model computes in.
    exact = kind != "weights alone"
    if not exact:
        state.weights = {
            name: tensor.to(torch.bfloat16).to(torch.float32)
            for name, tensor in state.weights.items()
        }
    second = {"torch_dist": "fsdp_dtensor", "fsdp_dtensor": "torch_dist"}[first]
    path = small_models.write(state, tmp_path / "first", first)
    there = converted(path, tmp_path / "second", second)
    back = converted(there.directory, tmp_path / "third", first)
    for opened in (there, back):
        found = compare_states(opened.state(), state)
        assert not found.differs, found
    mine, theirs = open_checkpoint(path).stored, back.stored
    assert mine.metadata.state_dict_metadata.keys() == theirs.metadata.state_dict_metadata.keys()
    for key in mine.tensors:
        assert (mine.dtype(key), mine.shape(key)) == (theirs.dtype(key), theirs.shape(key)), key


KEYS: dict[str, dict[str, tuple[int, ...]]] = {
    "experts": {
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": (2, 2, 24, 8),
        "decoder.layers.mlp.router.expert_bias": (2, 2),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": (2, 8),
        "model.module.decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight_v": (12, 8),
        "model.module.decoder.layers.1.pre_mlp_layernorm.weight": (8,),
        "model.module.decoder.layers.0.mlp.router.expert_bias": (2,),
    },
    "some layers of experts": {
        "decoder.layers.1.mlp.experts.experts.linear_fc2.weight": (2, 8, 12),
        "decoder.layers.0.mlp.linear_fc1.weight": (24, 8),
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (8,),
        "model.module.decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight": (8, 12),
    },
    "predicting further tokens": {
        "mtp.layers.0.eh_proj.weight": (8, 16),
        "mtp.layers.0.transformer_layer.mlp.linear_fc1.weight": (24, 8),
        "model.module.mtp.layers.0.transformer_layer.mlp.linear_fc1.weight_w": (12, 8),
        "model.module.mtp.layers.0.enorm.weight": (8,),
    },
    "transformer engine with experts": {
        "decoder.layers.pre_mlp_layernorm.weight": (2, 8),
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": (2, 2, 24, 8),
        "model.module.decoder.layers.0.mlp.experts.linear_fc1.weight1_w": (12, 8),
        "model.module.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (8,),
    },
    "fp32": {"optimizer.state.module.module.output_layer.weight.exp_avg": (32, 8)},
    "gated": {"optimizer.state.module.module.module.output_layer.weight.exp_avg": (32, 8)},
    "gelu with biases": {
        "decoder.layers.mlp.linear_fc1.bias": (2, 12),
        "model.module.decoder.layers.0.mlp.linear_fc1.bias": (12,),
        "model.module.decoder.layers.0.mlp.linear_fc1.weight": (12, 8),
    },
}
"""Keys of both formats: those of fsdp_dtensor begin with `model.` or `optimizer.`."""


@pytest.mark.always("experts", "fp32")
@pytest.mark.parametrize("kind", KEYS)
def test_keys_are_those_of_the_facts(kind: str, tmp_path: Path) -> None:
    found = {}
    for form in ("torch_dist", "fsdp_dtensor"):
        stored = StoredCheckpoint(small_models.write(model_of(kind), tmp_path / form, form))
        is_here = form == "fsdp_dtensor"
        keys = [key for key in KEYS[kind] if key.startswith(("model.", "optimizer.")) == is_here]
        found |= {key: stored.shape(key) for key in keys}
    assert found == KEYS[kind]


def with_shifted_state(path: Path, shifted: list[str]) -> None:
    """Write a torch_dist file with main weights and moments of other parameters.

    A defect of Megatron-Core writes such files.
    """
    state = small_models.state_of(small_models.shapes_of())
    target = torch_dist.target(state, choose_spelling(state))
    for position, entry in enumerate(target.entries):
        for name in shifted:
            key, index = choose_spelling(state).stacked_key(name)
            if (
                entry.key.startswith("optimizer.state.")
                and entry.key.endswith(key)
                and entry.offsets[: len(index)] == index
            ):
                moved = in_memory(
                    torch.roll(entry.tensor.read().reshape(-1), 3).reshape(entry.tensor.shape)
                )
                target.entries[position] = type(entry)(entry.key, entry.shape, entry.offsets, moved)
    conversion.convert(
        type(target)(target.entries, extra_files=target._extra_files),
        new_checkpoint(path, 3),
        show_progress=False,
    )


def test_weights_win_over_main_weights_that_contradict_them(tmp_path: Path) -> None:
    shifted = ["decoder.layers.1.mlp.linear_fc1.weight", "output_layer.weight"]
    with_shifted_state(tmp_path / "in", shifted)
    state = open_checkpoint(tmp_path / "in").state()
    notes = conversion.convert(
        fsdp_dtensor.target(state, choose_spelling(state)),
        new_checkpoint(tmp_path / "out", 3),
        show_progress=False,
    )
    assert [note.partition(":")[0] for note in notes] == sorted(shifted)
    there = open_checkpoint(tmp_path / "out").state()
    original = small_models.state_of(small_models.shapes_of())
    for name, tensor in original.weights.items():
        kept = tensor.read().to(torch.bfloat16).float() if name in shifted else tensor.read()
        assert torch.equal(there.weights[name].read(), kept), name
        assert there.step_of(name) == (0.0 if name in shifted else 3.0), name
        for slot, moment in there.moments[name].items():
            expected = original.moments[name][slot].read()
            if name in shifted:
                expected = torch.zeros_like(expected)
            assert torch.equal(moment.read(), expected), (name, slot)


def test_negative_zeros_and_numbers_that_are_none_contradict_nothing_they_should_not(
    tmp_path: Path,
) -> None:
    """A main weight that is NaN belongs to a weight that is NaN."""
    state = small_models.state_of(small_models.shapes_of())
    values = state.weights["output_layer.weight"].read()
    values[0, 0], values[0, 1], values[0, 2] = float("nan"), -0.0, float("inf")
    state.weights["output_layer.weight"] = in_memory(values)
    path = small_models.write(state, tmp_path / "in")
    there = converted(path, tmp_path / "out", "fsdp_dtensor")
    assert same(there.state().weights["output_layer.weight"].read(), values)
    assert there.state().step_of("output_layer.weight") == 3.0


def test_numpy_states_survive(tmp_path: Path) -> None:
    state = small_models.state_of(small_models.shapes_of())
    numpy_state = numpy.random.RandomState(5).get_state()
    generators = {
        "np_rng_state": numpy_state,
        "rng_tracker_states": {"model-parallel-rng": torch.arange(5)},
    }
    state.random_states = {
        stage_and_tensor_rank: [generators] * 2
        for stage_and_tensor_rank in itertools.product(range(2), range(2))
    }
    path = small_models.write(state, tmp_path / "in")
    back = converted(
        converted(path, tmp_path / "out", "fsdp_dtensor").directory, tmp_path / "back", "torch_dist"
    ).state()
    assert same(back.random_states, state.random_states)
