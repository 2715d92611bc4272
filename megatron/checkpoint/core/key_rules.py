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

import argparse
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

# ---- what there is
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
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
    Row("embedding.word_embeddings", ("vocabulary", "hidden"), 0, leaves=("weight",)),
    Row("embedding.position_embeddings", ("positions", "hidden"), leaves=("weight",)),
    Row("embedding.tokentype_embeddings", ("token_types", "hidden"), leaves=("weight",)),
)
LAYER = (
    Row("input_layernorm", ("hidden",)),
    Row("self_attention.linear_proj", ("hidden", "attention_width"), 1),
    Row("self_attention.linear_qkv", ("qkv_rows", "hidden"), 0),
    Row("self_attention.linear_q_proj", ("latent_query_rows", "hidden"), 0),
    Row("self_attention.linear_q_down_proj", ("query_rank", "hidden")),
    Row("self_attention.linear_q_up_proj", ("latent_query_rows", "query_rank"), 0),
    Row("self_attention.linear_kv_down_proj", ("key_value_down_rows", "hidden")),
    Row("self_attention.linear_kv_up_proj", ("key_value_up_rows", "key_value_rank"), 0),
    Row("self_attention.q_layernorm", ("query_norm",)),
    Row("self_attention.k_layernorm", ("head_dim",)),
    Row("self_attention.kv_layernorm", ("key_value_rank",)),
    Row("pre_mlp_layernorm", ("hidden",)),
    Row("mlp.router", ("experts", "hidden")),
    Row("mlp.router", ("experts",), leaves=("expert_bias",), is_buffer=True),
    Row(
        "mlp.experts.local_experts.{expert}.linear_fc1",
        ("expert_fc1_rows", "hidden"),
        0,
        gated=True,
    ),
    Row("mlp.experts.local_experts.{expert}.linear_fc2", ("hidden", "expert_width"), 1),
    # A module's own parameter comes before those of the modules in it.
    Row("mlp.shared_experts", ("one", "hidden"), leaves=("gate_weight",)),
    Row("mlp.shared_experts.linear_fc1", ("shared_fc1_rows", "hidden"), 0, gated=True),
    Row("mlp.shared_experts.linear_fc2", ("hidden", "shared_width"), 1),
    Row("mlp.linear_fc1", ("fc1_rows", "hidden"), 0, gated=True),
    Row("mlp.linear_fc2", ("hidden", "mlp_width"), 1),
)
INNER_LAYER = "transformer_layer."
PREDICTING_LAYER = (
    Row("enorm", ("hidden",)),
    Row("hnorm", ("hidden",)),
    Row("eh_proj", ("hidden", "twice_hidden"), 0),
    *(replace(row, module=INNER_LAYER + row.module) for row in LAYER),
    Row("final_layernorm", ("hidden",)),
)
MODEL: tuple[tuple[str, tuple[Row, ...]], ...] = (
    ("", BEFORE_LAYERS),
    ("decoder.layers.{number}.", LAYER),
    ("", (Row("decoder.final_layernorm", ("hidden",)),)),
    ("mtp.layers.{number}.", PREDICTING_LAYER),
    ("", (Row("output_layer", ("vocabulary", "hidden"), 0),)),
)

# ---- other spellings
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerKind:
    """What the spelling of a layer's parameters depends on."""

    has_experts: bool
    is_latent: bool  # multi-latent attention


@dataclass(frozen=True)
class FusedNorm:
    """A norm whose weight and bias can be called ``<linear layer>.layer_norm_weight`` and ``_bias``.

    Attributes:
        in_engine: in which layers of Transformer Engine it is so, in the model as in files.
        in_files_of_local: in which layers torch_dist files call it so although the model is of
            local layers.
    """

    norm: str
    linear: str
    in_engine: Callable[[LayerKind], bool]
    in_files_of_local: Callable[[LayerKind], bool]


