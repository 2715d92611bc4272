# SPDX-License-Identifier: Apache-2.0
"""Shapes that the parameters of a model should have, from the arguments of its run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from megatron.checkpoint.core.key_rules import rule_of


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, by the names that ``ParameterRule.dims`` has, from its arguments.

    A size is an attribute, such as ``sizes.hidden``. It is None if the arguments lack it.

    Attributes:
        args: of the run.
    """

    args: argparse.Namespace

    def __getattr__(self, name: str) -> int | None:
        try:
            return _SIZES[name](self.args)
        except (AttributeError, TypeError):  # an argument that is missing or None
            return None


def expected_shape(name: str, sizes: Sizes) -> tuple[int | None, ...] | None:
    """Return the shape that a parameter should have; None for one that is not known.

    Args:
        name: its canonical name.
        sizes: of the model. Dims that it does not say are None in the result.
    """
    rule = rule_of(name)
    if rule is None:
        return None
    dims = rule.dims[:1] if name.endswith(".bias") else rule.dims
    return tuple(getattr(sizes, dim) for dim in dims)


def _gated_rows(args: argparse.Namespace, width: int) -> int:
    is_gated = args.swiglu or getattr(args, "quick_geglu", False)
    return width * (2 if is_gated else 1)


def _attention_width(args: argparse.Namespace) -> int:
    head_dim: int = args.v_head_dim if args.multi_latent_attention else args.kv_channels
    num_heads: int = args.num_attention_heads
    return num_heads * head_dim


def _qkv_rows(args: argparse.Namespace) -> int:
    num_heads: int = args.num_attention_heads
    num_groups: int = args.num_query_groups if args.group_query_attention else num_heads
    head_dim: int = args.kv_channels
    return (num_heads + 2 * num_groups) * head_dim


_SIZES: dict[str, Callable[[argparse.Namespace], int]] = {
    "one": lambda args: 1,
    "hidden": lambda args: args.hidden_size,
    "twice_hidden": lambda args: 2 * args.hidden_size,
    "vocabulary": lambda args: args.padded_vocab_size,
    "positions": lambda args: args.max_position_embeddings,
    "token_types": lambda args: args.num_tokentypes,
    "head_dim": lambda args: args.kv_channels,
    "attention_width": _attention_width,
    "qkv_rows": _qkv_rows,
    "query_rank": lambda args: args.q_lora_rank,
    "key_value_rank": lambda args: args.kv_lora_rank,
    "query_norm": lambda args: (
        args.q_lora_rank if args.multi_latent_attention else args.kv_channels
    ),
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
