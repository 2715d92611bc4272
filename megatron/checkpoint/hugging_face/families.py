# SPDX-License-Identifier: Apache-2.0
"""Model families with a counterpart in Megatron-Core: names of tensors, settings of config.json.

A family is data: rows pair canonical names with those of transformers' modules, rules pair
Megatron-LM's arguments with keys of config.json. Both work in both directions. A setting or an
argument that no rule of the family covers has to have its default, or the model would compute
something else.

Source of names and settings: ``configuration_*.py`` and ``modeling_*.py`` of
https://github.com/huggingface/transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.checkpoint.core.key_rules import OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.checkpoint.hugging_face.expert_settings import (
    EXPERTS_EVERYWHERE,
    FIRST_LAYERS_DENSE,
    NORMALIZED_SCORES,
    ROUTING_GROUPS,
    SHARED_EXPERTS,
    SIGMOID_SCORES,
    SPARSE_LAYERS,
)
from megatron.checkpoint.hugging_face.family import (
    FUSED_HEADS,
    GATE_AND_UP,
    HEADS,
    SAME,
    TRANSPOSED,
    VOCABULARY,
    Family,
    Rearrangement,
    TensorRow,
    Where,
    compresses_queries,
    everywhere,
    has_experts,
    is_dense,
    keeps_queries,
    untied,
)
from megatron.checkpoint.hugging_face.rotary_settings import LLAMA3, YARN, rotary
from megatron.checkpoint.hugging_face.setting_rules import (
    EVEN_HEADS,
    GELU,
    INNER_WIDTH,
    LATENT_HEADS,
    LAYER_TYPES,
    ONE_DROPOUT,
    PREDICTIONS,
    QUERY_RANK,
    grouped_queries,
    head_width,
    only,
    same,
    tied_embeddings,
    without_meaning,
)

LLAMA_RULES = (
    same("num_hidden_layers", "num_layers"),
    same("hidden_size", "hidden_size"),
    same("num_attention_heads", "num_attention_heads"),
    same("vocab_size", "vocab_size"),
    same("max_position_embeddings", "max_position_embeddings"),
    same("initializer_range", "init_method_std", 0.02),
    same("attention_dropout", "attention_dropout", 0.0),
    only("hidden_act", "silu"),
    only("attention_bias", False, because="the counterpart has no biases in attention"),
)
LLAMA_ARGUMENTS = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
}
NO_DROPOUT = {"hidden_dropout": 0.0}


def weight(
    ours: str,
    theirs: str,
    rearrangement: Rearrangement = SAME,
    where: Where = everywhere,
) -> TensorRow:
    """Return the row of the weights of some modules.

    Args:
        ours: path of our module, in a layer without the layer's path.
        theirs: paths of their modules, separated by blanks.
        rearrangement: functions between our weight and theirs.
        where: returns True for the layers that have it.
    """
    names = " ".join(f"{path}.weight" for path in theirs.split())
    return TensorRow(f"{ours}.weight", names, rearrangement, where)


def with_bias(
    ours: str,
    theirs: str,
    rearrangement: Rearrangement = SAME,
) -> tuple[TensorRow, TensorRow]:
    """Return the rows of the weight and the bias of a module.

    Args:
        ours: path of our module.
        theirs: path of their module.
        rearrangement: functions between both. Transposed, a bias stays the same.
    """
    return (
        weight(ours, theirs, rearrangement),
        TensorRow(f"{ours}.bias", f"{theirs}.bias", rearrangement),
    )


OUTSIDE_LAYERS = (
    TensorRow(WORD_EMBEDDINGS, "model.embed_tokens.weight", VOCABULARY),
    weight("decoder.final_layernorm", "model.norm"),
    TensorRow(OUTPUT_LAYER, "lm_head.weight", VOCABULARY, untied),
)
NORMS = (
    weight("input_layernorm", "input_layernorm"),
    weight("pre_mlp_layernorm", "post_attention_layernorm"),
)
_QKV = tuple(f"self_attn.{part}_proj" for part in "qkv")
ATTENTION = (
    weight("self_attention.linear_qkv", " ".join(_QKV), HEADS),
    weight("self_attention.linear_proj", "self_attn.o_proj"),
)
QKV_BIAS = TensorRow(
    "self_attention.linear_qkv.bias",
    " ".join(f"{path}.bias" for path in _QKV),
    HEADS,
)
HEAD_NORMS = (
    weight("self_attention.q_layernorm", "self_attn.q_norm"),
    weight("self_attention.k_layernorm", "self_attn.k_norm"),
)
LATENT_ATTENTION = (
    weight("self_attention.linear_q_proj", "self_attn.q_proj", where=keeps_queries),
    weight("self_attention.linear_q_down_proj", "self_attn.q_a_proj", where=compresses_queries),
    weight("self_attention.q_layernorm", "self_attn.q_a_layernorm", where=compresses_queries),
    weight("self_attention.linear_q_up_proj", "self_attn.q_b_proj", where=compresses_queries),
    weight("self_attention.linear_kv_down_proj", "self_attn.kv_a_proj_with_mqa"),
    weight("self_attention.kv_layernorm", "self_attn.kv_a_layernorm"),
    weight("self_attention.linear_kv_up_proj", "self_attn.kv_b_proj"),
    weight("self_attention.linear_proj", "self_attn.o_proj"),
)
"""Rotated rows stay in order: Megatron-Core's latent attention rotates pairs of neighbours, as
transformers does with ``rope_interleave``."""


def gated_mlp(
    ours: str,
    theirs: str,
    where: Where,
    names: str = "gate_proj up_proj down_proj",
) -> tuple[TensorRow, TensorRow]:
    """Return the rows of a gated MLP.

    Args:
        ours: path of our MLP in a layer.
        theirs: path of their MLP in a layer.
        where: returns True for the layers that have it.
        names: names of their three projections, separated by blanks.
    """
    gate, up, down = (f"{theirs}.{name}" for name in names.split())
    return (
        weight(f"{ours}.linear_fc1", f"{gate} {up}", GATE_AND_UP, where),
        weight(f"{ours}.linear_fc2", down, where=where),
    )


DENSE_MLP = gated_mlp("mlp", "mlp", is_dense)
ROUTED_EXPERTS = (
    weight("mlp.router", "mlp.gate", where=has_experts),
    *gated_mlp("mlp.experts.local_experts.{expert}", "mlp.experts.{expert}", has_experts),
)
QWEN_RULES = (
    *LLAMA_RULES,
    only("use_sliding_window", False, because="sliding windows are not supported"),
    # These count with use_sliding_window only.
    without_meaning("sliding_window", "max_window_layers"),
    LAYER_TYPES,
    same("intermediate_size", "ffn_hidden_size"),
    rotary(10000.0, LLAMA3),
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
        rotary(10000.0, LLAMA3),
        tied_embeddings(False),
        only("mlp_bias", False, because="the counterpart has no biases in its MLP"),
    ),
    arguments=LLAMA_ARGUMENTS,
    training=NO_DROPOUT,
)
QWEN2 = replace(
    LLAMA,
    architecture="Qwen2ForCausalLM",
    layer=(*NORMS, *ATTENTION, QKV_BIAS, *DENSE_MLP),
    rules=(
        *QWEN_RULES,
        head_width(),
        grouped_queries(32),
        only("use_mrope", False, because="positions have one dimension", write=False),
    ),
    arguments=LLAMA_ARGUMENTS | {"add_qkv_bias": True},
)
QWEN3 = replace(
    LLAMA,
    architecture="Qwen3ForCausalLM",
    layer=(*NORMS, *ATTENTION, *HEAD_NORMS, *DENSE_MLP),
    rules=(*QWEN_RULES, head_width(128), grouped_queries(32)),
    arguments=LLAMA_ARGUMENTS | {"qk_layernorm": True},
)
MIXTRAL = replace(
    LLAMA,
    architecture="MixtralForCausalLM",
    layer=(
        *NORMS,
        *ATTENTION,
        weight("mlp.router", "block_sparse_moe.gate"),
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
        rotary(1e6, LLAMA3),
        tied_embeddings(False),
        only("sliding_window", None, because="sliding windows are not supported"),
        only("router_jitter_noise", 0.0, because="Megatron-Core adds noise to other values"),
    ),
)
QWEN3_MOE = replace(
    QWEN3,
    architecture="Qwen3MoeForCausalLM",
    layer=(*NORMS, *ATTENTION, *HEAD_NORMS, *DENSE_MLP, *ROUTED_EXPERTS),
    rules=(
        *QWEN_RULES,
        same("num_experts num_local_experts", "num_experts"),
        same("num_experts_per_tok", "moe_router_topk"),
        same("moe_intermediate_size", "moe_ffn_hidden_size"),
        NORMALIZED_SCORES,
        SPARSE_LAYERS,
        head_width(),
        grouped_queries(4),
    ),
)
DEEPSEEK_V3 = replace(
    LLAMA,
    architecture="DeepseekV3ForCausalLM",
    layer=(
        *NORMS,
        *LATENT_ATTENTION,
        *DENSE_MLP,
        *ROUTED_EXPERTS,
        TensorRow("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", where=has_experts),
        *gated_mlp("mlp.shared_experts", "mlp.shared_experts", has_experts),
    ),
    rules=(
        *LLAMA_RULES,
        LATENT_HEADS,
        same("intermediate_size", "ffn_hidden_size"),
        only("rms_norm_eps", 1e-6, because="norms of latents have 1e-06, as all then have here"),
        tied_embeddings(False),
        rotary(10000.0, YARN),
        only("rope_interleave", True, because="pairs of neighbours are rotated here"),
        QUERY_RANK,
        same("kv_lora_rank", "kv_lora_rank"),
        same("qk_nope_head_dim", "qk_head_dim"),
        same("qk_rope_head_dim", "qk_pos_emb_head_dim"),
        same("v_head_dim", "v_head_dim"),
        without_meaning("qk_head_dim", "head_dim"),  # follow from the widths above
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
        "layernorm_epsilon": 1e-6,
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
        TensorRow(WORD_EMBEDDINGS, "transformer.wte.weight", VOCABULARY),
        weight("embedding.position_embeddings", "transformer.wpe"),
        *with_bias("decoder.final_layernorm", "transformer.ln_f"),
        TensorRow(OUTPUT_LAYER, "lm_head.weight", VOCABULARY, untied),
    ),
    layer=(
        *with_bias("input_layernorm", "ln_1"),
        *with_bias("self_attention.linear_qkv", "attn.c_attn", FUSED_HEADS),
        *with_bias("self_attention.linear_proj", "attn.c_proj", TRANSPOSED),
        *with_bias("pre_mlp_layernorm", "ln_2"),
        *with_bias("mlp.linear_fc1", "mlp.c_fc", TRANSPOSED),
        *with_bias("mlp.linear_fc2", "mlp.c_proj", TRANSPOSED),
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
"""Families by the ``model_type`` of config.json."""


def family_named(name: Any, where: str) -> Family:
    """Return the family of a ``model_type``; ``where`` is its source, for the error.

    Raises:
        ValueError: for a type without counterpart.
    """
    if name not in FAMILIES:
        raise ValueError(
            f"{where} {name}, of which there is no counterpart here: known are"
            f" {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]
