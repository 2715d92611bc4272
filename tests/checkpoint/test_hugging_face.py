# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face: both programs compute the same from them, and what cannot be the same is refused by name."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint.core.key_rules import OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.checkpoint.core.lazy_tensor import LazyTensor, in_memory
from megatron.checkpoint.core.parameter_shapes import Sizes, expected_shape
from megatron.checkpoint.core.training_state import TrainingState
from megatron.checkpoint.hugging_face import reader as hugging_face
from megatron.checkpoint.hugging_face.families import FAMILIES
from megatron.checkpoint.hugging_face.model_arguments import model_flags
from megatron.checkpoint.hugging_face.model_directory import INDEX, SINGLE_FILE
from megatron.checkpoint.hugging_face.reader import read
from megatron.checkpoint.hugging_face.safetensors_shard import DTYPES, stored_tensors, write_shard
from megatron.checkpoint.hugging_face.writer import HuggingFaceTarget
from tests.checkpoint import hugging_face_models as models
from tests.checkpoint.hugging_face_models import (
    KINDS,
    LLAMA3,
    VOCABULARY,
    YARN,
    config_of,
    parsed,
    random_state,
    write,
)
from tests.rank_pool import run_ranks

TOLERANCE = 1e-5
"""Of logits, in parts of the largest: fp32 sums in another order."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_read_computes_the_same_in_megatron_core(kind: str, tmp_path: Path):
    (error,) = run_ranks(1, models.import_and_compare, kind, tmp_path)
    print(f"{kind}: {error:.1e}")
    assert error < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_written_computes_the_same_in_transformers(kind: str, tmp_path: Path):
    ((error, family),) = run_ranks(1, models.export_and_compare, kind, tmp_path)
    print(f"{kind}: {error:.1e}")
    assert family == KINDS[kind][0]  # found out from the arguments
    assert error < TOLERANCE


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v3_whole_queries_tied"])
def test_layers_that_predict_further_tokens_compute_the_same_in_both(kind: str, tmp_path: Path):
    (errors,) = run_ranks(1, models.predict_and_compare, kind, tmp_path)
    if errors is None:
        pytest.skip("this release of transformers has no layers that predict further tokens")
    print(f"{kind}: {errors}")
    assert max(errors) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_several_files_is_the_same_after_reading_and_writing(
    kind: str, dtype: torch.dtype, tmp_path: Path
):
    run_ranks(1, models.write_again_and_compare, kind, dtype, tmp_path)


def test_neither_program_is_needed():
    """That Megatron-Core is not, tests/test_imports.py says of the whole package."""
    folder = Path(hugging_face.__file__).parent
    for path in set(folder.glob("*.py")) - {folder / "__init__.py"}:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        assert names and not any(name.startswith("transformers") for name in names), path


# ---- reading
# -----------------------------------------------------------------------------------------------------------


def saved(state: TrainingState, directory: Path, **options: Any) -> Path:
    write(HuggingFaceTarget(state, **options), directory)
    return directory


def edited_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_whole_tensor(kind: str, tmp_path: Path):
    state, expected = read(saved(random_state(kind), tmp_path)), random_state(kind)
    assert state.weights.keys() == expected.weights.keys()
    for name, tensor in state.weights.items():
        whole = expected.weights[name].read()
        first, last = whole.shape[0] // 4, whole.shape[0] * 2 // 3
        assert torch.equal(tensor.read(), whole), name
        assert torch.equal(tensor.read_rows(first, last), whole[first:last]), name


def test_what_is_read_is_memory_of_its_own(tmp_path: Path):
    tensor = read(saved(random_state("llama"), tmp_path)).weights[WORD_EMBEDDINGS]
    tensor.read().zero_()
    assert tensor.read().any()


def test_nothing_but_the_rows_is_read_from_a_large_file(tmp_path: Path):
    """The file has 64 GiB of zeros that are on no disk: reading all of them would not end well."""
    rows, width = 2**20, 2**14
    header = json.dumps(
        {"a": {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, rows * width * 4]}}
    ).encode()
    with open(tmp_path / "large.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + rows * width * 4)
    found = stored_tensors(tmp_path / "large.safetensors")["a"].read_rows(rows - 2, rows)
    assert found.shape == (2, width) and found.untyped_storage().nbytes() == 2 * width * 4


def test_files_are_those_of_the_library_in_both_directions(tmp_path: Path):
    """Of every dtype, also a scalar and a tensor without elements; in names whatever JSON can hold."""
    numbers = torch.arange(6).reshape(2, 3)
    content = {f"of {name}": numbers.to(dtype) for name, dtype in DTYPES.items()}
    content |= {
        "scalar": torch.tensor(2.5),
        "nothing": torch.empty(0, 3),
        'a "b" \u00e9': torch.ones(1),
    }
    save_file(content, tmp_path / "library", metadata={"format": "pt"})
    write_shard(
        tmp_path / "ours",
        {name: in_memory(tensor) for name, tensor in content.items()},
        lambda size: None,
    )
    ours, library = stored_tensors(tmp_path / "library"), load_file(tmp_path / "ours")
    assert ours.keys() == library.keys() == content.keys()
    for name, tensor in content.items():
        for found in (ours[name].read(), library[name]):
            assert found.dtype == tensor.dtype and found.shape == tensor.shape, name
            assert torch.equal(found.float(), tensor.float()), name


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "does not begin with a header"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "does not begin with a header"),
        ((2).to_bytes(8, "little") + b"[]", "does not begin with a header"),
        ((2).to_bytes(8, "little") + b"{x", "cannot be read"),
        (
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
            "a: F32 \\(2,\\) is not what bytes 0 to 8 of 0",
        ),
        (
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,0]}}',
            "a: F32 \\(2,\\) is not what bytes 0 to 0",
        ),
        (
            b'{"a":{"dtype":"F3","shape":[],"data_offsets":[0,0]}}',
            "a: torch does not know its dtype F3",
        ),
        (b'{"a":{"dtype":"F32"}}', "a: its description is damaged"),
    ],
    ids=[
        "empty",
        "a length without end",
        "no object",
        "no JSON",
        "cut off",
        "wrong size",
        "dtype",
        "description",
    ],
)
def test_a_damaged_file_is_named_with_its_damage(content: bytes, words: str, tmp_path: Path):
    whole = len(content).to_bytes(8, "little") + content if content.startswith(b"{") else content
    (tmp_path / "damaged").write_bytes(whole)
    with pytest.raises(
        ValueError, match=f"damaged cannot be read as a safetensors file:(.|\n)*{words}|{words}"
    ):
        stored_tensors(tmp_path / "damaged")


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
def test_configs_of_old_and_new_releases_mean_the_same(kind: str, older: dict, newer: dict):
    family = FAMILIES[KINDS[kind][0]]
    results = [family.read_config(config_of(kind, **changes)) for changes in (older, newer)]
    assert results[0] == results[1] and not results[0][1]


def test_released_gpt2_files_have_no_prefix_and_some_masks(tmp_path: Path):
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


def test_a_copy_of_the_tied_embedding_is_passed_over_with_a_note(tmp_path: Path):
    saved(random_state("qwen2_tied"), tmp_path)
    content = load_file(tmp_path / SINGLE_FILE)
    save_file(
        content | {"lm_head.weight": content["model.embed_tokens.weight"].clone()},
        tmp_path / SINGLE_FILE,
    )
    state = read(tmp_path)
    assert OUTPUT_LAYER not in state.weights and "lm_head.weight" in state.notes[0]


def test_predicting_layers_that_the_config_speaks_of_but_are_not_there_are_noted(tmp_path: Path):
    saved(random_state("deepseek_v3"), tmp_path)
    assert not read(tmp_path).notes
    edited_config(tmp_path, num_nextn_predict_layers=1)
    state = read(tmp_path)
    assert (
        state.args.mtp_num_layers is None
        and "1 layers that predict further tokens" in state.notes[0]
    )


def test_the_bias_of_experts_is_fp32_whatever_the_file_has(tmp_path: Path):
    """Megatron-Core adds steps to it that bf16 would lose."""
    saved(random_state("deepseek_v3"), tmp_path)
    content = load_file(tmp_path / SINGLE_FILE)
    save_file({name: tensor.bfloat16() for name, tensor in content.items()}, tmp_path / SINGLE_FILE)
    state = read(tmp_path)
    bias = state.buffers["decoder.layers.1.mlp.router.expert_bias"]
    assert bias.dtype == bias.read().dtype == torch.float32
    assert state.weights["decoder.layers.1.mlp.router.weight"].dtype == torch.bfloat16


def test_the_vocabulary_is_padded_with_zeros_where_it_is_asked_for(tmp_path: Path):
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


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window true"),
    (
        "qwen3",
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types sliding_attention",
    ),
    ("mixtral", {"sliding_window": 4096}, "sliding_window 4096"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
    (
        "mixtral",
        {"num_experts_per_tok": 3, "num_key_value_heads": 3},
        "no multiple of num_key_value_heads 3",
    ),
    ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
    ("llama", {"attention_bias": True}, "attention_bias true"),
    ("llama", {"mlp_bias": True}, "mlp_bias true"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "of type dynamic"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "of type linear"),
    ("qwen3", {"rope_scaling": YARN}, "of type yarn"),
    ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor 2.0"),
    (
        "llama",
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 4096}},
        "max_position_embeddings 4096",
    ),
    ("llama", {"rope_theta": 10000.5}, "rope_theta 10000.5"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("llama", {"logit_scale": 0.5}, "logit_scale 0.5: unknown"),
    ("llama", {"hidden_size": None}, "hidden_size is missing"),
    ("qwen3_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok 1 with norm_topk_prob"),
    ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, "no layer has experts"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave false"),
    ("deepseek_v3", {"topk_group": 1}, "topk_group 1"),
    ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob false"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func softmax"),
    ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads 2"),
    ("deepseek_v3", {"rope_scaling": YARN | {"beta_fast": 16}}, "beta_fast 16"),
    (
        "deepseek_v3",
        {"rope_scaling": YARN | {"mscale_all_dim": 1.0}},
        "mscale_all_dim but without mscale",
    ),
    ("deepseek_v3", {"rope_scaling": YARN | {"attention_factor": 1.1}}, "attention_factor 1.1"),
    ("gpt2", {"activation_function": "relu"}, "activation_function relu"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx true"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention true"),
    ("gpt2", {"embd_pdrop": 0.2}, "embd_pdrop 0.2"),
]


@pytest.mark.parametrize(
    ("kind", "changes", "words"), REFUSALS, ids=[f"{each[0]}-{each[2]}" for each in REFUSALS]
)
def test_settings_that_change_the_computation_are_refused_by_name(
    kind: str, changes: dict, words: str, tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps(config_of(kind, **changes)))
    with pytest.raises(
        ValueError, match="settings that Megatron-Core's models do not have"
    ) as refused:
        read(tmp_path)
    assert words in str(refused.value)


def test_all_settings_that_are_refused_are_named_at_once(tmp_path: Path):
    changes = {
        "use_sliding_window": True,
        "hidden_act": "relu",
        "rope_scaling": {"type": "linear"},
        "magic": 3,
    }
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen2", **changes)))
    with pytest.raises(ValueError) as refused:
        read(tmp_path)
    assert all(
        word in str(refused.value)
        for word in ("use_sliding_window", "hidden_act", "linear", "magic")
    )


def test_all_tensors_that_do_not_fit_are_named_at_once(tmp_path: Path):
    saved(random_state("qwen3_moe"), tmp_path)
    content = load_file(tmp_path / SINGLE_FILE)
    content["model.layers.7.self_attn.q_proj.weight"] = content.pop(
        "model.layers.0.self_attn.q_proj.weight"
    )
    content["model.norm.weight"] = torch.ones(33)
    content["model.layers.1.mlp.up_proj.weight"] = content["model.layers.1.mlp.up_proj.weight"].to(
        torch.int8
    )
    save_file(content, tmp_path / SINGLE_FILE)
    with pytest.raises(ValueError) as refused:
        read(tmp_path)
    for words in (
        "model.layers.7.self_attn.q_proj.weight: unknown",
        "model.layers.0.self_attn.q_proj.weight: missing",
        "model.norm.weight: (33,), but by config.json (32,)",
        "model.layers.1.mlp.up_proj.weight: torch.int8",
    ):
        assert words in str(refused.value)


def damage_index(directory: Path) -> None:
    content = json.loads((directory / INDEX).read_text())
    content["weight_map"]["model.norm.weight"] = "model-00009-of-00009.safetensors"
    (directory / INDEX).write_text(json.dumps(content))


def lose_tensor(directory: Path) -> None:
    content = json.loads((directory / INDEX).read_text())
    content["weight_map"]["model.strange.weight"] = "model-00001-of-00004.safetensors"
    (directory / INDEX).write_text(json.dumps(content))


def cut_file(directory: Path) -> None:
    path = directory / "model-00001-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def remove_tensors(directory: Path) -> None:
    (directory / INDEX).unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_index, "model-00009-of-00009.safetensors"),
        (lose_tensor, "model.strange.weight: not in model-00001-of-00004.safetensors"),
        (cut_file, "model-00001-of-00004.safetensors cannot be read"),
        (remove_tensors, "neither model.safetensors nor"),
        (lambda directory: edited_config(directory, model_type="mamba"), "mamba"),
        (
            lambda directory: (directory / "config.json").write_text("{"),
            "config.json cannot be read",
        ),
    ],
    ids=[
        "a file is missing",
        "a tensor is not where it should be",
        "a file is cut",
        "no tensors",
        "family",
        "no JSON",
    ],
)
def test_a_damaged_directory_is_named(damage: Any, words: str, tmp_path: Path):
    assert len(HuggingFaceTarget(random_state("llama"), shard_bytes=20_000).parts) == 4
    saved(random_state("llama"), tmp_path, shard_bytes=20_000)
    damage(tmp_path)
    with pytest.raises(ValueError, match=words):
        read(tmp_path)


# ---- flags
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", {"hidden_dropout": 0.0, "attention_dropout": 0.0, "init_method_std": 0.02}),
        ("qwen3", {"attention_dropout": 0.25, "init_method_std": 0.5}),
        ("deepseek_v3", {"moe_router_dtype": "fp32", "hidden_dropout": 0.0}),
        ("gpt2", {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    ],
    ids=["llama", "qwen3 with dropout", "deepseek_v3", "gpt2"],
)
def test_training_goes_on_with_the_dropout_and_precision_of_the_family(kind: str, expected: dict):
    changes = {"attention_dropout": 0.25, "initializer_range": 0.5} if kind == "qwen3" else {}
    args = random_state(kind, **changes).args
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize("kind", KINDS)
def test_flags_of_a_run_with_these_flags_are_the_same_flags(kind: str):
    """So they hold all that the arguments say of the model, and the program takes them."""
    args = random_state(kind, torch.bfloat16).args
    args.bf16 = True
    flags = model_flags(args)
    again = model_flags(parsed(flags))
    assert "--bf16" in flags
    if kind == "gpt2":  # without a GPU the program says in other words that it is the tanh formula
        again.remove("--openai-gelu")
    assert again == flags


# ---- writing
# -----------------------------------------------------------------------------------------------------------


def peak_of(action: Any) -> int:
    """By how many bytes this process' memory grew at most."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
    before = memory("VmRSS")
    action()
    return memory("VmHWM") - before


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is Linux's to tell"
)
def test_a_conversion_holds_two_tensors_at_a_time(tmp_path: Path):
    config = config_of(
        "llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=9, vocab_size=4096
    )
    args, _ = FAMILIES["llama"].read_config(config)
    args.padded_vocab_size, args.params_dtype = 4096, torch.float32
    empty = TrainingState({}, args=args)
    for pairing in FAMILIES["llama"].pairings(args):
        shape = expected_shape(pairing.ours, Sizes(args))
        empty.weights[pairing.ours] = LazyTensor(
            shape, torch.float32, lambda start, stop, row=shape[1:]: torch.zeros(stop - start, *row)
        )
    largest = max(tensor.num_bytes for tensor in empty.weights.values())
    whole = sum(tensor.num_bytes for tensor in empty.weights.values())
    assert whole > 10 * largest
    assert peak_of(lambda: saved(empty, tmp_path / "first")) < 2.5 * largest
    assert peak_of(lambda: saved(read(tmp_path / "first"), tmp_path / "second")) < 2.5 * largest


