# SPDX-License-Identifier: Apache-2.0
"""Rules between flags: what is refused, what follows from what.

One function per subject, called in the order of RULES.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

from megatron.pretrain.arguments.check import Check
from megatron.pretrain.arguments.config_flags import STATE_DTYPES
from megatron.pretrain.arguments.machine_rules import fit_to_machine
from megatron.pretrain.arguments.model_rules import complete_model
from megatron.pretrain.arguments.not_built import NEEDS, NOT_BUILT, NOT_BUILT_VALUES
from megatron.pretrain.arguments.parallel_rules import check_microbatches, complete_parallelism

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")
POSITIVE = (
    *REQUIRED,
    *[
        "ffn_hidden_size",
        "kv_channels",
        "num_query_groups",
        "max_position_embeddings",
        "global_batch_size",
        "train_iters",
        "train_samples",
        "save_interval",
        "save_retain_interval",
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
]


def refuse_not_built(check: Check) -> None:
    """What this version does not do."""
    for dest, value in check.given.items():
        name = check.flag(dest)
        shown = " ".join(map(str, value)) if isinstance(value, list) else as_written(value)
        if dest in NOT_BUILT and check.changed(dest):
            spelled = name if isinstance(value, bool) else f"{name} {shown}"
            reason = NOT_BUILT[dest]
            check.problems.append(
                f"{spelled}: {'' if 'not built' in reason else 'not built: '}{reason}"
            )
        values = value if isinstance(value, list) else [value]
        for item in values:
            if item in NOT_BUILT_VALUES.get(dest, {}):
                check.problems.append(f"{name} {shown}: {NOT_BUILT_VALUES[dest][item]}")
    if check.args.deprecated_use_mcore_models:
        check.notes.append("--use-mcore-models: deprecated, is the default")
    if check.args.ckpt_fully_parallel_save_deprecated:
        check.notes.append("--ckpt-fully-parallel-save: deprecated, is the default")


def as_written(value: Any) -> str:
    """The word that stands for a value on the command line."""
    if isinstance(value, torch.dtype):
        return next(word for word, dtype in STATE_DTYPES.items() if dtype == value)
    return str(getattr(value, "name", value))


def check_numbers(check: Check) -> None:
    """Required flags, and the sign of numbers."""
    missing = [check.flag(dest) for dest in REQUIRED if getattr(check.args, dest) is None]
    check.require(not missing, f"required but not given: {', '.join(missing)}")
    for dests, holds, words in (
        (POSITIVE, lambda v: v > 0, "at least 1"),
        (NOT_NEGATIVE, lambda v: v >= 0, "at least 0"),
    ):
        for dest in dests:
            value = getattr(check.args, dest)
            check.require(
                value is None or holds(value), f"{check.flag(dest)} must be {words}, got {value}"
            )


def choose_data_parallelism(check: Check) -> None:
    """What --use-megatron-fsdp implies and excludes, and the rules of Megatron-Core's own data parallelism."""
    args = check.args
    if args.use_megatron_fsdp:
        imply_fsdp(check)
    else:
        check.require(
            args.ckpt_format != "fsdp_dtensor",
            "--ckpt-format fsdp_dtensor needs --use-megatron-fsdp",
        )
        check.at_most_one("ddp_bucket_size", "ddp_num_buckets")
    sharded = args.use_distributed_optimizer
    check.require(
        not (args.overlap_param_gather and not args.overlap_grad_reduce),
        "--overlap-param-gather needs --overlap-grad-reduce",
    )
    check.require(
        not args.overlap_param_gather or sharded,
        "--overlap-param-gather needs --use-distributed-optimizer or --use-megatron-fsdp",
    )
    check.require(
        args.optimizer != "sgd" or not sharded,
        "--optimizer sgd works without --use-distributed-optimizer and --use-megatron-fsdp only:"
        " use adam",
    )
    check.at_most_one("ddp_average_in_collective", "calculate_per_token_loss")
    check.at_most_one("ddp_average_in_collective", "ddp_reduce_scatter_with_fp32_accumulation")
    check.require(
        not args.ddp_reduce_scatter_with_fp32_accumulation
        or args.num_distributed_optimizer_instances == 1,
        "--ddp-reduce-scatter-with-fp32-accumulation does not go with several"
        " --num-distributed-optimizer-instances: leave one out",
    )


