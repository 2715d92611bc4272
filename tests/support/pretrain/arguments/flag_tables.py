# SPDX-License-Identifier: Apache-2.0
"""Flag tables: every flag of data parallelism, optimizer, checkpoints and model parallelism."""

from datetime import timedelta

import torch

from megatron.fsdp import Offload
from tests.support.pretrain.arguments.flag_rows import (
    FSDP,
    LINE,
    OVERLAP,
    PIPELINE,
    SAMPLES,
    SHARDED,
    TRAIN,
    changes,
    shown,
)

VIRTUAL = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
VIRTUAL_OF_FOUR = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
EXPERTS = "--num-experts 8 --disable-bias-linear"
FP8 = "--fp8-format hybrid"
OFFLOAD = f"{FSDP} --optimizer-cpu-offload"
bf16, fp32 = torch.bfloat16, torch.float32

DATA_PARALLELISM = (
    changes(
        FSDP,
        ddp__use_megatron_fsdp=True,
        optimizer__use_distributed_optimizer=True,
        args__ckpt_format="fsdp_dtensor",
    ),
    changes(
        "--expert-data-parallel-sharding-strategy optim",
        f"{FSDP} {EXPERTS} --expert-model-parallel-size 2",
        ddp__expert_data_parallel_sharding_strategy="optim",
    ),
    changes(
        "--embedding-data-parallel-sharding-strategy optim",
        FSDP,
        ddp__embedding_data_parallel_sharding_strategy="optim",
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
        "--use-nccl-ub",
        FSDP,
        ddp__nccl_ub=True,
        ddp__fsdp_double_buffer=True,
        ddp__fsdp_manual_registration=True,
        gpu=True,
    ),
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
        "--megatron-fsdp-main-params-dtype bf16", FSDP, ddp__megatron_fsdp_main_params_dtype=bf16
    ),
    changes(
        "--megatron-fsdp-main-grads-dtype fp32", FSDP, ddp__megatron_fsdp_main_grads_dtype=fp32
    ),
    changes("--megatron-fsdp-version 2", FSDP, ddp__megatron_fsdp_version=2),
    changes("--megatron-fsdp-grad-comm-dtype bf16", FSDP, ddp__megatron_fsdp_grad_comm_dtype=bf16),
    changes(
        "--megatron-fsdp-enable-fine-grained-param-gather",
        FSDP,
        ddp__megatron_fsdp_enable_fine_grained_param_gather=True,
    ),
    changes(
        "--create-all-gather-group",
        FSDP,
        ddp__create_all_gather_group=True,
        groups__create_all_gather_group=True,
    ),
    changes("--ddp-average-in-collective", FSDP, ddp__average_in_collective=True),
    changes("--grad-reduce-in-bf16", "--bf16", ddp__grad_reduce_in_fp32=False),
    changes("--grad-reduce-in-bf16", f"--bf16 {FSDP}", ddp__megatron_fsdp_grad_comm_dtype=bf16),
    changes(
        "--accumulate-allreduce-grads-in-fp32",
        f"--fp16 {FSDP}",
        ddp__megatron_fsdp_main_grads_dtype=fp32,
    ),
    changes(
        "--fp8-param-gather",
        f"{FP8} {FSDP}",
        gpu=True,
        model__fp8_param=True,
        ddp__fp8_param_gather=True,
    ),
    changes("--optimizer-cpu-offload", FSDP, ddp__megatron_fsdp_offload_policy=Offload()),
    changes(
        "--optimizer-offload-fraction 0.5",
        OFFLOAD,
        ddp__megatron_fsdp_offload_policy=Offload(fraction=0.5),
        optimizer__optimizer_offload_fraction=0.5,
    ),
    changes("--no-align-param-gather", f"{OVERLAP} {VIRTUAL}", ddp__align_param_gather=False),
    changes("--use-sharp", gpu=True, groups__use_sharp=True),
    changes(
        "--sharp-enabled-group dp_replica",
        f"--use-sharp {SHARDED} --num-distributed-optimizer-instances 2",
        gpu=True,
        groups__sharp_enabled_group="dp_replica",
    ),
)

OPTIMIZER = (
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
    changes("--decoupled-lr 0.05", optimizer__decoupled_lr=0.05, overrides__max_lr=0.05),
    changes(
        "--decoupled-min-lr 0.003",
        "--decoupled-lr 0.05",
        optimizer__decoupled_min_lr=0.003,
        overrides__min_lr=0.003,
    ),
    changes(
        "--use-checkpoint-opt_param-scheduler", schedule__use_checkpoint_opt_param_scheduler=True
    ),
    changes("--override-opt_param-scheduler", schedule__override_opt_param_scheduler=True),
)