def test_one_file_has_at_most_so_many_bytes_or_one_tensor(tmp_path: Path):
    target = HuggingFaceTarget(random_state("llama"), shard_bytes=7_000)
    number = f"{len(target.parts):05d}"
    assert target.parts[-1].name == f"model-{number}-of-{number}.safetensors"
    write(target, tmp_path)
    for part in target.parts:
        content = load_file(tmp_path / part.name)
        assert part.num_bytes == sum(tensor.nbytes for tensor in content.values())
        assert part.num_bytes <= 7_000 or len(content) == 1


def test_values_are_aligned_whatever_their_dtypes(tmp_path: Path):
    state = random_state(
        "deepseek_v3", torch.bfloat16, n_routed_experts=12, n_group=1, topk_group=1, q_lora_rank=23
    )
    path = saved(state, tmp_path) / SINGLE_FILE
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    assert start % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
    assert {each["dtype"] for each in header.values()} == {"F32", "BF16"}
    for name, each in header.items():
        assert (start + each["data_offsets"][0]) % (4 if each["dtype"] == "F32" else 2) == 0, name
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(
        load_file(path)[bias], state.buffers["decoder.layers.1.mlp.router.expert_bias"].read()
    )


def test_weights_are_in_the_dtype_of_the_run_unless_another_is_asked_for(tmp_path: Path):
    state = random_state("llama")
    state.args.params_dtype = torch.bfloat16  # as where a file has the main weights of such a run
    expected = state.weights["decoder.final_layernorm.weight"].read()
    for name, options in {"run": {}, "asked": {"dtype": torch.float16}}.items():
        dtype = options.get("dtype", torch.bfloat16)
        directory = saved(state, tmp_path / name, **options)
        assert torch.equal(
            load_file(directory / SINGLE_FILE)["model.norm.weight"], expected.to(dtype)
        )
        assert json.loads((directory / "config.json").read_text())["torch_dtype"] == str(
            dtype
        ).removeprefix("torch.")


