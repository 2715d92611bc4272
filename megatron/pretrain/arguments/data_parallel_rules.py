# SPDX-License-Identifier: Apache-2.0
"""Rules of data parallelism: --use-megatron-fsdp, and Megatron-Core's own data parallelism."""

from megatron.pretrain.arguments.check import Check

STRICT = ("raise_all", "raise_unexpected")
LENIENT = ("log_all", "ignore_all")
"""Values of --dist-ckpt-strictness that loads of fsdp_dtensor can follow."""


def choose_data_parallelism(check: Check) -> None:
    """Choose fully sharded or Megatron-Core's own data parallelism, and check the flags of both."""
    args = check.args
    if args.use_megatron_fsdp:
        imply_fsdp(check)
    else:
        check.require(
            args.ckpt_format != "fsdp_dtensor",
            "--ckpt-format fsdp_dtensor needs --use-megatron-fsdp",
        )
        check.at_most_one("ddp_bucket_size", "ddp_num_buckets")
    check.require(
        not args.nccl_ub or check.machine.cuda,
        "--use-nccl-ub registers memory with NCCL, which needs GPUs: give --fsdp-double-buffer"
        " alone",
    )
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
    """Apply the settings that --use-megatron-fsdp implies, and print them in one line."""
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
        words = []
        for dest, value in new.items():
            name = dest.replace("_", "-")
            words.append(name if value is True else f"{name} {value}")
        check.notes.append(f"--use-megatron-fsdp sets {', '.join(words)}")
    choose_strictness(check)
    check_outer_axis(check)
    if args.init_model_with_meta_device and args.data_parallel_sharding_strategy == "no_shard":
        check.problems.append(
            "--init-model-with-meta-device does not go with --data-parallel-sharding-strategy"
            " no_shard, where every rank has all weights anyway: leave it out"
        )


def choose_strictness(check: Check) -> None:
    """Let --dist-ckpt-strictness say how strict loads of fsdp_dtensor are, where it fits."""
    args, flag = check.args, check.flag("dist_ckpt_strictness")
    if not check.changed("dist_ckpt_strictness"):
        return
    choice = args.dist_ckpt_strictness
    check.require(
        choice in STRICT or choice in LENIENT,
        f"{flag} {choice}: loads with --use-megatron-fsdp are strict about missing and unexpected"
        f" keys alike: give one of {', '.join((*STRICT, *LENIENT))}",
    )
    if choice in LENIENT:
        args.strict_fsdp_dtensor_load = False
        check.notes.append(f"{flag} {choice} sets {check.flag('strict_fsdp_dtensor_load')}")
    elif not args.strict_fsdp_dtensor_load:
        check.problems.append(
            f"{flag} {choice} contradicts {check.flag('strict_fsdp_dtensor_load')}: leave one out"
        )


def check_outer_axis(check: Check) -> None:
    """Check the flags of hybrid sharding, which has an outer data axis."""
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
