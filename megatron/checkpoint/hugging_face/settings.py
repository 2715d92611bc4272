# SPDX-License-Identifier: Apache-2.0
"""What settings of config.json mean in Megatron-LM's arguments: single rules, of which the families choose theirs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.hugging_face.model_arguments import layers_with_experts
from megatron.checkpoint.hugging_face.tensors import num_groups

Config = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """What some keys of config.json mean in Megatron-LM's arguments.

    Attributes:
        keys: that it reads or writes, or that follow from those it writes.
        names: of arguments that it reads or writes.
        read: config -> arguments. The list takes what is wrong with the settings, in words.
        write: arguments -> keys of config. The list takes what is wrong with the arguments.
    """

    keys: tuple[str, ...]
    names: tuple[str, ...]
    read: Callable[[Config, list[str]], dict[str, Any]]
    write: Callable[[argparse.Namespace, list[str]], Config]


_REQUIRED = object()


def same(keys: str, name: str, default: Any = _REQUIRED) -> Rule:
    """A key and an argument that mean the same.

    Args:
        keys: its spellings, separated by blanks; the first is written.
        name: of the argument.
        default: what a config without the key means, or with null.
    """
    spellings = tuple(keys.split())

    def read(config: Config, problems: list[str]) -> dict[str, Any]:
        value = next((config[key] for key in spellings if config.get(key) is not None), default)
        if value is _REQUIRED:
            problems.append(f"{' or '.join(spellings)} is missing")
            return {}
        return {name: value}

    def write(args: argparse.Namespace, problems: list[str]) -> Config:
        value = getattr(args, name, None)
        if value is None and default is _REQUIRED:
            problems.append(f"{name} is not set")
        return {spellings[0]: value}

    return Rule(spellings, (name,), read, write)


def only(key: str, *allowed: Any, because: str = "", write: bool = True) -> Rule:
    """A key with which Megatron can do nothing but ``allowed``.

    The first of them is written where ``write`` says so.
    """

    def read(config: Config, problems: list[str]) -> dict[str, Any]:
        if key in config and config[key] not in (*allowed, None):
            reason = because or f"Megatron-Core's counterpart has {in_words(allowed[0])} only"
            problems.append(f"{key} {in_words(config[key])}: {reason}")
        return {}

    return Rule((key,), (), read, lambda args, problems: {key: allowed[0]} if write else {})


def in_words(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def without_meaning(*keys: str) -> Rule:
    """Keys that follow from others, or are for training by other programs.

    They are not taken over from a template.
    """
    return Rule(keys, (), lambda config, problems: {}, lambda args, problems: {})


def tied_embeddings(default: bool) -> Rule:
    """Whether the output layer's weight is that of the embedding."""

    def read(config: Config, problems: list[str]) -> dict[str, Any]:
        return {
            "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", default)
        }

    return Rule(
        ("tie_word_embeddings",),
        ("untie_embeddings_and_output_weights",),
        read,
        lambda args, problems: {
            "tie_word_embeddings": not args.untie_embeddings_and_output_weights
        },
    )


def grouped_queries(default: int | None) -> Rule:
    """How many heads share a key and a value; where the config does not say how many keys there are, the default."""

    def read(config: Config, problems: list[str]) -> dict[str, Any]:
        heads = config.get("num_attention_heads") or 1
        groups = config.get("num_key_value_heads", default) or heads
        if heads % groups:
            problems.append(
                f"num_attention_heads {heads} is no multiple of num_key_value_heads {groups}"
            )
        return {
            "group_query_attention": groups != heads,
            "num_query_groups": groups if groups != heads else 1,
        }

    names = ("group_query_attention", "num_query_groups")
    return Rule(
        ("num_key_value_heads",),
        names,
        read,
        lambda args, problems: {"num_key_value_heads": num_groups(args)},
    )