def test_the_template_gives_tokenizer_and_other_settings_but_not_the_model(tmp_path: Path):
    template = saved(random_state("llama", vocab_size=37), tmp_path / "template")
    edited_config(
        template,
        bos_token_id=17,
        rope_theta=None,
        rope_parameters={"rope_theta": 10000.0},
        rms_norm_eps=0.5,
    )
    for name in ("tokenizer.json", "generation_config.json", "notes.txt"):
        (template / name).write_text(name)
    saved(random_state("llama", num_hidden_layers=3), tmp_path / "new", template=template)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (config["bos_token_id"], config["num_hidden_layers"], config["rms_norm_eps"]) == (
        17,
        3,
        0.01,
    )
    assert config["rope_parameters"] == {"rope_theta": 10000.0}  # means the same, so it stays
    assert (
        load_file(tmp_path / "new" / SINGLE_FILE)["lm_head.weight"].shape
        == (config["vocab_size"], 32)
        == (37, 32)
    )
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        "config.json", SINGLE_FILE, "tokenizer.json", "generation_config.json"
    }  # fmt: skip
    assert read(tmp_path / "new").args.tokenizer_model == str(tmp_path / "new")


@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        ({}, {}, VOCABULARY),
        ({"vocab_size": 37}, {}, 37),
        ({"vocab_size": 37, "tokenizer_type": "NullTokenizer"}, {}, 38),
        ({"vocab_size": 37}, {"vocab_size": 33}, 33),
    ],
    ids=["all rows", "that of the run", "and its end of document", "as asked for"],
)
def test_rows_beyond_the_vocabulary_are_cut_off(
    arguments: dict, options: dict, expected: int, tmp_path: Path
):
    state = random_state("llama")
    del state.args.vocab_size
    vars(state.args).update(arguments)
    directory = saved(state, tmp_path, **options)
    assert load_file(directory / SINGLE_FILE)["lm_head.weight"].shape[0] == expected
    assert json.loads((directory / "config.json").read_text())["vocab_size"] == expected