FUSED_NORMS = (
    FusedNorm(
        "input_layernorm",
        "self_attention.linear_qkv",
        lambda kind: not kind.is_latent,
        lambda kind: not kind.is_latent,
    ),
    FusedNorm(
        "pre_mlp_layernorm",
        "mlp.linear_fc1",
        lambda kind: not kind.has_experts,
        lambda kind: not kind.is_latent,
    ),
    FusedNorm(
        "self_attention.q_layernorm",
        "self_attention.linear_q_up_proj",
        lambda kind: kind.is_latent,
        lambda kind: False,
    ),
    FusedNorm(
        "self_attention.kv_layernorm",
        "self_attention.linear_kv_up_proj",
        lambda kind: True,
        lambda kind: False,
    ),
    # Releases after 0.16 can join both down projections of latent attention, and then the norm
    # before them.
    FusedNorm(
        "input_layernorm",
        "self_attention.linear_qkv_down_proj",
        lambda kind: False,
        lambda kind: False,
    ),
)
HALVES = ("_w", "_v")
"""Endings of the gate and of what it multiplies.

A rank's fused tensor is no contiguous slice of the global one.
"""

OTHER_INNER_LAYER = "mtp_model_layer."
"""What the layer inside a multi-token prediction layer is called from Megatron-Core 0.17 on."""

_WRAPPERS = re.compile(r"^(module\.)*")
_GROUPED = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))$")
_STACKED_EXPERTS = re.compile(r"\.mlp\.experts\.experts\.(linear_fc[12]\.(?:weight|bias))$")
_LAYER = re.compile(r"^((?:decoder|mtp)\.layers\.\d+\.(?:transformer_layer\.)?)(.+)$")
_STACKED_LAYERS = re.compile(r"^decoder\.layers\.(?!\d)")
_NUMBER = re.compile(r"^decoder\.layers\.(\d+)\.")
_FUSED = re.compile(r"\.layer_norm_(weight|bias)$")


def plain_name(name: str) -> str:
    """A parameter's name without the wrappers around the model."""
    return name[_WRAPPERS.match(name).end() :]


def canonical_name(name: str) -> str:
    """The canonical name of a parameter that a module or a file calls ``name``, whichever layers the model is made of."""
    name = plain_name(name).replace(f".{OTHER_INNER_LAYER}", f".{INNER_LAYER}")
    name = _GROUPED.sub(r".mlp.experts.local_experts.\3.\1.\2", name)
    if _FUSED.search(name):
        for row in FUSED_NORMS:
            name = re.sub(
                rf"\.{re.escape(row.linear)}\.layer_norm_(weight|bias)$", rf".{row.norm}.\1", name
            )
    return name


