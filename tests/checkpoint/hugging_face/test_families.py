# SPDX-License-Identifier: Apache-2.0
"""Families of Hugging Face models: transformers and Megatron-Core compute the same from them."""

import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint.core.key_rules import OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.checkpoint.hugging_face import model_reader as hugging_face
from megatron.checkpoint.hugging_face.families import FAMILIES
from megatron.checkpoint.hugging_face.model_directory import SINGLE_FILE
from megatron.checkpoint.hugging_face.model_reader import read
from tests.support.checkpoint import hugging_face_models as models
from tests.support.checkpoint.hugging_face.saved_models import edited_config, saved
from tests.support.checkpoint.hugging_face_models import (
    KINDS,
    LLAMA3,
    VOCABULARY,
    YARN,
    config_of,
    random_state,
)
from tests.support.rank_pool import run_ranks
from tests.support.syntax_trees import parse

TOLERANCE = 1e-5
"""Of logits, in parts of the largest: fp32 sums in another order."""


FEW = (
    "llama",
    "qwen2",
    "qwen3_tied",
    "qwen3_moe_scores_as_they_are",
    "deepseek_v3_yarn_without_mscale",
    "gpt2_exact_gelu_untied",
)
"""A kind of most families."""
WITH_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3")
SHARES = [FEW, [kind for kind in KINDS if kind not in FEW]]


def of_each(job: Callable[..., Any], kinds: Sequence[str], folder: Path) -> dict[str, Any]:
    """Call a job of `hugging_face_models` for each kind on one rank, which transformers changes."""
    return run_ranks(1, models.of_each, job, kinds, folder)[0]


@pytest.mark.always("few")
@pytest.mark.parametrize("kinds", SHARES, ids=["few", "others"])
def test_models_that_are_read_compute_the_same_in_megatron_core(
    kinds: Sequence[str], tmp_path: Path
) -> None:
    errors = of_each(models.import_and_compare, kinds, tmp_path)
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.always("few")
@pytest.mark.parametrize("kinds", SHARES, ids=["few", "others"])
def test_models_that_are_written_compute_the_same_in_transformers(
    kinds: Sequence[str], tmp_path: Path
) -> None:
    for kind, (error, family) in of_each(models.export_and_compare, kinds, tmp_path).items():
        assert family == KINDS[kind][0]  # found out from the arguments
        assert error < TOLERANCE, kind


def test_layers_that_predict_further_tokens_compute_the_same_in_both(tmp_path: Path) -> None:
    kinds = ("deepseek_v3", "deepseek_v3_whole_queries_tied")
    errors = of_each(models.predict_and_compare, kinds, tmp_path)
    if None in errors.values():
        pytest.skip("this release of transformers has no layers that predict further tokens")
    assert max(map(max, errors.values())) < TOLERANCE, errors


@pytest.mark.exhaustive
@pytest.mark.parametrize("kinds", SHARES, ids=["few", "others"])
def test_models_in_several_files_are_the_same_after_reading_and_writing(
    kinds: Sequence[str], tmp_path: Path
) -> None:
    of_each(models.write_again_and_compare, kinds, tmp_path)


def test_neither_program_is_needed() -> None:
    """That Megatron-Core is not, tests/test_imports.py says of the whole package."""
    folder = Path(hugging_face.__file__).parent
    for path in folder.glob("[!_]*.py"):
        nodes = list(ast.walk(parse(path.read_text())))
        names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        for node in nodes:
            if isinstance(node, ast.Import):
                names += [each.name for each in node.names]
        assert names and not any(name.startswith("transformers") for name in names), path


OLD_LLAMA3 = {key: value for key, value in LLAMA3.items() if key != "rope_type"} | {
    "type": "llama3"
}