CHECKPOINTS = (
    changes("--dist-ckpt-strictness raise_all", torch_dist__strict="raise_all"),
    changes(
        "--dist-ckpt-optim-fully-reshardable",
        SHARDED,
        torch_dist__distrib_optim_sharding_type="fully_reshardable",
    ),
    changes(
        "--async-strategy mcore",
        "--save s --save-interval 1 --async-save",
        args__async_strategy="mcore",
    ),
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
    changes("--use-tp-pp-dp-mapping", groups__order="tp-cp-ep-pp-dp"),
    changes("--use-tp-pp-dp-mapping", FSDP, groups__order="tp-cp-ep-pp-dp"),
    changes("--distributed-backend gloo", start__backend="gloo", gpu=True),
    changes(
        "--distributed-timeout-minutes 7",
        start__timeout=timedelta(minutes=7),
        groups__distributed_timeout_minutes=7,
    ),
    changes("--disable-gloo-process-groups", groups__create_gloo_process_groups=False),
    changes(
        "--high-priority-stream-groups dp_cp",
        gpu=True,
        groups__high_priority_stream_groups=["dp_cp"],
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

SHOWN = """
    test_background_save.py::test_a_save_in_the_background_is_a_blocking_one
        --async-save --use-persistent-ckpt-worker
    test_captured_iterations.py::test_iterations_have_the_bits_of_a_run_without_graphs
        --cuda-graph-impl
    test_checkpoint_arguments.py::test_the_model_of_the_checkpoint_takes_the_place_of_the_flags
        --use-checkpoint-args
    test_checkpoint_arguments.py::test_a_model_that_means_something_else_is_refused_on_all_ranks_alike
        --no-check-checkpoint-args
    test_checkpointing.py::test_a_resumed_run_has_bitwise_the_losses_of_one_that_never_stopped
        --save --load
    test_checkpointing.py::test_old_checkpoints_are_dropped_but_for_multiples_and_the_newest
        --save-retain-interval
    test_checkpointing.py::test_a_partial_load_takes_what_there_is_and_a_strict_one_says_what_is_missing
        --no-strict-fsdp-dtensor-load
    test_checkpointing.py::test_what_was_not_saved_is_missed_by_name_and_can_be_done_without
        --no-save-optim --no-save-rng
    test_checkpointing.py::test_the_optimizer_or_the_random_state_can_be_left_out_of_a_load
        --no-load-optim --finetune
    test_checkpointing.py::test_without_the_random_state_dropout_goes_another_way --no-load-rng
    test_checkpointing.py::test_a_step_that_is_not_there_is_refused_with_those_that_are --ckpt-step
    test_checkpointing.py::test_a_run_starts_from_scratch_without_a_checkpoint_unless_told_to_stop
        --exit-on-missing-checkpoint
    test_checkpointing.py::test_a_pretrained_checkpoint_gives_the_weights_where_there_is_no_checkpoint_yet
        --pretrained-checkpoint
    test_constant_structure.py::test_saves_with_fsdp_are_planned_once_and_are_the_same
        --ckpt-assume-constant-structure
    test_constant_structure.py::test_without_shared_work_the_first_rank_writes_what_all_have
        --no-ckpt-fully-parallel-save
    test_direct_loading.py::test_a_run_with_fsdp_saves_what_runs_with_and_without_it_load
        --ckpt-format
    test_flags.py::test_gradients_of_stages_are_reduced_together_unless_told_otherwise
        --no-align-grad-reduce
    test_gpt_optimizer.py::test_the_map_of_parameters_to_groups_is_a_checkpoint_that_torch_reads
        --dump-param-to-param-group-map
    test_integrity.py::test_damage_is_loaded_without_verification --no-verify-integrity
    test_loop.py::test_flags_change_fsdp_as_they_change_ddp --data-parallel-random-init
    test_low_precision.py::test_strategies_train_as_the_ddp_of_megatron_core
        --reuse-grad-buf-for-mxfp8-param-ag
    test_nccl_settings.py::test_settings_reach_core --nccl-communicator-config-path
    test_newest_checkpoint.py::test_the_newest_itself_can_be_insisted_on --no-load-fallback
    test_non_persistent_saves.py::test_the_newer_checkpoint_of_both_kinds_is_loaded
        --non-persistent-save-interval --non-persistent-ckpt-type --non-persistent-global-ckpt-dir
    test_precision_aware.py::test_strategies_have_the_losses_of_ddp_with_the_same_dtypes
        --use-precision-aware-optimizer --main-grads-dtype --main-params-dtype
        --exp-avg-dtype --exp-avg-sq-dtype
    test_releases.py::test_weights_in_fp4_train_like_ddp --fp4-param-gather
    test_rules.py::test_user_buffers_are_registered_after_the_first_step_with_fsdp_only
        --fsdp-manual-registration
    test_save_directory.py::test_a_run_overwrites_nothing_that_it_does_not_continue --overwrite
    test_torch_dist_checkpoint.py::test_without_fsdp_a_run_resumes_bitwise --save-interval
    test_torch_dist_checkpoint.py::test_the_first_rank_alone_gathers_the_optimizer_to_write_it
        --distrib-optim-fully-reshardable-mem-efficient
    test_torch_dist_checkpoint.py::test_ranks_read_parts_and_exchange_them
        --ckpt-fully-parallel-load
"""
"""Tests whose runs show what flags of the training loop do, each before its flags."""

ROWS = [*DATA_PARALLELISM, *OPTIMIZER, *CHECKPOINTS, *PARALLELISM, *shown(SHOWN)]
