# SPDX-License-Identifier: Apache-2.0
"""Flag tables: every flag of data parallelism, optimizer, checkpoints and model parallelism."""

import itertools
from datetime import timedelta

import torch

from megatron.fsdp import Offload
from tests.support.pretrain.arguments.checkpoint_flag_table import CHECKPOINTS
from tests.support.pretrain.arguments.flag_rows import (
    FSDP,
    LINE,
    OVERLAP,
    PIPELINE,
    SAMPLES,
    SHARDED,
    TRAIN,
    changes,
    refused,
    shown,
)

VIRTUAL = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
VIRTUAL_OF_FOUR = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
EXPERTS = "--num-experts 8 --disable-bias-linear"
FP8 = "--fp8-format hybrid"
BF16_LAYERS = f"{FP8} --fp8-recipe tensorwise --first-last-layers-bf16"
OFFLOAD = f"{FSDP} --optimizer-cpu-offload"
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32

DATA_PARALLELISM = (
    changes(
        FSDP,
        ddp__use_megatron_fsdp=True,
        optimizer__use_distributed_optimizer=True,
        args__ckpt_format="fsdp_dtensor",
    ),
    refused("--megatron-fsdp-version 2", "second generation"),
    changes(
        "--data-parallel-sharding-strategy optim",
        FSDP,
        ddp__data_parallel_sharding_strategy="optim",
    ),
    changes(
        "--outer-dp-sharding-strategy optim",
        f"{FSDP} --num-distributed-optimizer-instances 2",
        ddp__outer_dp_sharding_strategy="optim",
    ),
    changes(
        "--expert-data-parallel-sharding-strategy optim",
        f"{FSDP} {EXPERTS} --expert-model-parallel-size 2",
        ddp__expert_data_parallel_sharding_strategy="optim",
    ),
    changes(
        "--expert-outer-dp-sharding-strategy optim",
        f"{FSDP} {EXPERTS} --expert-model-parallel-size 2 --num-distributed-optimizer-instances 2",
        ddp__expert_outer_dp_sharding_strategy="optim",
    ),
    changes(
        "--num-distributed-optimizer-instances 4",
        SHARDED,
        ddp__num_distributed_optimizer_instances=4,
        groups__num_distributed_optimizer_instances=4,
    ),
    changes(
        SHARDED, ddp__use_distributed_optimizer=True, optimizer__use_distributed_optimizer=True
    ),
    changes("--overlap-grad-reduce", ddp__overlap_grad_reduce=True),
    changes(
        "--overlap-param-gather",
        f"{SHARDED} --overlap-grad-reduce",
        ddp__overlap_param_gather=True,
        optimizer__overlap_param_gather=True,
    ),
    refused("--overlap-param-gather-with-optimizer-step", "use --overlap-param-gather"),
    changes(
        "--use-nccl-ub",
        FSDP,
        ddp__nccl_ub=True,
        ddp__fsdp_double_buffer=True,
        ddp__fsdp_manual_registration=True,
        gpu=True,
    ),
    changes(
        "--disable-symmetric-registration",
        f"{FSDP} --use-nccl-ub",
        ddp__disable_symmetric_registration=True,
        gpu=True,
    ),
    shown(
        "--fsdp-manual-registration",
        "test_rules.py::test_user_buffers_are_registered_after_the_first_step_with_fsdp_only",
    ),
    changes("--fsdp-double-buffer", FSDP, ddp__fsdp_double_buffer=True),
    changes(
        "--megatron-fsdp-max-pool-double-buffer",
        FSDP,
        ddp__megatron_fsdp_max_pool_double_buffer=True,
    ),
    changes(
        "--fsdp-db-use-persist-buf-on-alloc-fail",
        FSDP,
        ddp__fsdp_db_use_persist_buf_on_alloc_fail=True,
    ),
    changes(
        "--suggested-communication-unit-size 7", FSDP, ddp__suggested_communication_unit_size=7
    ),
    changes(
        "--megatron-fsdp-main-params-dtype bf16", FSDP, ddp__megatron_fsdp_main_params_dtype=bf16
    ),
    changes(
        "--megatron-fsdp-main-grads-dtype fp32", FSDP, ddp__megatron_fsdp_main_grads_dtype=fp32
    ),
    changes("--megatron-fsdp-grad-comm-dtype bf16", FSDP, ddp__megatron_fsdp_grad_comm_dtype=bf16),
    changes(
        "--megatron-fsdp-enable-fine-grained-param-gather",
        FSDP,
        ddp__megatron_fsdp_enable_fine_grained_param_gather=True,
    ),
    changes(
        "--keep-fp8-transpose-cache",
        f"{FP8} --fp8-param-gather {FSDP}",
        gpu=True,
        ddp__keep_fp8_transpose_cache=True,
    ),
    changes(
        "--create-all-gather-group",
        FSDP,
        ddp__create_all_gather_group=True,
        groups__create_all_gather_group=True,
    ),
    refused("--enable-full-sharding-in-hsdp", "use --outer-dp-sharding-strategy optim"),
    changes("--init-model-with-meta-device", FSDP, model__init_model_with_meta_device=True),
    changes("--calculate-per-token-loss", model__calculate_per_token_loss=True),
    changes(
        "--no-gradient-accumulation-fusion", model__gradient_accumulation_fusion=False, gpu=True
    ),
    refused("--no-gradient-reduce-div-fusion", "gradients are always scaled in one place"),
    changes("--ddp-average-in-collective", ddp__average_in_collective=True),
    changes("--ddp-average-in-collective", FSDP, ddp__average_in_collective=True),
    changes("--ddp-bucket-size 77", "--overlap-grad-reduce", ddp__bucket_size=77),
    changes("--ddp-num-buckets 4", "--overlap-grad-reduce", ddp__bucket_size=250),
    changes(
        "--ddp-pad-buckets-for-high-nccl-busbw", SHARDED, ddp__pad_buckets_for_high_nccl_busbw=True
    ),
    changes(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        SHARDED,
        ddp__reduce_scatter_with_fp32_accumulation=True,
    ),
    changes("--grad-reduce-in-bf16", "--bf16", ddp__grad_reduce_in_fp32=False),
    changes("--grad-reduce-in-bf16", f"--bf16 {FSDP}", ddp__megatron_fsdp_grad_comm_dtype=bf16),
    changes("--accumulate-allreduce-grads-in-fp32", "--fp16", ddp__grad_reduce_in_fp32=True),
    changes(
        "--accumulate-allreduce-grads-in-fp32",
        f"--fp16 {FSDP}",
        ddp__megatron_fsdp_main_grads_dtype=fp32,
    ),
    changes(
        "--first-last-layers-bf16",
        f"{FP8} --fp8-recipe tensorwise",
        gpu=True,
        model__first_last_layers_bf16=True,
    ),
    changes(
        "--num-layers-at-start-in-bf16 2",
        BF16_LAYERS,
        gpu=True,
        model__num_layers_at_start_in_bf16=2,
    ),
    changes(
        "--num-layers-at-end-in-bf16 2", BF16_LAYERS, gpu=True, model__num_layers_at_end_in_bf16=2
    ),
    changes(
        "--fp8-param-gather",
        f"{FP8} {FSDP}",
        gpu=True,
        model__fp8_param=True,
        ddp__fp8_param_gather=True,
    ),
    changes("--fp8-format e4m3", gpu=True, model__fp8="e4m3"),
    changes(
        "--fp8-recipe mxfp8",
        FP8,
        gpu=True,
        model__fp8_recipe="mxfp8",
        optimizer__fp8_recipe="mxfp8",
    ),
    changes("--fp8-margin 1", FP8, gpu=True, model__fp8_margin=1),
    changes("--fp8-amax-history-len 2", FP8, gpu=True, model__fp8_amax_history_len=2),
    changes("--fp8-amax-compute-algo max", FP8, gpu=True, model__fp8_amax_compute_algo="max"),
    shown(
        "--reuse-grad-buf-for-mxfp8-param-ag",
        "test_low_precision.py::test_strategies_train_as_the_ddp_of_megatron_core",
    ),
    changes("--fp4-format e2m1", gpu=True, model__fp4="e2m1"),
    shown("--fp4-param-gather", "test_releases.py::test_weights_in_fp4_train_like_ddp"),
    *(
        shown(
            flag,
            "test_precision_aware.py::test_strategies_have_the_losses_of_ddp_with_the_same_dtypes",
        )
        for flag in (
            "--use-precision-aware-optimizer",
            "--main-grads-dtype",
            "--main-params-dtype",
            "--exp-avg-dtype",
            "--exp-avg-sq-dtype",
        )
    ),
    changes("--optimizer-cpu-offload", FSDP, ddp__megatron_fsdp_offload_policy=Offload()),
    changes(
        "--optimizer-offload-fraction 0.5",
        OFFLOAD,
        ddp__megatron_fsdp_offload_policy=Offload(fraction=0.5),
        optimizer__optimizer_offload_fraction=0.5,
    ),
    shown(
        "--cuda-graph-impl",
        "test_captured_iterations.py::test_iterations_have_the_bits_of_a_run_without_graphs",
    ),
    refused("--use-torch-fsdp2", "use --use-megatron-fsdp"),
    refused("--torch-fsdp2-no-reshard-after-forward", "use --use-megatron-fsdp"),
    shown(
        "--no-align-grad-reduce",
        "test_flags.py::test_gradients_of_stages_are_reduced_together_unless_told_otherwise",
    ),
    changes("--no-align-param-gather", f"{OVERLAP} {VIRTUAL}", ddp__align_param_gather=False),
    refused("--defer-embedding-wgrad-compute", "late weight gradients are not built yet"),
    refused("--wgrad-deferral-limit 3", "late weight gradients are not built yet"),
    changes("--use-sharp", gpu=True, groups__use_sharp=True),
    changes(
        "--sharp-enabled-group dp_replica",
        f"--use-sharp {SHARDED} --num-distributed-optimizer-instances 2",
        gpu=True,
        groups__sharp_enabled_group="dp_replica",
    ),
    shown("--nccl-communicator-config-path", "test_nccl_settings.py::test_settings_reach_core"),
    changes("--check-for-large-grads", ddp__check_for_large_grads=True),
    changes("--no-check-for-nan-in-loss-and-grad", ddp__check_for_nan_in_grad=False),
)

