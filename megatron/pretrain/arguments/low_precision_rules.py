# SPDX-License-Identifier: Apache-2.0
"""Rules of FP8, FP4 and the precision-aware optimizer: what they need."""

import torch
from megatron.core import fp8_utils
from megatron.core.distributed import DistributedDataParallelConfig

from megatron.pretrain.arguments.check import Check

SUPPORT = {
    "delayed": ("DelayedScaling", "is_fp8_available"),
    "tensorwise": ("Float8CurrentScaling", "is_fp8_available"),
    "blockwise": ("Float8BlockScaling", "is_fp8_block_scaling_available"),
    "mxfp8": ("MXFP8BlockScaling", "is_mxfp8_available"),
    "nvfp4": ("NVFP4BlockScaling", "is_nvfp4_available"),
    "custom": ("CustomRecipe", "is_fp8_available"),
}
"""Recipe -> its class in Transformer Engine, and the function that asks the device."""

PRECISION_AWARE = (
    *("use_precision_aware_optimizer", "main_grads_dtype", "main_params_dtype"),
    *("exp_avg_dtype", "exp_avg_sq_dtype"),
)


def check_low_precision(check: Check) -> None:
    """Check what FP8 and FP4 need, after the layers have been chosen."""
    args = check.args
    check_precision_aware(check)
    for dest, recipe in (("fp8", args.fp8_recipe), ("fp4", args.fp4_recipe)):
        if getattr(args, dest):
            check_layers(check, check.flag(dest), recipe)
    check.require(
        not args.fp4_param or hasattr(DistributedDataParallelConfig, "fp4_param_gather"),
        "--fp4-param-gather needs Megatron-Core 0.17 or newer: this one forgets the values before"
        " quantization, from which main weights begin",
    )
    check.require(
        not (args.fp8_param_gather and args.fp8_recipe == "mxfp8")
        or args.use_megatron_fsdp
        or args.reuse_grad_buf_for_mxfp8_param_ag,
        "--fp8-param-gather with recipe mxfp8 needs --reuse-grad-buf-for-mxfp8-param-ag or"
        " --use-megatron-fsdp: Transformer Engine cannot move such weights to a buffer",
    )
    if args.reuse_grad_buf_for_mxfp8_param_ag and args.use_megatron_fsdp:
        args.reuse_grad_buf_for_mxfp8_param_ag = False
        check.notes.append(
            "--reuse-grad-buf-for-mxfp8-param-ag: off, --use-megatron-fsdp frees gathered weights"
        )


def check_precision_aware(check: Check) -> None:
    """Check what the precision-aware optimizer needs."""
    aware = check.args.use_precision_aware_optimizer
    check.require(
        not aware or fp8_utils.HAVE_TE,
        "--use-precision-aware-optimizer needs FusedAdam of Transformer Engine, which is not"
        " installed, or cannot be imported without CUDA; leave it out",
    )
    if check.args.main_params_dtype == torch.float16:
        of_model = check.given.get("megatron_fsdp_main_params_dtype", torch.float16)
        check.require(
            of_model == torch.float16,
            "--main-params-dtype fp16 sets --megatron-fsdp-main-params-dtype fp16: leave out one",
        )
        check.args.megatron_fsdp_main_params_dtype = torch.float16
    accumulated = check.args.megatron_fsdp_main_grads_dtype
    if accumulated is None and not check.args.accumulate_allreduce_grads_in_fp32:
        accumulated = check.args.params_dtype
    check.require(
        not aware or accumulated != torch.float16,
        "--use-precision-aware-optimizer reads gradients in fp32 or bf16: give"
        " --megatron-fsdp-main-grads-dtype fp32",
    )


def forget_precision_aware(check: Check) -> None:
    """Go on without the optimizer where it has been refused; Megatron-Core looks for its class."""
    if not fp8_utils.HAVE_TE:
        for dest in PRECISION_AWARE:
            check.set_default(dest)


def check_layers(
    check: Check,
    flag: str,
    recipe: str,
) -> None:
    """Check that the layers compute with the recipe of a format, and that it divides matrices."""
    args = check.args
    tensor = check.args.tensor_model_parallel_size
    if args.transformer_impl != "transformer_engine":
        reason = "give --transformer-impl transformer_engine"
        if not check.machine.transformer_engine:
            reason = "it is not installed, or cannot be imported without CUDA; use --bf16"
        check.problems.append(f"{flag} needs layers of Transformer Engine: {reason}")
        return
    obstacle = recipe_obstacle(recipe)
    check.require(not obstacle, f"{flag} with recipe {recipe}: {obstacle}")
    block = 32 if recipe == "mxfp8" else 16
    reason = f"kernels of {flag} divide matrices into blocks of {block}"
    check.require_multiple("hidden_size", block, reason)
    check.require_multiple("ffn_hidden_size", block * tensor, reason)
    width = args.num_attention_heads * args.kv_channels
    if not args.multi_latent_attention:
        check.require(
            width % (block * tensor) == 0,
            f"--num-attention-heads times --kv-channels, {width}, must be a multiple of"
            f" {block * tensor}: {reason}",
        )
    tokens = args.seq_length * args.micro_batch_size // args.context_parallel_size
    check.require(
        tokens % 8 == 0,
        f"{flag} needs microbatches of a multiple of 8 tokens on a rank, not {tokens}: change"
        " --seq-length or --micro-batch-size",
    )


def recipe_obstacle(recipe: str) -> str | None:
    """Return why Transformer Engine cannot compute with a recipe on this machine, or None."""
    if not fp8_utils.HAVE_TE:
        return None  # refused with its layers
    name, question = SUPPORT[recipe]
    manager = fp8_utils.FP8GlobalStateManager
    recipes = fp8_utils.transformer_engine.common.recipe
    if not hasattr(recipes, name) or not hasattr(manager, question):
        return f"Transformer Engine {fp8_utils.get_te_version()} has no {name}: install a newer one"
    is_available, reason = getattr(manager, question)()
    return None if is_available else str(reason).strip()
