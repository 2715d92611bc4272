# SPDX-License-Identifier: Apache-2.0
"""Flags and values that are known but cannot be honoured: refused with the reason, never ignored.

A flag listed here is accepted at its default only, so that scripts that spell a default out keep
working. Names are patterns: a field that a newer release adds to a feature is refused too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import megatron.core
from megatron.core.transformer.enums import AttnBackend

from megatron.mcore_adapter.run.optimizer_names import MUON
from megatron.pretrain.arguments.check import Check
from megatron.pretrain.arguments.config_flags import absent_values, matches
from megatron.pretrain.arguments.flags import as_written

OTHER_TOKENIZERS: dict[Any, str] = {
    "BertWordPieceLowerCase": "is for BERT",
    "BertWordPieceCase": "is for BERT",
    "MultimodalTokenizer": "is for images and text",
    "NullMultimodalTokenizer": "is for images and text",
    "SFTTokenizer": "is for fine-tuning on conversations",
}
"""Tokenizers of Megatron-LM that are none of a GPT's training on text."""

IN_THE_OTHER_LOOP = "Megatron-LM's loop has it: --loop megatron-lm"
"""The end of the reason for what this loop leaves to Megatron-LM's."""

REFUSED: dict[str, str] = {
    f"steps are not repeated here; {IN_THE_OTHER_LOOP}": """rerun_mode error_injection_*
        result_rejected_tracker_filename check_for_spiky_loss check_for_large_grads""",
    f"replicas are not compared here; {IN_THE_OTHER_LOOP}": (
        "check_weight_hash_across_dp_replicas_interval"
    ),
    f"evaluations are over --eval-iters batches of one set; {IN_THE_OTHER_LOOP}": (
        "full_validation multiple_validation_sets"
    ),
    f"batches and weight decay do not grow; {IN_THE_OTHER_LOOP}": """rampup_batch_size
        start_weight_decay end_weight_decay weight_decay_incr_style""",
    f"rates do not follow the width here; {IN_THE_OTHER_LOOP}": "use_mup mup_*",
    f"layers follow from the other flags here; {IN_THE_OTHER_LOOP}": """spec hybrid_layer_pattern
        mamba_* use_mamba_mem_eff_path experimental_attention_variant dsa_* linear_*""",
    "newer releases have no other classes of tokenizers": "legacy_tokenizer",
    f"the command line names data here; {IN_THE_OTHER_LOOP}": (
        "data_args_path per_split_data_args_path"
    ),
    f"is not written here, and all else of every step; {IN_THE_OTHER_LOOP}": """
        log_memory_interval log_world_size_to_tensorboard moe_per_layer_logging
        tensorboard_log_interval tensorboard_queue_size""",
    f"use --ddp-bucket-size; {IN_THE_OTHER_LOOP}": "ddp_num_buckets",
    "Transformer Engine has had none since 1.8": "fp8_interval",
    "main weights are --use-megatron-fsdp's own; see --megatron-fsdp-main-params-dtype": (
        "store_param_remainders"
    ),
    "--use-precision-aware-optimizer sets it; leave it out": "megatron_fsdp_use_decoupled_grad",
    "activations on the host are not built yet": """cpu_offloading_* fine_grained_* offload_modules
        min_offloaded_tensor_size delay_offload* delta_offload* activation_offload_fraction
        moe_paged_stash*""",
    "late weight gradients are not built yet; leave it out, results are the same": """
        defer_embedding_wgrad_compute wgrad_deferral_limit""",
    "late weight gradients of experts are not built yet; leave it out, results are the same": """
        overlap_dispatch_backward_* ep_overlap_early_attn_memory_release
        high_priority_a2a_comm_stream""",
    "two optimizers on a rank are not built yet; use --overlap-param-gather": (
        "overlap_param_gather_with_optimizer_step"
    ),
    "no release of Megatron-Core reads it; use --outer-dp-sharding-strategy optim": (
        "enable_full_sharding_in_hsdp"
    ),
    "torchrun has it: torchrun --log-dir DIR --redirects 3 --local-ranks-filter 0": "log_dir",
    "use --timing-log-level 1 --timing-log-option all, or --profile": "*straggler*",
    "nvidia-smi and DCGM measure energy": "log_energy",
    "gradients are always scaled in one place; choosing where is not built": (
        "gradient_reduce_div_fusion"
    ),
    "deprecated; use --cuda-graph-impl": "enable_cuda_graph external_cuda_graph",
    "captured iterations imply it; leave it out": "megatron_fsdp_cuda_graph_mode",
    "CUDA graphs of layers, and of the optimizer, are not built": (
        "cuda_graph_[!isw]* *_cuda_graph*"  # not of impl, scope and warmup_steps
    ),
    "needs Transformer Engine's random tracker, which is not built in yet": "te_rng_tracker",
    "PyTorch's FSDP2 is not a choice here; use --use-megatron-fsdp": "*torch_fsdp2*",
    "process groups are always built at the start": "lazy_mpu_init",
    "start the program with torchrun, which sets LOCAL_RANK": "local_rank",
    "one process of each rank writes; leave it out": "dist_ckpt_workers",
    "checkpoints on the disks of nodes are not built; use --async-save": "non_persistent_local_*",
    "fill-in-the-middle data is not built; rearrange documents before they are tokenized": "fim_*",
    "Megatron-Core no longer writes fully_sharded_model_space; leave it out, it is still read": (
        "dist_ckpt_save_pre_mcore_014"
    ),
    "learning from a teacher with ModelOpt is not built": "export_te_mcore_model export_kd_*",
    "main weights are part of the optimizer's state here": "load_main_params_from_ckpt",
    "deprecated; use --position-embedding-type none": "add_position_embedding",
    "no layer of this release of Megatron-Core reads it": (
        "apply_residual_connection_post_layernorm"
    ),
    "needs fused kernels that this program has not been run with": """use_kitchen* kitchen_*
        *_glu_interleave_size preserve_fp32_weights use_grouped_gemm_for_*
        moe_use_legacy_grouped_gemm""",
    "belongs to optimizers that are not built yet; use adam, muon or sgd": """adaptive_muon_* lion_*
        soap_* use_layer_wise_distributed_optimizer qk_clip*""",
    "is for inference; this program trains": """flash_decode batch_invariant_mode inference_*
        symmetric_ar_type use_inference_optimized_layers mlp_chunks_for_prefill cache_mla_latents
        nccl_all_reduce_for_prefill moe_pad_experts_for_cuda_graph_inference""",
    "belongs to models that are no GPT": "mrope_section mtp_hybrid_override_pattern",
    "sequences of several lengths in a batch are not built": (
        "hybrid_context_parallel max_seqlen_per_dp_cp_rank"
    ),
    "replaying the choices of a router is not built": "moe_enable_routing_replay",
    "largest attention logits are not logged": "log_max_attention_logit",
    "weights that are gathered again for each product are not built; use --use-megatron-fsdp": (
        "*num_weight_shards"
    ),
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
"""Reason -> patterns of destinations, separated by blanks."""

NOT_BUILT_VALUES: dict[str, dict[Any, str]] = {
    "ckpt_format": dict.fromkeys(
        ("torch", "torch_dcp", "zarr"), "not written or read here; use torch_dist or fsdp_dtensor"
    ),
    "non_persistent_ckpt_type": dict.fromkeys(
        ("local", "in_memory"), "not built; use --async-save, or global"
    ),
    "optimizer": dict.fromkeys(
        ("lion", "soap", "adaptive_muon"), "not built yet; use adam, muon or sgd"
    ),
    "muon_scalar_optimizer": {"lion": "not built yet; use adam"},
    "position_embedding_type": {
        "yarn": "not built yet; use rope",
        "mrope": "is for images and video; use rope",
        "relative": "GPT has no relative positions; use rope",
    },
    "transformer_impl": {
        "inference_optimized": "is for inference; use transformer_engine or local"
    },
    "attention_backend": {
        AttnBackend.local: "needs a custom layer specification, not built yet; use auto"
    },
    "dataloader_type": {"external": "this program reads its own data; use single or cyclic"},
    "tokenizer_type": OTHER_TOKENIZERS,
}
"""Destination -> value -> the reason why this one value is refused."""

SAME_HERE: dict[str, str] = {
    "deprecated, is the default": """deprecated_use_mcore_models log_batch_size_to_tensorboard
        ckpt_fully_parallel_save_deprecated log_learning_rate_to_tensorboard""",
    "is the default": """log_throughput verify_integrity auto_detect_ckpt_format
        use_tokenizer_model_from_checkpoint_args""",
    "that logger is not public; nothing is sent anyway": "enable_one_logger",
    "names a logger that is not public; nothing is sent": "one_logger_* app_tag_run_*",
    "deprecated, Megatron-Core decides it": "async_tensor_model_parallel_allreduce",
}
"""What is the same with and without a flag -> patterns of destinations."""


@dataclass(frozen=True)
class Needs:
    """A rule about flags that have an effect only beside another flag, and are refused without."""

    dests: str
    """Patterns of their destinations, separated by blanks."""
    other: str
    """The destination of the other flag."""
    values: tuple[Any, ...] = ()
    """Its values that they need; empty for any that is set."""
    remedy: str = ""
    """The end of the error message, where it is not the plain one of `end`."""
    unless: str = ""
    """Another destination that also gives them an effect when it is set."""

    def is_met(self, args: object) -> bool:
        """Return True if the flags have an effect."""
        if self.unless and getattr(args, self.unless):
            return True
        value = getattr(args, self.other)
        found = value if isinstance(value, list) else [value]
        return any(item in self.values for item in found) if self.values else bool(value)

    def end(self, flag: Callable[[str], str]) -> str:
        """Return the end of the error message, in which `flag` gives the spelling of flags."""
        if self.remedy:
            return self.remedy
        if self.values == (False,):
            return f"does nothing with {flag(self.other)}"
        switch = self.values in ((), (True,))
        words = "" if switch else f" {' or '.join(map(as_written, self.values))}"
        return f"needs {flag(self.other)}{words}" + (
            f" or {flag(self.unless)}" if self.unless else ""
        )


SHARDED = ("optim", "optim_grads", "optim_grads_params")
LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "quantile_balancing")

