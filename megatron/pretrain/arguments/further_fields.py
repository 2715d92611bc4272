# SPDX-License-Identifier: Apache-2.0
"""Flags of all config fields that no other table names, so that new fields are flags at once.

The installed release of Megatron-Core decides which there are: name, type, choices, default and
help are those of the field. Values reach the config object. What this program cannot honour is
refused by name: `REFUSED` says why, with patterns, so that a field that a newer release adds to one
of these features is refused too.
"""

import enum
import typing
from collections.abc import Iterable
from dataclasses import fields
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Literal

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron.pretrain.arguments.flags import (
    ConfigFields,
    Flag,
    is_list_or_item,
    spelled,
    without_none,
)

CONFIGS = {
    "further settings of the model": TransformerConfig,
    "further settings of latent attention": MLATransformerConfig,
    "further settings of the optimizer": OptimizerConfig,
    "further settings of data parallelism": DistributedDataParallelConfig,
}

NO_FLAG = """virtual_pipeline_model_parallel_size params_dtype pipeline_dtype autocast_dtype
    enable_autocast variable_seq_lengths batch_p2p_* deallocate_pipeline_outputs
    gated_linear_unit bias_activation_fusion persist_layer_norm quant_recipe is_hybrid_model
    mtp_standalone num_microbatches_with_partial_activation_checkpoints
    heterogeneous_block_specs hetereogenous_dist_checkpoint inference_sampling_seed
    inference_rng_tracker mup_width_mult gtp_weight_remat_size expert_gtp_weight_remat_size
    num_buckets cpu_offloading timers barrier_with_L1_time _*"""
"""Fields that the program derives, or whose flag has another name."""

FP8 = "FP8 and FP4 training is not built yet; use --bf16"
OFFLOAD = "activations and optimizer state on the host are not built yet"
INFERENCE = "is for inference; this program trains"
SEQUENCES = "sequences of several lengths in a batch are not built"
ATTENTION = "attention of this kind needs layers of its own, which are not built in yet; use --spec"
EXPERT_OVERLAP = (
    "hiding expert communication behind other work is not built yet; leave it out, results are the"
    " same"
)

REFUSED: dict[str, str] = {
    FP8: """fp8_* fp4_* activation_func_fp8_input_store tp_only_amax_red use_kitchen*
        kitchen_* disable_parameter_transpose_cache moe_router_padding_for_*
        *_glu_interleave_size preserve_fp32_weights use_grouped_gemm_for_*""",
    OFFLOAD: """cpu_offloading_* fine_grained_* offload_modules min_offloaded_tensor_size
        delay_offload* delta_offload* activation_offload_fraction moe_paged_stash*
        use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_*""",
    "CUDA graphs are not built yet": """enable_cuda_graph external_cuda_graph cuda_graph_*
        optimizer_cuda_graph megatron_fsdp_cuda_graph_mode""",
    "belongs to optimizers that are not built yet; use adam or sgd": """muon_* adaptive_muon_*
        lion_* soap_* use_layer_wise_distributed_optimizer qk_clip*""",
    "needs Transformer Engine's fused Adam, which is not built in yet": """store_param_remainders
        megatron_fsdp_use_decoupled_grad""",
    INFERENCE: """flash_decode batch_invariant_mode inference_* symmetric_ar_type
        use_inference_optimized_layers mlp_chunks_for_prefill cache_mla_latents
        nccl_all_reduce_for_prefill moe_pad_experts_for_cuda_graph_inference""",
    "belongs to models that are no GPT": """mamba_* use_mamba_mem_eff_path mrope_section
        mtp_hybrid_override_pattern""",
    ATTENTION: "experimental_attention_variant dsa_* linear_*",
    SEQUENCES: "hybrid_context_parallel max_seqlen_per_dp_cp_rank",
    "replaying the choices of a router is not built": "moe_enable_routing_replay",
    "largest attention logits are not logged": "log_max_attention_logit",
    "weights that are gathered again for each product are not built; use --use-megatron-fsdp": (
        "*num_weight_shards"
    ),
    EXPERT_OVERLAP: """ep_overlap_early_attn_memory_release high_priority_a2a_comm_stream
        overlap_dispatch_backward_with_experts_wgrad""",
    "experts with one weight for all are not built": "moe_single_grouped_*",
    "stages send with the library of --distributed-backend": (
        "pipeline_model_parallel_comm_backend use_ring_exchange_p2p"
    ),
    "the first gathers begin with the first forward": "fsdp_all_gather_in_start_param_sync",
    "deprecated; use --expert-tensor-parallel-size": "moe_extended_tp",
    "deprecated; use --moe-expert-capacity-factor": "moe_token_dropping",
    "deprecated; use --moe-router-num-groups and --moe-router-group-topk": (
        "moe_router_topk_limited_devices"
    ),
    "deprecated; use --use-megatron-fsdp": "use_custom_fsdp",
}
"""Reason -> patterns of fields, separated by blanks."""

