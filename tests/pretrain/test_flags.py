# SPDX-License-Identifier: Apache-2.0
"""Flag by flag: what it changes, shown in a config or where the program reads it, or why it is refused.

The tables hold every flag of data parallelism, precision, optimizer, schedule, checkpoints and
parallelism. The last test holds the list of all other destinations, so that no flag can be accepted
and ignored.
"""

import argparse
import ast
import functools
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.optimizer import get_standard_config_overrides

from megatron.pretrain import gpt_optimizer, ranks, torch_dist_checkpoint
from megatron.pretrain.arguments import CommandLineError, build_parser, parse_arguments
from megatron.pretrain.arguments.config_flags import CONFIG_GROUPS
from megatron.pretrain.arguments.configs import ddp_config, optimizer_config, transformer_config
from megatron.pretrain.arguments.not_built import NOT_BUILT

ROOT = Path(__file__).parents[2]
LINE = """--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size 1 --global-batch-size 8
    --mock-data --vocab-size 100"""
TRAIN = f"{LINE} --lr 0.01 --train-iters 20"
SAMPLES = f"{LINE} --lr 0.01 --train-samples 160"


@dataclass(frozen=True)
class Row:
    """One flag as it is written in a command line, and what shows that it does what it says.

    `changes`: what the flag makes of a value that is another one without it, as "place.name" ->
    value.
    `shown_by`: a test whose runs show it, where the effect lies in the training loop.
    `refused`: what the error says.
    """

    flag: str
    beside: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    shown_by: str = ""
    refused: str = ""
    base: str = TRAIN
    gpu: bool = False

    @property
    def name(self) -> str:
        return self.flag.split()[0]


def changes(
    flag: str, beside: str = "", *, base: str = TRAIN, gpu: bool = False, **values: Any
) -> Row:
    """`place__name=value`: the flag changes the value at the place to this one."""
    named = {name.replace("__", ".", 1): value for name, value in values.items()}
    return Row(flag, beside, changes=named, base=base, gpu=gpu)


def refused(flag: str, reason: str) -> Row:
    return Row(flag, refused=reason)


def shown(flag: str, test: str) -> Row:
    return Row(flag, shown_by=f"tests/pretrain/{test}")