NEEDS: tuple[Needs, ...] = (
    Needs(
        "*data_parallel_sharding_strategy megatron_fsdp_* create_all_gather_group"
        " *outer_dp_sharding_strategy init_model_with_meta_device strict_fsdp_dtensor_load"
        " fsdp_double_buffer fsdp_db_use_persist_buf_on_alloc_fail fsdp_manual_registration"
        " suggested_communication_unit_size keep_fp8_transpose_cache optimizer_cpu_offload"
        " use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_*dtype",
        "use_megatron_fsdp",
    ),
    Needs("main_grads_dtype main_params_dtype exp_avg_*dtype", "use_precision_aware_optimizer"),
    Needs(
        "cuda_graph_scope cuda_graph_warmup_steps", "cuda_graph_impl", ("local", "full_iteration")
    ),
    Needs("disable_symmetric_registration fsdp_manual_registration", "nccl_ub"),
    Needs(
        "ddp_bucket_size ddp_pad_buckets_for_high_nccl_busbw"
        " ddp_reduce_scatter_with_fp32_accumulation dump_param_to_param_group_map",
        "use_megatron_fsdp",
        (False,),
    ),
    Needs(
        "param_name_patterns_for_fp32_local_accumulation",
        "use_megatron_fsdp",
        (False,),
        "does nothing with --use-megatron-fsdp; see --megatron-fsdp-main-grads-dtype",
    ),
    Needs("ddp_bucket_size align_grad_reduce overlap_param_gather", "overlap_grad_reduce"),
    Needs(
        "ddp_pad_buckets_for_high_nccl_busbw ddp_reduce_scatter_with_fp32_accumulation"
        " num_distributed_optimizer_instances",
        "use_distributed_optimizer",
    ),
    Needs(
        "megatron_fsdp_enable_fine_grained_param_gather create_all_gather_group",
        "data_parallel_sharding_strategy",
        SHARDED,
        "does nothing with --data-parallel-sharding-strategy no_shard, which gathers nothing",
    ),
    Needs(
        "perform_initialization",
        "init_model_with_meta_device",
        (False,),
        "contradicts --init-model-with-meta-device, which initialises",
    ),
    Needs(
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type mscale"
        " rotary_scaling_factor mscale_all_dim original_max_position_embeddings beta_fast"
        " beta_slow mla_down_proj_fusion",
        "multi_latent_attention",
    ),
    Needs(
        "add_qkv_bias qk_l2_norm softmax_scale rotary_interleaved no_rope_freq use_rope_scaling"
        " attention_output_gate",
        "multi_latent_attention",
        (False,),
    ),
    Needs("mtp_*", "mtp_num_layers"),
    Needs("mtp_num_layers", "position_embedding_type", ("rope", "none")),
    Needs("recompute_method recompute_num_layers", "recompute_granularity", ("full",)),
    Needs("distribute_saved_activations", "recompute_granularity", ("full",)),
    Needs("recompute_modules", "recompute_granularity", ("selective",)),
    Needs("test_mode apply_wd_to_qk_layernorm", "qk_layernorm"),
    Needs(
        "moe_enable_deepep moe_flex_dispatcher_* moe_deepep_* moe_hybridep_* moe_ncclep_*"
        " moe_permute_fusion_into_hybridep",
        "moe_token_dispatcher_type",
        ("flex",),
    ),
    Needs(
        "moe_shared_expert_gate moe_shared_expert_overlap", "moe_shared_expert_intermediate_size"
    ),
    Needs("moe_token_drop_policy", "moe_expert_capacity_factor"),
    Needs("moe_router_bias_update_rate", "moe_router_enable_expert_bias"),
    Needs("delay_wgrad_compute", "overlap_moe_expert_parallel_comm"),
    Needs("moe_router_num_groups", "moe_router_group_topk"),
    Needs("moe_aux_loss_coeff", "moe_router_load_balancing_type", LOSSES),
    Needs("num_query_groups", "group_query_attention"),
    Needs(
        "use_rope_scaling rope_scaling_factor rotary_interleaved no_rope_freq"
        " rotary_seq_len_interpolation_factor",
        "position_embedding_type",
        ("rope",),
    ),
    Needs(
        "rotary_base rotary_percent",
        "position_embedding_type",
        ("rope",),
        unless="multi_latent_attention",
    ),
    Needs("rope_scaling_factor", "use_rope_scaling"),
    Needs(
        "optimizer_offload_fraction use_torch_optimizer_for_cpu_offload pin_cpu_*"
        " overlap_cpu_optimizer_d2h_h2d",
        "optimizer_cpu_offload",
    ),
    Needs("overlap_param_gather", "use_distributed_optimizer", unless="use_megatron_fsdp"),
    Needs("use_fused_weighted_squared_relu expert_*_sharding_strategy", "num_experts"),
    Needs("use_fused_weighted_squared_relu", "squared_relu"),
    Needs(
        "activation_func_clamp_value glu_linear_offset activation_func_fp8_input_store", "swiglu"
    ),
    Needs(
        "activation_func_fp8_input_store",
        "bias_swiglu_fusion",
        remedy="is read by the fused SwiGLU alone, which is for GPUs: leave it out",
    ),
    Needs("window_attn_skip_freq", "window_size"),
    Needs(
        "memory_efficient_layer_norm fused_single_qkv_rope use_te_activation_func"
        " fused_residual_rmsnorm use_transformer_engine_op_fuser mla_down_proj_fusion"
        " flash_attention_version tp_comm_overlap window_attn_skip_freq delay_wgrad_compute",
        "transformer_impl",
        ("transformer_engine",),
        "needs Transformer Engine, which only --transformer-impl transformer_engine on GPUs uses;"
        " leave it out",
    ),
    Needs(
        "fp8_recipe fp8_param_gather fp8_margin fp8_amax_* fp8_wgrad fp8_dot_product_attention"
        " fp8_multi_head_attention",
        "fp8",
    ),
    Needs("fp8_margin fp8_amax_* fp8_wgrad", "fp8_recipe", ("delayed",)),
    Needs("fp8_quantizer_factory", "fp8_recipe", ("custom",)),
    Needs("fp4_recipe fp4_param", "fp4"),
    Needs("fp4_quantizer_factory", "fp4_recipe", ("custom",)),
    Needs(
        "first_last_layers_bf16 tp_only_amax_red disable_parameter_transpose_cache"
        " moe_router_padding_for_* fp8_output_proj",
        "fp8",
        unless="fp4",
    ),
    Needs("num_layers_at_start_in_bf16 num_layers_at_end_in_bf16", "first_last_layers_bf16"),
    Needs(
        "fp8_param_gather fp4_param",
        "use_distributed_optimizer",
        remedy="needs --use-megatron-fsdp or --use-distributed-optimizer, which have main weights",
    ),
    Needs("reuse_grad_buf_for_mxfp8_param_ag", "fp8_param_gather"),
    Needs("keep_fp8_transpose_cache", "fp8_param_gather", unless="fp4_param"),
    Needs("reuse_grad_buf_for_mxfp8_param_ag", "fp8_recipe", ("mxfp8",)),
    Needs("tp_comm_*_*", "tp_comm_overlap"),
    Needs("tp_comm_overlap clone_scatter_output_in_embedding", "sequence_parallel"),
    Needs(
        "microbatch_group_size_per_vp_stage overlap_p2p_comm_warmup_flush",
        "virtual_pipeline_model_parallel_size",
        remedy="needs virtual pipeline stages, see --num-virtual-stages-per-pipeline-rank",
    ),
    Needs(
        "reset_attention_mask",
        "create_attention_mask_in_dataloader",
        remedy="has no effect with --no-create-attention-mask-in-dataloader",
    ),
    Needs("decoupled_min_lr", "decoupled_lr"),
    Needs("lr_wsd_decay_*", "lr_decay_style", ("WSD",)),
    Needs("sgd_momentum", "optimizer", ("sgd",)),
    Needs("muon_*", "optimizer", MUON),
    Needs("adam_beta1 adam_beta2 adam_eps decoupled_weight_decay", "optimizer", ("adam", *MUON)),
    Needs("dry_run_ranks", "dry_run"),
    Needs("manual_gc_interval", "manual_gc"),
    Needs("profile_* use_pytorch_profiler", "profile"),
    Needs("grad_reduce_in_bf16", "bf16"),
    Needs("initial_loss_scale min_loss_scale loss_scale_window hysteresis", "fp16"),
    Needs("ckpt_step", "load"),
    Needs(
        "use_checkpoint_args no_check_checkpoint_args no_load_fallback",
        "load",
        unless="pretrained_checkpoint",
    ),
    Needs(
        "save_retain_interval log_progress overwrite async_save non_persistent_save_interval",
        "save",
    ),
    Needs("save_retain_interval", "save_interval"),
    Needs("use_persistent_ckpt_worker async_strategy", "async_save"),
    Needs(
        "non_persistent_save_interval non_persistent_global_ckpt_dir",
        "non_persistent_ckpt_type",
        ("global",),
    ),
    Needs("non_persistent_ckpt_type", "load", unless="non_persistent_save_interval"),
    Needs(
        "log_validation_ppl_to_tensorboard log_memory_to_tensorboard log_timers_to_tensorboard"
        " log_loss_scale_to_tensorboard",
        "tensorboard_dir",
        unless="wandb_project",
    ),
    Needs("memory_snapshot_path", "record_memory_history"),
    Needs("wandb_exp_name wandb_entity wandb_save_dir", "wandb_project"),
)