OPTIMIZER = (
    changes("--optimizer sgd", optimizer__optimizer="sgd"),
    changes("--optimizer muon", optimizer__optimizer="muon"),
    refused("--optimizer soap", "not built yet"),
    changes(
        "--lr 0.01",
        base=f"{LINE} --train-iters 20 --lr 0.02",
        optimizer__lr=0.01,
        schedule__max_lr=0.01,
    ),
    changes("--min-lr 0.001", optimizer__min_lr=0.001, schedule__min_lr=0.001),
    changes("--lr-decay-style cosine", schedule__lr_decay_style="cosine"),
    changes("--lr-decay-iters 10", schedule__lr_decay_steps=80),
    changes("--lr-decay-samples 90", base=SAMPLES, schedule__lr_decay_steps=90),
    changes("--lr-warmup-fraction 0.25", schedule__lr_warmup_steps=40),
    changes("--lr-warmup-iters 5", schedule__lr_warmup_steps=40),
    changes("--lr-warmup-samples 30", base=SAMPLES, schedule__lr_warmup_steps=30),
    changes("--lr-warmup-init 0.002", schedule__init_lr=0.002),
    changes(
        "--lr-wsd-decay-iters 4",
        "--lr-decay-style WSD",
        base=f"{TRAIN} --lr-wsd-decay-iters 3",
        schedule__wsd_decay_steps=32,
    ),
    changes(
        "--lr-wsd-decay-samples 33",
        "--lr-decay-style WSD",
        base=f"{SAMPLES} --lr-wsd-decay-samples 30",
        schedule__wsd_decay_steps=33,
    ),
    changes(
        "--lr-wsd-decay-style linear",
        "--lr-decay-style WSD --lr-wsd-decay-iters 4",
        schedule__lr_wsd_decay_style="linear",
    ),
    changes(
        "--weight-decay 0.3",
        optimizer__weight_decay=0.3,
        schedule__start_wd=0.3,
        schedule__end_wd=0.3,
    ),
    changes(
        "--start-weight-decay 0.1",
        "--end-weight-decay 0.4 --weight-decay-incr-style linear",
        base=f"{TRAIN} --start-weight-decay 0.2",
        schedule__start_wd=0.1,
    ),
    changes(
        "--end-weight-decay 0.4",
        "--start-weight-decay 0.1 --weight-decay-incr-style linear",
        base=f"{TRAIN} --end-weight-decay 0.2",
        schedule__end_wd=0.4,
    ),
    changes(
        "--weight-decay-incr-style cosine",
        "--start-weight-decay 0.1 --end-weight-decay 0.4",
        base=f"{TRAIN} --weight-decay-incr-style linear",
        schedule__wd_incr_style="cosine",
    ),
    changes(
        "--apply-wd-to-qk-layernorm", "--qk-layernorm", optimizer__apply_wd_to_qk_layernorm=True
    ),
    changes("--adam-beta1 0.8", optimizer__adam_beta1=0.8),
    changes("--adam-beta2 0.95", optimizer__adam_beta2=0.95),
    changes("--adam-eps 1e-6", optimizer__adam_eps=1e-6),
    changes("--sgd-momentum 0.5", "--optimizer sgd", optimizer__sgd_momentum=0.5),
    changes("--clip-grad 0.1", optimizer__clip_grad=0.1),
    changes("--decoupled-lr 0.05", optimizer__decoupled_lr=0.05, overrides__max_lr=0.05),
    changes(
        "--decoupled-min-lr 0.003",
        "--decoupled-lr 0.05",
        optimizer__decoupled_min_lr=0.003,
        overrides__min_lr=0.003,
    ),
    changes("--loss-scale 8", "--fp16", optimizer__loss_scale=8.0),
    changes("--initial-loss-scale 64", "--fp16", optimizer__initial_loss_scale=64.0),
    changes("--min-loss-scale 2", "--fp16", optimizer__min_loss_scale=2.0),
    changes("--loss-scale-window 5", "--fp16", optimizer__loss_scale_window=5.0),
    changes("--hysteresis 1", "--fp16", optimizer__hysteresis=1),
    changes(
        "--use-checkpoint-opt_param-scheduler", schedule__use_checkpoint_opt_param_scheduler=True
    ),
    changes("--override-opt_param-scheduler", schedule__override_opt_param_scheduler=True),
)