FSDP = "--use-megatron-fsdp"
SHARDED = "--use-distributed-optimizer"
OVERLAP = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
VIRTUAL = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
VIRTUAL_OF_FOUR = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
PIPELINE = "--pipeline-model-parallel-size 2"
EXPERTS = "--num-experts 8 --disable-bias-linear"
NO_LOW_PRECISION = "FP8 and FP4 training is not built yet"
NO_USER_BUFFERS = "user-buffer registration is not built yet"
NO_FIXED_BUFFERS = "fixed buffers for gathered units are not built yet"
NO_STATE_DTYPE = "needs Transformer Engine's fused Adam"
NO_OFFLOAD = "optimizer state on the host is not built yet"
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
    refused("--use-nccl-ub", NO_USER_BUFFERS),
    refused("--disable-symmetric-registration", NO_USER_BUFFERS),
    refused("--fsdp-manual-registration", NO_USER_BUFFERS),
    refused("--fsdp-double-buffer", NO_FIXED_BUFFERS),
    refused("--megatron-fsdp-max-pool-double-buffer", NO_FIXED_BUFFERS),
    refused("--fsdp-db-use-persist-buf-on-alloc-fail", NO_FIXED_BUFFERS),
    refused(
        "--suggested-communication-unit-size 7",
        "the size of communication is one transformer layer",
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
    refused("--keep-fp8-transpose-cache", NO_LOW_PRECISION),
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
    refused("--first-last-layers-bf16", NO_LOW_PRECISION),
    refused("--num-layers-at-start-in-bf16 2", NO_LOW_PRECISION),
    refused("--num-layers-at-end-in-bf16 2", NO_LOW_PRECISION),
    refused("--fp8-param-gather", NO_LOW_PRECISION),
    refused("--fp8-format e4m3", NO_LOW_PRECISION),
    refused("--fp8-recipe mxfp8", NO_LOW_PRECISION),
    refused("--fp8-margin 1", NO_LOW_PRECISION),
    refused("--fp8-amax-history-len 2", NO_LOW_PRECISION),
    refused("--fp8-amax-compute-algo max", NO_LOW_PRECISION),
    refused("--reuse-grad-buf-for-mxfp8-param-ag", NO_LOW_PRECISION),
    refused("--fp4-format e2m1", NO_LOW_PRECISION),
    refused("--fp4-param-gather", NO_LOW_PRECISION),
    refused("--use-precision-aware-optimizer", NO_STATE_DTYPE),
    refused("--main-grads-dtype bf16", NO_STATE_DTYPE),
    refused("--main-params-dtype fp16", NO_STATE_DTYPE),
    refused("--exp-avg-dtype bf16", NO_STATE_DTYPE),
    refused("--exp-avg-sq-dtype bf16", NO_STATE_DTYPE),
    refused("--optimizer-cpu-offload", NO_OFFLOAD),
    refused("--optimizer-offload-fraction 0.5", NO_OFFLOAD),
    refused(
        "--delay-wgrad-compute", "hiding expert communication behind other work is not built yet"
    ),
    refused("--cuda-graph-impl local", "CUDA graphs are not built yet"),
    refused("--use-torch-fsdp2", "use --use-megatron-fsdp"),
    refused("--torch-fsdp2-no-reshard-after-forward", "use --use-megatron-fsdp"),
    shown(
        "--no-align-grad-reduce",
        "test_flags.py::test_gradients_of_stages_are_reduced_together_unless_told_otherwise",
    ),
    changes("--no-align-param-gather", f"{OVERLAP} {VIRTUAL}", ddp__align_param_gather=False),
    refused("--defer-embedding-wgrad-compute", "needs a CUDA kernel for late weight gradients"),
    refused("--wgrad-deferral-limit 3", "needs a CUDA kernel for late weight gradients"),
    refused("--use-sharp", "reducing in the network"),
    changes("--check-for-large-grads", ddp__check_for_large_grads=True),
    changes("--no-check-for-nan-in-loss-and-grad", ddp__check_for_nan_in_grad=False),
)

