# SPDX-License-Identifier: Apache-2.0
"""Rules between settings of config.json and Megatron-LM's arguments, from which families choose."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.hugging_face.model_arguments import num_query_groups

Config = dict[str, Any]
"""The content of a config.json, or a part of it."""

Arguments = dict[str, Any]
"""Values of Megatron-LM's arguments, by name."""

Problems = list[str]
"""Reasons why a config or arguments cannot be followed; rules append to it."""

Read = Callable[[Config, Problems], Arguments]
"""A config -> arguments. Problems with the settings are appended to the list."""

Write = Callable[[Namespace, Problems], Config]
"""Arguments -> keys of a config. Problems with the arguments are appended to the list."""


@dataclass(frozen=True)
class SettingRule:
    """Meaning of some keys of config.json in Megatron-LM's arguments.

    Attributes:
        keys: keys that it reads or writes, or that follow from those it writes.
        names: names of arguments that it reads or writes.
        read: function that reads from the config.
        write: function that writes to the config.
    """

    keys: tuple[str, ...]
    names: tuple[str, ...]
    read: Read
    write: Write


def read_nothing(config: Config, problems: Problems) -> Arguments:
    """Stand for reading in a rule that only writes, or that allows any value."""
    return {}


def write_nothing(args: Namespace, problems: Problems) -> Config:
    """Stand for writing in a rule that only reads."""
    return {}


_REQUIRED = object()


def same(
    keys: str,
    name: str,
    default: Any = _REQUIRED,
) -> SettingRule:
    """Make the rule of a key and an argument that mean the same.

    Args:
        keys: its spellings, separated by blanks; the first is written.
        name: name of the argument.
        default: the meaning of a config without the key, or with null. Without a default such a
            config is a problem.
    """
    spellings = tuple(keys.split())

    def read(config: Config, problems: Problems) -> Arguments:
        for key in spellings:
            if config.get(key) is not None:
                return {name: config[key]}
        if default is _REQUIRED:
            problems.append(f"{' or '.join(spellings)} is missing")
            return {}
        return {name: default}

    def write(args: Namespace, problems: Problems) -> Config:
        value = getattr(args, name, None)
        if value is None and default is _REQUIRED:
            problems.append(f"{name} is not set")
        return {spellings[0]: value}

    return SettingRule(spellings, (name,), read, write)


def derived(
    key: str,
    name: str,
    read: Callable[[Config], Any],
) -> SettingRule:
    """Make the rule of a key and an argument whose value follows from several keys.

    Args:
        key: key of the config that is written.
        name: name of the argument.
        read: returns the argument's value for a config.
    """
    return SettingRule(
        (key,),
        (name,),
        read=lambda config, problems: {name: read(config)},
        write=lambda args, problems: {key: getattr(args, name)},
    )


def only(
    key: str,
    *allowed: Any,
    because: str = "",
    write: bool = True,
) -> SettingRule:
    """Make the rule of a key that must have one of the values which Megatron-Core can follow.

    Args:
        key: key of the config.
        *allowed: the values, besides null.
        because: the reason for people.
        write: whether to write the first of the values.
    """

    def read(config: Config, problems: Problems) -> Arguments:
        if key in config and config[key] not in (*allowed, None):
            reason = because or f"Megatron-Core's counterpart has {in_words(allowed[0])} only"
            problems.append(f"{key} {in_words(config[key])}: {reason}")
        return {}

    def write_first(args: Namespace, problems: Problems) -> Config:
        return {key: allowed[0]}

    if not write:
        return SettingRule((key,), (), read, write_nothing)
    return SettingRule((key,), (), read, write_first)


def without_meaning(*keys: str) -> SettingRule:
    """Make the rule of keys that follow from others, or are for training by other programs.

    They are not copied from a template.
    """
    return SettingRule(keys, (), read_nothing, write_nothing)


def in_words(value: Any) -> str:
    """Return a value as JSON spells it, for messages."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def tied_embeddings(default: bool) -> SettingRule:
    """Make the rule of an output layer that may have the weight of the embedding."""
    key, name = "tie_word_embeddings", "untie_embeddings_and_output_weights"
    return SettingRule(
        (key,),
        (name,),
        read=lambda config, problems: {name: not config.get(key, default)},
        write=lambda args, problems: {key: not getattr(args, name)},
    )


# ---- attention


def grouped_queries(default: int | None) -> SettingRule:
    """Make the rule of heads that share a key and a value; ``default`` None: one for each head."""

    def read(config: Config, problems: Problems) -> Arguments:
        heads = config.get("num_attention_heads") or 1
        groups = config.get("num_key_value_heads", default) or heads
        if heads % groups:
            problems.append(
                f"num_attention_heads {heads} is no multiple of num_key_value_heads {groups}"
            )
        if groups == heads:
            return {"group_query_attention": False, "num_query_groups": 1}
        return {"group_query_attention": True, "num_query_groups": groups}

    return SettingRule(
        ("num_key_value_heads",),
        ("group_query_attention", "num_query_groups"),
        read,
        write=lambda args, problems: {"num_key_value_heads": num_query_groups(args)},
    )


def head_width(default: int | None = None) -> SettingRule:
    """Make the rule of a head's width; ``default`` None: hidden size over the number of heads."""

    def read(config: Config) -> Any:
        hidden_size = config.get("hidden_size") or 0
        num_heads = config.get("num_attention_heads") or 1
        even = hidden_size // num_heads
        return config.get("head_dim") or default or even

    return derived("head_dim", "kv_channels", read)