PARALLELISM = (
    changes(
        "--tensor-model-parallel-size 2",
        model__tensor_model_parallel_size=2,
        groups__tensor_model_parallel_size=2,
        groups__expert_tensor_parallel_size=2,
    ),
    changes(
        PIPELINE, model__pipeline_model_parallel_size=2, groups__pipeline_model_parallel_size=2
    ),
    changes(
        "--num-layers-per-virtual-pipeline-stage 2",
        PIPELINE,
        model__virtual_pipeline_model_parallel_size=2,
        groups__virtual_pipeline_model_parallel_size=2,
    ),
    changes(
        "--num-virtual-stages-per-pipeline-rank 4",
        PIPELINE,
        model__virtual_pipeline_model_parallel_size=4,
    ),
    changes(
        "--decoder-first-pipeline-num-layers 3",
        PIPELINE,
        model__num_layers_in_first_pipeline_stage=3,
    ),
    changes(
        "--decoder-last-pipeline-num-layers 3", PIPELINE, model__num_layers_in_last_pipeline_stage=3
    ),
    changes(
        "--pipeline-model-parallel-layout Ettt|tttttL",
        PIPELINE,
        model__pipeline_model_parallel_layout="Ettt|tttttL",
    ),
    changes(
        "--no-overlap-p2p-communication",
        VIRTUAL_OF_FOUR,
        model__overlap_p2p_comm=False,
        model__batch_p2p_comm=True,
    ),
    changes(
        "--context-parallel-size 2", model__context_parallel_size=2, groups__context_parallel_size=2
    ),
    changes("--cp-comm-type a2a", "--context-parallel-size 2", model__cp_comm_type="a2a", gpu=True),
    changes(
        "--expert-model-parallel-size 2",
        EXPERTS,
        model__expert_model_parallel_size=2,
        groups__expert_model_parallel_size=2,
    ),
    changes(
        "--expert-tensor-parallel-size 2",
        f"{EXPERTS} --expert-model-parallel-size 2",
        model__expert_tensor_parallel_size=2,
        groups__expert_tensor_parallel_size=2,
    ),
    changes("--sequence-parallel", "--tensor-model-parallel-size 2", model__sequence_parallel=True),
    changes("--use-tp-pp-dp-mapping", groups__order="tp-cp-ep-pp-dp"),
    changes("--use-tp-pp-dp-mapping", FSDP, groups__order="tp-cp-ep-pp-dp"),
    changes("--distributed-backend gloo", start__backend="gloo", gpu=True),
    changes(
        "--distributed-timeout-minutes 7",
        start__timeout=timedelta(minutes=7),
        groups__distributed_timeout_minutes=7,
    ),
    changes("--use-cpu-initialization", model__use_cpu_initialization=True),
    shown("--data-parallel-random-init", "test_loop.py::test_flags_change_fsdp_as_they_change_ddp"),
    changes("--disable-gloo-process-groups", groups__create_gloo_process_groups=False),
    changes(
        "--high-priority-stream-groups dp_cp",
        gpu=True,
        groups__high_priority_stream_groups=["dp_cp"],
    ),
    refused("--local-rank 1", "sets LOCAL_RANK"),
    refused("--lazy-mpu-init", "process groups are always built at the start"),
    changes(
        "--overlap-moe-expert-parallel-comm",
        f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --bf16",
        model__overlap_moe_expert_parallel_comm=True,
    ),
    changes(
        "--delay-wgrad-compute",
        f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --bf16"
        " --overlap-moe-expert-parallel-comm",
        gpu=True,
        model__delay_wgrad_compute=True,
        ddp__delay_wgrad_compute=True,
    ),
)

TABLES = {
    "data parallelism": DATA_PARALLELISM,
    "optimizer": OPTIMIZER,
    "checkpoints": CHECKPOINTS,
    "parallelism": PARALLELISM,
}

ROWS = [*itertools.chain.from_iterable(TABLES.values())]
