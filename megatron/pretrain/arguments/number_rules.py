# SPDX-License-Identifier: Apache-2.0
"""Rules about single numbers: which must be given, their signs, and that they are finite."""

import math

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
        "rotary_seq_len_interpolation_factor",
        "global_batch_size",
        "train_iters",
        "dry_run_ranks",
        "train_samples",
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
]
"""Destinations whose values are at least 0, if they are given."""
PROBABILITIES = ("attention_dropout", "hidden_dropout")
"""Destinations whose values are from 0 to 1."""


def check_numbers(check: Check) -> None:
    """Refuse missing required flags, numbers that are not finite, and those out of their range."""
    missing = [check.flag(dest) for dest in REQUIRED if getattr(check.args, dest) is None]
    check.require(not missing, f"required but not given: {', '.join(missing)}")
    infinite = check_finite(check)
    for dest in PROBABILITIES:
        value = getattr(check.args, dest)
        check.require(
            dest in infinite or 0 <= value <= 1,
            f"{check.flag(dest)} must be from 0 to 1, got {value}",
        )
    for dest in POSITIVE:
        value = getattr(check.args, dest)
        check.require(
            value is None or value > 0, f"{check.flag(dest)} must be at least 1, got {value}"
        )
    for dest in NOT_NEGATIVE:
        value = getattr(check.args, dest)
        check.require(
            value is None or dest in infinite or value >= 0,
            f"{check.flag(dest)} must be at least 0, got {value}",
        )


def check_finite(check: Check) -> set[str]:
    """Refuse infinities and NaN, which comparisons let through; return where they were given."""
    infinite = set()
    for dest, value in check.given.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                check.problems.append(f"{check.flag(dest)} must be a finite number, got {number}")
                infinite.add(dest)
    return infinite