def refusal(dest: str) -> str | None:
    """Return the reason why any value but the default of a destination is refused, or None."""
    return next((why for why, patterns in REFUSED.items() if matches(dest, patterns)), None)


def same_here(dest: str) -> str | None:
    """Return what is the same with and without a flag, or None."""
    return next((what for what, patterns in SAME_HERE.items() if matches(dest, patterns)), None)


def refuse_not_built(check: Check) -> None:
    """Refuse what this program or this release cannot honour, and go on with the default."""
    absent = absent_values()
    for dest, value in [*check.given.items()]:
        name, shown = check.flag(dest), as_written(value)
        reason = refusal(dest)
        problems = []
        if reason and check.changed(dest):
            problems.append(f"{name if isinstance(value, bool) else f'{name} {shown}'}: {reason}")
        for item in value if isinstance(value, list) else [value]:
            if item in NOT_BUILT_VALUES.get(dest, {}):
                problems.append(f"{name} {shown}: {NOT_BUILT_VALUES[dest][item]}")
            if item in absent.get(dest, ()):
                release = megatron.core.__version__
                problems.append(f"{name} {item}: Megatron-Core {release} has no such choice")
        if problems:
            check.problems += problems
            check.set_default(dest)


def note_what_is_the_same(check: Check) -> None:
    """Note flags that choose what this program does anyway."""
    for dest in check.given:
        sentence = same_here(dest)
        if sentence and check.changed(dest):
            check.notes.append(f"{check.flag(dest)}: {sentence}; leave it out")


def check_needs(check: Check) -> None:
    """Refuse flags that would have no effect beside the others."""
    changed = [dest for dest in check.given if check.changed(dest)]
    refused = set()
    for rule in NEEDS:
        for dest in changed:
            if matches(dest, rule.dests) and not rule.is_met(check.args):
                check.problems.append(f"{check.flag(dest)} {rule.end(check.flag)}")
                refused.add(dest)
    for dest in refused:
        check.set_default(dest)