def imply_fsdp(check: Check) -> None:
    """Settings that follow from --use-megatron-fsdp."""
    args = check.args
    implied = {
        "data_parallel_sharding_strategy": "optim_grads_params",
        "use_distributed_optimizer": True,
        "ckpt_format": "fsdp_dtensor",
    }
    new = {dest: value for dest, value in implied.items() if dest not in check.given}
    for dest, value in new.items():
        setattr(args, dest, value)
    if new:
        names = {dest: dest.replace("_", "-") for dest in new}
        words = [
            names[dest] if value is True else f"{names[dest]} {value}"
            for dest, value in new.items()
        ]
        check.notes.append(f"--use-megatron-fsdp sets {', '.join(words)}")
    if args.ckpt_format == "torch_dist":
        check.problems.append(
            "--use-megatron-fsdp writes --ckpt-format fsdp_dtensor only: give that or leave it out"
        )
    check_outer_axis(check)
    if args.init_model_with_meta_device and args.data_parallel_sharding_strategy == "no_shard":
        check.problems.append(
            "--init-model-with-meta-device does not go with --data-parallel-sharding-strategy"
            " no_shard, where every rank has all weights anyway: leave it out"
        )


def check_outer_axis(check: Check) -> None:
    """Hybrid sharding: what the outer data axis divides."""
    args = check.args
    instances = args.num_distributed_optimizer_instances
    if args.outer_dp_sharding_strategy == "optim":
        check.require(
            args.data_parallel_sharding_strategy == "optim_grads_params",
            "--outer-dp-sharding-strategy optim needs --data-parallel-sharding-strategy"
            f" optim_grads_params, got {args.data_parallel_sharding_strategy}",
        )
        check.require(
            instances > 1,
            "--outer-dp-sharding-strategy optim needs an outer axis: give"
            " --num-distributed-optimizer-instances, at least 2",
        )
    check.require(
        not args.create_all_gather_group or instances == 1,
        "--create-all-gather-group makes a group of all data ranks, but"
        f" --num-distributed-optimizer-instances {instances} gathers over parts of them: leave"
        " one out",
    )


def choose_precision(check: Check) -> None:
    """Dtypes of parameters and gradients."""
    args = check.args
    check.at_most_one("bf16", "fp16")
    check.at_most_one("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32")
    args.params_dtype = (
        torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    )
    if args.use_megatron_fsdp:
        choose_gradient_dtype(
            check,
            "accumulate_allreduce_grads_in_fp32",
            "megatron_fsdp_main_grads_dtype",
            torch.float32,
        )
        choose_gradient_dtype(
            check, "grad_reduce_in_bf16", "megatron_fsdp_grad_comm_dtype", torch.bfloat16
        )
    if args.bf16 and not args.grad_reduce_in_bf16:
        args.accumulate_allreduce_grads_in_fp32 = True
    if args.fp16 and args.loss_scale is None and args.check_for_nan_in_loss_and_grad:
        # The first scales overflow on purpose: that is how the dynamic scale is found.
        args.check_for_nan_in_loss_and_grad = False
        check.notes.append(
            "--fp16 with a dynamic loss scale: the check for NaN in loss and gradients is off"
        )


def choose_gradient_dtype(check: Check, switch: str, dest: str, dtype: torch.dtype) -> None:
    """With FSDP a switch of the older names sets the dtype of the newer one, and may not contradict it."""
    if not getattr(check.args, switch):
        return
    if dest not in check.given:
        setattr(check.args, dest, dtype)
        check.notes.append(
            f"{check.flag(switch)} sets {check.flag(dest)} {str(dtype).removeprefix('torch.')}"
        )
    elif getattr(check.args, dest) != dtype:
        check.problems.append(f"{check.flag(switch)} contradicts {check.flag(dest)}: leave one out")


def complete_batch_and_length(check: Check) -> None:
    """Batch sizes, number of iterations, and the counters a run starts with."""
    args = check.args
    args.iteration = 0
    args.consumed_train_samples = args.skipped_train_samples = args.consumed_valid_samples = 0
    if args.micro_batch_size and args.micro_batch_size > 0:
        step = args.micro_batch_size * args.data_parallel_size
        args.global_batch_size = step if args.global_batch_size is None else args.global_batch_size
        check.require(
            args.global_batch_size % step == 0,
            f"--global-batch-size {args.global_batch_size} must be a multiple of {step}:"
            f" --micro-batch-size {args.micro_batch_size} times {args.data_parallel_size}"
            " data-parallel ranks",
        )
    check.at_most_one("train_iters", "train_samples")
    check.require(
        args.skip_train or args.train_iters or args.train_samples,
        "required but not given: --train-iters or --train-samples",
    )
    grows = args.rampup_batch_size is not None and check_growing_batch(check)
    if args.train_samples and args.global_batch_size and args.global_batch_size > 0:
        args.train_iters = (
            growing_iterations(args) if grows else args.train_samples // args.global_batch_size
        )
        check.require(
            args.train_iters,
            f"--train-samples {args.train_samples} is less than one --global-batch-size"
            f" {args.global_batch_size}"
            + (f", also at its start of {args.rampup_batch_size[0]}" if grows else ""),
        )
    args.train_iters = args.train_iters or 0
    args.no_load_optim = args.no_load_optim or args.skip_train


