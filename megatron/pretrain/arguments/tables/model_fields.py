# SPDX-License-Identifier: Apache-2.0
"""Rows of the fields of Megatron-Core's configs that are about the model.

A field of a config is a flag of its name, with its type, choices, default and help. A row has what
the field itself does not imply: rules, a sentence for --help where Megatron-Core's is long, and
other settings of the `Flag`. A field without a row is a flag without rules.
"""

from megatron.core.transformer.enums import AttnBackend

from megatron.pretrain.arguments.flags import (
    ABOVE_0,
    AT_LEAST_0,
    DERIVED,
    DIVIDED,
    EMPTY_IS_NONE,
    IN_SHORT_HELP,
    REQUIRED,
    SIZE,
    Needs,
    NotCaptured,
    Range,
    Refused,
    Row,
    named,
    off,
    only_in_other_loop,
    renamed,
)
from megatron.pretrain.arguments.tables.training_fields import (
    NEEDS_FP8_OR_FP4,
    NEEDS_FSDP,
    NEEDS_QK_NORM,
    NEEDS_TRANSFORMER_ENGINE,
    OTHER_KERNELS,
)
from megatron.pretrain.arguments.values import frequency, integer_pair

SHARE = Range(lambda value: 0 <= value <= 1, "from 0 to 1")
NEEDS_ROPE = Needs("position_embedding_type", ("rope",))
NEEDS_SWIGLU = Needs("swiglu")
NEEDS_FULL_RECOMPUTATION = Needs("recompute_granularity", ("full",))
NEEDS_MTP = Needs("mtp_num_layers")
NEEDS_LATENT_ATTENTION = Needs("multi_latent_attention")
NOT_WITH_LATENT_ATTENTION = Needs("multi_latent_attention", (False,))
NEEDS_EXPERTS = Needs("num_experts")
NEEDS_SHARED_EXPERT = Needs("moe_shared_expert_intermediate_size")
LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "quantile_balancing")
NEEDS_FLEX = Needs("moe_token_dispatcher_type", ("flex",))

FOR_INFERENCE = Refused("is for inference; this program trains")
NO_HOST_ACTIVATIONS = Refused("activations on the host are not built yet")
NO_LATE_GRADIENTS_OF_EXPERTS = Refused(
    "late weight gradients of experts are not built yet; leave it out, results are the same"
)
NO_SINGLE_WEIGHT = Refused("experts with one weight for all are not built")
NO_MUP = only_in_other_loop("rates do not follow the width here")
NOT_WRITTEN = only_in_other_loop("is not written here, and all else of every step")
OTHER_LAYERS = only_in_other_loop("layers follow from the other flags here")
OTHER_MODELS = Refused("belongs to models that are no GPT")