def head_width(default: int | None = None) -> Rule:
    """Width of a head, where the config says it; else the default, or what divides the hidden size."""

    def read(config: Config, problems: list[str]) -> dict[str, Any]:
        width = config.get("head_dim") or default
        return {
            "kv_channels": (
                width
                or (config.get("hidden_size") or 0) // (config.get("num_attention_heads") or 1)
            )
        }

    return Rule(
        ("head_dim",), ("kv_channels",), read, lambda args, problems: {"head_dim": args.kv_channels}
    )


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096, "truncate": True}
"""What Megatron-LM has no flags for, at the values it has."""


def rotary(theta: float, scaling: str) -> Rule:
    """Rotary positions.

    Args:
        theta: the base where the config does not say it.
        scaling: the one way of stretching that the counterpart knows, ``llama3`` or ``yarn``.
    """
    read_scaling, write_scaling = (
        (_read_llama3, _write_llama3) if scaling == "llama3" else (_read_yarn, _write_yarn)
    )

    def read(config: Config, problems: list[str]) -> dict[str, Any]:
        # Releases of transformers before 5 have the base beside what stretches it.
        settings = {
            "rope_theta": config.get("rope_theta"),
            "partial_rotary_factor": config.get("partial_rotary_factor"),
        }
        given = (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})
        settings |= {key: value for key, value in given.items() if value is not None}
        base = settings.pop("rope_theta") or theta
        if base != int(base):
            problems.append(f"rope_theta {base}: --rotary-base takes whole numbers")
        if settings.pop("partial_rotary_factor") not in (None, 1.0):
            problems.append(
                "partial_rotary_factor: Megatron-Core's counterpart rotates whole heads"
            )
        older = settings.pop("type", "default")
        kind = settings.pop("rope_type", older)
        if kind not in ("default", scaling):
            problems.append(f"rope_scaling of type {kind}: the counterpart has {scaling} only")
            return {}
        return {"rotary_base": int(base)} | read_scaling(
            settings if kind == scaling else None, problems
        )

    def write(args: argparse.Namespace, problems: list[str]) -> Config:
        return {
            "rope_theta": float(args.rotary_base),
            "rope_scaling": write_scaling(args, problems),
        }

    llama3 = ("use_rope_scaling", "rope_scaling_factor")
    names = (
        llama3
        if scaling == "llama3"
        else ("rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim")
    )
    keys = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    return Rule(keys, ("rotary_base", *names), read, write)


def _read_llama3(settings: Config | None, problems: list[str]) -> dict[str, Any]:
    if settings is None:
        return {"use_rope_scaling": False}
    factor = _without_flags(settings, LLAMA3, problems)
    return {"use_rope_scaling": True, "rope_scaling_factor": factor}


def _write_llama3(args: argparse.Namespace, problems: list[str]) -> Config | None:
    if not args.use_rope_scaling:
        return None
    return {"rope_type": "llama3", "factor": float(args.rope_scaling_factor), **LLAMA3}


def _read_yarn(settings: Config | None, problems: list[str]) -> dict[str, Any]:
    if settings is None:
        return {"rope_type": "rope"}
    scale, scale_of_all = settings.pop("mscale", None), settings.pop("mscale_all_dim", None)
    if scale_of_all and not scale:
        problems.append(
            "rope_scaling with mscale_all_dim but without mscale: the counterpart uses both or none"
        )
    factor = _without_flags(settings, YARN, problems)
    # transformers leaves mscale out of account unless there are both.
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": factor,
        "mscale": float(scale) if scale and scale_of_all else 1.0,
        "mscale_all_dim": float(scale_of_all or 0.0),
    }


