# SPDX-License-Identifier: Apache-2.0
"""The table of the parameters that models have, and their shapes, which all formats use.

The rules of ``MODEL`` and ``LAYER`` list the parameters, in the order in which a GPTModel registers
them, by canonical name (:mod:`megatron.checkpoint.core.spelling`). Supporting layers with other
parameters takes a few more rules.
"""

from __future__ import annotations

import functools
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.checkpoint.core.lazy_tensor import Shape
from megatron.checkpoint.core.spelling import (
    HALVES,
    INNER_LAYER,
    Spelling,
    canonical_name,
    is_grouped,
)


@dataclass(frozen=True)
class ParameterRule:
    """The weight of a module, and its bias, which is as long as the weight has rows.

    Attributes:
        module: path of the module; ``{expert}`` is a number.
        dims: dims of the weight, by their names in :mod:`megatron.checkpoint.core.key_rules`.
        split_dim: dim of the weight that tensor parallelism splits; None for no split. Biases are
            split with dim 0 only.
        gated: if the model's MLPs are gated, dim 0 is the gate, followed by the rows that it
            multiplies.
        leaves: names of the parameters that the module has.
        is_buffer: a buffer, not a parameter: stored in its own dtype, without optimizer state.
    """

    module: str
    dims: tuple[str, ...]
    split_dim: int | None = None
    gated: bool = False
    leaves: tuple[str, ...] = ("weight", "bias")
    is_buffer: bool = False


WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
VOCABULARY = (WORD_EMBEDDINGS, OUTPUT_LAYER)
"""Parameters with a row for every token of the vocabulary.

They have some more rows, so that tensor parallelism can divide them.
"""

BEFORE_LAYERS = (
    ParameterRule("embedding.word_embeddings", ("vocabulary", "hidden"), 0, leaves=("weight",)),
    ParameterRule(
        "embedding.position_embeddings",
        ("positions", "hidden"),
        leaves=("weight",),
    ),
    ParameterRule("embedding.tokentype_embeddings", ("token_types", "hidden"), leaves=("weight",)),
)
LAYER = (
    ParameterRule("input_layernorm", ("hidden",)),
    ParameterRule("self_attention.linear_proj", ("hidden", "attention_width"), 1),
    ParameterRule("self_attention.linear_qkv", ("qkv_rows", "hidden"), 0),
    ParameterRule("self_attention.linear_q_proj", ("latent_query_rows", "hidden"), 0),
    ParameterRule("self_attention.linear_q_down_proj", ("query_rank", "hidden")),
    ParameterRule("self_attention.linear_q_up_proj", ("latent_query_rows", "query_rank"), 0),
    ParameterRule("self_attention.linear_kv_down_proj", ("key_value_down_rows", "hidden")),
    ParameterRule("self_attention.linear_kv_up_proj", ("key_value_up_rows", "key_value_rank"), 0),
    ParameterRule("self_attention.q_layernorm", ("query_norm",)),
    ParameterRule("self_attention.k_layernorm", ("head_dim",)),
    ParameterRule("self_attention.kv_layernorm", ("key_value_rank",)),
    ParameterRule("pre_mlp_layernorm", ("hidden",)),
    ParameterRule("mlp.router", ("experts", "hidden")),
    ParameterRule("mlp.router", ("experts",), leaves=("expert_bias",), is_buffer=True),
    ParameterRule(
        "mlp.experts.local_experts.{expert}.linear_fc1",
        ("expert_fc1_rows", "hidden"),
        0,
        gated=True,
    ),
    ParameterRule("mlp.experts.local_experts.{expert}.linear_fc2", ("hidden", "expert_width"), 1),
    # A module's own parameter comes before those of the modules in it.
    ParameterRule("mlp.shared_experts", ("one", "hidden"), leaves=("gate_weight",)),
    ParameterRule("mlp.shared_experts.linear_fc1", ("shared_fc1_rows", "hidden"), 0, gated=True),
    ParameterRule("mlp.shared_experts.linear_fc2", ("hidden", "shared_width"), 1),
    ParameterRule("mlp.linear_fc1", ("fc1_rows", "hidden"), 0, gated=True),
    ParameterRule("mlp.linear_fc2", ("hidden", "mlp_width"), 1),
)
PREDICTING_LAYER = (
    ParameterRule("enorm", ("hidden",)),
    ParameterRule("hnorm", ("hidden",)),
    ParameterRule("eh_proj", ("hidden", "twice_hidden"), 0),
    *(replace(rule, module=INNER_LAYER + rule.module) for rule in LAYER),
    ParameterRule("final_layernorm", ("hidden",)),
)
MODEL: tuple[tuple[str, tuple[ParameterRule, ...]], ...] = (
    ("", BEFORE_LAYERS),
    ("decoder.layers.{number}.", LAYER),
    ("", (ParameterRule("decoder.final_layernorm", ("hidden",)),)),
    ("mtp.layers.{number}.", PREDICTING_LAYER),
    ("", (ParameterRule("output_layer", ("vocabulary", "hidden"), 0),)),
)


