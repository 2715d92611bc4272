# SPDX-License-Identifier: Apache-2.0
"""The flags that are fields of Megatron-Core's config classes, and their differences from these."""

import functools

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron.pretrain.arguments.flags import ConfigFields, Flag, frequency, integer_pair, one_of
from megatron.pretrain.arguments.further_fields import absent_further_flags

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FLOATS_OR_AUTO = FLOATS | {"auto": None}
"""`auto` stands for the dtype of the parameter, or of the main gradient."""
STATE_DTYPES = FLOATS | {"fp8": torch.uint8}

SHARDING = ("no_shard", "optim", "optim_grads", "optim_grads_params")
ROUTER_BALANCING = (
    "aux_loss",
    "seq_aux_loss",
    "global_aux_loss",
    "sinkhorn",
    "quantile_balancing",
    "none",
)

CONTEXT_COMMUNICATION = ("p2p", "a2a", "all_gather", "a2a+p2p")


def named(name: str, **more: object) -> dict[str, object]:
    """Return a change of the flag's name."""
    return {"names": (name,), **more}


def off(name: str) -> dict[str, object]:
    """Return a change that makes the flag a switch that turns a default off."""
    return {"names": (name,), "kind": "off", "default": True}


MODEL = ConfigFields(
    TransformerConfig,
    (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "kv_channels",
        "num_query_groups",
        "normalization",
        "layernorm_epsilon",
        "layernorm_zero_centered_gamma",
        "add_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
        "qk_l2_norm",
        "attention_dropout",
        "hidden_dropout",
        "attention_softmax_in_fp32",
        "apply_query_key_layer_scaling",
        "softmax_scale",
        "softmax_type",
        "rotary_interleaved",
        "no_rope_freq",
        "window_size",
        "fp32_residual_connection",
        "apply_residual_connection_post_layernorm",
        "init_method_std",
        "embedding_init_method_std",
        "transformer_impl",
        "attention_backend",
        "masked_softmax_fusion",
        "bias_dropout_fusion",
        "apply_rope_fusion",
        "gradient_accumulation_fusion",
        "cross_entropy_loss_fusion",
        "cross_entropy_fusion_impl",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "calculate_per_token_loss",
        "deterministic_mode",
        "disable_bf16_reduced_precision_matmul",
        "use_cpu_initialization",
        "init_model_with_meta_device",
        "test_mode",
        "mtp_num_layers",
        "mtp_loss_scaling_factor",
        "multi_latent_attention",
    ),
    {
        "num_layers": {"default": None, "names": ("--num-layers", "--encoder-num-layers")},
        "hidden_size": {"default": None},
        "num_attention_heads": {"default": None},
        "num_query_groups": {"default": 1},
        "layernorm_epsilon": named("--norm-epsilon"),
        "layernorm_zero_centered_gamma": named("--apply-layernorm-1p"),
        "add_bias_linear": off("--disable-bias-linear"),
        "attention_softmax_in_fp32": {
            "names": ("--attention-softmax-in-fp32",),
            "kind": "switch",
            "default": False,
        },
        "no_rope_freq": {"type": frequency},
        "window_size": {"type": integer_pair, "nargs": None},
        "masked_softmax_fusion": off("--no-masked-softmax-fusion"),
        "bias_dropout_fusion": off("--no-bias-dropout-fusion"),
        "apply_rope_fusion": off("--no-rope-fusion"),
        "gradient_accumulation_fusion": off("--no-gradient-accumulation-fusion"),
    },
)

LATENT_ATTENTION = ConfigFields(
    MLATransformerConfig,
    (
        "q_lora_rank",
        "kv_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "v_head_dim",
        "rope_type",
        "rotary_scaling_factor",
        "mscale",
        "mscale_all_dim",
    ),
    {
        "q_lora_rank": {"default": None},
        "kv_lora_rank": {"default": 32},
        "rotary_scaling_factor": {"default": 1.0},
        "rope_type": {"default": None, "choices": ("rope", "yarn")},
    },
)

