# SPDX-License-Identifier: Apache-2.0
"""How many floating-point operations a model needs."""

from __future__ import annotations

import argparse


def floating_point_operations(args: argparse.Namespace, batch_size: int) -> float:
    """Operations of matrix products in one training step over ``batch_size`` sequences: forward, and twice that for backward.

    After Korthikanti et al., arXiv:2205.05198, appendix A, with grouped queries, gated MLPs, latent
    attention, experts and multi-token prediction. Recomputation does not count.
    """
    experts = layers_with_experts(args)
    extra = args.mtp_num_layers or 0
    dense_layers = args.num_layers - sum(experts) + (0 if experts[-1] else extra)
    expert_layers = sum(experts) + (
        extra if experts[-1] else 0
    )  # a predicted token has a layer of the last one's kind
    per_token = (args.num_layers + extra) * attention_products(args)
    per_token += dense_layers * mlp_products(args, args.ffn_hidden_size)
    if expert_layers:
        per_token += expert_layers * expert_products(args)
    per_token += extra * 2 * args.hidden_size * args.hidden_size
    per_token += (1 + extra) * args.hidden_size * args.padded_vocab_size
    return 3.0 * 2.0 * per_token * batch_size * args.seq_length


def layers_with_experts(args: argparse.Namespace) -> list[bool]:
    """For every layer whether it has experts."""
    if not args.num_experts:
        return [False] * args.num_layers
    if isinstance(args.moe_layer_freq, int):
        return [number % args.moe_layer_freq == 0 for number in range(args.num_layers)]
    return [bool(each) for each in args.moe_layer_freq]


def attention_products(args: argparse.Namespace) -> float:
    """Multiplications a token and layer."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    keys_seen = args.seq_length / 2  # causal: half of the products are masked
    if args.multi_latent_attention:
        query = args.qk_head_dim + args.qk_pos_emb_head_dim
        rank = args.q_lora_rank
        projections = (
            hidden * heads * query if rank is None else hidden * rank + rank * heads * query
        )
        projections += hidden * (args.kv_lora_rank + args.qk_pos_emb_head_dim)
        projections += (
            args.kv_lora_rank * heads * (args.qk_head_dim + args.v_head_dim)
            + heads * args.v_head_dim * hidden
        )
        return projections + heads * (query + args.v_head_dim) * keys_seen
    groups = args.num_query_groups if args.group_query_attention else heads
    projections = hidden * args.kv_channels * (2 * heads + 2 * groups)
    return projections + 2 * heads * args.kv_channels * keys_seen


def mlp_products(args: argparse.Namespace, width: int) -> float:
    return (3 if args.swiglu else 2) * args.hidden_size * width


def expert_products(args: argparse.Namespace) -> float:
    """Of the router, the experts that a token is sent to, and those that all tokens share."""
    shared = mlp_products(args, args.moe_shared_expert_intermediate_size or 0)
    chosen = args.moe_router_topk * mlp_products(args, args.moe_ffn_hidden_size)
    return args.hidden_size * args.num_experts + chosen + shared