def check_growing_batch(check: Check) -> bool:
    """The rules of --rampup-batch-size; whether all of them hold."""
    args = check.args
    start, increment, samples = args.rampup_batch_size
    count = len(check.problems)
    check.require(
        args.train_samples,
        "--rampup-batch-size counts samples: give --train-samples instead of --train-iters",
    )
    check.require(
        min(start, increment, samples) > 0,
        f"--rampup-batch-size {start} {increment} {samples}: each must be at least 1",
    )
    if args.micro_batch_size and args.micro_batch_size > 0 and count == len(check.problems):
        step = args.micro_batch_size * args.data_parallel_size
        grown = args.global_batch_size - start
        check.require(
            grown > 0 and grown % increment == 0,
            f"--rampup-batch-size {start} {increment} {samples}: increments of {increment} must"
            f" lead from {start} to --global-batch-size {args.global_batch_size}",
        )
        check.require(
            start % step == 0 and increment % step == 0,
            f"--rampup-batch-size {start} {increment} {samples}: start and increment must be"
            f" multiples of {step}: --micro-batch-size {args.micro_batch_size} times"
            f" {args.data_parallel_size} data-parallel ranks",
        )
    return count == len(check.problems)


def growing_iterations(args: argparse.Namespace) -> int:
    """Iterations of whole batches that --train-samples is enough for, with --rampup-batch-size."""
    start, increment, samples = args.rampup_batch_size
    calculator = RampupBatchsizeNumMicroBatchesCalculator(
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
        False,
        1,
        start,
        increment,
        samples,
    )
    consumed = iterations = 0
    while consumed <= samples:
        calculator.update(consumed, consistency_check=False)
        size = calculator.get_current_global_batch_size()
        if consumed + size > args.train_samples:
            return iterations
        consumed += size
        iterations += 1
    return iterations + (args.train_samples - consumed) // args.global_batch_size


def complete_schedule(check: Check) -> None:
    """Learning rate and weight decay."""
    args = check.args
    check.require(args.lr is not None or args.skip_train, "required but not given: --lr")
    if args.lr is not None:
        check.require(
            args.min_lr <= args.lr, f"--min-lr {args.min_lr} must be at most --lr {args.lr}"
        )
    if args.decoupled_min_lr is not None:
        check.require(args.decoupled_lr is not None, "--decoupled-min-lr needs --decoupled-lr")
    unit, other, length = (
        ("samples", "iters", args.train_samples)
        if args.train_samples
        else ("iters", "samples", args.train_iters)
    )
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if check.changed(f"{name}_{other}"):
            check.problems.append(
                f"{check.flag(f'{name}_{other}')} does not go with --train-{unit}: use"
                f" {check.flag(f'{name}_{unit}')}"
            )
    if getattr(args, f"lr_decay_{unit}") is None and length:
        setattr(args, f"lr_decay_{unit}", length)
    check_warmup(check, unit)
    check.require(
        args.lr_decay_style != "WSD" or getattr(args, f"lr_wsd_decay_{unit}"),
        f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}",
    )
    check.at_most_one("use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler")
    complete_weight_decay(check)


def check_warmup(check: Check, unit: str) -> None:
    """The warm-up is given once and ends before the decay does."""
    args = check.args
    count, length = getattr(args, f"lr_warmup_{unit}"), getattr(args, f"lr_decay_{unit}")
    if args.lr_warmup_fraction is not None:
        check.require(
            0 <= args.lr_warmup_fraction < 1,
            f"--lr-warmup-fraction must be in [0, 1), got {args.lr_warmup_fraction}",
        )
        check.require(
            count == 0,
            f"--lr-warmup-fraction and --lr-warmup-{unit} exclude each other: give one of them",
        )
    elif length:
        check.require(
            count < length,
            f"--lr-warmup-{unit} {count} must be less than the decay length {length}",
        )
    if args.lr is not None:
        check.require(
            args.lr_warmup_init <= args.lr,
            f"--lr-warmup-init {args.lr_warmup_init} must be at most --lr {args.lr}",
        )