MIXTURE_OF_EXPERTS = ConfigFields(
    TransformerConfig,
    (
        "num_moe_experts",
        "moe_ffn_hidden_size",
        "moe_layer_freq",
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_gate",
        "moe_shared_expert_overlap",
        "moe_router_topk",
        "moe_router_pre_softmax",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_topk_scaling_factor",
        "moe_router_score_function",
        "moe_router_enable_expert_bias",
        "moe_router_bias_update_rate",
        "moe_router_dtype",
        "moe_router_load_balancing_type",
        "moe_router_force_load_balancing",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_input_jitter_eps",
        "moe_token_dispatcher_type",
        "moe_expert_capacity_factor",
        "moe_pad_expert_input_to_capacity",
        "moe_token_drop_policy",
        "moe_grouped_gemm",
        "moe_use_legacy_grouped_gemm",
        "moe_enable_deepep",
        "moe_flex_dispatcher_backend",
        "moe_permute_fusion",
        "moe_router_fusion",
        "moe_per_layer_logging",
        "overlap_moe_expert_parallel_comm",
        "delay_wgrad_compute",
    ),
    {
        "num_moe_experts": named("--num-experts", dest="num_experts"),
        "moe_layer_freq": {"type": frequency},
        "moe_router_score_function": {"choices": ("softmax", "sigmoid", "sqrtsoftplus")},
        "moe_router_load_balancing_type": {"type": str, "nargs": "+", "choices": ROUTER_BALANCING},
        "moe_aux_loss_coeff": {"type": float, "nargs": "+"},
        "moe_flex_dispatcher_backend": {"choices": ("deepep", "hybridep", "ncclep")},
    },
)

LOW_PRECISION = ConfigFields(
    TransformerConfig,
    (
        "fp8",
        "fp8_recipe",
        "fp8_param",
        "fp8_margin",
        "fp8_amax_history_len",
        "fp8_amax_compute_algo",
        "first_last_layers_bf16",
        "num_layers_at_start_in_bf16",
        "num_layers_at_end_in_bf16",
        "fp4",
        "fp4_param",
        "cuda_graph_impl",
        "use_te_rng_tracker",
    ),
    {
        "fp8": named("--fp8-format"),
        "fp8_param": named("--fp8-param-gather", dest="fp8_param_gather"),
        "fp4": named("--fp4-format"),
        "fp4_param": named("--fp4-param-gather"),
        "cuda_graph_impl": {"choices": ("none", "local", "transformer_engine", "full_iteration")},
        "use_te_rng_tracker": named("--te-rng-tracker", dest="te_rng_tracker"),
    },
)

PARALLELISM = ConfigFields(
    TransformerConfig,
    (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "sequence_parallel",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout",
        "overlap_p2p_comm",
        "cp_comm_type",
        "hierarchical_context_parallel_sizes",
        "defer_embedding_wgrad_compute",
        "wgrad_deferral_limit",
    ),
    {
        "num_layers_in_first_pipeline_stage": named(
            "--decoder-first-pipeline-num-layers", dest="decoder_first_pipeline_num_layers"
        ),
        "num_layers_in_last_pipeline_stage": named(
            "--decoder-last-pipeline-num-layers", dest="decoder_last_pipeline_num_layers"
        ),
        "pipeline_model_parallel_layout": {"type": str},
        "overlap_p2p_comm": off("--no-overlap-p2p-communication"),
        "cp_comm_type": {
            "type": str,
            "nargs": "+",
            "default": ["p2p"],
            "choices": CONTEXT_COMMUNICATION,
        },
    },
)

