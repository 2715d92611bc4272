# SPDX-License-Identifier: Apache-2.0
"""Rules of parallelism: data parallelism, and ranks, layers, sequences and batches over the axes.

What Megatron-Core's config checks itself is left to it.
"""

import math
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.checkpoint.store import durable
from megatron.pretrain.arguments.check import Check
from megatron.pretrain.arguments.flags import Implied

UNREADABLE = (OSError, ValueError, AttributeError, TypeError, RecursionError, yaml.YAMLError)
"""Errors of a YAML file that cannot be read, or has something else than settings of groups."""
STRICT = ("raise_all", "raise_unexpected")
LENIENT = ("log_all", "ignore_all")
"""Values of --dist-ckpt-strictness that loads of fsdp_dtensor can follow."""
UNEVEN = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
ACCOUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""Switches that count the embedding, or the output layer, as a layer of its stage."""
NCCL_GROUPS = (
    *("dp_cp", "intra_dp_cp", "dp", "ep_dp", "intra_ep_dp", "inter_ep_dp", "tp", "pp", "cp", "hcp"),
    *("ep", "mp", "embd", "pos_embd", "tp_cp", "tp_dp", "tp_dp_cp", "ep_tp", "tp_ep_mp"),
    *("tp_ep_pp", "intra_dist_opt_instance"),
)
"""Names that Megatron-Core has for its groups in settings of NCCL. FSDP reduces over the first
two, and over those of ``ep_dp`` for experts."""
NCCL_SETTINGS = ("is_high_priority_stream", "cga_cluster_size", "max_ctas", "min_ctas", "net_name")
INTERLEAVED = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")


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
    check.require(
        not args.nccl_ub or check.machine.cuda,
        "--use-nccl-ub registers memory with NCCL, which needs GPUs: give --fsdp-double-buffer"
        " alone",
    )
    check_communicators(check)
    sharded = args.use_distributed_optimizer
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


def check_communicators(check: Check) -> None:
    """Check the flags that set up NCCL's communicators, which Megatron-Core creates."""
    args = check.args
    path = check.args.nccl_communicator_config_path
    settings: dict[str, Any] = {}
    names: set[str] = set()
    if path:
        try:
            settings = yaml.safe_load(durable.file_at(Path(path)).read_text())
            names = set().union(*settings.values())
        except UNREADABLE as error:
            settings = {}
            check.problems.append(f"{path}: {error}; expected are lines as dp_cp: {{max_ctas: 32}}")
    for group in sorted({*settings, *args.high_priority_stream_groups} - {*NCCL_GROUPS}):
        check.problems.append(f"{group} is no group: the names are {', '.join(NCCL_GROUPS)}")
    for name in sorted(names - {*NCCL_SETTINGS}):
        check.problems.append(f"{path}: {name} is none of {', '.join(NCCL_SETTINGS)}")
    group = args.sharp_enabled_group
    instances = args.num_distributed_optimizer_instances
    check.require(
        group != "dp_replica" or instances > 1,
        f"--sharp-enabled-group {group} needs --num-distributed-optimizer-instances above 1",
    )
    dests = ("use_sharp", "nccl_communicator_config_path", "high_priority_stream_groups")
    used = ", ".join(check.flag(dest) for dest in dests if getattr(args, dest))
    check.require(
        not used or (check.machine.cuda and args.distributed_backend == "nccl"),
        f"{used}: for NCCL, which needs GPUs: leave it out, results are the same",
    )


