# SPDX-License-Identifier: Apache-2.0
"""Flags and values that the command line knows but this version does not implement.

They are refused with the reason, never ignored. A flag listed here is accepted at its default only,
so that scripts that spell a default out keep working.
"""

import argparse
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.enums import AttnBackend

FP8 = "FP8 and FP4 training is not built yet; use --bf16"
STATE_DTYPE = (
    "needs Transformer Engine's fused Adam, not built yet; leave it out, optimizer state is fp32"
)
OFFLOAD = "optimizer state on the host is not built yet"
LATE_OUTPUT = (
    "needs a CUDA kernel for late weight gradients, not built yet; leave it out, results are the"
    " same"
)
EXPERT_OVERLAP = (
    "hiding expert communication behind other work is not built yet; leave it out, results are the"
    " same"
)
LOCAL_SAVES = (
    "checkpoints on the disks of nodes are not built; use --async-save, which writes while training"
    " goes on"
)
MOE_KERNELS = "needs fused kernels that this program has not been run with"
OTHER_TOKENIZERS: dict[Any, str] = {
    "BertWordPieceLowerCase": "is for BERT",
    "BertWordPieceCase": "is for BERT",
    "MultimodalTokenizer": "is for images and text",
    "NullMultimodalTokenizer": "is for images and text",
    "SFTTokenizer": "is for fine-tuning on conversations",
}
"""Tokenizers of Megatron-LM that are none of a GPT's training on text."""
OTHER_FSDP = "PyTorch's FSDP2 is not a choice here; use --use-megatron-fsdp"

_REFUSED: dict[str, str] = {
    FP8: (
        """fp8 fp8_recipe fp8_param_gather fp8_margin fp8_amax_history_len fp8_amax_compute_algo
        first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
        reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache fp4 fp4_param"""
    ),
    STATE_DTYPE: (
        """use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype
        exp_avg_sq_dtype"""
    ),
    OFFLOAD: "optimizer_cpu_offload optimizer_offload_fraction",
    LATE_OUTPUT: "defer_embedding_wgrad_compute wgrad_deferral_limit",
    EXPERT_OVERLAP: "overlap_moe_expert_parallel_comm delay_wgrad_compute",
    "two optimizers on a rank are not built yet; use --overlap-param-gather": (
        "overlap_param_gather_with_optimizer_step"
    ),
    "no release of Megatron-Core reads it; use --outer-dp-sharding-strategy optim": (
        "enable_full_sharding_in_hsdp"
    ),
    "the second generation's switches are not built; leave it out": "megatron_fsdp_version",
    "torchrun has it: torchrun --log-dir DIR --redirects 3 --local-ranks-filter 0": "log_dir",
    "use --timing-log-level 1 --timing-log-option all, or --profile": (
        "log_straggler disable_straggler_on_startup straggler_ctrlr_port straggler_minmax_count"
    ),
    "nvidia-smi and DCGM measure energy": "log_energy",
    "reducing in the network's switches is not built yet; leave it out, results are the same": (
        "use_sharp"
    ),
    "gradients are always scaled in one place; choosing where is not built": (
        "gradient_reduce_div_fusion"
    ),
    "CUDA graphs are not built yet": "cuda_graph_impl",
    "needs Transformer Engine's random tracker, which is not built in yet": "te_rng_tracker",
    OTHER_FSDP: "use_torch_fsdp2 torch_fsdp2_reshard_after_forward",
    "this program always builds its process groups at the start and on ordinary streams": (
        """
        high_priority_stream_groups lazy_mpu_init"""
    ),
    "start the program with torchrun, which sets LOCAL_RANK": "local_rank",
    "one process of each rank writes; leave it out": "dist_ckpt_workers",
    "Megatron-Core no longer writes fully_sharded_model_space; leave it out, it is still read": (
        "dist_ckpt_save_pre_mcore_014"
    ),
    "learning from a teacher with ModelOpt is not built": (
        "export_te_mcore_model export_kd_teacher_load export_kd_cfg"
    ),
    "main weights are part of the optimizer's state here": "load_main_params_from_ckpt",
    "deprecated; use --position-embedding-type none": "add_position_embedding",
    "no layer of this release of Megatron-Core reads it": (
        "apply_residual_connection_post_layernorm"
    ),
    LOCAL_SAVES: "non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo",
    MOE_KERNELS: "moe_use_legacy_grouped_gemm",
}
"""Reason -> destinations, separated by blanks."""


def _by_destination(refused: dict[str, str]) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for reason, dests in refused.items():
        reasons.update(dict.fromkeys(dests.split(), reason))
    return reasons