@pytest.mark.parametrize(
    ("kind", "older", "newer"),
    [
        (
            "llama",
            {"rope_theta": 5e5},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        ),
        (
            "llama",
            {"rope_theta": 5e5, "rope_scaling": OLD_LLAMA3},
            {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        ),
        (
            "deepseek_v3",
            {"rope_theta": 1e4, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
            {"rope_parameters": YARN | {"rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0}},
        ),
        (
            "qwen3_moe",
            {"torch_dtype": "float32"},
            {"dtype": "float32", "use_sliding_window": False, "sliding_window": 4096},
        ),
    ],
    ids=["rotary base", "llama3", "yarn", "dtype"],
)
def test_configs_of_old_and_new_releases_mean_the_same(kind: str, older: dict, newer: dict) -> None:
    family = FAMILIES[KINDS[kind][0]]
    results = [family.read_config(config_of(kind, **changes)) for changes in (older, newer)]
    assert results[0] == results[1] and not results[0][1]


def test_released_gpt2_files_have_no_prefix_and_some_masks(tmp_path: Path) -> None:
    expected = random_state("gpt2")
    saved(expected, tmp_path)
    content = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(tmp_path / SINGLE_FILE).items()
    }
    save_file(content | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / SINGLE_FILE)
    state = read(tmp_path)
    assert all(
        torch.equal(tensor.read(), expected.weights[name].read())
        for name, tensor in state.weights.items()
    )


def test_a_copy_of_the_tied_embedding_is_passed_over_with_a_note(tmp_path: Path) -> None:
    saved(random_state("qwen2_tied"), tmp_path)
    content = load_file(tmp_path / SINGLE_FILE)
    save_file(
        content | {"lm_head.weight": content["model.embed_tokens.weight"].clone()},
        tmp_path / SINGLE_FILE,
    )
    state = read(tmp_path)
    assert OUTPUT_LAYER not in state.weights and "lm_head.weight" in state.notes[0]


def test_predicting_layers_that_the_config_speaks_of_but_are_not_there_are_noted(
    tmp_path: Path,
) -> None:
    saved(random_state("deepseek_v3"), tmp_path)
    assert not read(tmp_path).notes
    edited_config(tmp_path, num_nextn_predict_layers=1)
    state = read(tmp_path)
    assert state.args.mtp_num_layers is None
    assert "1 layers that predict further tokens" in state.notes[0]


def test_experts_of_transformers_own_modules_are_read(tmp_path: Path) -> None:
    for kind, same in of_each(models.read_both_formats, WITH_EXPERTS, tmp_path).items():
        assert same, kind


@pytest.mark.parametrize("kind", WITH_EXPERTS)
def test_stacked_experts_of_another_shape_are_refused(kind: str, tmp_path: Path) -> None:
    whole = saved(random_state(kind), tmp_path) / SINGLE_FILE
    content = load_file(whole)
    layer = "model.layers.2." if kind == "deepseek_v3" else "model.layers.0."
    for name in [name for name in content if name.startswith(layer) and ".experts." in name]:
        content.pop(name)
    content[f"{layer}mlp.experts.gate_up_proj"] = torch.zeros(4, 32, 48)  # transposed
    content[f"{layer}mlp.experts.down_proj"] = torch.zeros(4, 24)
    save_file(content, whole)
    with pytest.raises(ValueError, match=r"experts\.3\..*: \(16, 48\), but by config") as caught:
        read(tmp_path)
    assert "experts.down_proj: unknown" in str(caught.value)


def test_the_bias_of_experts_is_fp32_whatever_the_file_has(tmp_path: Path) -> None:
    """Megatron-Core adds steps to it that bf16 would lose."""
    saved(random_state("deepseek_v3"), tmp_path)
    content = load_file(tmp_path / SINGLE_FILE)
    save_file({name: tensor.bfloat16() for name, tensor in content.items()}, tmp_path / SINGLE_FILE)
    state = read(tmp_path)
    bias = state.buffers["decoder.layers.1.mlp.router.expert_bias"]
    assert bias.dtype == bias.read().dtype == torch.float32
    assert state.weights["decoder.layers.1.mlp.router.weight"].dtype == torch.bfloat16


def test_the_vocabulary_is_padded_with_zeros_where_it_is_asked_for(tmp_path: Path) -> None:
    whole = random_state("llama").weights
    state = read(saved(random_state("llama"), tmp_path), vocabulary_multiple=16)
    assert (state.args.vocab_size, state.args.padded_vocab_size) == (VOCABULARY, 48)
    for name in (WORD_EMBEDDINGS, OUTPUT_LAYER):
        assert torch.equal(
            state.weights[name].read(), torch.cat([whole[name].read(), torch.zeros(8, 32)])
        )
        assert torch.equal(state.weights[name].read_rows(39, 42)[1:], torch.zeros(2, 32))
    assert read(tmp_path).weights[WORD_EMBEDDINGS].shape == (VOCABULARY, 32)
    assert load_file(saved(state, tmp_path / "back") / SINGLE_FILE)["lm_head.weight"].shape == (
        VOCABULARY,
        32,
    )
