# SPDX-License-Identifier: Apache-2.0
"""Rules for mixtures of experts: which layers have them, shared experts, and routing."""

from __future__ import annotations

from argparse import Namespace

from megatron.checkpoint.hugging_face.model_arguments import layers_with_experts
from megatron.checkpoint.hugging_face.setting_rules import (
    Arguments,
    Config,
    Problems,
    SettingRule,
    in_words,
)

# ---- layers


def _layer_frequency(pattern: list[int], problems: Problems) -> Arguments:
    """Return ``moe_layer_freq`` for one number per layer: 1 with experts, 0 without."""
    if pattern and not any(pattern):
        problems.append("no layer has experts: --moe-layer-freq has to name one")
    if all(pattern):
        return {"moe_layer_freq": 1}
    return {"moe_layer_freq": pattern}


def _read_sparse_layers(config: Config, problems: Problems) -> Arguments:
    """Read every ``decoder_sparse_step``-th layer: with a step of 2 layers 1, 3, 5 and so on."""
    dense = config.get("mlp_only_layers") or []
    step = config.get("decoder_sparse_step") or 1
    pattern = []
    for number in range(config.get("num_hidden_layers") or 0):
        pattern.append(int(number not in dense and (number + 1) % step == 0))
    return _layer_frequency(pattern, problems)


def _write_sparse_layers(args: Namespace, problems: Problems) -> Config:
    dense = []
    for number, sparse in enumerate(layers_with_experts(args)):
        if not sparse:
            dense.append(number)
    return {"mlp_only_layers": dense, "decoder_sparse_step": 1}


SPARSE_LAYERS = SettingRule(
    ("mlp_only_layers", "decoder_sparse_step"),
    ("moe_layer_freq",),
    _read_sparse_layers,
    _write_sparse_layers,
)
"""Any layers can be dense."""


def _read_first_dense(config: Config, problems: Problems) -> Arguments:
    num_layers = config.get("num_hidden_layers") or 0
    num_dense = config.get("first_k_dense_replace", 3) or 0
    pattern = [int(number >= num_dense) for number in range(num_layers)]
    return _layer_frequency(pattern, problems)


def _write_first_dense(args: Namespace, problems: Problems) -> Config:
    pattern = layers_with_experts(args)
    if pattern != sorted(pattern):
        problems.append(f"moe_layer_freq {args.moe_layer_freq}: dense layers have to come first")
    return {"first_k_dense_replace": pattern.count(0)}


FIRST_LAYERS_DENSE = SettingRule(
    ("first_k_dense_replace",),
    ("moe_layer_freq",),
    _read_first_dense,
    _write_first_dense,
)
"""The first layers can be dense."""


def _write_all_sparse(args: Namespace, problems: Problems) -> Config:
    if not all(layers_with_experts(args)):
        problems.append(
            f"moe_layer_freq {args.moe_layer_freq}: all layers have experts in this family"
        )
    return {}


EXPERTS_EVERYWHERE = SettingRule(
    (),
    ("moe_layer_freq",),
    lambda config, problems: {"moe_layer_freq": 1},
    _write_all_sparse,
)
"""No layer can be dense."""

# ---- shared experts


def _read_shared_experts(config: Config, problems: Problems) -> Arguments:
    number = config.get("n_shared_experts", 1)
    if not number:
        problems.append(f"n_shared_experts {number}: there is at least one")
    width = (number or 1) * (config.get("moe_intermediate_size") or 0)
    return {"moe_shared_expert_intermediate_size": width}


def _write_shared_experts(args: Namespace, problems: Problems) -> Config:
    width = args.moe_shared_expert_intermediate_size or 0
    expert = args.moe_ffn_hidden_size or 1
    if not width or width % expert:
        problems.append(
            f"moe_shared_expert_intermediate_size {width} is no multiple of moe_ffn_hidden_size"
            f" {expert}"
        )
    return {"n_shared_experts": width // expert}


SHARED_EXPERTS = SettingRule(
    ("n_shared_experts",),
    ("moe_shared_expert_intermediate_size",),
    _read_shared_experts,
    _write_shared_experts,
)
"""Their number there, the width of all together here."""

# ---- routing


def _read_normalized(config: Config, problems: Problems) -> Arguments:
    normalized = bool(config.get("norm_topk_prob", False))
    if normalized and config.get("num_experts_per_tok") == 1:
        problems.append(
            "num_experts_per_tok 1 with norm_topk_prob true: Megatron-LM refuses a softmax over one"
            " score"
        )
    return {"moe_router_pre_softmax": not normalized}


NORMALIZED_SCORES = SettingRule(
    ("norm_topk_prob",),
    ("moe_router_pre_softmax",),
    _read_normalized,
    write=lambda args, problems: {"norm_topk_prob": not args.moe_router_pre_softmax},
)
"""Scores of the chosen experts add up to 1 exactly if the softmax comes after the choice."""


def _read_sigmoid_scores(config: Config, problems: Problems) -> Arguments:
    topk = config.get("num_experts_per_tok")
    normalized = config.get("norm_topk_prob", True)
    if bool(normalized) != (topk != 1):
        problems.append(
            f"norm_topk_prob {in_words(normalized)} with num_experts_per_tok {topk}: Megatron-Core"
            " makes the scores add up to 1 exactly where there are several"
        )
    return {}


SIGMOID_SCORES = SettingRule(
    ("norm_topk_prob",),
    (),
    _read_sigmoid_scores,
    write=lambda args, problems: {"norm_topk_prob": args.moe_router_topk != 1},
)
"""Sigmoid scores of several chosen experts always add up to 1 in Megatron-Core."""


def _read_routing_groups(config: Config, problems: Problems) -> Arguments:
    num_groups = config.get("n_group", 8) or 1
    chosen = config.get("topk_group", 4) or 1
    if chosen == num_groups:  # all of them: no limit
        return {"moe_router_num_groups": None, "moe_router_group_topk": None}
    topk = config.get("num_experts_per_tok") or 0
    if not _scores_groups_alike(topk, chosen):
        problems.append(f"num_experts_per_tok {topk} with topk_group {chosen}: {_OTHER_SCORES}")
    return {"moe_router_num_groups": num_groups, "moe_router_group_topk": chosen}


def _write_routing_groups(args: Namespace, problems: Problems) -> Config:
    chosen = args.moe_router_group_topk
    if not chosen:
        return {"n_group": 1, "topk_group": 1}
    topk = args.moe_router_topk
    if not _scores_groups_alike(topk, chosen):
        problems.append(
            f"moe_router_topk {topk} with moe_router_group_topk {chosen}: {_OTHER_SCORES}"
        )
    return {"n_group": args.moe_router_num_groups, "topk_group": chosen}


_OTHER_SCORES = "both programs agree only where one is twice the other"


def _scores_groups_alike(topk: int, chosen: int) -> bool:
    """Return True if both programs score a group of experts alike.

    The score of a group is the sum of its best experts' scores: of two experts in transformers, of
    as many as a chosen group contributes on average in Megatron-Core.
    """
    return topk // chosen == 2


ROUTING_GROUPS = SettingRule(
    ("n_group", "topk_group"),
    ("moe_router_num_groups", "moe_router_group_topk"),
    _read_routing_groups,
    _write_routing_groups,
)
"""Experts are chosen from the best groups only."""