NOT_BUILT = _by_destination(_REFUSED)
"""Destination -> the reason why any value but the default is refused."""

NOT_BUILT_VALUES: dict[str, dict[Any, str]] = {
    "ckpt_format": dict.fromkeys(
        ("torch", "torch_dcp"), "not written or read here; use torch_dist or fsdp_dtensor"
    ),
    "non_persistent_ckpt_type": dict.fromkeys(("local", "in_memory"), LOCAL_SAVES),
    "optimizer": dict.fromkeys(
        ("muon", "dist_muon", "lion", "soap", "adaptive_muon"), "not built yet; use adam or sgd"
    ),
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


@dataclass(frozen=True)
class Needs:
    """A rule about flags that have an effect only beside another flag, and are refused without."""

    dests: str
    """Their destinations, separated by blanks."""
    attribute: str
    """The destination of the other flag."""
    values: tuple[Any, ...]
    """Its values that they need; empty for any that is set."""
    remedy: str
    """The end of the error message, which begins with the refused flag."""
    unless: str | None = None
    """Another destination that also gives them an effect when it is set."""

    def is_met(self, args: argparse.Namespace) -> bool:
        """Return True if the flags have an effect."""
        if self.unless and getattr(args, self.unless):
            return True
        value = getattr(args, self.attribute)
        return value in self.values if self.values else bool(value)


NEEDS: tuple[Needs, ...] = (
    Needs(
        "data_parallel_sharding_strategy megatron_fsdp_main_params_dtype"
        " megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype"
        " megatron_fsdp_enable_fine_grained_param_gather create_all_gather_group"
        " outer_dp_sharding_strategy init_model_with_meta_device strict_fsdp_dtensor_load"
        " fsdp_double_buffer megatron_fsdp_max_pool_double_buffer"
        " fsdp_db_use_persist_buf_on_alloc_fail suggested_communication_unit_size",
        "use_megatron_fsdp",
        (True,),
        "needs --use-megatron-fsdp",
    ),
    Needs(
        "disable_symmetric_registration fsdp_manual_registration",
        "nccl_ub",
        (True,),
        "needs --use-nccl-ub",
    ),
    Needs(
        "ddp_bucket_size ddp_num_buckets ddp_pad_buckets_for_high_nccl_busbw"
        " ddp_reduce_scatter_with_fp32_accumulation",
        "use_megatron_fsdp",
        (False,),
        "does nothing with --use-megatron-fsdp",
    ),
    Needs(
        "ddp_bucket_size ddp_num_buckets",
        "overlap_grad_reduce",
        (True,),
        "needs --overlap-grad-reduce",
    ),
    Needs(
        "ddp_pad_buckets_for_high_nccl_busbw ddp_reduce_scatter_with_fp32_accumulation"
        " num_distributed_optimizer_instances",
        "use_distributed_optimizer",
        (True,),
        "needs --use-distributed-optimizer",
    ),
    Needs(
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type"
        " rotary_scaling_factor mscale mscale_all_dim",
        "multi_latent_attention",
        (True,),
        "needs --multi-latent-attention",
    ),
    Needs(
        "add_qkv_bias qk_l2_norm softmax_scale rotary_interleaved no_rope_freq use_rope_scaling",
        "multi_latent_attention",
        (False,),
        "does nothing with --multi-latent-attention",
    ),
    Needs("mtp_loss_scaling_factor", "mtp_num_layers", (), "needs --mtp-num-layers"),
    Needs(
        "megatron_fsdp_enable_fine_grained_param_gather create_all_gather_group",
        "data_parallel_sharding_strategy",
        ("optim", "optim_grads", "optim_grads_params"),
        "does nothing with --data-parallel-sharding-strategy no_shard, which gathers nothing",
    ),
    Needs(
        "recompute_method recompute_num_layers",
        "recompute_granularity",
        ("full",),
        "needs --recompute-granularity full",
    ),
    Needs(
        "recompute_modules",
        "recompute_granularity",
        ("selective",),
        "needs --recompute-granularity selective",
    ),
    Needs("align_grad_reduce", "overlap_grad_reduce", (True,), "needs --overlap-grad-reduce"),
    Needs("test_mode", "qk_layernorm", (True,), "needs --qk-layernorm, whose weights it compares"),
    Needs(
        "moe_enable_deepep moe_flex_dispatcher_backend",
        "moe_token_dispatcher_type",
        ("flex",),
        "needs --moe-token-dispatcher-type flex",
    ),
    Needs("apply_wd_to_qk_layernorm", "qk_layernorm", (True,), "needs --qk-layernorm"),
    Needs("num_query_groups", "group_query_attention", (True,), "needs --group-query-attention"),
    Needs(
        "use_rope_scaling rope_scaling_factor rotary_interleaved no_rope_freq",
        "position_embedding_type",
        ("rope",),
        "needs --position-embedding-type rope",
    ),
    Needs(
        "rotary_base rotary_percent",
        "position_embedding_type",
        ("rope",),
        "needs --position-embedding-type rope or --multi-latent-attention",
        unless="multi_latent_attention",
    ),
    Needs(
        "rotary_seq_len_interpolation_factor",
        "position_embedding_type",
        ("rope",),
        "needs --position-embedding-type rope",
    ),
    Needs(
        "use_fused_weighted_squared_relu",
        "num_experts",
        (),
        "weighs routed tokens: needs --num-experts",
    ),
    Needs("rope_scaling_factor", "use_rope_scaling", (True,), "needs --use-rope-scaling"),
    Needs(
        "fim_rate fim_spm_rate fim_split_sample fim_no_prefix fim_prefix_token fim_middle_token"
        " fim_suffix_token fim_pad_token fim_eod_token",
        "fim_data",
        (True,),
        "needs --fim-data",
    ),
    Needs("fim_fragment_rate", "fim_split_sample", (), "needs --fim-split-sample"),
    Needs("full_validation", "eval_interval", (), "needs --eval-interval", unless="skip_train"),
    Needs("multiple_validation_sets", "full_validation", (True,), "needs --full-validation"),
    Needs(
        "lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style",
        "lr_decay_style",
        ("WSD",),
        "needs --lr-decay-style WSD",
    ),
    Needs("sgd_momentum", "optimizer", ("sgd",), "needs --optimizer sgd"),
    Needs("adam_beta1 adam_beta2 adam_eps", "optimizer", ("adam",), "needs --optimizer adam"),
    Needs("dry_run_ranks", "dry_run", (True,), "needs --dry-run"),
    Needs("manual_gc_interval", "manual_gc", (True,), "needs --manual-gc"),
    Needs(
        "profile_step_start profile_step_end profile_ranks use_pytorch_profiler",
        "profile",
        (True,),
        "needs --profile",
    ),
    Needs("grad_reduce_in_bf16", "bf16", (True,), "needs --bf16"),
    Needs(
        "initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        "fp16",
        (True,),
        "needs --fp16",
    ),
    Needs("ckpt_step", "load", (), "needs --load"),
    Needs(
        "use_checkpoint_args no_check_checkpoint_args no_load_fallback",
        "load",
        (),
        "needs --load or --pretrained-checkpoint",
        unless="pretrained_checkpoint",
    ),
    Needs(
        "save_retain_interval log_progress overwrite async_save non_persistent_save_interval",
        "save",
        (),
        "needs --save",
    ),
    Needs("save_retain_interval", "save_interval", (), "needs --save-interval"),
    Needs("use_persistent_ckpt_worker async_strategy", "async_save", (True,), "needs --async-save"),
    Needs(
        "non_persistent_save_interval",
        "non_persistent_ckpt_type",
        ("global",),
        "needs --non-persistent-ckpt-type global",
    ),
    Needs(
        "non_persistent_global_ckpt_dir",
        "non_persistent_ckpt_type",
        ("global",),
        "needs --non-persistent-ckpt-type global",
    ),
    Needs(
        "non_persistent_ckpt_type",
        "load",
        (),
        "needs --non-persistent-save-interval or --load",
        unless="non_persistent_save_interval",
    ),
    Needs(
        "log_validation_ppl_to_tensorboard log_memory_to_tensorboard tensorboard_log_interval"
        " log_timers_to_tensorboard log_loss_scale_to_tensorboard log_world_size_to_tensorboard"
        " moe_per_layer_logging",
        "tensorboard_dir",
        (),
        "needs --tensorboard-dir or --wandb-project",
        unless="wandb_project",
    ),
    Needs("tensorboard_queue_size", "tensorboard_dir", (), "needs --tensorboard-dir"),
    Needs(
        "memory_snapshot_path", "record_memory_history", (True,), "needs --record-memory-history"
    ),
    Needs(
        "wandb_exp_name wandb_entity wandb_save_dir",
        "wandb_project",
        (),
        "needs --wandb-project",
    ),
    Needs(
        "error_injection_rate error_injection_type result_rejected_tracker_filename",
        "rerun_mode",
        ("validate_results",),
        "needs --rerun-mode validate_results",
    ),
)