def _write_yarn(args: argparse.Namespace, problems: list[str]) -> Config | None:
    if args.rope_type == "rope":
        if args.rotary_scaling_factor > 1 and args.mscale_all_dim:
            problems.append(
                "rotary_scaling_factor and mscale_all_dim change the scores although rope_type is"
                " rope"
            )
        return None
    if not args.mscale_all_dim and args.mscale != 1:
        problems.append(
            f"mscale {args.mscale} without mscale_all_dim, which transformers would not use"
        )
    found = {
        "rope_type": "yarn",
        "factor": float(args.rotary_scaling_factor),
        "beta_fast": 32,
        "beta_slow": 1,
    }
    found["original_max_position_embeddings"] = YARN["original_max_position_embeddings"]
    return found | (
        {"mscale": args.mscale, "mscale_all_dim": args.mscale_all_dim}
        if args.mscale_all_dim
        else {}
    )


def _without_flags(settings: Config, fixed: Config, problems: list[str]) -> float:
    """The factor, where all other settings have the values that Megatron-LM has no flags for."""
    factor = settings.pop("factor", None)
    if factor is None:
        problems.append("rope_scaling without a factor")
    for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        if name in fixed and name not in settings:
            problems.append(f"rope_scaling without {name}")
    for name, value in settings.items():
        if name not in fixed:
            problems.append(f"rope_scaling has {name} {value}, which Megatron-LM does not know")
        elif value != fixed[name]:
            problems.append(
                f"rope_scaling has {name} {value}: Megatron-LM has {fixed[name]} and no flag for it"
            )
    return float(factor or 1.0)


def _read_normalized(config: Config, problems: list[str]) -> dict[str, Any]:
    normalized = bool(config.get("norm_topk_prob", False))
    if normalized and config.get("num_experts_per_tok") == 1:
        problems.append(
            "num_experts_per_tok 1 with norm_topk_prob true: Megatron-LM refuses a softmax over one"
            " score"
        )
    return {"moe_router_pre_softmax": not normalized}


NORMALIZED_SCORES = Rule(
    ("norm_topk_prob",),
    ("moe_router_pre_softmax",),
    _read_normalized,
    lambda args, problems: {"norm_topk_prob": not args.moe_router_pre_softmax},
)


def _read_sparse_layers(config: Config, problems: list[str]) -> dict[str, Any]:
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step") or 1
    layers = range(config.get("num_hidden_layers") or 0)
    return {
        "moe_layer_freq": _frequency(
            [int(n not in dense and (n + 1) % step == 0) for n in layers], problems
        )
    }


def _frequency(pattern: list[int], problems: list[str]) -> list[int] | int:
    if pattern and not any(pattern):
        problems.append("no layer has experts: --moe-layer-freq has to name one")
    return 1 if all(pattern) else pattern


SPARSE_LAYERS = Rule(
    ("mlp_only_layers", "decoder_sparse_step"),
    ("moe_layer_freq",),
    _read_sparse_layers,
    lambda args, problems: {
        "mlp_only_layers": [
            number for number, sparse in enumerate(layers_with_experts(args)) if not sparse
        ],
        "decoder_sparse_step": 1,
    },
)


def _read_first_dense(config: Config, problems: list[str]) -> dict[str, Any]:
    layers, dense = (
        config.get("num_hidden_layers") or 0,
        config.get("first_k_dense_replace", 3) or 0,
    )
    return {
        "moe_layer_freq": _frequency([int(number >= dense) for number in range(layers)], problems)
    }


def _write_first_dense(args: argparse.Namespace, problems: list[str]) -> Config:
    pattern = layers_with_experts(args)
    if pattern != sorted(pattern):
        problems.append(f"moe_layer_freq {args.moe_layer_freq}: dense layers have to come first")
    return {"first_k_dense_replace": pattern.count(0)}


FIRST_LAYERS_DENSE = Rule(
    ("first_k_dense_replace",), ("moe_layer_freq",), _read_first_dense, _write_first_dense
)


