# SPDX-License-Identifier: Apache-2.0
"""Rules about single numbers: which must be given, their signs, and that they are finite."""

import math
from collections.abc import Callable, Iterable

import torch

from megatron.pretrain.arguments.check import Check

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")
"""Destinations that every command line must give."""
POSITIVE = (
    *REQUIRED,
    *[
        "ffn_hidden_size",
        "kv_channels",
        "num_query_groups",
        "max_position_embeddings",
        "rotary_base",
        "rotary_seq_len_interpolation_factor",
        "global_batch_size",
        "train_iters",
        "dry_run_ranks",
        "train_samples",
        "hysteresis",
        "save_interval",
        "save_retain_interval",
        "non_persistent_save_interval",
        "eval_interval",
        "log_interval",
        "exit_interval",
        "exit_duration_in_mins",
        "vocab_size",
        "padded_vocab_size",
        "make_vocab_size_divisible_by",
        "ddp_bucket_size",
        "ddp_num_buckets",
        "lr_decay_iters",
        "lr_decay_samples",
        "lr_wsd_decay_iters",
        "lr_wsd_decay_samples",
        "distributed_timeout_minutes",
        "tensorboard_log_interval",
        "log_memory_interval",
        "check_weight_hash_across_dp_replicas_interval",
        "straggler_minmax_count",
        "num_experts",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "num_distributed_optimizer_instances",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "moe_ffn_hidden_size",
        "moe_shared_expert_intermediate_size",
        "moe_router_topk",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "v_head_dim",
        "mtp_num_layers",
    ],
)
"""Destinations whose values are at least 1, if they are given."""
NOT_NEGATIVE = [
    "lr",
    "min_lr",
    "clip_grad",
    "weight_decay",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_init",
    "eval_iters",
    "num_workers",
    "manual_gc_interval",
    "init_method_std",
    "embedding_init_method_std",
    "layernorm_epsilon",
    "adam_eps",
    "decoupled_lr",
    "decoupled_min_lr",
    "error_injection_rate",
    "ckpt_step",
    "seed",
]
"""Destinations whose values are at least 0, if they are given."""
ABOVE_ZERO = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window")
"""Destinations of real numbers that are above 0, if they are given."""
PROBABILITIES = ("attention_dropout", "hidden_dropout")
"""Destinations whose values are from 0 to 1."""
DECAYS = ("adam_beta1", "adam_beta2", "sgd_momentum")
"""Destinations of the shares of an optimizer's running means that a step keeps: below 1."""
LARGEST_FLOAT = torch.finfo(torch.float32).max
"""The largest number in single precision, in which tensors have them."""
LONGEST_TIMEOUT = 10**9
"""Minutes; :class:`datetime.timedelta` ends soon after."""
SEEDS = 2**32
"""Numbers that NumPy takes as a seed. A rank adds at most 100 for each rank before it."""


def check_numbers(check: Check) -> None:
    """Refuse missing required flags, numbers that are not finite, and those out of their range."""
    missing = [check.flag(dest) for dest in REQUIRED if getattr(check.args, dest) is None]
    check.require(not missing, f"required but not given: {', '.join(missing)}")
    infinite = check_finite(check)
    demands: tuple[tuple[Iterable[str], Callable[[float], bool], str], ...] = (
        (PROBABILITIES, lambda value: 0 <= value <= 1, "from 0 to 1"),
        (DECAYS, lambda value: 0 <= value < 1, "at least 0 and below 1"),
        (("rotary_percent",), lambda value: 0 < value <= 1, "above 0 and at most 1"),
        (POSITIVE, lambda value: value > 0, "at least 1"),
        (ABOVE_ZERO, lambda value: value > 0, "above 0"),
        (NOT_NEGATIVE, lambda value: value >= 0, "at least 0"),
    )
    for dests, is_met, words in demands:
        for dest in dests:
            value = getattr(check.args, dest, None)  # a release may lack the flag
            if value is not None and dest not in infinite:
                check.require(is_met(value), f"{check.flag(dest)} must be {words}, got {value}")
    minutes = check.args.distributed_timeout_minutes
    check.require(
        minutes <= LONGEST_TIMEOUT,
        f"--distributed-timeout-minutes must be at most {LONGEST_TIMEOUT}, got {minutes}",
    )
    least, first = check.args.min_loss_scale, check.args.initial_loss_scale
    check.require(
        least <= first or infinite & {"min_loss_scale", "initial_loss_scale"},
        f"--min-loss-scale {least} must be at most --initial-loss-scale {first}",
    )
    highest = SEEDS - 100 * check.machine.world_size
    check.require(
        check.args.seed <= highest, f"--seed must be at most {highest}, got {check.args.seed}"
    )


def check_finite(check: Check) -> set[str]:
    """Refuse infinities, NaN, which comparisons let through, and numbers that no tensor can hold.

    Returns:
        The destinations of these.
    """
    infinite = set()
    for dest, value in check.given.items():
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, float) or abs(number) <= LARGEST_FLOAT:
                continue
            kind = "number that fits in 32 bits" if math.isfinite(number) else "finite number"
            check.problems.append(f"{check.flag(dest)} must be a {kind}, got {number}")
            infinite.add(dest)
    return infinite
