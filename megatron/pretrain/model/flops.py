# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations (FLOPs) of a training step.

Counted are the matrix products of the model, where one multiply-add is two operations.
Source: Korthikanti et al., arXiv:2205.05198, appendix A, extended to grouped queries, gated MLPs,
latent attention, experts, and multi-token prediction.
"""

from __future__ import annotations

import argparse

from megatron.checkpoint.hugging_face.model_arguments import layers_with_experts


def training_flops(args: argparse.Namespace, num_sequences: int) -> float:
    """Return the FLOPs of one training step over ``num_sequences`` sequences, of all ranks.

    Backward needs twice the operations of forward. Recomputed activations do not count.

    Args:
        args: the completed arguments, with ``padded_vocab_size``.
        num_sequences: the global batch size, in sequences of ``args.seq_length`` tokens.
    """
    with_experts = layers_with_experts(args)
    num_expert_layers = sum(with_experts)
    num_dense_layers = args.num_layers - num_expert_layers
    # Every further token is predicted by one more layer, built like the last one of the model.
    num_predicting_layers = args.mtp_num_layers or 0
    if with_experts[-1]:
        num_expert_layers += num_predicting_layers
    else:
        num_dense_layers += num_predicting_layers

    per_token = (args.num_layers + num_predicting_layers) * attention_multiply_adds(args)
    per_token += num_dense_layers * mlp_multiply_adds(
        args.hidden_size, args.ffn_hidden_size, is_gated=args.swiglu
    )
    if num_expert_layers:
        per_token += num_expert_layers * expert_multiply_adds(args)
    per_token += num_predicting_layers * 2 * args.hidden_size * args.hidden_size
    per_token += (1 + num_predicting_layers) * args.hidden_size * args.padded_vocab_size
    multiply_adds = 3.0 * per_token * num_sequences * args.seq_length  # backward is two thirds
    return 2.0 * multiply_adds


def attention_multiply_adds(args: argparse.Namespace) -> float:
    """Return the multiply-adds of one attention layer for one token, projections included."""
    hidden = args.hidden_size
    heads = args.num_attention_heads
    keys_seen = args.seq_length / 2  # causal: half of the products are masked
    if not args.multi_latent_attention:
        groups = args.num_query_groups if args.group_query_attention else heads
        projections = hidden * args.kv_channels * (2 * heads + 2 * groups)
        return projections + 2 * heads * args.kv_channels * keys_seen
    query = args.qk_head_dim + args.qk_pos_emb_head_dim
    if args.q_lora_rank is None:
        projections = hidden * heads * query
    else:
        projections = args.q_lora_rank * (hidden + heads * query)
    projections += hidden * (args.kv_lora_rank + args.qk_pos_emb_head_dim)
    projections += args.kv_lora_rank * heads * (args.qk_head_dim + args.v_head_dim)
    projections += heads * args.v_head_dim * hidden
    return projections + heads * (query + args.v_head_dim) * keys_seen


def mlp_multiply_adds(
    hidden_size: int,
    width: int,
    *,
    is_gated: bool,
) -> float:
    """Return the multiply-adds of an MLP for one token; a gated one has a third matrix."""
    num_matrices = 3 if is_gated else 2
    return num_matrices * hidden_size * width


def expert_multiply_adds(args: argparse.Namespace) -> float:
    """Return the multiply-adds of one layer of experts for one token.

    These are the router, the experts that the router chooses, and those that all tokens share.
    """
    router = args.hidden_size * args.num_experts
    # Experts share their input, so several are as one that is as wide as all of them.
    width = args.moe_router_topk * args.moe_ffn_hidden_size
    width += args.moe_shared_expert_intermediate_size or 0
    return router + mlp_multiply_adds(args.hidden_size, width, is_gated=args.swiglu)
