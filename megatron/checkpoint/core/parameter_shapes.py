# SPDX-License-Identifier: Apache-2.0
"""Shapes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from megatron.checkpoint.core.key_rules import rule_of


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, from its arguments; None where they do not say.

    The names of ``Row.dims``.
    """

    args: argparse.Namespace

    def __getattr__(self, name: str) -> int | None:
        try:
            return _SIZES[name](self.args)
        except (AttributeError, TypeError):  # an argument that is missing or None
            return None


def _gated_rows(args: argparse.Namespace, width: int) -> int:
    return width * (2 if args.swiglu or getattr(args, "quick_geglu", False) else 1)


def _head_dim(args: argparse.Namespace) -> int:
    return args.kv_channels


def _groups(args: argparse.Namespace) -> int:
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads


_SIZES: dict[str, Callable[[argparse.Namespace], int]] = {
    "one": lambda args: 1,
    "hidden": lambda args: args.hidden_size,
    "twice_hidden": lambda args: 2 * args.hidden_size,
    "vocabulary": lambda args: args.padded_vocab_size,
    "positions": lambda args: args.max_position_embeddings,
    "head_dim": _head_dim,
    "attention_width": lambda args: (
        args.num_attention_heads
        * (args.v_head_dim if args.multi_latent_attention else _head_dim(args))
    ),
    "qkv_rows": lambda args: (args.num_attention_heads + 2 * _groups(args)) * _head_dim(args),
    "query_rank": lambda args: args.q_lora_rank,
    "key_value_rank": lambda args: args.kv_lora_rank,
    "query_norm": lambda args: args.q_lora_rank if args.multi_latent_attention else _head_dim(args),
    "latent_query_rows": lambda args: (
        args.num_attention_heads * (args.qk_head_dim + args.qk_pos_emb_head_dim)
    ),
    "key_value_down_rows": lambda args: args.kv_lora_rank + args.qk_pos_emb_head_dim,
    "key_value_up_rows": lambda args: (
        args.num_attention_heads * (args.qk_head_dim + args.v_head_dim)
    ),
    "experts": lambda args: args.num_experts,
    "expert_width": lambda args: args.moe_ffn_hidden_size,
    "expert_fc1_rows": lambda args: _gated_rows(args, args.moe_ffn_hidden_size),
    "shared_width": lambda args: args.moe_shared_expert_intermediate_size,
    "shared_fc1_rows": lambda args: _gated_rows(args, args.moe_shared_expert_intermediate_size),
    "mlp_width": lambda args: args.ffn_hidden_size,
    "fc1_rows": lambda args: _gated_rows(args, args.ffn_hidden_size),
}


def expected_shape(name: str, sizes: Sizes) -> tuple[int | None, ...] | None:
    """The shape of a parameter by its canonical name, None for dims that the arguments do not say; None if it is unknown."""
    row = rule_of(name)
    if row is None:
        return None
    dims = row.dims[:1] if name.endswith(".bias") else row.dims
    return tuple(getattr(sizes, dim) for dim in dims)
