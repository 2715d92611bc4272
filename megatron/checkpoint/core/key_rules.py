# SPDX-License-Identifier: Apache-2.0
"""The one table of what parameters are called, which every reader and writer of checkpoints goes by.

A parameter has one *canonical* name: that in a GPTModel of local layers on one rank, with layers
and experts counted over the whole model and gated weights whole, such as
``decoder.layers.7.mlp.experts.local_experts.3.linear_fc1.weight``. Files and modules spell it in
other ways:

- Transformer Engine's layers keep some norms inside the linear layer that follows
  (``FUSED_NORMS``), and all experts of a layer in one module, ``mlp.experts.linear_fc1.weight3``;
- fsdp_dtensor files have the spelling of the model's modules, and the two halves of gated weights
  apart (``HALVES``);
- torch_dist files stack layers and experts:
  ``decoder.layers.mlp.experts.experts.linear_fc1.weight``, with two leading axes, and call norms as
  Transformer Engine does, more or less (``FUSED_NORMS`` again).

The rows of ``MODEL`` and ``LAYER`` say which parameters there are, in the order in which a GPTModel
registers them. A new kind of layer is a few rows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.checkpoint.core.spelling import (
    _EXPERT,
    _GROUPED,
    _NUMBER,
    HALVES,
    INNER_LAYER,
    Spelling,
    canonical_name,
)


@dataclass(frozen=True)
class ParameterRule:
    """The weight of a module, and its bias, which is as long as the weight has rows.

    Attributes:
        module: its path; ``{expert}`` is a number.
        dims: of the weight, by the names of :class:`Sizes`.
        split_dim: along which tensor parallelism divides the weight. Biases are divided with dim 0
            only.
        gated: dim 0 is a gate and what it multiplies, one after the other, where the model's MLPs
            are gated.
        leaves: what the module has.
        is_buffer: no parameter: stored in its own dtype, without optimizer state.
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
"""Parameters with a row for every token of the vocabulary, and more so that tensor parallelism can divide them."""

BEFORE_LAYERS = (
    ParameterRule("embedding.word_embeddings", ("vocabulary", "hidden"), 0, leaves=("weight",)),
    ParameterRule("embedding.position_embeddings", ("positions", "hidden"), leaves=("weight",)),
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
    *(replace(row, module=INNER_LAYER + row.module) for row in LAYER),
    ParameterRule("final_layernorm", ("hidden",)),
)
MODEL: tuple[tuple[str, tuple[ParameterRule, ...]], ...] = (
    ("", BEFORE_LAYERS),
    ("decoder.layers.{number}.", LAYER),
    ("", (ParameterRule("decoder.final_layernorm", ("hidden",)),)),
    ("mtp.layers.{number}.", PREDICTING_LAYER),
    ("", (ParameterRule("output_layer", ("vocabulary", "hidden"), 0),)),
)


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], int, ParameterRule]]:
    """What canonical names look like, with the number of their stack, and their rows."""
    found = []
    for stack, (prefix, rows) in enumerate(MODEL):
        for row in rows:
            path = (
                re.escape(prefix + row.module)
                .replace(r"\{number\}", r"\d+")
                .replace(r"\{expert\}", r"\d+")
            )
            found.append((re.compile(rf"^{path}\.({'|'.join(row.leaves)})$"), stack, row))
    return found


@functools.cache
def rule_of(name: str) -> ParameterRule | None:
    """The row for a canonical name; None for a parameter of no model that is known here."""
    return next((row for pattern, _, row in _patterns() if pattern.match(name)), None)


def registration_order(name: str, spelling: Spelling | None = None) -> tuple[Any, ...]:
    """Sorts canonical names as a GPTModel registers its parameters; unknown ones come last, by name.

    Args:
        spelling: of the model; default: local layers. Transformer Engine's linear layers register
            the norm inside before their own weight, and grouped experts the first layer of all
            experts before the second of any.
    """
    spelled = spelling.module_name(name) if spelling is not None else name
    linear, fused, norm_leaf = spelled.rpartition(".layer_norm_")
    if fused:
        return (*registration_order(f"{linear}.weight")[:-1], -2 if norm_leaf == "weight" else -1)
    for position, (pattern, stack, row) in enumerate(_patterns()):
        if pattern.match(name):
            layer, expert = (
                [int(number) for number in re.findall(r"\.(\d+)(?=\.)", name)] + [0, 0]
            )[:2]
            module = row.module.partition("{expert}")[0]  # the rows of an expert stand together
            first = next(
                at
                for at, (_, of, each) in enumerate(_patterns())
                if of == stack and each.module.startswith(module)
            )
            within = (position, expert) if _GROUPED.search(spelled) else (expert, position)
            return (stack, layer, first, *within, row.leaves.index(name.rpartition(".")[2]))
    return (len(MODEL), name)


def layer_number(name: str) -> int | None:
    """Of a parameter in the decoder."""
    found = _NUMBER.match(name)
    return int(found[1]) if found is not None else None


def is_expert(name: str) -> bool:
    """Whether a parameter is one of the experts that expert parallelism divides."""
    return ".mlp.experts." in name


def expert_number(name: str) -> int | None:
    """Of a parameter of one expert."""
    found = _EXPERT.search(name)
    return int(found[1]) if found is not None else None


def is_buffer(name: str) -> bool:
    """Whether a model stores it beside its parameters."""
    row = rule_of(name)
    return row is not None and row.is_buffer


def has_extra_state(name: str, transformer_engine: bool) -> bool:
    """Whether the module of a weight has an ``_extra_state`` in torch_dist files: linear layers, in the engine norms."""
    module, _, leaf = name.rpartition(".")
    if leaf != "weight" or module in (
        "output_layer",
        "embedding.word_embeddings",
        "embedding.position_embeddings",
    ):
        return False
    return module.rpartition(".")[2].startswith(("linear_", "eh_proj")) or (
        transformer_engine and "norm" in module
    )


def is_gated(name: str, gated_linear_unit: bool = True) -> bool:
    """Whether fsdp_dtensor files have the parameter's halves apart."""
    row = rule_of(canonical_name(name)) if gated_linear_unit else None
    return row is not None and row.gated


def has_halves(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a parameter is a gate and what that multiplies: it has twice as many rows as the next layer has columns.

    Args:
        shapes: of all parameters of the model, by canonical name.
    """
    following = shapes.get(re.sub(r"linear_fc1\.(weight|bias)$", "linear_fc2.weight", name))
    return is_gated(name) and following is not None and shapes[name][0] == 2 * following[1]


def entry_names(name: str, gated_linear_unit: bool) -> list[str]:
    """The names under which an fsdp_dtensor file has a parameter: its own, or those of its halves."""
    return [name + half for half in HALVES] if is_gated(name, gated_linear_unit) else [name]


def split_dim(name: str) -> int | None:
    """The dim along which tensor parallelism divides a parameter; None where every rank has the whole."""
    row = rule_of(name)
    if row is None or row.split_dim is None:
        return None
    if name.endswith(".bias"):
        return 0 if row.split_dim == 0 else None
    return row.split_dim