def _read_layer_types(config: Config, problems: Problems) -> Arguments:
    others = sorted(set(config.get("layer_types") or []) - {"full_attention"})
    if others:
        problems.append(
            f"layer_types {', '.join(others)}: the counterpart has full_attention in all layers"
        )
    return {}


LAYER_TYPES = SettingRule(("layer_types",), (), _read_layer_types, write_nothing)
"""Every layer attends to all tokens before."""


def _read_latent_heads(config: Config, problems: Problems) -> Arguments:
    heads = config.get("num_attention_heads")
    others = config.get("num_key_value_heads")
    if others not in (None, heads):
        problems.append(
            f"num_key_value_heads {others}: latent attention has as many as num_attention_heads,"
            f" {heads}"
        )
    return {}


LATENT_HEADS = SettingRule(
    ("num_key_value_heads",),
    (),
    _read_latent_heads,
    write=lambda args, problems: {"num_key_value_heads": args.num_attention_heads},
)
"""Latent attention has a key and a value for each head."""


QUERY_RANK = derived("q_lora_rank", "q_lora_rank", lambda config: config.get("q_lora_rank", 1536))
"""The width of compressed queries in latent attention; null: they are not compressed."""

# ---- quantization and predicting layers


def _read_quantization(config: Config, problems: Problems) -> Arguments:
    given = config.get("quantization_config") or {}
    block = given.get("weight_block_size") or ()
    is_fp8 = given.get("quant_method") == "fp8" and given.get("fmt", "e4m3") == "e4m3"
    sizes = []
    for size in block:
        if type(size) is int and size > 0:
            sizes.append(size)
    has_blocks = len(block) == len(sizes) == 2
    if given and not (is_fp8 and has_blocks):
        problems.append(
            f"quantization_config {given}: known is quant_method fp8 of the fmt e4m3 with a"
            " weight_block_size of two numbers; otherwise save the model without quantization first"
        )
    return {}


FP8_IN_BLOCKS = SettingRule(("quantization_config",), (), _read_quantization, write_nothing)
"""Weights in FP8 with a scale for each block, which the reader multiplies."""


PREDICTIONS = SettingRule(
    ("num_nextn_predict_layers", "num_mtp_layers"),
    ("mtp_num_layers",),
    read_nothing,  # the tensors in the files show how many there are
    write=lambda args, problems: {"num_nextn_predict_layers": args.mtp_num_layers or 0},
)
"""The number of layers that predict further tokens."""

# ---- GPT-2

_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


def _read_gelu(config: Config, problems: Problems) -> Arguments:
    name = config.get("activation_function", "gelu_new")
    if name not in (*_TANH_GELU, "gelu"):
        problems.append(f"activation_function {name}: the counterpart has gelu and gelu_new only")
    return {"bias_gelu_fusion": name != "gelu"}


def _write_gelu(args: Namespace, problems: Problems) -> Config:
    if args.openai_gelu or args.bias_gelu_fusion:
        return {"activation_function": "gelu_new"}
    return {"activation_function": "gelu"}


GELU = SettingRule(
    ("activation_function",),
    ("openai_gelu", "bias_gelu_fusion"),
    _read_gelu,
    _write_gelu,
)
"""The tanh formula of GELU is that of Megatron-Core's fused kernel."""


INNER_WIDTH = derived(
    "n_inner",
    "ffn_hidden_size",
    lambda config: config.get("n_inner") or 4 * (config.get("n_embd") or 0),
)
"""The width of the MLP; null: four times the hidden size."""


def _read_dropout(config: Config, problems: Problems) -> Arguments:
    residual = config.get("resid_pdrop", 0.1)
    embedding = config.get("embd_pdrop", 0.1)
    if residual != embedding:
        problems.append(
            f"resid_pdrop {residual} and embd_pdrop {embedding}: Megatron-LM has one"
            " --hidden-dropout for both"
        )
    return {"hidden_dropout": residual}


ONE_DROPOUT = SettingRule(
    ("resid_pdrop", "embd_pdrop"),
    ("hidden_dropout",),
    _read_dropout,
    write=lambda args, _: dict.fromkeys(("resid_pdrop", "embd_pdrop"), args.hidden_dropout),
)
"""Residuals and embeddings have one probability of dropout."""


def _read_even_heads(config: Config, problems: Problems) -> Arguments:
    hidden_size = config.get("n_embd") or 0
    num_heads = config.get("n_head") or 1
    return {"kv_channels": hidden_size // num_heads}


def _write_even_heads(args: Namespace, problems: Problems) -> Config:
    if args.kv_channels * args.num_attention_heads != args.hidden_size:
        problems.append(
            f"kv_channels {args.kv_channels}: heads are as wide as hidden_size over"
            " num_attention_heads"
        )
    return {}


EVEN_HEADS = SettingRule((), ("kv_channels",), _read_even_heads, _write_even_heads)
"""Heads divide the hidden size evenly."""