def _read_routing_groups(config: Config, problems: list[str]) -> dict[str, Any]:
    groups, chosen = config.get("n_group", 8) or 1, config.get("topk_group", 4) or 1
    if chosen == groups:  # all of them: no limit
        return {"moe_router_num_groups": None, "moe_router_group_topk": None}
    _check_routing_groups(
        config.get("num_experts_per_tok") or 0,
        chosen,
        "num_experts_per_tok",
        "topk_group",
        problems,
    )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def _write_routing_groups(args: argparse.Namespace, problems: list[str]) -> Config:
    if not args.moe_router_group_topk:
        return {"n_group": 1, "topk_group": 1}
    chosen = args.moe_router_group_topk
    _check_routing_groups(
        args.moe_router_topk, chosen, "moe_router_topk", "moe_router_group_topk", problems
    )
    return {"n_group": args.moe_router_num_groups, "topk_group": chosen}


def _check_routing_groups(
    topk: int, chosen: int, name: str, group_name: str, problems: list[str]
) -> None:
    """The score of a group sums its best: two of them in transformers, as many as it gives on average in Megatron-Core."""
    if topk // chosen != 2:
        problems.append(
            f"{name} {topk} with {group_name} {chosen}: both programs agree only where one is twice"
            " the other"
        )


ROUTING_GROUPS = Rule(
    ("n_group", "topk_group"),
    ("moe_router_num_groups", "moe_router_group_topk"),
    _read_routing_groups,
    _write_routing_groups,
)


def _read_shared_experts(config: Config, problems: list[str]) -> dict[str, Any]:
    number = config.get("n_shared_experts", 1)
    if not number:
        problems.append(f"n_shared_experts {number}: there is at least one")
    return {
        "moe_shared_expert_intermediate_size": (
            (number or 1) * (config.get("moe_intermediate_size") or 0)
        )
    }


