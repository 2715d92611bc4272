# SPDX-License-Identifier: Apache-2.0
"""Rows of the fields of Megatron-Core's configs that are about training, not about the model.

A field of a config is a flag of its name, with its type, choices, default and help. A row has what
the field itself does not imply: rules, a sentence for --help where Megatron-Core's is long, and
other settings of the `Flag`. A field without a row is a flag without rules.
"""

import torch

from megatron.mcore_adapter.run.optimizer_names import MUON
from megatron.pretrain.arguments.flags import (
    ABOVE_0,
    AT_LEAST_0,
    IN_SHORT_HELP,
    SIZE,
    Implied,
    Needs,
    NotCaptured,
    Range,
    Redundant,
    Refused,
    Row,
    named,
    off,
    only_in_other_loop,
    renamed,
)
from megatron.pretrain.arguments.values import STATE_DTYPES, one_of

LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
state_dtype = one_of(STATE_DTYPES)

NEEDS_FSDP = Needs("use_megatron_fsdp")
NOT_WITH_FSDP = Needs("use_megatron_fsdp", (False,))
NEEDS_USER_BUFFERS = Needs("nccl_ub")
NEEDS_DISTRIBUTED_OPTIMIZER = Needs("use_distributed_optimizer")
NEEDS_OVERLAPPED_REDUCTION = Needs("overlap_grad_reduce")
NO_REPEATED_STEPS = only_in_other_loop("steps are not repeated here")

NEEDS_ADAM = Needs("optimizer", ("adam", *MUON))
NEEDS_MUON = Needs("optimizer", MUON)
NEEDS_OFFLOAD = Needs("optimizer_cpu_offload")
NEEDS_PRECISION_AWARE = Needs("use_precision_aware_optimizer")
NEEDS_FP16 = Needs("fp16")
NEEDS_QK_NORM = Needs("qk_layernorm")
# A step keeps this share of an optimizer's running mean.
SHARE_OF_MEAN = Range(lambda value: 0 <= value < 1, "at least 0 and below 1")
OTHER_OPTIMIZERS = Refused("belongs to optimizers that are not built yet; use adam, muon or sgd")

NEEDS_FP8 = Needs("fp8")
NEEDS_FP4 = Needs("fp4")
NEEDS_FP8_OR_FP4 = Needs("fp8", unless="fp4")
NEEDS_DELAYED_SCALING = Needs("fp8_recipe", ("delayed",))
NEEDS_LAYERS_IN_BF16 = Needs("first_last_layers_bf16")
NEEDS_MAIN_WEIGHTS = Needs(
    "use_distributed_optimizer",
    remedy="needs --use-megatron-fsdp or --use-distributed-optimizer, which have main weights",
)
OTHER_KERNELS = Refused("needs fused kernels that this program has not been run with")
NEEDS_CAPTURE = Needs("cuda_graph_impl", ("local", "full_iteration"))
NO_LAYER_GRAPHS = Refused("CUDA graphs of layers, and of the optimizer, are not built")
USE_CUDA_GRAPH_IMPL = Refused("deprecated; use --cuda-graph-impl")

NEEDS_TRANSFORMER_ENGINE = Needs(
    "transformer_impl",
    ("transformer_engine",),
    "needs Transformer Engine, which only --transformer-impl transformer_engine on GPUs uses;"
    " leave it out",
)
NEEDS_SEQUENCE_PARALLEL = Needs("sequence_parallel")
NEEDS_TP_OVERLAP = Needs("tp_comm_overlap")
NEEDS_STAGES = Needs("pipeline_model_parallel_size", above=1)
NEEDS_VIRTUAL_STAGES = Needs(
    "virtual_pipeline_model_parallel_size",
    remedy="needs virtual pipeline stages, see --num-virtual-stages-per-pipeline-rank",
)
ONE_BACKEND = Refused("stages send with the library of --distributed-backend")
ONE_LENGTH = Refused("sequences of several lengths in a batch are not built")
NO_LATE_GRADIENTS = Refused(
    "late weight gradients are not built yet; leave it out, results are the same"
)
NO_WEIGHT_SHARDS = Refused(
    "weights that are gathered again for each product are not built; use --use-megatron-fsdp"
)

