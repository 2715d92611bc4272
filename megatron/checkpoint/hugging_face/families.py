# SPDX-License-Identifier: Apache-2.0
"""The families of Hugging Face models that have a Megatron counterpart: names of tensors, and settings of config.json.

A family is data. Its rows (:mod:`megatron.checkpoint.hugging_face.tensors`) pair canonical names
with those of transformers' modules, its rules (:mod:`megatron.checkpoint.hugging_face.settings`)
pair Megatron-LM's arguments with keys of config.json. Both work in both directions. A setting or an
argument that no rule of the family speaks of has to have its default, or the model would compute
something else.

Source of names and settings: ``configuration_*.py`` and ``modeling_*.py`` of
https://github.com/huggingface/transformers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.core.key_rules import OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.checkpoint.core.spelling import INNER_LAYER
from megatron.checkpoint.hugging_face.model_arguments import ARGUMENTS, completed
from megatron.checkpoint.hugging_face.settings import (
    EPSILON_OF_LATENTS,
    EVEN_HEADS,
    EXPERTS_EVERYWHERE,
    FIRST_LAYERS_DENSE,
    GELU,
    INNER_WIDTH,
    KINDS_OF_ATTENTION,
    LATENT_HEADS,
    NORMALIZED_SCORES,
    ONE_DROPOUT,
    PREDICTIONS,
    QUERY_RANK,
    ROUTING_GROUPS,
    SHARED_EXPERTS,
    SIGMOID_SCORES,
    SPARSE_LAYERS,
    Config,
    Rule,
    grouped_queries,
    head_width,
    in_words,
    only,
    rotary,
    same,
    tied_embeddings,
    without_meaning,
)
from megatron.checkpoint.hugging_face.tensors import (
    FUSED_HEADS,
    GATE_AND_UP,
    HEADS,
    TRANSPOSED,
    VOCABULARY,
    Pairing,
    Row,
    Where,
    compresses_queries,
    has_experts,
    is_dense,
    keeps_queries,
    untied,
)

_IGNORED = [
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "finetuning_task",
    "id2label",
    "keys_to_ignore_at_inference",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "sep_token_id",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "use_cache",
    "use_return_dict",
]
"""Settings that change nothing a model computes from given tokens."""

COMMON = (
    only("is_encoder_decoder", False, write=False),
    only("is_decoder", False, True, write=False),
    only("add_cross_attention", False, write=False),
    only("tie_encoder_decoder", False, write=False),
    only(
        "quantization_config",
        None,
        because="save the model without quantization first",
        write=False,
    ),
)
SIZES = (
    same("num_hidden_layers", "num_layers"),
    same("hidden_size", "hidden_size"),
    same("num_attention_heads", "num_attention_heads"),
    same("vocab_size", "vocab_size"),
    same("max_position_embeddings", "max_position_embeddings"),
    same("initializer_range", "init_method_std", 0.02),
)
LLAMA_RULES = (
    *SIZES,
    same("attention_dropout", "attention_dropout", 0.0),
    only("hidden_act", "silu"),
    only("attention_bias", False, because="the counterpart has no biases in attention"),
)
NO_WINDOW = (
    only("use_sliding_window", False, because="sliding windows are not supported"),
    without_meaning(
        "sliding_window", "max_window_layers"
    ),  # which count with use_sliding_window only
    KINDS_OF_ATTENTION,
)
EXPERTS = (
    same("num_experts num_local_experts", "num_experts"),
    same("num_experts_per_tok", "moe_router_topk"),
    same("moe_intermediate_size", "moe_ffn_hidden_size"),
)
LLAMA_ARGUMENTS = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
}
NO_DROPOUT = {"hidden_dropout": 0.0}

OUTSIDE_LAYERS = (
    Row(WORD_EMBEDDINGS, "model.embed_tokens.weight", VOCABULARY),
    Row("decoder.final_layernorm.weight", "model.norm.weight"),
    Row(OUTPUT_LAYER, "lm_head.weight", VOCABULARY, untied),
)
NORMS = (
    Row("input_layernorm.weight", "input_layernorm.weight"),
    Row("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
)
ATTENTION = (
    Row(
        "self_attention.linear_qkv.weight",
        " ".join(f"self_attn.{each}_proj.weight" for each in "qkv"),
        HEADS,
    ),
    Row("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)
QKV_BIAS = Row(
    "self_attention.linear_qkv.bias",
    " ".join(f"self_attn.{each}_proj.bias" for each in "qkv"),
    HEADS,
)
HEAD_NORMS = (
    Row("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    Row("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)
LATENT_ATTENTION = (
    Row("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", where=keeps_queries),
    Row(
        "self_attention.linear_q_down_proj.weight",
        "self_attn.q_a_proj.weight",
        where=compresses_queries,
    ),
    Row(
        "self_attention.q_layernorm.weight",
        "self_attn.q_a_layernorm.weight",
        where=compresses_queries,
    ),
    Row(
        "self_attention.linear_q_up_proj.weight",
        "self_attn.q_b_proj.weight",
        where=compresses_queries,
    ),
    Row("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    Row("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    Row("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
    Row("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)
"""Rotated rows stay where they are: Megatron-Core's latent attention takes pairs of neighbours, as transformers does with
``rope_interleave``."""


def gated_mlp(
    ours: str, theirs: str, where: Where, names: str = "gate_proj up_proj down_proj"
) -> tuple[Row, Row]:
    """Rows of a gated MLP at these paths."""
    gate, up, down = (f"{theirs}.{name}.weight" for name in names.split())
    return (
        Row(f"{ours}.linear_fc1.weight", f"{gate} {up}", GATE_AND_UP, where),
        Row(f"{ours}.linear_fc2.weight", down, where=where),
    )


DENSE_MLP = gated_mlp("mlp", "mlp", is_dense)
ROUTED_EXPERTS = (
    Row("mlp.router.weight", "mlp.gate.weight", where=has_experts),
    *gated_mlp("mlp.experts.local_experts.{expert}", "mlp.experts.{expert}", has_experts),
)
PREDICTING_LAYER = (
    Row("enorm.weight", "enorm.weight"),
    Row("hnorm.weight", "hnorm.weight"),
    Row("eh_proj.weight", "eh_proj.weight"),
    Row("final_layernorm.weight", "shared_head.norm.weight"),
)
PREDICTING_COPIES = ("embed_tokens.weight", "shared_head.head.weight")


@dataclass(frozen=True)
class Family:
    """One ``model_type``.

    Attributes:
        architecture: transformers' class of the language model.
        base: what all names but the output layer's begin with. A file of the model without its head
            leaves it out.
        layers: what names in a layer begin with, before its number.
        outside: rows outside of layers.
        layer: rows of a layer.
        rules: settings.
        arguments: what every model of the family has.
        training: what a model of the family trains with, where the config does not say it; no part
            of the model.
        predicts: whether layers that predict further tokens may follow the others.
        passed_over: endings of tensors that old files have and nothing needs.
        ignored: settings without meaning here, beside those of all families.
    """

    architecture: str
    outside: tuple[Row, ...]
    layer: tuple[Row, ...]
    rules: tuple[Rule, ...]
    arguments: dict[str, Any]
    training: dict[str, Any]
    base: str = "model."
    layers: str = "model.layers."
    predicts: bool = False
    passed_over: tuple[str, ...] = (".rotary_emb.inv_freq",)
    ignored: tuple[str, ...] = ()

    def pairings(self, args: argparse.Namespace) -> Iterator[Pairing]:
        """All tensors of the model of ``args``."""
        for row in self.outside:
            if row.where(args, 0):
                yield Pairing(row.ours, tuple(row.theirs.split()), row.rearrangement)
        for number in range(args.num_layers):
            yield from _in_layer(
                self.layer, args, number, f"decoder.layers.{number}.", f"{self.layers}{number}."
            )
        for number in range(args.mtp_num_layers or 0):
            ours, theirs = f"mtp.layers.{number}.", f"{self.layers}{args.num_layers + number}."
            last = args.num_layers - 1  # further layers are made like it
            yield from _in_layer(PREDICTING_LAYER, args, last, ours, theirs)
            yield from _in_layer(self.layer, args, last, ours + INNER_LAYER, theirs)
            head = OUTPUT_LAYER if args.untie_embeddings_and_output_weights else WORD_EMBEDDINGS
            for ours, copy in zip((WORD_EMBEDDINGS, head), PREDICTING_COPIES):
                yield Pairing(ours, (theirs + copy,), VOCABULARY, is_copy=True)

    def read_config(self, config: Config) -> tuple[argparse.Namespace, list[str]]:
        """The arguments that a config means, and what is wrong with it, in words."""
        values: dict[str, Any] = {argument.name: argument.default for argument in ARGUMENTS}
        values |= self.arguments | self.training
        problems: list[str] = []
        for rule in (*self.rules, *COMMON):
            values |= rule.read(config, problems)
        known = {key for rule in (*self.rules, *COMMON) for key in rule.keys} | {
            *_IGNORED,
            *self.ignored,
        }
        unknown = sorted(
            key for key, value in config.items() if key not in known and value is not None
        )
        problems += [
            f"{key} {in_words(config[key])}: unknown, and may change what the model computes"
            for key in unknown
        ]
        return argparse.Namespace(**values), problems

    def write_config(self, args: argparse.Namespace) -> tuple[Config, list[str]]:
        """The config of the model of ``args``, and what there is no model of the family for, in words."""
        args = completed(args)
        problems = [
            f"{name} is {getattr(args, name, None)} instead of {value}"
            for name, value in self.arguments.items()
            if getattr(args, name, None) != value
        ]
        covered = {name for rule in self.rules for name in rule.names} | {
            *self.arguments,
            "padded_vocab_size",
        }
        for argument in ARGUMENTS:
            value = getattr(args, argument.name)
            if (
                argument.name not in covered
                and argument.in_outputs
                and argument.counts(args)
                and value != argument.default
            ):
                problems.append(f"{argument.name} is {value} instead of {argument.default}")
        if problems:
            return {}, problems
        config: Config = {}
        for rule in self.rules:
            config |= rule.write(args, problems)
        return config, problems

    @property
    def keys(self) -> set[str]:
        """Keys of the config that its rules write, or that follow from those."""
        return {key for rule in self.rules for key in rule.keys}


def _in_layer(
    rows: tuple[Row, ...], args: argparse.Namespace, number: int, ours: str, theirs: str
) -> Iterator[Pairing]:
    for row in rows:
        if not row.where(args, number):
            continue
        for expert in range(args.num_experts) if "{expert}" in row.ours else [0]:
            names = tuple(theirs + name.format(expert=expert) for name in row.theirs.split())
            yield Pairing(ours + row.ours.format(expert=expert), names, row.rearrangement)


QWEN_RULES = (
    *LLAMA_RULES,
    *NO_WINDOW,
    same("rms_norm_eps", "layernorm_epsilon", 1e-6),
    tied_embeddings(False),
)

LLAMA = Family(
    architecture="LlamaForCausalLM",
    outside=OUTSIDE_LAYERS,
    layer=(*NORMS, *ATTENTION, *DENSE_MLP),
    rules=(
        *LLAMA_RULES,
        same("intermediate_size", "ffn_hidden_size"),
        same("rms_norm_eps", "layernorm_epsilon", 1e-6),
        head_width(),
        grouped_queries(None),
        rotary(10000.0, "llama3"),
        tied_embeddings(False),
        only("mlp_bias", False, because="the counterpart has no biases in its MLP"),
    ),
    arguments=LLAMA_ARGUMENTS,
    training=NO_DROPOUT,
)
QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    outside=OUTSIDE_LAYERS,
    layer=(*NORMS, *ATTENTION, QKV_BIAS, *DENSE_MLP),
    rules=(
        *QWEN_RULES,
        same("intermediate_size", "ffn_hidden_size"),
        head_width(),
        grouped_queries(32),
        rotary(10000.0, "llama3"),
        only(
            "use_mrope",
            False,
            because="positions in several dimensions are not supported",
            write=False,
        ),
    ),
    arguments=LLAMA_ARGUMENTS | {"add_qkv_bias": True},
    training=NO_DROPOUT,
)
QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    outside=OUTSIDE_LAYERS,
    layer=(*NORMS, *ATTENTION, *HEAD_NORMS, *DENSE_MLP),
    rules=(
        *QWEN_RULES,
        same("intermediate_size", "ffn_hidden_size"),
        head_width(128),
        grouped_queries(32),
        rotary(10000.0, "llama3"),
    ),
    arguments=LLAMA_ARGUMENTS | {"qk_layernorm": True},
    training=NO_DROPOUT,
)
MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    outside=OUTSIDE_LAYERS,
    layer=(
        *NORMS,
        *ATTENTION,
        Row("mlp.router.weight", "block_sparse_moe.gate.weight"),
        *gated_mlp(
            "mlp.experts.local_experts.{expert}",
            "block_sparse_moe.experts.{expert}",
            has_experts,
            "w1 w3 w2",
        ),
    ),
    rules=(
        *LLAMA_RULES,
        same("num_local_experts num_experts", "num_experts", 8),
        same("num_experts_per_tok", "moe_router_topk", 2),
        same("intermediate_size", "ffn_hidden_size"),
        same("intermediate_size", "moe_ffn_hidden_size"),
        EXPERTS_EVERYWHERE,
        same("rms_norm_eps", "layernorm_epsilon", 1e-5),
        head_width(),
        grouped_queries(8),
        rotary(1e6, "llama3"),
        tied_embeddings(False),
        only("sliding_window", None, because="sliding windows are not supported"),
        only("router_jitter_noise", 0.0, because="Megatron-Core adds noise to other values"),
    ),
    arguments=LLAMA_ARGUMENTS,
    training=NO_DROPOUT,
)
QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    outside=OUTSIDE_LAYERS,
    layer=(*NORMS, *ATTENTION, *HEAD_NORMS, *DENSE_MLP, *ROUTED_EXPERTS),
    rules=(
        *QWEN_RULES,
        *EXPERTS,
        NORMALIZED_SCORES,
        SPARSE_LAYERS,
        same("intermediate_size", "ffn_hidden_size"),
        head_width(),
        grouped_queries(4),
        rotary(10000.0, "llama3"),
    ),
    arguments=LLAMA_ARGUMENTS | {"qk_layernorm": True},
    training=NO_DROPOUT,
)
DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    outside=OUTSIDE_LAYERS,
    layer=(
        *NORMS,
        *LATENT_ATTENTION,
        *DENSE_MLP,
        *ROUTED_EXPERTS,
        Row("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", where=has_experts),
        *gated_mlp("mlp.shared_experts", "mlp.shared_experts", has_experts),
    ),
    rules=(
        *SIZES,
        LATENT_HEADS,
        same("attention_dropout", "attention_dropout", 0.0),
        only("hidden_act", "silu"),
        only("attention_bias", False, because="the counterpart has no biases in attention"),
        same("intermediate_size", "ffn_hidden_size"),
        same("rms_norm_eps", "layernorm_epsilon", 1e-6),
        EPSILON_OF_LATENTS,
        tied_embeddings(False),
        rotary(10000.0, "yarn"),
        only(
            "rope_interleave",
            True,
            because="Megatron-Core's latent attention rotates pairs of neighbours",
        ),
        QUERY_RANK,
        same("kv_lora_rank", "kv_lora_rank"),
        same("qk_nope_head_dim", "qk_head_dim"),
        same("qk_rope_head_dim", "qk_pos_emb_head_dim"),
        same("v_head_dim", "v_head_dim"),
        without_meaning("qk_head_dim", "head_dim"),  # which follow from those
        same("n_routed_experts num_local_experts", "num_experts"),
        same("num_experts_per_tok", "moe_router_topk"),
        same("moe_intermediate_size", "moe_ffn_hidden_size"),
        same("routed_scaling_factor", "moe_router_topk_scaling_factor", 2.5),
        SHARED_EXPERTS,
        FIRST_LAYERS_DENSE,
        ROUTING_GROUPS,
        SIGMOID_SCORES,
        only("scoring_func", "sigmoid"),
        only("topk_method", "noaux_tc"),
        only("moe_layer_freq", 1, write=False),
        PREDICTIONS,
    ),
    arguments=LLAMA_ARGUMENTS
    | {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    training=NO_DROPOUT | {"moe_router_dtype": "fp32"},
    predicts=True,
    ignored=("aux_loss_alpha", "ep_size", "seq_aux"),
)
GPT2 = Family(
    architecture="GPT2LMHeadModel",
    base="transformer.",
    layers="transformer.h.",
    outside=(
        Row(WORD_EMBEDDINGS, "transformer.wte.weight", VOCABULARY),
        Row("embedding.position_embeddings.weight", "transformer.wpe.weight"),
        Row("decoder.final_layernorm.weight", "transformer.ln_f.weight"),
        Row("decoder.final_layernorm.bias", "transformer.ln_f.bias"),
        Row(OUTPUT_LAYER, "lm_head.weight", VOCABULARY, untied),
    ),
    layer=(
        Row("input_layernorm.weight", "ln_1.weight"),
        Row("input_layernorm.bias", "ln_1.bias"),
        Row("self_attention.linear_qkv.weight", "attn.c_attn.weight", FUSED_HEADS),
        Row("self_attention.linear_qkv.bias", "attn.c_attn.bias", FUSED_HEADS),
        Row("self_attention.linear_proj.weight", "attn.c_proj.weight", TRANSPOSED),
        Row("self_attention.linear_proj.bias", "attn.c_proj.bias"),
        Row("pre_mlp_layernorm.weight", "ln_2.weight"),
        Row("pre_mlp_layernorm.bias", "ln_2.bias"),
        Row("mlp.linear_fc1.weight", "mlp.c_fc.weight", TRANSPOSED),
        Row("mlp.linear_fc1.bias", "mlp.c_fc.bias"),
        Row("mlp.linear_fc2.weight", "mlp.c_proj.weight", TRANSPOSED),
        Row("mlp.linear_fc2.bias", "mlp.c_proj.bias"),
    ),
    rules=(
        same("n_layer", "num_layers"),
        same("n_embd", "hidden_size"),
        same("n_head", "num_attention_heads"),
        same("n_positions", "max_position_embeddings"),
        same("vocab_size", "vocab_size"),
        same("initializer_range", "init_method_std", 0.02),
        same("layer_norm_epsilon", "layernorm_epsilon", 1e-5),
        same("attn_pdrop", "attention_dropout", 0.1),
        tied_embeddings(True),
        GELU,
        INNER_WIDTH,
        ONE_DROPOUT,
        EVEN_HEADS,
        only("scale_attn_weights", True, write=False),
        only("scale_attn_by_inverse_layer_idx", False, write=False),
    ),
    arguments={
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
    },
    training={},
    passed_over=(".attn.bias", ".attn.masked_bias"),
    ignored=(
        "n_ctx",
        "reorder_and_upcast_attn",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    ),
)
FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "deepseek_v3": DEEPSEEK_V3,
    "gpt2": GPT2,
}
"""By the ``model_type`` of config.json."""