def without_a_weight(state: TrainingState) -> None:
    del state.weights["decoder.layers.1.mlp.linear_fc1.weight"]
    state.weights["decoder.layers.1.mlp.linear_fc1.bias"] = in_memory(torch.zeros(96))
    state.weights["decoder.final_layernorm.weight"] = in_memory(torch.zeros(31))


WRONG_STATES: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "other tensors": (
        without_a_weight,
        {},
        [
            "linear_fc1.weight: missing",
            "linear_fc1.bias: has no place",
            "final_layernorm.weight: (31,), but",
        ],
    ),
    "no arguments": (lambda state: setattr(state, "args", None), {}, ["no arguments"]),
    "no embedding": (lambda state: state.weights.pop(WORD_EMBEDDINGS), {}, [WORD_EMBEDDINGS]),
    "no family": (
        lambda state: setattr(state.args, "squared_relu", True),
        {},
        [f"{each}: " for each in FAMILIES],
    ),
    "a window": (
        lambda state: setattr(state.args, "window_size", (64, 0)),
        {"family": "llama"},
        ["window_size is (64, 0)"],
    ),
    "another family": (
        lambda state: None,
        {"family": "qwen3"},
        ["qwen3", "qk_layernorm is False instead of True"],
    ),
    "an unknown family": (lambda state: None, {"family": "mamba"}, ["mamba", *FAMILIES]),
    "too many tokens": (lambda state: None, {"vocab_size": 50}, ["50 tokens", "40 rows"]),
    "no tokens": (lambda state: None, {"vocab_size": 0}, ["0 tokens", "40 rows"]),
}