OPTIMIZER = ConfigFields(
    OptimizerConfig,
    (
        "optimizer",
        "lr",
        "min_lr",
        "decoupled_lr",
        "decoupled_min_lr",
        "weight_decay",
        "apply_wd_to_qk_layernorm",
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
        "sgd_momentum",
        "clip_grad",
        "log_num_zeros_in_grad",
        "fp16",
        "bf16",
        "loss_scale",
        "initial_loss_scale",
        "min_loss_scale",
        "loss_scale_window",
        "hysteresis",
        "use_distributed_optimizer",
        "overlap_param_gather",
        "overlap_param_gather_with_optimizer_step",
        "use_precision_aware_optimizer",
        "main_grads_dtype",
        "main_params_dtype",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
    ),
    {
        "optimizer": {
            "choices": ("adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon")
        },
        "min_lr": {"default": 0.0},
        "optimizer_offload_fraction": {"default": 1.0},
        "main_grads_dtype": one_of({k: FLOATS[k] for k in ("fp32", "bf16")}),
        "main_params_dtype": one_of({k: FLOATS[k] for k in ("fp32", "fp16")}),
        "exp_avg_dtype": one_of(STATE_DTYPES),
        "exp_avg_sq_dtype": one_of(STATE_DTYPES),
    },
)

DATA_PARALLEL = ConfigFields(
    DistributedDataParallelConfig,
    (
        "use_megatron_fsdp",
        "data_parallel_sharding_strategy",
        "outer_dp_sharding_strategy",
        "num_distributed_optimizer_instances",
        "overlap_grad_reduce",
        "align_param_gather",
        "grad_reduce_in_fp32",
        "check_for_nan_in_grad",
        "check_for_large_grads",
        "bucket_size",
        "pad_buckets_for_high_nccl_busbw",
        "reduce_scatter_with_fp32_accumulation",
        "average_in_collective",
        "gradient_reduce_div_fusion",
        "reuse_grad_buf_for_mxfp8_param_ag",
        "suggested_communication_unit_size",
        "keep_fp8_transpose_cache",
        "nccl_ub",
        "disable_symmetric_registration",
        "fsdp_manual_registration",
        "fsdp_double_buffer",
    ),
    {
        "data_parallel_sharding_strategy": {"choices": SHARDING},
        "outer_dp_sharding_strategy": {"choices": ("no_shard", "optim")},
        "align_param_gather": off("--no-align-param-gather"),
        "grad_reduce_in_fp32": named(
            "--accumulate-allreduce-grads-in-fp32", dest="accumulate_allreduce_grads_in_fp32"
        ),
        "check_for_nan_in_grad": (
            off("--no-check-for-nan-in-loss-and-grad") | {"dest": "check_for_nan_in_loss_and_grad"}
        ),
        "bucket_size": named("--ddp-bucket-size", dest="ddp_bucket_size"),
        "pad_buckets_for_high_nccl_busbw": named(
            "--ddp-pad-buckets-for-high-nccl-busbw", dest="ddp_pad_buckets_for_high_nccl_busbw"
        ),
        "reduce_scatter_with_fp32_accumulation": named(
            "--ddp-reduce-scatter-with-fp32-accumulation",
            dest="ddp_reduce_scatter_with_fp32_accumulation",
        ),
        "average_in_collective": named(
            "--ddp-average-in-collective", dest="ddp_average_in_collective"
        ),
        "gradient_reduce_div_fusion": off("--no-gradient-reduce-div-fusion"),
        "nccl_ub": named("--use-nccl-ub"),
    },
)

CONFIG_GROUPS: dict[str, ConfigFields] = {
    "data parallelism": DATA_PARALLEL,
    "optimizer": OPTIMIZER,
    "model": MODEL,
    "multi-latent attention": LATENT_ATTENTION,
    "mixture of experts": MIXTURE_OF_EXPERTS,
    "low precision and graphs": LOW_PRECISION,
    "model parallelism": PARALLELISM,
}


def config_flags() -> dict[str, list[Flag]]:
    """Return the generated flags by the title of their group in --help."""
    return {title: source.flags() for title, source in CONFIG_GROUPS.items()}


@functools.cache
def absent_flags() -> set[str]:
    """Return the flags of fields that this release of Megatron-Core lacks, as they are written."""
    return absent_further_flags().union(*(source.absent() for source in CONFIG_GROUPS.values()))


@functools.cache
def absent_values() -> dict[str, set[str]]:
    """Return the choices that this release of Megatron-Core lacks, by destination."""
    lacking: dict[str, set[str]] = {}
    for source in CONFIG_GROUPS.values():
        lacking |= source.absent_choices()
    return lacking