def imply_fsdp(check: Check) -> None:
    """Apply and check what --use-megatron-fsdp implies, also together with --use-nccl-ub."""
    args = check.args
    if args.megatron_fsdp_version == 2:
        check.require(
            "use_distributed_optimizer" not in check.given,
            "--use-distributed-optimizer with --megatron-fsdp-version 2: hooks do what it is for;"
            " leave it out",
        )
        # Megatron-Core's optimizer is the same, but no note names a flag that is refused.
        args.use_distributed_optimizer = True
    imply(check, "use_megatron_fsdp")
    if args.nccl_ub:
        imply(check, "nccl_ub")
    choose_strictness(check)
    check_strategies(check)
    # Megatron-Core then runs parts of layers, of two microbatches in turn.
    for other in ("fsdp_double_buffer", "nccl_ub", "mtp_num_layers"):
        check.at_most_one("overlap_moe_expert_parallel_comm", other)
    # Hooks would reduce the gradients of units inside of layers before those are computed.
    check.at_most_one("delay_wgrad_compute", "megatron_fsdp_enable_fine_grained_param_gather")
    levels = {args.data_parallel_sharding_strategy, args.expert_data_parallel_sharding_strategy}
    if args.init_model_with_meta_device and levels <= {"no_shard", None}:
        check.problems.append(
            "--init-model-with-meta-device does not go with --data-parallel-sharding-strategy"
            " no_shard, where every rank has all weights anyway: leave it out"
        )


def imply(check: Check, other: str) -> None:
    """Apply the settings that another flag implies and nobody has given; note them in one line."""
    words = []
    for dest, flag in check.flags.items():
        for rule in flag.rules_of(Implied):
            if (
                rule.other != other
                or dest in check.given
                or getattr(check.args, dest) == rule.value
            ):
                continue
            setattr(check.args, dest, rule.value)
            name = dest.replace("_", "-")
            words.append(name if rule.value is True else f"{name} {rule.value}")
    if words:
        check.notes.append(f"{check.flag(other)} sets {', '.join(words)}")


def choose_strictness(check: Check) -> None:
    """Let --dist-ckpt-strictness choose how strict loads of fsdp_dtensor are, where it fits."""
    args = check.args
    flag = check.flag("dist_ckpt_strictness")
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


def check_strategies(check: Check) -> None:
    """Check the strategies of dense and of expert parameters, and the flags of hybrid sharding."""
    args = check.args
    instances = args.num_distributed_optimizer_instances
    for kind in ("", "expert_"):
        level = f"{kind}data_parallel_sharding_strategy"
        outer = f"{kind}outer_dp_sharding_strategy"
        given = getattr(args, level) or args.data_parallel_sharding_strategy
        if getattr(args, outer) != "optim":
            continue
        check.require(
            given == "optim_grads_params",
            f"{check.flag(outer)} optim needs {check.flag(level)} optim_grads_params, got {given}",
        )
        check.require(
            instances > 1,
            f"{check.flag(outer)} optim needs an outer axis: give"
            " --num-distributed-optimizer-instances, at least 2",
        )
    check.require(
        not args.create_all_gather_group or instances == 1,
        "--create-all-gather-group makes a group of all data ranks, but"
        f" --num-distributed-optimizer-instances {instances} gathers over parts of them: leave"
        " one out",
    )


def complete_parallelism(check: Check) -> None:
    """Complete the sizes of the axes, and check them against layers and sequence length."""
    args = check.args
    args.world_size = check.machine.world_size
    args.virtual_pipeline_model_parallel_size = None
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = args.tensor_model_parallel_size
    divide_ranks(check)
    complete_sequence_parallelism(check)
    complete_pipeline(check)