@dataclass(frozen=True)
class _TableEntry:
    """A rule with the canonical names that it is for, and its position in the table.

    Attributes:
        pattern: fits the canonical names.
        stack: number of the rule's entry in ``MODEL``.
        position: number of the rule in the whole table.
        position_of_module: number of the first rule for the same module; all rules of an expert are
            for one module.
        rule: the rule.
    """

    pattern: re.Pattern[str]
    stack: int
    position: int
    position_of_module: int
    rule: ParameterRule


@functools.cache
def _table() -> list[_TableEntry]:
    entries: list[_TableEntry] = []
    for stack, (prefix, rules) in enumerate(MODEL):
        start = len(entries)
        for rule in rules:
            path = re.escape(prefix + rule.module)
            path = path.replace(r"\{number\}", r"\d+").replace(r"\{expert\}", r"\d+")
            pattern = re.compile(rf"^{path}\.({'|'.join(rule.leaves)})$")
            module = rule.module.partition("{expert}")[0]
            is_of_module = [other.module.startswith(module) for other in rules]
            entries.append(
                _TableEntry(
                    pattern,
                    stack,
                    position=len(entries),
                    position_of_module=start + is_of_module.index(True),
                    rule=rule,
                )
            )
    return entries


def _entry_of(name: str) -> _TableEntry | None:
    for entry in _table():
        if entry.pattern.match(name):
            return entry
    return None


@functools.cache
def rule_of(name: str) -> ParameterRule | None:
    """Return the rule for a canonical name; None for a parameter that is not known here."""
    entry = _entry_of(name)
    if entry is None:
        return None
    return entry.rule


def registration_order(name: str, spelling: Spelling | None = None) -> tuple[Any, ...]:
    """Return a key that sorts canonical names in the order in which a GPTModel registers them.

    Unknown names come last, by name. The default spelling is that of local layers. Transformer
    Engine's linear layers register the norm inside before their own weight, and grouped experts the
    first linear layer of all experts before the second of any.
    """
    module_name = name
    if spelling is not None:
        module_name = spelling.module_name(name)
    linear, fused, norm_leaf = module_name.rpartition(".layer_norm_")
    if fused:
        of_linear = registration_order(f"{linear}.weight")
        leaf = -1  # before the leaves of the linear layer itself
        if norm_leaf == "weight":
            leaf = -2
        return (*of_linear[:-1], leaf)
    entry = _entry_of(name)
    if entry is None:
        return (len(MODEL), name)
    numbers = []
    for number in re.findall(r"\.(\d+)(?=\.)", name):
        numbers.append(int(number))
    layer, expert = [*numbers, 0, 0][:2]
    # Experts are modules one after another, each with fc1 and fc2: 0.fc1, 0.fc2, 1.fc1, 1.fc2. A
    # module of grouped experts has 0.fc1, 1.fc1, 0.fc2, 1.fc2.
    in_module = (expert, entry.position)
    if is_grouped(module_name):
        in_module = (entry.position, expert)
    _, _, leaf_name = name.rpartition(".")
    leaf = entry.rule.leaves.index(leaf_name)
    return (entry.stack, layer, entry.position_of_module, *in_module, leaf)