OPTIMIZER = (
    changes("--optimizer sgd", optimizer__optimizer="sgd"),
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

ASYNC = "saving in the background is not built yet"
SHARED_WORK = "how ranks share the work of a checkpoint is fixed"
CHECKPOINTING = "test_checkpointing.py::"
LEFT_OUT_OF_SAVE = (
    f"{CHECKPOINTING}test_what_was_not_saved_is_missed_by_name_and_can_be_done_without"
)
LEFT_OUT_OF_LOAD = (
    f"{CHECKPOINTING}test_the_optimizer_or_the_random_state_can_be_left_out_of_a_load"
)
CHECKPOINTS = (
    shown(
        "--save",
        f"{CHECKPOINTING}test_a_resumed_run_has_bitwise_the_losses_of_one_that_never_stopped",
    ),
    shown(
        "--load",
        f"{CHECKPOINTING}test_a_resumed_run_has_bitwise_the_losses_of_one_that_never_stopped",
    ),
    shown("--save-interval", f"{CHECKPOINTING}test_without_fsdp_a_run_resumes_bitwise"),
    shown(
        "--save-retain-interval",
        f"{CHECKPOINTING}test_old_checkpoints_are_dropped_but_for_multiples_and_the_newest",
    ),
    # Which of the other two formats it is follows from --use-megatron-fsdp: see there.
    refused("--ckpt-format torch", "use torch_dist or fsdp_dtensor"),
    refused("--ckpt-format torch_dcp", "use torch_dist or fsdp_dtensor"),
    shown(
        "--no-strict-fsdp-dtensor-load",
        f"{CHECKPOINTING}test_a_partial_load_takes_what_there_is_and_a_strict_one_says_what_is_missing",
    ),
    refused("--auto-detect-ckpt-format", "say which format with --ckpt-format"),
    changes("--dist-ckpt-strictness raise_all", torch_dist__strict="raise_all"),
    changes(
        "--dist-ckpt-optim-fully-reshardable",
        SHARDED,
        torch_dist__distrib_optim_sharding_type="fully_reshardable",
    ),
    refused("--distrib-optim-fully-reshardable-mem-efficient", SHARED_WORK),
    refused("--async-save", ASYNC),
    refused("--use-persistent-ckpt-worker", ASYNC),
    refused("--async-strategy mcore", ASYNC),
    refused("--dist-ckpt-workers 2", ASYNC),
    refused("--non-persistent-save-interval 2", "extra, overwritten saves are not built yet"),
    refused("--non-persistent-ckpt-type local", "extra, overwritten saves are not built yet"),
    refused("--ckpt-assume-constant-structure", ASYNC),
    Row(
        "--ckpt-fully-parallel-save",
        changes={"notes": "--ckpt-fully-parallel-save: deprecated, is the default"},
    ),
    refused("--no-ckpt-fully-parallel-save", SHARED_WORK),
    refused("--ckpt-fully-parallel-load", SHARED_WORK),
    shown("--no-save-optim", LEFT_OUT_OF_SAVE),
    shown("--no-save-rng", LEFT_OUT_OF_SAVE),
    shown("--no-load-optim", LEFT_OUT_OF_LOAD),
    shown(
        "--no-load-rng", f"{CHECKPOINTING}test_without_the_random_state_dropout_goes_another_way"
    ),
    shown("--finetune", LEFT_OUT_OF_LOAD),
    shown(
        "--ckpt-step",
        f"{CHECKPOINTING}test_a_step_that_is_not_there_is_refused_with_those_that_are",
    ),
    shown(
        "--exit-on-missing-checkpoint",
        f"{CHECKPOINTING}test_a_run_starts_from_scratch_without_a_checkpoint_unless_told_to_stop",
    ),
    refused("--use-checkpoint-args", "give the model flags on the command line"),
    shown(
        "--pretrained-checkpoint",
        f"{CHECKPOINTING}test_a_pretrained_checkpoint_gives_the_weights_where_there_is_no_checkpoint_yet",
    ),
    shown(
        "--dump-param-to-param-group-map",
        f"{CHECKPOINTING}test_the_map_of_parameters_to_groups_is_a_checkpoint_that_torch_reads",
    ),
    refused("--verify-integrity", "hashes of checkpoint files are not built yet"),
    refused("--load-main-params-from-ckpt", "main weights are part of the optimizer's state"),
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
    refused(
        "--hierarchical-context-parallel-sizes 2 2",
        "context parallelism on two levels is not built yet",
    ),
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
    shown(
        "--data-parallel-random-init", "test_pretrain.py::test_flags_change_fsdp_as_they_change_ddp"
    ),
    changes("--disable-gloo-process-groups", groups__create_gloo_process_groups=False),
    refused("--high-priority-stream-groups dp_cp", "on ordinary streams"),
    refused("--local-rank 1", "sets LOCAL_RANK"),
    refused("--lazy-mpu-init", "process groups at the start"),
    refused(
        "--overlap-moe-expert-parallel-comm",
        "hiding expert communication behind other work is not built yet",
    ),
)

TABLES = {
    "data parallelism": DATA_PARALLELISM,
    "optimizer": OPTIMIZER,
    "checkpoints": CHECKPOINTS,
    "parallelism": PARALLELISM,
}
ROWS = [row for table in TABLES.values() for row in table]


def rows(kind: str) -> pytest.MarkDecorator:
    found = [row for row in ROWS if getattr(row, kind)]
    return pytest.mark.parametrize(
        "row", found, ids=[f"{row.name} {row.beside}".strip() for row in found]
    )


@functools.cache
def parse(line: str, gpu: bool = False) -> tuple[argparse.Namespace, list[str]]:
    return parse_arguments(
        line.split(),
        world_size=8,
        cuda=gpu,
        transformer_engine=gpu,
        fused_weight_gradient=gpu,
        environment={},
    )


# ---- the places
# ------------------------------------------------------------------------------------------------------


def keywords_of(module: Any, name: str, call: Callable[[], Any]) -> dict[str, Any]:
    """The keywords that `call` hands to `module.name`; a first argument without one is the `backend`."""
    seen: dict[str, Any] = {}

    def record(*positional: Any, **keywords: Any) -> None:
        seen.update(keywords, **({"backend": positional[0]} if positional else {}))

    with patch.object(module, name, record):
        call()
    return seen


def start(args: argparse.Namespace) -> dict[str, Any]:
    """How the program opens its process group."""
    nothing = {"initialize_model_parallel": lambda args: None, "seed": lambda *args: None}
    with (
        patch.multiple(ranks, **nothing),
        patch.object(ranks.cpu, "install"),
        patch.dict("os.environ"),
    ):
        return keywords_of(ranks.dist, "init_process_group", lambda: ranks.start(args))


def torch_dist(args: argparse.Namespace) -> dict[str, Any]:
    """How a torch_dist checkpoint is described and read."""
    seen = torch_dist_checkpoint.content_metadata(
        args.use_distributed_optimizer, args.dist_ckpt_optim_fully_reshardable
    )

    def load(content: Any, source: str, strict: Any) -> None:
        seen["strict"] = strict.value
        raise KeyError("enough seen")

    inner = {"gathered_weights": lambda model: nullcontext(), "sharded_state": lambda *a, **k: {}}
    inner |= {"_refuse_code": lambda source: None, "agree": lambda problems: list(problems)}
    inner["read_metadata"] = lambda source: argparse.Namespace(state_dict_metadata={})
    outer = {"load": load, "load_content_metadata": lambda source: {}}
    with (
        patch.multiple(torch_dist_checkpoint, **inner),
        patch.multiple(torch_dist_checkpoint.dist_checkpointing, **outer),
    ):
        with pytest.raises(ValueError, match="enough seen"):
            torch_dist_checkpoint.load(args, {}, [], None, Path("nowhere"))
    return seen


def overrides(args: argparse.Namespace) -> dict[str, Any]:
    """What the optimizer is told about the embedding and the output layer."""
    found = get_standard_config_overrides(optimizer_config(args))
    return {name: value for settings in found.values() for name, value in dict(settings).items()}


def schedule(args: argparse.Namespace) -> dict[str, Any]:
    """The scheduler of rates and weight decay."""
    group = {"lr": 0.0, "weight_decay": 0.0, "max_lr": args.lr, "min_lr": args.min_lr}
    return vars(gpt_optimizer.build_scheduler(args, SimpleNamespace(param_groups=[group])))


PLACES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "args": vars,
    "model": lambda args: vars(transformer_config(args)),
    "optimizer": lambda args: vars(optimizer_config(args)),
    "ddp": lambda args: vars(ddp_config(args, num_parameters=1000)),
    "schedule": schedule,
    "overrides": overrides,
    "groups": lambda args: keywords_of(
        ranks.parallel_state,
        "initialize_model_parallel",
        lambda: ranks.initialize_model_parallel(args),
    ),
    "start": start,
    "torch_dist": torch_dist,
}


