# SPDX-License-Identifier: Apache-2.0
"""Rules of FP8 and FP4: the layers, recipes and shapes that they need."""

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


def recipe_obstacle(recipe: str) -> str | None:
    """Return why Transformer Engine cannot compute with a recipe on this machine, or None."""
    if not fp8_utils.HAVE_TE:
        return "Transformer Engine cannot be imported"
    name, question = SUPPORT[recipe]
    manager = fp8_utils.FP8GlobalStateManager
    recipes = fp8_utils.transformer_engine.common.recipe
    if not hasattr(recipes, name) or not hasattr(manager, question):
        return f"Transformer Engine {fp8_utils.get_te_version()} has no {name}: install a newer one"
    is_available, reason = getattr(manager, question)()
    return None if is_available else str(reason).strip()


def check_low_precision(check: Check) -> None:
    """Check what FP8 and FP4 need, after the layers have been chosen."""
    args = check.args
    check.at_most_one("fp8", "fp4")
    for dest, recipe in (("fp8", args.fp8_recipe), ("fp4", args.fp4_recipe)):
        if getattr(args, dest):
            check_layers(check, check.flag(dest), recipe)
    for dest in ("fp8_param_gather", "fp4_param"):
        if getattr(args, dest):
            check_stored_weights(check, check.flag(dest))
    if args.fp4_param:
        check.require(
            hasattr(DistributedDataParallelConfig, "fp4_param_gather"),
            "--fp4-param-gather needs Megatron-Core 0.17 or newer: this one forgets the values"
            " before quantization, from which main weights begin",
        )
    if args.reuse_grad_buf_for_mxfp8_param_ag and args.use_megatron_fsdp:
        args.reuse_grad_buf_for_mxfp8_param_ag = False
        check.notes.append(
            "--reuse-grad-buf-for-mxfp8-param-ag does nothing with --use-megatron-fsdp, which frees"
            " gathered weights"
        )


def check_layers(check: Check, flag: str, recipe: str) -> None:
    """Check that the layers compute with the recipe of a format."""
    args, machine = check.args, check.machine
    if args.transformer_impl != "transformer_engine":
        reason = "give --transformer-impl transformer_engine"
        if not machine.transformer_engine:
            reason = "it is not installed, or cannot be imported without CUDA; use --bf16"
        check.problems.append(f"{flag} needs layers of Transformer Engine: {reason}")
        return
    obstacle = machine.recipe_obstacle(recipe)
    check.require(not obstacle, f"{flag} with recipe {recipe}: {obstacle}")
    check_shapes(check, flag, recipe)


def check_shapes(check: Check, flag: str, recipe: str) -> None:
    """Check that kernels can divide the matrices of this rank."""
    args, tensor = check.args, check.args.tensor_model_parallel_size
    tokens = args.seq_length * args.micro_batch_size // args.context_parallel_size
    if args.sequence_parallel:
        tokens //= tensor
    check.require(
        tokens % 8 == 0,
        f"{flag} multiplies matrices with multiples of 8 rows, but a microbatch has {tokens} tokens"
        " on a rank: change --seq-length or --micro-batch-size",
    )
    sizes = {"hidden_size": args.hidden_size, "ffn_hidden_size": args.ffn_hidden_size // tensor}
    if not args.multi_latent_attention:
        sizes["kv_channels"] = args.num_attention_heads * args.kv_channels // tensor
    block = 32 if recipe == "mxfp8" else 16
    for dest, size in sizes.items():
        check.require(
            size % block == 0,
            f"{flag} with recipe {recipe} needs matrices with multiples of {block} rows and columns"
            f" on a rank, but {check.flag(dest)} makes them {size}",
        )


def check_stored_weights(check: Check, flag: str) -> None:
    """Check what does not go with weights that are stored as codes."""
    args = check.args
    check.require(
        args.use_distributed_optimizer,
        f"{flag} needs --use-megatron-fsdp or --use-distributed-optimizer, whose main weights the"
        " codes are made of",
    )
    if not args.use_megatron_fsdp:
        return
    for dest, value, reason in (
        ("data_parallel_sharding_strategy", "no_shard", "codes are made of shards of main weights"),
        ("fsdp_double_buffer", True, "codes stay at one place, which memory slots change"),
        ("nccl_ub", True, "codes stay at one place, which memory slots change"),
        ("init_model_with_meta_device", True, "initialisation makes new parameters of them"),
    ):
        check.require(
            getattr(args, dest) != value,
            f"{flag} does not go with {check.flag(dest)}{'' if value is True else f' {value}'}:"
            f" {reason}",
        )