@pytest.mark.parametrize(("change", "options", "words"), WRONG_STATES.values(), ids=WRONG_STATES)
def test_what_cannot_be_written_is_refused_at_once(change: Any, options: dict, words: list[str]):
    state = random_state("llama")
    change(state)
    with pytest.raises(ValueError) as refused:
        HuggingFaceTarget(state, **options)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        ("deepseek_v3", {"layernorm_epsilon": 1e-5}, "layernorm_epsilon is 1e-05"),
        ("deepseek_v3", {"moe_layer_freq": [1, 0, 1]}, "dense layers have to come first"),
        ("deepseek_v3", {"moe_router_group_topk": 1}, "moe_router_group_topk 1"),
        (
            "deepseek_v3",
            {"moe_shared_expert_intermediate_size": 30},
            "no multiple of moe_ffn_hidden_size",
        ),
        ("deepseek_v3_yarn_without_mscale", {"mscale": 0.7}, "mscale 0.7"),
        ("mixtral", {"moe_layer_freq": 2}, "all layers have experts"),
        (
            "mixtral",
            {"moe_shared_expert_intermediate_size": 8},
            "moe_shared_expert_intermediate_size is 8",
        ),
        ("gpt2", {"kv_channels": 4}, "kv_channels 4"),
        ("llama", {"rotary_percent": 0.5}, "rotary_percent is 0.5"),
        ("llama", {"mtp_num_layers": 1}, "mtp_num_layers is 1"),
        ("llama", {"apply_layernorm_1p": True}, "apply_layernorm_1p is True"),
    ],
    ids=lambda it: next(iter(it)) if isinstance(it, dict) else None,
)
def test_arguments_without_a_counterpart_are_refused_by_name(
    kind: str, arguments: dict, words: str
):
    state = random_state(kind)
    vars(state.args).update(arguments)
    with pytest.raises(ValueError) as refused:
        HuggingFaceTarget(state, family=KINDS[kind][0])
    assert words in str(refused.value)


def test_a_template_of_another_family_is_refused(tmp_path: Path):
    template = saved(random_state("qwen3"), tmp_path)
    with pytest.raises(ValueError, match="template .* is of the family qwen3, but llama"):
        HuggingFaceTarget(random_state("llama"), family="llama", template=template)
    with pytest.raises(ValueError, match="the family qwen3"):
        HuggingFaceTarget(random_state("llama"), template=template)


def test_a_tensor_that_is_not_as_it_said_stops_the_writing(tmp_path: Path):
    state = random_state("llama")
    state.weights["decoder.final_layernorm.weight"] = LazyTensor(
        (32,), torch.float32, lambda start, stop: torch.zeros(31)
    )
    with pytest.raises(RuntimeError, match="model.norm.weight should be"):
        write(HuggingFaceTarget(state), tmp_path)