# ---- the tests
# -------------------------------------------------------------------------------------------------------


@rows("changes")
def test_a_flag_changes_what_it_says(row):
    without, _ = parse(f"{row.base} {row.beside}", row.gpu)
    args, notes = parse(f"{row.base} {row.beside} {row.flag}", row.gpu)
    for name, value in row.changes.items():
        if name == "notes":
            assert value in notes
            continue
        place, _, key = name.partition(".")
        before, after = (PLACES[place](given).get(key) for given in (without, args))
        if isinstance(value, str) and not isinstance(after, str):
            after = str(after)  # a pipeline layout
        assert after == value
        assert before != after


@pytest.fixture(scope="module")
def refusals() -> list[str]:
    """Every refused flag on one command line: all are named at once."""
    by_name = {row.name: row.flag for row in ROWS if row.refused}
    with pytest.raises(CommandLineError) as caught:
        parse(f"{TRAIN} {' '.join(by_name.values())}")
    return caught.value.problems


@rows("refused")
def test_a_flag_is_refused_with_its_reason(row, refusals):
    if row.name == "--ckpt-format":
        with pytest.raises(CommandLineError) as caught:
            parse(f"{TRAIN} {row.flag}")
        refusals = caught.value.problems
    assert any(text.startswith(row.flag + ":") and row.refused in text for text in refusals)


@rows("shown_by")
def test_a_flag_of_the_loop_is_shown_by_a_test_that_exists(row):
    path, _, name = row.shown_by.partition("::")
    text = (ROOT / path).read_text()
    assert name in {
        node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)
    }
    assert re.search(rf"{row.name}\b", text)