def divide_ranks(check: Check) -> None:
    """Find the number of data-parallel ranks, and check that every axis divides the ranks."""
    args = check.args
    world = args.world_size
    tensor = args.tensor_model_parallel_size
    pipeline = args.pipeline_model_parallel_size
    context = args.context_parallel_size
    expert_tensor = args.expert_tensor_parallel_size
    expert = args.expert_model_parallel_size
    model = tensor * pipeline * context
    experts = expert_tensor * expert * pipeline
    args.data_parallel_size = max(1, world // model)
    axes = {f"tensor {tensor} x pipeline {pipeline} x context {context}": model}
    sizes = {"data x context ranks": world // (tensor * pipeline)}
    if args.num_experts:
        axes[f"expert tensor {expert_tensor} x expert {expert} x pipeline {pipeline}"] = experts
        sizes["expert data ranks"] = world // experts
    wrong = [words for words, size in axes.items() if world % size]
    for words in wrong:
        check.problems.append(
            f"{words} parallelism needs a multiple of {axes[words]} ranks, not {world}: change"
            " --nproc_per_node of torchrun or these sizes"
        )
    if wrong:
        return
    instances = args.num_distributed_optimizer_instances
    for words, size in sizes.items():
        check.require(
            size % instances == 0,
            f"--num-distributed-optimizer-instances {instances} must divide the {size} {words}",
        )
    if args.num_experts and expert == 1:
        # Without expert parallelism Megatron-Core reduces experts over the data ranks of everything
        # else.
        check.require(
            expert_tensor == tensor,
            f"--expert-tensor-parallel-size {expert_tensor} beside --tensor-model-parallel-size"
            f" {tensor} needs --expert-model-parallel-size of at least 2: Megatron-Core would"
            " reduce experts over the wrong ranks",
        )
    if args.num_experts and args.use_tp_pp_dp_mapping and pipeline > 1:
        # Megatron-Core then needs the same pipeline groups for experts and for everything else.
        check.require(
            model == experts,
            f"--use-tp-pp-dp-mapping needs as many ranks for one copy of the experts ({experts}) as"
            f" of the rest ({model}): leave it out, or change --expert-tensor-parallel-size or"
            " --expert-model-parallel-size",
        )


def complete_sequence_parallelism(check: Check) -> None:
    """Check that context ranks, with two chunks each, and tensor ranks divide the sequence."""
    args = check.args
    tensor = args.tensor_model_parallel_size
    context = args.context_parallel_size
    levels = args.hierarchical_context_parallel_sizes
    check.require(
        ("a2a+p2p" in args.cp_comm_type) == bool(levels),
        "--cp-comm-type a2a+p2p and --hierarchical-context-parallel-sizes need each other",
    )
    check.require(
        not levels or math.prod(levels) == context,
        f"--hierarchical-context-parallel-sizes {' '.join(map(str, levels or ()))} must multiply to"
        f" --context-parallel-size {context}",
    )
    if args.sequence_parallel and tensor == 1:
        args.sequence_parallel = False
        check.notes.append(
            "--sequence-parallel: off, it needs --tensor-model-parallel-size above 1; leave it out"
        )
    if args.num_experts and tensor > 1 and not args.skip_train:
        check.require(
            args.sequence_parallel,
            f"experts with --tensor-model-parallel-size {tensor} train only with sequence"
            " parallelism: give --sequence-parallel",
        )
    if context > 1:
        check.require_multiple(
            "seq_length",
            2 * context,
            f"every one of {context} context-parallel ranks has two chunks",
        )
    if args.sequence_parallel and args.seq_length % context == 0:
        check.require_multiple(
            "seq_length",
            tensor * context,
            f"--sequence-parallel divides it over {tensor} tensor-parallel ranks"
            + (f" after {context} context-parallel ones" if context > 1 else ""),
        )


def complete_pipeline(check: Check) -> None:
    """Divide the layers over pipeline stages, and check the settings of pipeline schedules."""
    args = check.args
    is_piped = args.pipeline_model_parallel_size > 1
    if is_piped and args.pipeline_model_parallel_layout:
        follow_layout(check)
    elif is_piped:
        divide_layers(check)
    if is_piped and args.init_model_with_meta_device:
        # The last stage's copy of the embedding gets its values from the first stage's while the
        # model is built.
        remedy = (
            "leave out --mtp-num-layers"
            if args.mtp_num_layers
            else "give --untie-embeddings-and-output-weights"
        )
        check.require(
            args.untie_embeddings_and_output_weights and not args.mtp_num_layers,
            "--init-model-with-meta-device cannot fill an embedding that two pipeline stages"
            f" share: leave it out, or {remedy}",
        )
    if args.virtual_pipeline_model_parallel_size is None:
        # Only an interleaved schedule can overlap messages between stages, or align gathers.
        args.overlap_p2p_comm = args.align_param_gather = False
    elif args.pipeline_model_parallel_size == 2:
        # In a batch of messages between the same two ranks, both directions would be mistaken for
        # each other.
        check.require(
            args.overlap_p2p_comm,
            "--no-overlap-p2p-communication does not go with virtual stages on two pipeline stages:"
            " leave it out",
        )
    args.align_param_gather = args.align_param_gather and args.overlap_param_gather


def follow_layout(check: Check) -> None:
    """Take the stages from --pipeline-model-parallel-layout."""
    args = check.args
    others = [check.flag(dest) for dest in INTERLEAVED if getattr(args, dest)]
    check.require(
        not others, f"--pipeline-model-parallel-layout says it all: leave out {', '.join(others)}"
    )
    try:
        layout = PipelineParallelLayerLayout(
            args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size
        )
        predicts_alone = layout.validate_layer_layout(args.num_layers, args.mtp_num_layers)
    except (AssertionError, NotImplementedError):
        return  # Megatron-Core's config reports what is wrong
    check.require(
        not predicts_alone,
        f"--pipeline-model-parallel-layout {args.pipeline_model_parallel_layout}: m (the layers"
        " that predict more tokens) must be in the last stage, whose embedding is kept equal to"
        " the first one's",
    )
    stages = layout.virtual_pipeline_model_parallel_size
    args.virtual_pipeline_model_parallel_size = stages if stages > 1 else None


def divide_layers(check: Check) -> None:
    """Find the number of virtual stages; Megatron-Core's config checks those of uneven sizes."""
    args = check.args
    check.at_most_one(*INTERLEAVED)
    stages = args.pipeline_model_parallel_size
    virtual = args.num_virtual_stages_per_pipeline_rank
    is_uneven = any(getattr(args, dest) for dest in (*UNEVEN, *ACCOUNTED))
    if not is_uneven and args.num_layers % stages:
        check.problems.append(
            f"--num-layers {args.num_layers} must be a multiple of --pipeline-model-parallel-size"
            f" {stages}, or give --decoder-first-pipeline-num-layers,"
            " --decoder-last-pipeline-num-layers or --pipeline-model-parallel-layout"
        )
        return
    if args.num_layers_per_virtual_pipeline_stage:
        if any(getattr(args, dest) for dest in UNEVEN):
            check.problems.append(
                "--num-layers-per-virtual-pipeline-stage is for stages of one size: use"
                " --num-virtual-stages-per-pipeline-rank"
            )
            return
        accounted = sum(getattr(args, dest) for dest in ACCOUNTED)
        per_virtual = args.num_layers_per_virtual_pipeline_stage
        per_stage = (args.num_layers + accounted) // stages
        check.require(
            per_stage % per_virtual == 0,
            f"--num-layers-per-virtual-pipeline-stage {per_virtual} must divide the {per_stage}"
            " layers of a pipeline stage",
        )
        virtual = per_stage // per_virtual
    elif virtual and not is_uneven:
        check.require(
            args.num_layers // stages % virtual == 0,
            f"--num-virtual-stages-per-pipeline-rank {virtual} must divide the"
            f" {args.num_layers // stages} layers of a pipeline stage",
        )
    args.virtual_pipeline_model_parallel_size = virtual if virtual and virtual > 1 else None


def check_microbatches(check: Check) -> None:
    """Check that the microbatches of an interleaved schedule fit its stages."""
    args = check.args
    if args.virtual_pipeline_model_parallel_size is None:
        return
    stages = args.pipeline_model_parallel_size
    group = args.microbatch_group_size_per_vp_stage
    one = args.micro_batch_size * args.data_parallel_size
    if group:
        flag = check.flag("microbatch_group_size_per_vp_stage")
        microbatches = args.global_batch_size // one
        check.require(
            stages <= group <= microbatches,
            f"{flag} {group} must be from {stages} (the pipeline stages) to {microbatches} (the"
            " microbatches of a step)",
        )
        left = microbatches % group if group > 0 else 0
        check.require(
            left == 0 or left >= stages,
            f"{flag} {group} leaves a group of {left} of {microbatches} microbatches, less than"
            f" {stages} pipeline stages: choose a divisor",
        )
        return
    check.require_multiple(
        "global_batch_size",
        one * stages,
        f"virtual stages need a multiple of {stages} microbatches on each of"
        f" {args.data_parallel_size} data-parallel ranks",
    )