@dataclass(frozen=True)
class Spelling:
    """How one model's modules and files call parameters.

    Attributes:
        engine: the layers are Transformer Engine's.
        grouped_experts: all experts of a layer are one module.
        stacked: torch_dist files stack the decoder's layers, which are all alike.
        layers: kind of each layer, by its path with a dot at the end.
        inner_layer: name of the layer inside a multi-token prediction layer.
    """

    engine: bool
    grouped_experts: bool
    stacked: bool
    layers: dict[str, LayerKind]
    inner_layer: str = INNER_LAYER

    def module_name(self, name: str) -> str:
        """What the model calls the parameter with this canonical name."""
        name = self._with_fused_norm(name, lambda row, kind: self.engine and row.in_engine(kind))
        if self.grouped_experts:
            name = _EXPERT.sub(lambda found: f".mlp.experts.{found[2]}{found[1]}", name)
        return name.replace(f".{INNER_LAYER}", f".{self.inner_layer}")

    def stacked_place(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The key of a torch_dist file that holds the parameter, and its place along the key's leading axes."""
        name = self._with_fused_norm(
            name, lambda row, kind: (row.in_engine if self.engine else row.in_files_of_local)(kind)
        )
        index: tuple[int, ...] = ()
        expert = _EXPERT.search(name)
        if expert is not None:
            index = (int(expert[1]),)
            name = f"{name[: expert.start()]}.mlp.experts.experts.{expert[2]}"
        number = _NUMBER.match(name) if self.stacked else None
        if number is not None:
            index = (int(number[1]), *index)
            name = f"decoder.layers.{name[number.end() :]}"
        return name.replace(f".{INNER_LAYER}", f".{self.inner_layer}"), index

    def _with_fused_norm(self, name: str, is_fused: Callable[[FusedNorm, LayerKind], bool]) -> str:
        layer = _LAYER.match(name)
        if layer is None:
            return name
        module, _, leaf = layer[2].rpartition(".")
        for row in FUSED_NORMS:
            if module == row.norm and is_fused(row, self.layers[layer[1]]):
                return f"{layer[1]}{row.linear}.layer_norm_{leaf}"
        return name


def layer_kinds(names: Iterable[str]) -> dict[str, LayerKind]:
    """The kind of every layer of a model whose parameters have these canonical names."""
    parts: dict[str, list[str]] = {}
    for name in names:
        layer = _LAYER.match(name)
        if layer is not None:
            parts.setdefault(layer[1], []).append(layer[2])
    return {
        path: LayerKind(
            has_experts=any(part.startswith(("mlp.router.", "mlp.experts.")) for part in tails),
            is_latent=any(part.startswith("self_attention.linear_kv_down_proj.") for part in tails),
        )
        for path, tails in parts.items()
    }


def unstacked(key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The canonical names of the parameters that one key of a torch_dist file holds, with their place along its axes.

    Raises:
        ValueError: where the tensor has fewer axes than its key says.
    """
    layers = _STACKED_LAYERS.match(key)
    experts = _STACKED_EXPERTS.search(key)
    if len(shape) < (layers is not None) + (experts is not None):
        raise ValueError(f"{key} has the shape {shape}: an axis of layers or experts is missing")
    numbers: list[tuple[int, ...]] = [()]
    for axis in range((layers is not None) + (experts is not None)):
        numbers = [(*number, each) for number in numbers for each in range(shape[axis])]
    for index in numbers:
        name = key
        if experts is not None:
            name = f"{key[: experts.start()]}.mlp.experts.local_experts.{index[-1]}.{experts[1]}"
        if layers is not None:
            name = f"decoder.layers.{index[0]}.{name[layers.end() :]}"
        yield canonical_name(name), index


# ---- facts about one parameter
# ---------------------------------------------------------------------------------------


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], int, Row]]:
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
def row_of(name: str) -> Row | None:
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
    row = row_of(name)
    return row is not None and row.is_buffer


def has_extra_state(name: str, engine: bool) -> bool:
    """Whether the module of a weight has an ``_extra_state`` in torch_dist files: linear layers, in the engine norms."""
    module, _, leaf = name.rpartition(".")
    if leaf != "weight" or module in (
        "output_layer",
        "embedding.word_embeddings",
        "embedding.position_embeddings",
    ):
        return False
    return module.rpartition(".")[2].startswith(("linear_", "eh_proj")) or (
        engine and "norm" in module
    )


def is_gated(name: str, gated_linear_unit: bool = True) -> bool:
    """Whether fsdp_dtensor files have the parameter's halves apart."""
    row = row_of(canonical_name(name)) if gated_linear_unit else None
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
    row = row_of(name)
    if row is None or row.split_dim is None:
        return None
    if name.endswith(".bias"):
        return 0 if row.split_dim == 0 else None
    return row.split_dim


# ---- shapes
# ----------------------------------------------------------------------------------------------------------


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
    row = row_of(name)
    if row is None:
        return None
    dims = row.dims[:1] if name.endswith(".bias") else row.dims
    return tuple(getattr(sizes, dim) for dim in dims)
