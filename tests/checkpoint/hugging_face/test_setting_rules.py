# SPDX-License-Identifier: Apache-2.0
"""Settings of Hugging Face models: those that change the computation are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.hugging_face.families import FAMILIES
from megatron.checkpoint.hugging_face.model_arguments import model_flags
from megatron.checkpoint.hugging_face.model_reader import read
from megatron.checkpoint.hugging_face.model_writer import HuggingFaceTarget
from tests.support.checkpoint.hugging_face_models import (
    KINDS,
    LLAMA3,
    YARN,
    config_of,
    parsed,
    random_state,
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
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(kind, **changes)))
    with pytest.raises(
        ValueError, match="settings that Megatron-Core's models do not have"
    ) as refused:
        read(tmp_path)
    assert words in str(refused.value)


def test_all_settings_that_are_refused_are_named_at_once(tmp_path: Path) -> None:
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
def test_training_goes_on_with_the_dropout_and_precision_of_the_family(
    kind: str, expected: dict
) -> None:
    changes = {"attention_dropout": 0.25, "initializer_range": 0.5} if kind == "qwen3" else {}
    args = random_state(kind, **changes).args
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.seldom("mixtral")
@pytest.mark.parametrize("kind", KINDS)
def test_flags_of_a_run_with_these_flags_are_the_same_flags(kind: str) -> None:
    """So they hold all that the arguments say of the model, and the program takes them."""
    args = random_state(kind, torch.bfloat16).args
    args.bf16 = True
    flags = model_flags(args)
    again = model_flags(parsed(flags))
    assert "--bf16" in flags
    if kind == "gpt2":  # without a GPU the program says in other words that it is the tanh formula
        again.remove("--openai-gelu")
    assert again == flags


def test_flags_say_the_numbers_of_the_model_even_where_they_are_the_defaults() -> None:
    """They follow the flags of a script, and the script may set another base or epsilon."""
    flags = model_flags(random_state("llama", rope_theta=10000.0).args)
    assert flags[flags.index("--rotary-base") + 1] == "10000"
    assert "--norm-epsilon" in flags and "--mscale" not in flags


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
) -> None:
    state = random_state(kind)
    vars(state.args).update(arguments)
    with pytest.raises(ValueError) as refused:
        HuggingFaceTarget(state, family=KINDS[kind][0])
    assert words in str(refused.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_setting_that_is_left_out_has_the_value_of_transformers_or_is_refused(name: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = FAMILIES[name]
    config = {**CONFIG_MAPPING[name]().to_dict(), "model_type": name}
    args, problems = family.read_config(config)
    assert problems == []
    for key in family.keys & config.keys():
        others = {other: value for other, value in config.items() if other != key}
        without, problems = family.read_config(others)
        if problems:
            assert any("is missing" in problem for problem in problems), key
        else:
            assert vars(without) == vars(args), key
