# SPDX-License-Identifier: Apache-2.0
"""Rules of dtypes: parameters, and gradients in memory and in reductions."""

import torch

from megatron.pretrain.arguments.check import Check


def choose_precision(check: Check) -> None:
    """Choose the dtypes of parameters and gradients."""
    args = check.args
    check.at_most_one("bf16", "fp16")
    check.at_most_one("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32")
    args.params_dtype = torch.float32
    if args.bf16:
        args.params_dtype = torch.bfloat16
    elif args.fp16:
        args.params_dtype = torch.float16
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
            "--fp16 with a dynamic loss scale: the check for NaN in loss and gradients is off;"
            " a fixed --loss-scale keeps it"
        )


def choose_gradient_dtype(check: Check, switch: str, dest: str, dtype: torch.dtype) -> None:
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
