# SPDX-License-Identifier: Apache-2.0
"""Rules of training: dtypes, batch, length of the run, rates and weight decay."""

import math

import torch

from megatron.pretrain.arguments.check import Check

SEEDS = 2**32
"""Numbers that NumPy takes as a seed. A rank adds at most 100 for each rank before it."""


def choose_precision(check: Check) -> None:
    """Choose the dtypes of parameters and gradients."""
    args = check.args
    check.at_most_one("bf16", "fp16")
    args.fp16 = args.fp16 and not args.bf16
    check.at_most_one("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32")
    args.params_dtype = torch.float32
    if args.bf16:
        args.params_dtype = torch.bfloat16
    elif args.fp16:
        args.params_dtype = torch.float16
    least = args.min_loss_scale
    first = args.initial_loss_scale
    check.require(
        not math.inf > least > first,
        f"--min-loss-scale {least} must be at most --initial-loss-scale {first}",
    )
    in_bf16 = args.main_grads_dtype == torch.bfloat16
    check.require(
        not (in_bf16 and args.accumulate_allreduce_grads_in_fp32),
        "--main-grads-dtype bf16 contradicts --accumulate-allreduce-grads-in-fp32: leave one out",
    )
    if args.use_megatron_fsdp:
        if args.use_precision_aware_optimizer and "main_grads_dtype" in check.given:
            choose_gradient_dtype(
                check, "main_grads_dtype", "megatron_fsdp_main_grads_dtype", args.main_grads_dtype
            )
        choose_gradient_dtype(
            check,
            "accumulate_allreduce_grads_in_fp32",
            "megatron_fsdp_main_grads_dtype",
            torch.float32,
        )
        choose_gradient_dtype(
            check, "grad_reduce_in_bf16", "megatron_fsdp_grad_comm_dtype", torch.bfloat16
        )
    if args.bf16 and not (args.grad_reduce_in_bf16 or in_bf16):
        args.accumulate_allreduce_grads_in_fp32 = True
    if args.fp16 and args.loss_scale is None and args.check_for_nan_in_loss_and_grad:
        # The first scales overflow on purpose: that is how the dynamic scale is found.
        args.check_for_nan_in_loss_and_grad = False
        check.notes.append(
            "--fp16 with a dynamic loss scale: the check for NaN in loss and gradients is off;"
            " a fixed --loss-scale keeps it"
        )


def choose_gradient_dtype(
    check: Check,
    switch: str,
    dest: str,
    dtype: torch.dtype,
) -> None:
    """Let a switch of older releases set the dtype of its newer flag, which it may not contradict.

    Args:
        check: the arguments.
        switch: destination of the older switch.
        dest: destination of the newer flag.
        dtype: the dtype that the switch means.
    """
    if not getattr(check.args, switch):
        return
    if dest not in check.given:
        setattr(check.args, dest, dtype)
        check.notes.append(
            f"{check.flag(switch)} sets {check.flag(dest)} {str(dtype).removeprefix('torch.')}"
        )
    elif getattr(check.args, dest) != dtype:
        check.problems.append(f"{check.flag(switch)} contradicts {check.flag(dest)}: leave one out")


def complete_length(check: Check) -> None:
    """Check that the length of the run is given once, and the seed."""
    args = check.args
    highest = SEEDS - 100 * check.machine.world_size
    check.require(args.seed <= highest, f"--seed must be at most {highest}, got {args.seed}")
    check.at_most_one("train_iters", "train_samples")
    is_there = args.skip_train or args.train_iters or args.train_samples
    check.require_given(is_there, "train_iters", "train_samples")
    args.train_iters = args.train_iters or 0
    args.no_load_optim = args.no_load_optim or args.skip_train


def complete_batch(check: Check) -> None:
    """Complete the global batch size, and the iterations that samples make."""
    args = check.args
    step = args.micro_batch_size * args.data_parallel_size
    args.global_batch_size = step if args.global_batch_size is None else args.global_batch_size
    check.require(
        args.global_batch_size % step == 0,
        f"--global-batch-size {args.global_batch_size} must be a multiple of {step}:"
        f" --micro-batch-size {args.micro_batch_size} times {args.data_parallel_size}"
        " data-parallel ranks",
    )
    if args.train_samples:
        args.train_iters = args.train_samples // args.global_batch_size
        check.require(
            args.train_iters,
            f"--train-samples {args.train_samples} is less than one --global-batch-size"
            f" {args.global_batch_size}",
        )


def complete_schedule(check: Check) -> None:
    """Complete the schedules of learning rate and weight decay."""
    args = check.args
    check.require_given(args.lr is not None or args.skip_train, "lr")
    if args.lr is not None:
        check.require(
            args.min_lr <= args.lr, f"--min-lr {args.min_lr} must be at most --lr {args.lr}"
        )
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
    # Checkpoints have them, as those of Megatron-LM.
    args.start_weight_decay = args.end_weight_decay = args.weight_decay


def check_warmup(check: Check, unit: str) -> None:
    """Check that the warm-up is given once and ends before the decay does."""
    args = check.args
    count = getattr(args, f"lr_warmup_{unit}")
    length = getattr(args, f"lr_decay_{unit}")
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