def is_buffer(name: str) -> bool:
    """Return True if a tensor of a model is a buffer, not a parameter."""
    rule = rule_of(name)
    return rule is not None and rule.is_buffer


def has_extra_state(name: str, transformer_engine: bool) -> bool:
    """Return True if the module of a weight has an ``_extra_state`` in torch_dist files.

    Linear layers have one, and so do Transformer Engine's norms.
    """
    module, _, leaf = name.rpartition(".")
    without = ("output_layer", "embedding.word_embeddings", "embedding.position_embeddings")
    if leaf != "weight" or module in without:
        return False
    _, _, module_name = module.rpartition(".")
    is_linear = module_name.startswith(("linear_", "eh_proj"))
    return is_linear or (transformer_engine and "norm" in module)


def is_gated(name: str, gated_linear_unit: bool = True) -> bool:
    """Return True if fsdp_dtensor files of a model store the two halves of a parameter separately.

    The name can be in any spelling; ``gated_linear_unit`` means that the model's MLPs are gated.
    """
    rule = rule_of(canonical_name(name))
    return gated_linear_unit and rule is not None and rule.gated


def has_halves(name: str, shapes: Mapping[str, Shape]) -> bool:
    """Return True if dim 0 of a parameter is a gate, followed by the rows that it multiplies.

    It then has twice as many rows as the next linear layer, whose shape is in ``shapes``, columns.
    """
    following = shapes.get(re.sub(r"linear_fc1\.(weight|bias)$", "linear_fc2.weight", name))
    if following is None or not is_gated(name):
        return False
    return shapes[name][0] == 2 * following[1]


def entry_names(name: str, gated_linear_unit: bool) -> list[str]:
    """Return the names of a parameter in an fsdp_dtensor file: its own, or those of its halves."""
    if not is_gated(name, gated_linear_unit):
        return [name]
    return [name + half for half in HALVES]


def split_dim(name: str) -> int | None:
    """Return the dim of a parameter that tensor parallelism splits; None for no split."""
    rule = rule_of(name)
    if rule is None or rule.split_dim is None:
        return None
    if name.endswith(".bias") and rule.split_dim != 0:
        return None
    return rule.split_dim


def expected_shape(name: str, args: Namespace) -> tuple[int | None, ...] | None:
    """Return the shape that a parameter should have; None for one that is not known.

    Args:
        name: canonical name.
        args: the arguments of the run; a dim that they do not determine is None in the result.
    """
    rule = rule_of(name)
    if rule is None:
        return None
    dims = rule.dims
    if name.endswith(".bias"):
        dims = dims[:1]
    return tuple(_size(dim, args) for dim in dims)


def _size(dim: str, args: Namespace) -> int | None:
    try:
        return _SIZES[dim](args)
    except (AttributeError, TypeError):  # an argument that is missing or None
        return None


def _gated_rows(args: Namespace, width: int) -> int:
    factor = 1
    if args.swiglu or getattr(args, "quick_geglu", False):
        factor = 2
    return factor * width


def _attention_width(args: Namespace) -> int:
    num_heads: int = args.num_attention_heads
    if args.multi_latent_attention:
        return num_heads * int(args.v_head_dim)
    return num_heads * int(args.kv_channels)


def _qkv_rows(args: Namespace) -> int:
    num_groups: int = args.num_attention_heads
    if args.group_query_attention:
        num_groups = args.num_query_groups
    num_heads: int = args.num_attention_heads + 2 * num_groups
    return num_heads * int(args.kv_channels)


def _query_norm(args: Namespace) -> int:
    if args.multi_latent_attention:
        return int(args.q_lora_rank)
    return int(args.kv_channels)


_SIZES: dict[str, Callable[[Namespace], int]] = {
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
    "query_norm": _query_norm,
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