TRAINING_FIELDS: dict[str, dict[str, Row]] = {
    "data parallelism": {
        "grad_reduce_in_fp32": renamed("accumulate_allreduce_grads_in_fp32"),
        "align_param_gather": off("--no-align-param-gather"),
        "num_distributed_optimizer_instances": (
            "outer ranks of hybrid sharding",
            IN_SHORT_HELP,
            SIZE,
            NEEDS_DISTRIBUTED_OPTIMIZER,
        ),
        "check_for_nan_in_grad": (
            off("--no-check-for-nan-in-loss-and-grad"),
            {"dest": "check_for_nan_in_loss_and_grad"},
            NotCaptured("the check reads losses on the host"),
        ),
        "check_for_large_grads": NO_REPEATED_STEPS,
        "bucket_size": (
            renamed("ddp_bucket_size"),
            SIZE,
            NOT_WITH_FSDP,
            NEEDS_OVERLAPPED_REDUCTION,
        ),
        "pad_buckets_for_high_nccl_busbw": (
            renamed("ddp_pad_buckets_for_high_nccl_busbw"),
            NOT_WITH_FSDP,
            NEEDS_DISTRIBUTED_OPTIMIZER,
        ),
        "reduce_scatter_with_fp32_accumulation": (
            renamed("ddp_reduce_scatter_with_fp32_accumulation"),
            NOT_WITH_FSDP,
            NEEDS_DISTRIBUTED_OPTIMIZER,
        ),
        "average_in_collective": renamed("ddp_average_in_collective"),
        "use_megatron_fsdp": ("shard weights, gradients and optimizer state", IN_SHORT_HELP),
        "use_custom_fsdp": Refused("deprecated; use --use-megatron-fsdp"),
        "data_parallel_sharding_strategy": (
            {"choices": LEVELS},
            "what is sharded",
            IN_SHORT_HELP,
            NEEDS_FSDP,
            Implied("use_megatron_fsdp", "optim_grads_params"),
        ),
        "gradient_reduce_div_fusion": (
            off("--no-gradient-reduce-div-fusion"),
            Refused("gradients are always scaled in one place; choosing where is not built"),
        ),
        "suggested_communication_unit_size": (
            "elements up to which small units are gathered together",
            SIZE,
            NEEDS_FSDP,
        ),
        "preserve_fp32_weights": OTHER_KERNELS,
        "keep_fp8_transpose_cache": (NEEDS_FSDP, Needs("fp8_param_gather", unless="fp4_param")),
        "nccl_ub": named("--use-nccl-ub"),
        "fsdp_double_buffer": (NEEDS_FSDP, Implied("nccl_ub", True)),
        "outer_dp_sharding_strategy": ({"choices": LEVELS[:2]}, NEEDS_FSDP),
        "disable_symmetric_registration": NEEDS_USER_BUFFERS,
        "fsdp_manual_registration": (NEEDS_FSDP, NEEDS_USER_BUFFERS, Implied("nccl_ub", True)),
        "param_name_patterns_for_fp32_local_accumulation": (
            named("--ddp-param-name-patterns-for-fp32-local-accumulation"),
            Needs(
                "use_megatron_fsdp",
                (False,),
                remedy="does nothing with --use-megatron-fsdp; see"
                " --megatron-fsdp-main-grads-dtype",
            ),
        ),
        "fsdp_all_gather_in_start_param_sync": Refused(
            "the first gathers begin with the first forward"
        ),
        "megatron_fsdp_use_decoupled_grad": Refused(
            "--use-precision-aware-optimizer sets it; leave it out"
        ),
        "megatron_fsdp_cuda_graph_mode": Refused("captured iterations imply it; leave it out"),
    },
    "optimizer": {
        "qk_clip": OTHER_OPTIMIZERS,
        "qk_clip_alpha": OTHER_OPTIMIZERS,
        "qk_clip_threshold": OTHER_OPTIMIZERS,
        "lr": ("learning rate after the warm-up", IN_SHORT_HELP, AT_LEAST_0),
        "min_lr": ({"default": 0.0}, AT_LEAST_0),
        "decoupled_lr": AT_LEAST_0,
        "decoupled_min_lr": (AT_LEAST_0, Needs("decoupled_lr")),
        "weight_decay": AT_LEAST_0,
        "apply_wd_to_qk_layernorm": NEEDS_QK_NORM,
        "reuse_grad_buf_for_mxfp8_param_ag": (
            Needs("fp8_param_gather"),
            Needs("fp8_recipe", ("mxfp8",)),
        ),
        "use_precision_aware_optimizer": (
            NEEDS_FSDP,
            Needs(
                "optimizer_cpu_offload",
                (False,),
                "does not go with --optimizer-cpu-offload: Transformer Engine's kernels update on"
                " GPUs",
            ),
            NotCaptured("it has not been tried"),
        ),
        "store_param_remainders": Refused(
            "main weights are --use-megatron-fsdp's own; see --megatron-fsdp-main-params-dtype"
        ),
        "main_grads_dtype": (
            {"type": one_of({"fp32": torch.float32, "bf16": torch.bfloat16})},
            NEEDS_FSDP,
            NEEDS_PRECISION_AWARE,
        ),
        "main_params_dtype": (
            {"type": one_of({"fp32": torch.float32, "fp16": torch.float16})},
            NEEDS_FSDP,
            NEEDS_PRECISION_AWARE,
        ),
        "exp_avg_dtype": ({"type": state_dtype}, NEEDS_FSDP, NEEDS_PRECISION_AWARE),
        "exp_avg_sq_dtype": ({"type": state_dtype}, NEEDS_FSDP, NEEDS_PRECISION_AWARE),
        "optimizer": (
            {"choices": ("adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon")},
            Refused("not built yet; use adam, muon or sgd", ("lion", "soap", "adaptive_muon")),
        ),
        "loss_scale": ABOVE_0,
        "initial_loss_scale": (ABOVE_0, NEEDS_FP16),
        "min_loss_scale": (ABOVE_0, NEEDS_FP16),
        "loss_scale_window": (ABOVE_0, NEEDS_FP16),
        "hysteresis": (SIZE, NEEDS_FP16),
        "adam_beta1": (SHARE_OF_MEAN, NEEDS_ADAM),
        "adam_beta2": (SHARE_OF_MEAN, NEEDS_ADAM),
        "adam_eps": (AT_LEAST_0, NEEDS_ADAM),
        "decoupled_weight_decay": NEEDS_ADAM,
        "sgd_momentum": (SHARE_OF_MEAN, Needs("optimizer", ("sgd",))),
        "muon_momentum": ({"default": 0.9}, SHARE_OF_MEAN, NEEDS_MUON),
        "muon_split_qkv": (off("--muon-no-split-qkv"), NEEDS_MUON),
        "muon_use_nesterov": NEEDS_MUON,
        "muon_scale_mode": (
            {"choices": ("spectral", "unit_rms_norm", "shape_scaling")},
            NEEDS_MUON,
        ),
        "muon_fp32_matmul_prec": ({"choices": ("medium", "high", "highest")}, NEEDS_MUON),
        "muon_num_ns_steps": (SIZE, NEEDS_MUON),
        "muon_tp_mode": ({"choices": ("blockwise", "duplicated", "distributed")}, NEEDS_MUON),
        "muon_extra_scale_factor": NEEDS_MUON,
        "muon_coefficient_type": NEEDS_MUON,
        "muon_scalar_optimizer": (
            {"choices": ("adam", "lion")},
            NEEDS_MUON,
            Refused("not built yet; use adam", ("lion",)),
        ),
        "muon_nesterov": NEEDS_MUON,
        "overlap_param_gather": (
            NEEDS_OVERLAPPED_REDUCTION,
            Needs("use_distributed_optimizer", unless="use_megatron_fsdp"),
        ),
        "overlap_param_gather_with_optimizer_step": Refused(
            "two optimizers on a rank are not built yet; use --overlap-param-gather"
        ),
        "optimizer_cpu_offload": (NEEDS_FSDP, NotCaptured("graphs cannot wait for the host")),
        "optimizer_offload_fraction": ({"default": 1.0}, NEEDS_OFFLOAD),
        "use_torch_optimizer_for_cpu_offload": NEEDS_OFFLOAD,
        "overlap_cpu_optimizer_d2h_h2d": NEEDS_OFFLOAD,
        "pin_cpu_grads": NEEDS_OFFLOAD,
        "pin_cpu_params": NEEDS_OFFLOAD,
        "clip_grad": AT_LEAST_0,
        "lion_beta1": OTHER_OPTIMIZERS,
        "lion_beta2": OTHER_OPTIMIZERS,
        "optimizer_cuda_graph": NO_LAYER_GRAPHS,
        "soap_shampoo_beta": OTHER_OPTIMIZERS,
        "soap_precondition_frequency": OTHER_OPTIMIZERS,
        "soap_use_kl_shampoo": OTHER_OPTIMIZERS,
        "adaptive_muon_moment2_method": OTHER_OPTIMIZERS,
        "adaptive_muon_beta2": OTHER_OPTIMIZERS,
        "adaptive_muon_eps": OTHER_OPTIMIZERS,
        "use_layer_wise_distributed_optimizer": OTHER_OPTIMIZERS,
        "grad_norm_skip_threshold": (),
        "use_distributed_optimizer": Implied("use_megatron_fsdp", True),
    },
    "low precision and graphs": {
        "tp_only_amax_red": NEEDS_FP8_OR_FP4,
        "disable_parameter_transpose_cache": NEEDS_FP8_OR_FP4,
        "moe_pad_experts_for_cuda_graph_inference": NO_LAYER_GRAPHS,
        "fp16": NotCaptured("loss scales of later steps are in other tensors"),
        "bf16": ("compute in bfloat16, main weights in fp32", IN_SHORT_HELP),
        "use_te_rng_tracker": (
            renamed("te_rng_tracker"),
            Refused("needs Transformer Engine's random tracker, which is not built in yet"),
        ),
        "fp8": (named("--fp8-format"), NotCaptured("FP8 has not been tried")),
        "fp8_recipe": NEEDS_FP8,
        "fp8_param": (renamed("fp8_param_gather"), NEEDS_FP8, NEEDS_MAIN_WEIGHTS),
        "fp8_quantizer_factory": Needs("fp8_recipe", ("custom",)),
        "fp8_margin": (NEEDS_FP8, NEEDS_DELAYED_SCALING),
        "fp8_interval": Refused("Transformer Engine has had none since 1.8"),
        "fp8_amax_history_len": (NEEDS_FP8, NEEDS_DELAYED_SCALING),
        "fp8_amax_compute_algo": (NEEDS_FP8, NEEDS_DELAYED_SCALING),
        "fp8_wgrad": (NEEDS_FP8, NEEDS_DELAYED_SCALING),
        "fp8_dot_product_attention": NEEDS_FP8,
        "fp8_multi_head_attention": NEEDS_FP8,
        "fp8_output_proj": NEEDS_FP8_OR_FP4,
        "first_last_layers_bf16": NEEDS_FP8_OR_FP4,
        "num_layers_at_start_in_bf16": NEEDS_LAYERS_IN_BF16,
        "num_layers_at_end_in_bf16": NEEDS_LAYERS_IN_BF16,
        "fp4": (named("--fp4-format"), NotCaptured("FP4 has not been tried")),
        "fp4_recipe": NEEDS_FP4,
        "fp4_param": (named("--fp4-param-gather"), NEEDS_FP4, NEEDS_MAIN_WEIGHTS),
        "fp4_quantizer_factory": Needs("fp4_recipe", ("custom",)),
        "enable_cuda_graph": USE_CUDA_GRAPH_IMPL,
        "cuda_graph_use_single_mempool": NO_LAYER_GRAPHS,
        "cuda_graph_retain_backward_graph": NO_LAYER_GRAPHS,
        "cuda_graph_warmup_steps": (Range(lambda value: value > 1, "at least 2"), NEEDS_CAPTURE),
        "external_cuda_graph": USE_CUDA_GRAPH_IMPL,
        "cuda_graph_impl": {"choices": ("none", "local", "transformer_engine", "full_iteration")},
        "cuda_graph_scope": ({"nargs": "+"}, NEEDS_CAPTURE),
        "cuda_graph_modules": ({"nargs": "+"}, NO_LAYER_GRAPHS),
        "inference_cuda_graph_scope": NO_LAYER_GRAPHS,
    },
    "model parallelism": {
        "tensor_model_parallel_size": (
            "ranks that divide a layer",
            IN_SHORT_HELP,
            SIZE,
        ),
        "pipeline_model_parallel_comm_backend": ONE_BACKEND,
        "pipeline_model_parallel_size": (
            "pipeline stages",
            IN_SHORT_HELP,
            SIZE,
            NotCaptured("Megatron-Core waits for messages between stages on the host"),
        ),
        "sequence_parallel": (),
        "context_parallel_size": (
            "ranks that divide a sequence",
            IN_SHORT_HELP,
            SIZE,
        ),
        "hierarchical_context_parallel_sizes": (),
        "hybrid_context_parallel": ONE_LENGTH,
        "expert_model_parallel_size": (
            "ranks that divide experts",
            IN_SHORT_HELP,
            SIZE,
        ),
        "expert_tensor_parallel_size": SIZE,
        "async_tensor_model_parallel_allreduce": Redundant("deprecated, Megatron-Core decides it"),
        "tp_comm_overlap": (NEEDS_TRANSFORMER_ENGINE, NEEDS_SEQUENCE_PARALLEL),
        "tp_comm_bulk_wgrad": NEEDS_TP_OVERLAP,
        "tp_comm_bulk_dgrad": NEEDS_TP_OVERLAP,
        "tp_comm_overlap_ag": NEEDS_TP_OVERLAP,
        "tp_comm_overlap_rs": NEEDS_TP_OVERLAP,
        "tp_comm_overlap_rs_dgrad": NEEDS_TP_OVERLAP,
        "tp_comm_split_ag": NEEDS_TP_OVERLAP,
        "tp_comm_atomic_ag": NEEDS_TP_OVERLAP,
        "tp_comm_split_rs": NEEDS_TP_OVERLAP,
        "tp_comm_atomic_rs": NEEDS_TP_OVERLAP,
        "tp_comm_overlap_disable_qkv": NEEDS_TP_OVERLAP,
        "tp_comm_overlap_disable_fc1": NEEDS_TP_OVERLAP,
        "tp_comm_bootstrap_backend": NEEDS_TP_OVERLAP,
        "overlap_p2p_comm": off("--no-overlap-p2p-communication"),
        "defer_embedding_wgrad_compute": NO_LATE_GRADIENTS,
        "wgrad_deferral_limit": NO_LATE_GRADIENTS,
        "overlap_p2p_comm_warmup_flush": NEEDS_VIRTUAL_STAGES,
        "microbatch_group_size_per_vp_stage": NEEDS_VIRTUAL_STAGES,
        "num_layers_in_first_pipeline_stage": (
            renamed("decoder_first_pipeline_num_layers"),
            SIZE,
            NEEDS_STAGES,
        ),
        "num_layers_in_last_pipeline_stage": (
            renamed("decoder_last_pipeline_num_layers"),
            SIZE,
            NEEDS_STAGES,
        ),
        "pipeline_model_parallel_layout": ({"type": str}, NEEDS_STAGES),
        "account_for_embedding_in_pipeline_split": NEEDS_STAGES,
        "account_for_loss_in_pipeline_split": NEEDS_STAGES,
        "cp_comm_type": (
            {
                "type": str,
                "nargs": "+",
                "default": ["p2p"],
                "choices": ("p2p", "a2a", "all_gather", "a2a+p2p"),
            },
            Needs("context_parallel_size", remedy="needs --context-parallel-size above 1", above=1),
        ),
        "tensor_parallel_num_weight_shards": NO_WEIGHT_SHARDS,
        "expert_tensor_parallel_num_weight_shards": NO_WEIGHT_SHARDS,
        "max_seqlen_per_dp_cp_rank": ONE_LENGTH,
        "use_ring_exchange_p2p": ONE_BACKEND,
        "clone_scatter_output_in_embedding": NEEDS_SEQUENCE_PARALLEL,
    },
}
"""Title of a group in --help -> field -> row."""

LATER_TRAINING_FIELDS = {
    "lion_": OTHER_OPTIMIZERS,
    "soap_": OTHER_OPTIMIZERS,
    "adaptive_muon_": OTHER_OPTIMIZERS,
    "qk_clip": OTHER_OPTIMIZERS,
}
"""Fields that a later release may add to what is not built, by the beginning of their names."""