def _write_shared_experts(args: argparse.Namespace, problems: list[str]) -> Config:
    width, expert = args.moe_shared_expert_intermediate_size or 0, args.moe_ffn_hidden_size or 1
    if not width or width % expert:
        problems.append(
            f"moe_shared_expert_intermediate_size {width} is no multiple of moe_ffn_hidden_size"
            f" {expert}"
        )
    return {"n_shared_experts": width // expert}


SHARED_EXPERTS = Rule(
    ("n_shared_experts",),
    ("moe_shared_expert_intermediate_size",),
    _read_shared_experts,
    _write_shared_experts,
)


def _read_sigmoid_scores(config: Config, problems: list[str]) -> dict[str, Any]:
    topk, normalized = config.get("num_experts_per_tok"), config.get("norm_topk_prob", True)
    if bool(normalized) != (topk != 1):
        problems.append(f"norm_topk_prob {in_words(normalized)} with num_experts_per_tok {topk}: Megatron-Core makes the "
                        "scores add up to 1 exactly where there are several")  # fmt: skip
    return {}


SIGMOID_SCORES = Rule(
    ("norm_topk_prob",),
    (),
    _read_sigmoid_scores,
    lambda args, problems: {"norm_topk_prob": args.moe_router_topk != 1},
)


def _read_one_width(config: Config, problems: list[str]) -> dict[str, Any]:
    heads, others = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if others not in (None, heads):
        problems.append(
            f"num_key_value_heads {others}: latent attention has as many as num_attention_heads,"
            f" {heads}"
        )
    return {}


LATENT_HEADS = Rule(
    ("num_key_value_heads",),
    (),
    _read_one_width,
    lambda args, problems: {"num_key_value_heads": args.num_attention_heads},
)


def _all_sparse(args: argparse.Namespace, problems: list[str]) -> Config:
    if not all(layers_with_experts(args)):
        problems.append(
            f"moe_layer_freq {args.moe_layer_freq}: all layers have experts in this family"
        )
    return {}


def _write_epsilon(args: argparse.Namespace, problems: list[str]) -> Config:
    if args.layernorm_epsilon != 1e-6:
        problems.append(
            f"layernorm_epsilon is {args.layernorm_epsilon}: transformers has 1e-06 for norms of"
            " latents"
        )
    return {}


def _read_epsilon(config: Config, problems: list[str]) -> dict[str, Any]:
    if config.get("rms_norm_eps", 1e-6) != 1e-6:
        value = config["rms_norm_eps"]
        problems.append(
            f"rms_norm_eps {value}: norms of latents have 1e-06 all the same, but Megatron-LM has"
            " one for all"
        )
    return {}


EPSILON_OF_LATENTS = Rule((), ("layernorm_epsilon",), _read_epsilon, _write_epsilon)
EXPERTS_EVERYWHERE = Rule(
    (), ("moe_layer_freq",), lambda config, problems: {"moe_layer_freq": 1}, _all_sparse
)


TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


def _read_gelu(config: Config, problems: list[str]) -> dict[str, Any]:
    name = config.get("activation_function", "gelu_new")
    if name not in (*TANH_GELU, "gelu"):
        problems.append(f"activation_function {name}: the counterpart has gelu and gelu_new only")
    return {"bias_gelu_fusion": name != "gelu"}


GELU = Rule(
    ("activation_function",),
    ("openai_gelu", "bias_gelu_fusion"),
    _read_gelu,
    lambda args, problems: {
        "activation_function": "gelu_new" if args.openai_gelu or args.bias_gelu_fusion else "gelu"
    },
)


def _read_inner_width(config: Config, problems: list[str]) -> dict[str, Any]:
    return {"ffn_hidden_size": config.get("n_inner") or 4 * (config.get("n_embd") or 0)}


INNER_WIDTH = Rule(
    ("n_inner",),
    ("ffn_hidden_size",),
    _read_inner_width,
    lambda args, problems: {"n_inner": args.ffn_hidden_size},
)


def _read_dropout(config: Config, problems: list[str]) -> dict[str, Any]:
    residual, embedding = config.get("resid_pdrop", 0.1), config.get("embd_pdrop", 0.1)
    if residual != embedding:
        problems.append(
            f"resid_pdrop {residual} and embd_pdrop {embedding}: Megatron-LM has one"
            " --hidden-dropout for both"
        )
    return {"hidden_dropout": residual}


ONE_DROPOUT = Rule(
    ("resid_pdrop", "embd_pdrop"),
    ("hidden_dropout",),
    _read_dropout,
    lambda args, problems: {"resid_pdrop": args.hidden_dropout, "embd_pdrop": args.hidden_dropout},
)


def _read_even_heads(config: Config, problems: list[str]) -> dict[str, Any]:
    return {"kv_channels": (config.get("n_embd") or 0) // (config.get("n_head") or 1)}


def _write_even_heads(args: argparse.Namespace, problems: list[str]) -> Config:
    if args.kv_channels * args.num_attention_heads != args.hidden_size:
        problems.append(
            f"kv_channels {args.kv_channels}: heads are as wide as hidden_size over"
            " num_attention_heads"
        )
    return {}


EVEN_HEADS = Rule((), ("kv_channels",), _read_even_heads, _write_even_heads)


def _read_kinds_of_attention(config: Config, problems: list[str]) -> dict[str, Any]:
    others = sorted(set(config.get("layer_types") or []) - {"full_attention"})
    if others:
        problems.append(
            f"layer_types {', '.join(others)}: the counterpart has full_attention in all layers"
        )
    return {}


KINDS_OF_ATTENTION = Rule(("layer_types",), (), _read_kinds_of_attention, lambda args, problems: {})
QUERY_RANK = Rule(
    ("q_lora_rank",),
    ("q_lora_rank",),
    lambda config, problems: {
        "q_lora_rank": config.get("q_lora_rank", 1536)
    },  # null: queries are not compressed
    lambda args, problems: {"q_lora_rank": args.q_lora_rank},
)
PREDICTIONS = Rule(
    ("num_nextn_predict_layers", "num_mtp_layers"),
    ("mtp_num_layers",),
    lambda config, problems: {},  # whether there are any is seen in the files
    lambda args, problems: {"num_nextn_predict_layers": args.mtp_num_layers or 0},
)