@pytest.mark.parametrize(
    ("flag", "aligned"), [("", True), ("--no-align-grad-reduce", False)], ids=["aligned", "each"]
)
def test_gradients_of_stages_are_reduced_together_unless_told_otherwise(flag, aligned):
    from megatron.pretrain import loop

    args, _ = parse(f"{TRAIN} --overlap-grad-reduce {PIPELINE} {flag}")
    config = SimpleNamespace(grad_sync_func=None)
    chunk = SimpleNamespace(no_sync=object(), start_grad_sync=object())
    with patch.object(loop, "get_model_config", lambda model: config):
        loop.connect(SimpleNamespace(args=args, model=[chunk], optimizer=None))
    assert config.grad_sync_func is (chunk.start_grad_sync if aligned else None)
    assert config.no_sync_func is chunk.no_sync


# Destinations outside of the tables that are no field of a config: where the program reads them. A
# rule that turns one into something else counts too; `arguments` is where those are.
READ_BY = {
    "arguments": (
        """swiglu squared_relu openai_gelu use_rotary_position_embeddings recompute_activations use_flash_attn
        no_persist_layer_norm bias_gelu_fusion bias_swiglu_fusion enable_experimental deprecated_use_mcore_models
        group_query_attention"""
    ),
    "gpt_model": (
        """position_embedding_type rotary_base rotary_percent use_rope_scaling rope_scaling_factor
        max_position_embeddings untie_embeddings_and_output_weights"""
    ),
    "data": (
        """seq_length mock_data data_path train_data_path valid_data_path test_data_path split
        data_cache_path mmap_bin_files create_attention_mask_in_dataloader reset_position_ids
        reset_attention_mask eod_mask_loss eval_iters train_samples"""
    ),
    "loop": (
        """tokenizer_type tokenizer_model vocab_size make_vocab_size_divisible_by padded_vocab_size
        dataloader_type micro_batch_size num_workers global_batch_size rampup_batch_size train_iters exit_interval exit_duration_in_mins
        exit_signal_handler skip_train eval_interval empty_unused_memory_level manual_gc manual_gc_interval log_params_norm
        profile profile_step_start profile_step_end profile_ranks"""
    ),
    "ranks": "seed",
    "report": (
        """log_interval log_throughput log_validation_ppl_to_tensorboard log_memory_to_tensorboard tensorboard_dir
        tensorboard_log_interval tensorboard_queue_size"""
    ),
    "checkpointing": "log_progress",
    "../../pretrain_gpt": "logging_level",
}
# Read by a rule alone: --profile has one profiler, which this switch names.
NAMED_ONLY = {"use_pytorch_profiler"}


def sources(name: str) -> str:
    folder = ROOT / "megatron" / "pretrain"
    files = sorted((folder / name).glob("*.py")) if name == "arguments" else [folder / f"{name}.py"]
    return "\n".join(
        path.read_text()
        for path in files
        if path.name not in ("program_flags.py", "config_flags.py")
    )


@pytest.mark.parametrize("module", READ_BY)
def test_other_flags_are_read_where_they_are_said_to_be(module):
    text = sources(module)
    assert not [dest for dest in READ_BY[module].split() if not re.search(rf"args\.{dest}\b", text)]


def test_no_flag_is_accepted_and_ignored():
    actions = [action for action in build_parser()._actions if action.dest != "help"]
    in_tables = {
        action.dest for action in actions for row in ROWS if row.name in action.option_strings
    }
    fields = {
        flag.dest for source in CONFIG_GROUPS.values() for flag in source.flags()
    }  # each has a test in test_arguments
    read = {dest for dests in READ_BY.values() for dest in dests.split()} | NAMED_ONLY
    known = {action.dest for action in actions}
    assert known == in_tables | fields | read | set(NOT_BUILT)
    assert read.isdisjoint(in_tables | fields | set(NOT_BUILT)), "listed twice"


def test_every_row_names_a_flag_and_is_of_one_kind():
    names = {name for action in build_parser()._actions for name in action.option_strings}
    assert {row.name for row in ROWS} <= names
    assert all(sum(map(bool, (row.changes, row.shown_by, row.refused))) == 1 for row in ROWS)