NEEDS_ENGINE = """memory_efficient_layer_norm fused_single_qkv_rope use_te_activation_func
    fused_residual_rmsnorm use_transformer_engine_op_fuser mla_down_proj_fusion
    flash_attention_version tp_comm_overlap window_attn_skip_freq"""
"""Fields that only Transformer Engine's layers read."""

CHANGES: dict[str, dict[str, Any]] = {
    "param_name_patterns_for_fp32_local_accumulation": {
        "names": ("--ddp-param-name-patterns-for-fp32-local-accumulation",)
    },
    "cuda_graph_scope": {"nargs": "+"},
    "cuda_graph_modules": {"nargs": "+"},
}

OF_SOME_RELEASES = """async_tensor_model_parallel_allreduce moe_extended_tp fused_residual_rmsnorm
    tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards
    mtp_detach_heads mtp_use_repeated_layer flash_attention_version dsa_indexer_topk_freq
    dsa_kernel_backend use_mup mup_base_hidden_size mup_embedding_mult mup_output_mult
    mup_base_head_dim mup_attn_scale_power use_transformer_engine_op_fuser fp8_output_proj
    high_priority_a2a_comm_stream use_grouped_gemm_for_shared_expert
    use_grouped_gemm_for_dense_mlp moe_router_force_biased moe_router_quantile_balancing_ema
    moe_single_grouped_weight moe_single_grouped_bias moe_permute_fusion_into_hybridep
    moe_flex_dispatcher_num_sms moe_ncclep_static_shape moe_ncclep_zero_copy
    moe_mlp_glu_interleave_size moe_expert_rank_capacity_factor cuda_graph_modules
    mlp_chunks_for_training delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks
    activation_offload_fraction moe_paged_stash moe_paged_stash_page_size
    overlap_dispatch_backward_with_experts_wgrad mla_down_proj_fusion muon_nesterov
    muon_use_nesterov muon_coefficient_type muon_scalar_optimizer lion_beta1 lion_beta2
    soap_shampoo_beta soap_precondition_frequency adaptive_muon_moment2_method
    adaptive_muon_beta2 adaptive_muon_eps grad_norm_skip_threshold optimizer_cuda_graph
    preserve_fp32_weights fsdp_all_gather_in_start_param_sync
    megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode
    use_layer_wise_distributed_optimizer cpu_offloading_retain_pinned_cpu_buffers"""
"""Fields that some of the releases 0.16 to 0.19 lack, to tell them from unknown flags."""


def further_flags(taken: Iterable[str], written: Iterable[str]) -> dict[str, list[Flag]]:
    """Return the flags of fields that are not `taken`, by the title of their group in --help.

    Args:
        taken: fields and destinations that have flags in other tables.
        written: these flags, as they are written. Two configs may have one flag under two names:
            --fp4-param-gather is `fp4_param` and `fp4_param_gather`.
    """
    seen, spelled_before = set(taken), set(written)
    groups: dict[str, list[Flag]] = {}
    for title, config in CONFIGS.items():
        hints = typing.get_type_hints(config)
        names = [
            f.name
            for f in fields(config)
            if f.init
            and f.name not in seen
            and not matches(f.name, NO_FLAG.split())
            and (can_be_written(hints[f.name]) or f.name in CHANGES)
        ]
        seen.update(names)
        flags = ConfigFields(config, tuple(names), CHANGES).flags()
        groups[title] = [flag for flag in flags if spelled_before.isdisjoint(flag.names)]
        spelled_before.update(chain.from_iterable(flag.names for flag in flags))
    return groups


def absent_further_flags() -> set[str]:
    """Return the flags of other releases' fields that this release lacks, as they are written."""
    here = {f.name for f in chain.from_iterable(map(fields, CONFIGS.values()))}
    return {spelled(name) for name in OF_SOME_RELEASES.split() if name not in here}


def refusal(name: str) -> str | None:
    """Return the reason why a field's value cannot be honoured, or None."""
    for reason, patterns in REFUSED.items():
        if matches(name, patterns.split()):
            return reason
    return None


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return True if the name matches one of the patterns of `fnmatch`."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def can_be_written(annotation: Any) -> bool:
    """Return True if values of this type can be written on a command line."""
    annotation = without_none(annotation)
    origin = typing.get_origin(annotation)
    if origin is Literal or is_list_or_item(annotation):
        return True
    if origin in (list, tuple):
        return typing.get_args(annotation)[0] in (int, float, str)
    is_enum = isinstance(annotation, type) and issubclass(annotation, enum.Enum)
    return is_enum or annotation in (bool, int, float, str)