def complete_weight_decay(check: Check) -> None:
    """Start and end of weight decay."""
    args = check.args
    start, end = args.start_weight_decay, args.end_weight_decay
    if args.weight_decay_incr_style == "constant":
        check.require(
            start is None and end is None,
            "--start/--end-weight-decay need --weight-decay-incr-style linear or cosine",
        )
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
    elif start is None or end is None:
        check.problems.append(
            f"--weight-decay-incr-style {args.weight_decay_incr_style} needs --start-weight-decay"
            " and --end-weight-decay"
        )
    else:
        check.require(
            0 <= start <= end,
            f"weight decay must grow: --start-weight-decay {start}, --end-weight-decay {end}",
        )
        check.require(
            not check.changed("weight_decay"),
            "--weight-decay does nothing with --start/--end-weight-decay: leave it out",
        )


def check_data(check: Check) -> None:
    """One source of data, whose files exist, and a tokenizer for it."""
    args = check.args
    separate = ("train_data_path", "valid_data_path", "test_data_path")
    sources = [
        bool(args.mock_data),
        bool(args.data_path),
        any(getattr(args, dest) for dest in separate),
    ]
    if not any(sources):
        check.notes.append(
            "no --data-path and no --mock-data: the text of Python's standard library"
        )
    check.require(
        sum(sources) < 2,
        "several data sources: give one of --mock-data, --data-path and --train-data-path",
    )
    if sources[2]:
        check.require(
            args.split is None, "--split is for --data-path; separate files per split have none"
        )
        check.require(
            args.train_data_path or args.skip_train,
            "--valid-data-path and --test-data-path need --train-data-path",
        )
    elif args.split is None:
        args.split = "969,30,1"
    for dest in ("data_path", *separate):
        check_prefixes(check, check.flag(dest), getattr(args, dest) or [])
    if args.tokenizer_type is None:
        args.tokenizer_type = "NullTokenizer" if args.mock_data else "ByteTokenizer"
    if args.tokenizer_type == "NullTokenizer":
        check.require(args.vocab_size, "NullTokenizer needs --vocab-size")
    if args.tokenizer_type == "HuggingFaceTokenizer":
        folder = args.tokenizer_model
        check.require(
            folder and os.path.isdir(folder),
            f"--tokenizer-model must be a local folder, got {folder}: download the tokenizer first",
        )
    args.dataloader_type = args.dataloader_type or "single"


def check_prefixes(check: Check, flag: str, words: list[str]) -> None:
    """Every prefix names an index and a data file. Words are prefixes, or weight prefix pairs."""
    weighted = (
        len(words) > 1 and len(words) % 2 == 0 and all(is_number(word) for word in words[::2])
    )
    for prefix in words[1::2] if weighted else words:
        missing = [suffix for suffix in (".idx", ".bin") if not Path(prefix + suffix).is_file()]
        check.require(
            not missing, f"{flag}: {' and '.join(prefix + suffix for suffix in missing)} not found"
        )


def is_number(word: str) -> bool:
    """Whether the word can be a weight."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def check_checkpoints_and_logging(check: Check) -> None:
    """Intervals of saves, and the profiler."""
    args = check.args
    check.require(not args.save or args.save_interval, "--save needs --save-interval")
    if args.save_retain_interval and args.save_interval:
        check.require(
            args.save_retain_interval % args.save_interval == 0,
            f"--save-retain-interval {args.save_retain_interval} must be a multiple of"
            f" --save-interval {args.save_interval}",
        )
    if args.profile:
        check.require(
            args.use_pytorch_profiler,
            "--profile needs --use-pytorch-profiler: other profilers are not built in",
        )
        check.require(
            0 <= args.profile_step_start < args.profile_step_end,
            "--profile-step-start must be less than --profile-step-end",
        )


def check_needs(check: Check) -> None:
    """Flags that would do nothing here."""
    for rule in NEEDS:
        value: Any = getattr(check.args, rule.attribute)
        if (value in rule.values if rule.values else value) or (
            rule.unless and getattr(check.args, rule.unless)
        ):
            continue
        for dest in rule.dests.split():
            if check.changed(dest):
                check.problems.append(f"{check.flag(dest)} {rule.remedy}")


RULES: tuple[Callable[[Check], None], ...] = (
    refuse_not_built,
    check_numbers,
    choose_data_parallelism,
    choose_precision,
    complete_parallelism,
    complete_model,
    complete_batch_and_length,
    check_microbatches,
    complete_schedule,
    check_data,
    check_checkpoints_and_logging,
    fit_to_machine,
    check_needs,
)