MODEL_FIELDS: dict[str, dict[str, Row]] = {
    "model": {
        "perform_initialization": Needs(
            "init_model_with_meta_device",
            (False,),
            remedy="contradicts --init-model-with-meta-device, which initialises",
        ),
        "gradient_accumulation_fusion": off("--no-gradient-accumulation-fusion"),
        "cpu_offloading_num_layers": NO_HOST_ACTIVATIONS,
        "cpu_offloading_activations": NO_HOST_ACTIVATIONS,
        "cpu_offloading_weights": NO_HOST_ACTIVATIONS,
        "cpu_offloading_double_buffering": NO_HOST_ACTIVATIONS,
        "cpu_offloading_retain_pinned_cpu_buffers": NO_HOST_ACTIVATIONS,
        "num_layers": (
            {"default": None, "names": ("--num-layers", "--encoder-num-layers")},
            REQUIRED,
            "transformer layers",
            IN_SHORT_HELP,
            SIZE,
        ),
        "mtp_num_layers": (
            SIZE,
            Needs("position_embedding_type", ("rope", "none")),
            NotCaptured("multi-token prediction has not been tried"),
        ),
        "mtp_loss_scaling_factor": NEEDS_MTP,
        "mtp_use_repeated_layer": NEEDS_MTP,
        "mtp_hybrid_override_pattern": OTHER_MODELS,
        "mtp_detach_heads": NEEDS_MTP,
        "hidden_size": (
            {"default": None},
            REQUIRED,
            "width of a token between layers",
            IN_SHORT_HELP,
            SIZE,
        ),
        "num_attention_heads": (
            {"default": None},
            REQUIRED,
            "heads of an attention",
            IN_SHORT_HELP,
            SIZE,
        ),
        "attention_backend": Refused(
            "needs a custom layer specification, not built yet; use auto", (AttnBackend.local,)
        ),
        "softmax_scale": (ABOVE_0, NOT_WITH_LATENT_ATTENTION),
        "num_query_groups": ({"default": 1}, SIZE, Needs("group_query_attention")),
        "ffn_hidden_size": (SIZE, DIVIDED),
        "kv_channels": SIZE,
        "hidden_dropout": SHARE,
        "attention_dropout": SHARE,
        "apply_residual_connection_post_layernorm": Refused(
            "no layer of this release of Megatron-Core reads it"
        ),
        "layernorm_epsilon": (named("--norm-epsilon"), AT_LEAST_0),
        "layernorm_zero_centered_gamma": named("--apply-layernorm-1p"),
        "add_bias_linear": off("--disable-bias-linear"),
        "add_qkv_bias": NOT_WITH_LATENT_ATTENTION,
        "activation_func_fp8_input_store": (
            NEEDS_SWIGLU,
            Needs(
                "bias_swiglu_fusion",
                remedy="is read by the fused SwiGLU alone, which is for GPUs: leave it out",
            ),
        ),
        "glu_linear_offset": NEEDS_SWIGLU,
        "activation_func_clamp_value": NEEDS_SWIGLU,
        "rotary_interleaved": (NOT_WITH_LATENT_ATTENTION, NEEDS_ROPE),
        "window_size": {"type": integer_pair, "nargs": None},
        "window_attn_skip_freq": (Needs("window_size"), NEEDS_TRANSFORMER_ENGINE),
        "normalization": ("kind of norm", IN_SHORT_HELP),
        "qk_l2_norm": NOT_WITH_LATENT_ATTENTION,
        "log_max_attention_logit": Refused("largest attention logits are not logged"),
        "attention_output_gate": NOT_WITH_LATENT_ATTENTION,
        "test_mode": (
            NEEDS_QK_NORM,
            Needs(
                "normalization",
                ("LayerNorm",),
                "compares weights and biases of norms: it needs --normalization LayerNorm",
            ),
        ),
        "deterministic_mode": Needs(
            "cross_entropy_loss_fusion", (False,), "excludes --cross-entropy-loss-fusion"
        ),
        "multi_latent_attention": Needs(
            "group_query_attention",
            (False,),
            "has its own keys and values: leave --group-query-attention out",
        ),
        "calculate_per_token_loss": NotCaptured(
            "Megatron-Core reads the number of tokens on the host"
        ),
        "no_rope_freq": ({"type": frequency}, NOT_WITH_LATENT_ATTENTION, NEEDS_ROPE),
        "experimental_attention_variant": OTHER_LAYERS,
        "dsa_indexer_n_heads": OTHER_LAYERS,
        "dsa_indexer_head_dim": OTHER_LAYERS,
        "dsa_indexer_topk": OTHER_LAYERS,
        "dsa_indexer_loss_coeff": OTHER_LAYERS,
        "dsa_indexer_use_sparse_loss": OTHER_LAYERS,
        "dsa_indexer_topk_freq": OTHER_LAYERS,
        "dsa_indexer_skip_topk_offset": OTHER_LAYERS,
        "dsa_kernel_backend": OTHER_LAYERS,
        "dsa_indexer_rope_interleaved": OTHER_LAYERS,
        "dsa_indexer_rotate_activation": OTHER_LAYERS,
        "dsa_indexer_scoring_relu": OTHER_LAYERS,
        "dsa_indexer_k_norm_epsilon": OTHER_LAYERS,
        "dsa_indexer_k_norm_fp32": OTHER_LAYERS,
        "linear_attention_freq": OTHER_LAYERS,
        "linear_conv_kernel_dim": OTHER_LAYERS,
        "linear_key_head_dim": OTHER_LAYERS,
        "linear_value_head_dim": OTHER_LAYERS,
        "linear_num_key_heads": OTHER_LAYERS,
        "linear_num_value_heads": OTHER_LAYERS,
        "init_method_std": AT_LEAST_0,
        "embedding_init_method_std": AT_LEAST_0,
        "init_model_with_meta_device": NEEDS_FSDP,
        "attention_softmax_in_fp32": {"kind": "switch", "default": False},
        "masked_softmax_fusion": off("--no-masked-softmax-fusion"),
        "memory_efficient_layer_norm": NEEDS_TRANSFORMER_ENGINE,
        "bias_dropout_fusion": off("--no-bias-dropout-fusion"),
        "apply_rope_fusion": off("--no-rope-fusion"),
        "use_fused_weighted_squared_relu": (NEEDS_EXPERTS, Needs("squared_relu")),
        "fused_single_qkv_rope": NEEDS_TRANSFORMER_ENGINE,
        "recompute_method": NEEDS_FULL_RECOMPUTATION,
        "recompute_num_layers": NEEDS_FULL_RECOMPUTATION,
        "distribute_saved_activations": NEEDS_FULL_RECOMPUTATION,
        "recompute_modules": Needs("recompute_granularity", ("selective",)),
        "use_kitchen": OTHER_KERNELS,
        "use_kitchen_attention": OTHER_KERNELS,
        "kitchen_attention_backend": OTHER_KERNELS,
        "flash_decode": FOR_INFERENCE,
        "batch_invariant_mode": FOR_INFERENCE,
        "use_te_activation_func": NEEDS_TRANSFORMER_ENGINE,
        "symmetric_ar_type": FOR_INFERENCE,
        "use_inference_optimized_layers": FOR_INFERENCE,
        "inference_fuse_tp_communication": FOR_INFERENCE,
        "inference_disable_triton_nvls_kernels": FOR_INFERENCE,
        "inference_grouped_gemm_backend": FOR_INFERENCE,
        "mrope_section": OTHER_MODELS,
        "mamba_state_dim": OTHER_LAYERS,
        "mamba_head_dim": OTHER_LAYERS,
        "mamba_num_groups": OTHER_LAYERS,
        "mamba_num_heads": OTHER_LAYERS,
        "use_mamba_mem_eff_path": OTHER_LAYERS,
        "mlp_chunks_for_prefill": FOR_INFERENCE,
        "transformer_impl": Refused(
            "is for inference; use transformer_engine or local", ("inference_optimized",)
        ),
        "fine_grained_activation_offloading": NO_HOST_ACTIVATIONS,
        "fine_grained_offloading_max_inflight_offloads": NO_HOST_ACTIVATIONS,
        "offload_modules": NO_HOST_ACTIVATIONS,
        "min_offloaded_tensor_size": NO_HOST_ACTIVATIONS,
        "use_mup": NO_MUP,
        "mup_base_hidden_size": NO_MUP,
        "mup_embedding_mult": NO_MUP,
        "mup_output_mult": NO_MUP,
        "mup_base_head_dim": NO_MUP,
        "mup_attn_scale_power": NO_MUP,
        "fused_residual_rmsnorm": NEEDS_TRANSFORMER_ENGINE,
        "nccl_all_reduce_for_prefill": FOR_INFERENCE,
        "use_transformer_engine_op_fuser": NEEDS_TRANSFORMER_ENGINE,
        "high_priority_a2a_comm_stream": NO_LATE_GRADIENTS_OF_EXPERTS,
        "use_grouped_gemm_for_dense_mlp": OTHER_KERNELS,
        "use_grouped_gemm_for_shared_expert": OTHER_KERNELS,
        "mlp_chunks_for_training": (),
        "flash_attention_version": NEEDS_TRANSFORMER_ENGINE,
        "delta_offload_bytes_across_pp_ranks": NO_HOST_ACTIVATIONS,
        "activation_offload_fraction": NO_HOST_ACTIVATIONS,
        "delay_offload_until_cuda_graph": NO_HOST_ACTIVATIONS,
        "config_logger_dir": EMPTY_IS_NONE,
        "virtual_pipeline_model_parallel_size": DERIVED,
        "params_dtype": DERIVED,
        "timers": DERIVED,
        "enable_autocast": DERIVED,
        "autocast_dtype": DERIVED,
        "num_microbatches_with_partial_activation_checkpoints": DERIVED,
        "pipeline_dtype": DERIVED,
        "variable_seq_lengths": DERIVED,
        "batch_p2p_comm": DERIVED,
        "batch_p2p_sync": DERIVED,
        "deallocate_pipeline_outputs": DERIVED,
        "mtp_standalone": DERIVED,
        "cpu_offloading": DERIVED,
        "gated_linear_unit": DERIVED,
        "bias_activation_fusion": DERIVED,
        "persist_layer_norm": DERIVED,
        "inference_rng_tracker": DERIVED,
        "inference_sampling_seed": DERIVED,
        "is_hybrid_model": DERIVED,
        "heterogeneous_block_specs": DERIVED,
        "hetereogenous_dist_checkpoint": DERIVED,
        "quant_recipe": DERIVED,
        "mup_width_mult": DERIVED,
        "num_buckets": DERIVED,
        "barrier_with_L1_time": DERIVED,
        "gtp_weight_remat_size": DERIVED,
        "expert_gtp_weight_remat_size": DERIVED,
    },
    "mixture of experts": {
        "moe_extended_tp": Refused("deprecated; use --expert-tensor-parallel-size"),
        "overlap_moe_expert_parallel_comm": (),
        "delay_wgrad_compute": (
            Needs("overlap_moe_expert_parallel_comm"),
            NEEDS_TRANSFORMER_ENGINE,
        ),
        "ep_overlap_early_attn_memory_release": NO_LATE_GRADIENTS_OF_EXPERTS,
        "num_moe_experts": (
            renamed("num_experts"),
            "experts of a layer; without it MLPs are dense",
            IN_SHORT_HELP,
            SIZE,
            NotCaptured("experts read their numbers of tokens on the host"),
        ),
        "moe_shared_expert_intermediate_size": (SIZE, DIVIDED),
        "moe_shared_expert_gate": NEEDS_SHARED_EXPERT,
        "moe_shared_expert_overlap": NEEDS_SHARED_EXPERT,
        "moe_shared_expert_glu_interleave_size": OTHER_KERNELS,
        "moe_layer_freq": {"type": frequency},
        "moe_ffn_hidden_size": SIZE,
        "moe_router_load_balancing_type": {
            "type": str,
            "nargs": "+",
            "choices": (*LOSSES, "sinkhorn", "none"),
        },
        "moe_router_topk": SIZE,
        "moe_router_topk_limited_devices": Refused(
            "deprecated; use --moe-router-num-groups and --moe-router-group-topk"
        ),
        "moe_router_padding_for_quantization": NEEDS_FP8_OR_FP4,
        "moe_router_padding_for_fp8": NEEDS_FP8_OR_FP4,
        "moe_router_num_groups": (SIZE, Needs("moe_router_group_topk")),
        "moe_router_group_topk": SIZE,
        "moe_router_score_function": {"choices": ("softmax", "sigmoid", "sqrtsoftplus")},
        "moe_router_bias_update_rate": Needs("moe_router_enable_expert_bias"),
        "moe_router_force_biased": (),
        "moe_router_quantile_balancing_ema": (),
        "moe_enable_routing_replay": Refused("replaying the choices of a router is not built"),
        "moe_use_legacy_grouped_gemm": OTHER_KERNELS,
        "moe_aux_loss_coeff": (
            {"type": float, "nargs": "+"},
            Needs("moe_router_load_balancing_type", LOSSES),
        ),
        "moe_token_dropping": Refused("deprecated; use --moe-expert-capacity-factor"),
        "moe_enable_deepep": NEEDS_FLEX,
        "moe_flex_dispatcher_backend": ({"choices": ("deepep", "hybridep", "ncclep")}, NEEDS_FLEX),
        "moe_flex_dispatcher_num_sms": NEEDS_FLEX,
        "moe_per_layer_logging": NOT_WRITTEN,
        "moe_token_drop_policy": Needs("moe_expert_capacity_factor"),
        "moe_deepep_num_sms": NEEDS_FLEX,
        "moe_hybridep_num_sms": NEEDS_FLEX,
        "moe_hybridep_num_blocks_permute": NEEDS_FLEX,
        "moe_hybridep_num_blocks_unpermute": NEEDS_FLEX,
        "moe_hybridep_num_sms_preprocessing": NEEDS_FLEX,
        "moe_hybridep_pad_uneven_dispatch_inputs": NEEDS_FLEX,
        "moe_permute_fusion_into_hybridep": NEEDS_FLEX,
        "inference_moe_disable_fused_quant_kernels": FOR_INFERENCE,
        "inference_moe_token_dispatcher_type": FOR_INFERENCE,
        "overlap_dispatch_backward_with_experts_wgrad": NO_LATE_GRADIENTS_OF_EXPERTS,
        "moe_single_grouped_weight": NO_SINGLE_WEIGHT,
        "moe_single_grouped_bias": NO_SINGLE_WEIGHT,
        "moe_mlp_glu_interleave_size": OTHER_KERNELS,
        "moe_expert_rank_capacity_factor": (),
        "moe_paged_stash": NO_HOST_ACTIVATIONS,
        "moe_paged_stash_page_size": NO_HOST_ACTIVATIONS,
        "moe_paged_stash_buffer_size_factor_cuda": NO_HOST_ACTIVATIONS,
        "moe_paged_stash_buffer_size_factor_cpu": NO_HOST_ACTIVATIONS,
        "moe_ncclep_static_shape": NEEDS_FLEX,
        "moe_ncclep_zero_copy": NEEDS_FLEX,
    },
    "multi-latent attention": {
        "q_lora_rank": ({"default": None}, SIZE, NEEDS_LATENT_ATTENTION, DIVIDED),
        "kv_lora_rank": ({"default": 32}, SIZE, NEEDS_LATENT_ATTENTION),
        "qk_head_dim": (SIZE, NEEDS_LATENT_ATTENTION),
        "qk_pos_emb_head_dim": (SIZE, NEEDS_LATENT_ATTENTION),
        "v_head_dim": (SIZE, NEEDS_LATENT_ATTENTION),
        "rope_type": ({"default": None, "choices": ("rope", "yarn")}, NEEDS_LATENT_ATTENTION),
        "rotary_scaling_factor": ({"default": 1.0}, NEEDS_LATENT_ATTENTION),
        "original_max_position_embeddings": NEEDS_LATENT_ATTENTION,
        "beta_fast": NEEDS_LATENT_ATTENTION,
        "beta_slow": NEEDS_LATENT_ATTENTION,
        "mscale": NEEDS_LATENT_ATTENTION,
        "mscale_all_dim": NEEDS_LATENT_ATTENTION,
        "cache_mla_latents": FOR_INFERENCE,
        "mla_down_proj_fusion": (NEEDS_LATENT_ATTENTION, NEEDS_TRANSFORMER_ENGINE),
    },
}
"""Title of a group in --help -> field -> row."""

LATER_MODEL_FIELDS = {
    "cpu_offloading_": NO_HOST_ACTIVATIONS,
    "fine_grained_": NO_HOST_ACTIVATIONS,
    "moe_paged_stash": NO_HOST_ACTIVATIONS,
    "dsa_": OTHER_LAYERS,
    "linear_": OTHER_LAYERS,
    "mamba_": OTHER_LAYERS,
    "mup_": NO_MUP,
    "inference_": FOR_INFERENCE,
    "use_kitchen": OTHER_KERNELS,
    "kitchen_": OTHER_KERNELS,
}
"""Fields that a later release may add to what is not built, by the beginning of their names."""
