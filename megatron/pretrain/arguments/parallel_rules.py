# SPDX-License-Identifier: Apache-2.0
"""Rules of parallelism: the division of ranks, layers, sequences and batches over the axes."""

import math

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.pretrain.arguments.check import Check

AXES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_distributed_optimizer_instances",
)
UNEVEN = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
ACCOUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""Switches that count the embedding, or the output layer, as a layer of its stage."""
INTERLEAVED = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")


def complete_parallelism(check: Check) -> None:
    """Complete the sizes of the axes, and check them against layers and sequence length."""
    args = check.args
    args.world_size = check.machine.world_size
    args.data_parallel_size = 1
    args.virtual_pipeline_model_parallel_size = None
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = args.tensor_model_parallel_size
    if any(getattr(args, dest) < 1 for dest in AXES):
        return  # reported as wrong numbers
    divide_ranks(check)
    complete_sequence_parallelism(check)
    complete_pipeline(check)


def divide_ranks(check: Check) -> None:
    """Find the number of data-parallel ranks, and check that every axis divides the ranks."""
    args = check.args
    world, tensor, pipeline = (
        args.world_size,
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
    )
    model = tensor * pipeline * args.context_parallel_size
    experts = args.expert_tensor_parallel_size * args.expert_model_parallel_size * pipeline
    args.data_parallel_size = max(1, world // model)
    axes = {f"tensor {tensor} x pipeline {pipeline} x context {args.context_parallel_size}": model}
    if args.num_experts:
        tensor_of_experts, ranks_of_experts = (
            args.expert_tensor_parallel_size,
            args.expert_model_parallel_size,
        )
        axes[
            f"expert tensor {tensor_of_experts} x expert {ranks_of_experts} x pipeline {pipeline}"
        ] = experts
    wrong = [
        f"{words} parallelism needs a multiple of {size} ranks"
        for words, size in axes.items()
        if world % size
    ]
    for problem in wrong:
        check.problems.append(
            f"{problem}, not {world}: change --nproc_per_node of torchrun or these sizes"
        )
    if wrong:
        return
    instances = args.num_distributed_optimizer_instances
    sizes = {"data x context ranks": world // (tensor * pipeline)}
    if args.num_experts:
        sizes["expert data ranks"] = world // experts
    for words, size in sizes.items():
        check.require(
            size % instances == 0,
            f"--num-distributed-optimizer-instances {instances} must divide the {size} {words}",
        )
    if args.num_experts and args.expert_model_parallel_size == 1:
        # Without expert parallelism Megatron-Core reduces experts over the data ranks of everything
        # else.
        check.require(
            args.expert_tensor_parallel_size == tensor,
            f"--expert-tensor-parallel-size {args.expert_tensor_parallel_size} beside"
            f" --tensor-model-parallel-size {tensor} needs --expert-model-parallel-size of at least"
            " 2: Megatron-Core would reduce experts over the wrong ranks",
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
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    check.require(
        context > 1 or not check.changed("cp_comm_type"),
        "--cp-comm-type needs --context-parallel-size above 1",
    )
    check_two_levels(check)
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
    if args.sequence_parallel and args.seq_length and args.seq_length % context == 0:
        check.require(
            args.seq_length // context % tensor == 0,
            f"--seq-length {args.seq_length} must be a multiple of {tensor * context}:"
            f" --sequence-parallel divides it over {tensor} tensor-parallel ranks"
            + (f" after {context} context-parallel ones" if context > 1 else ""),
        )


def check_two_levels(check: Check) -> None:
    """Check context parallelism on two levels, all-to-all inside and point to point outside."""
    args = check.args
    sizes = args.hierarchical_context_parallel_sizes
    check.require(
        ("a2a+p2p" in args.cp_comm_type) == bool(sizes),
        "--cp-comm-type a2a+p2p and --hierarchical-context-parallel-sizes need each other",
    )
    check.require(
        not sizes or math.prod(sizes) == args.context_parallel_size,
        f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes or ()))} must multiply to"
        f" --context-parallel-size {args.context_parallel_size}",
    )


def complete_pipeline(check: Check) -> None:
    """Divide the layers over pipeline stages, and check the settings of pipeline schedules."""
    args = check.args
    if args.pipeline_model_parallel_size == 1:
        for dest in (*INTERLEAVED, *UNEVEN, *ACCOUNTED, "pipeline_model_parallel_layout"):
            check.require(
                not getattr(args, dest),
                f"{check.flag(dest)} needs --pipeline-model-parallel-size of at least 2",
            )
    elif args.pipeline_model_parallel_layout:
        follow_layout(check)
    elif args.num_layers and args.num_layers > 0:
        divide_layers(check)
    if args.pipeline_model_parallel_size > 1 and args.init_model_with_meta_device:
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
    others = [
        check.flag(dest) for dest in (*INTERLEAVED, *UNEVEN, *ACCOUNTED) if getattr(args, dest)
    ]
    check.require(
        not others, f"--pipeline-model-parallel-layout says it all: leave out {', '.join(others)}"
    )
    try:
        layout = PipelineParallelLayerLayout(
            args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size
        )
        predicts_alone = layout.validate_layer_layout(args.num_layers, args.mtp_num_layers)
    except (AssertionError, NotImplementedError) as error:
        check.problems.append(
            f"--pipeline-model-parallel-layout {args.pipeline_model_parallel_layout}: {error}"
        )
        return
    check.require(
        not predicts_alone,
        f"--pipeline-model-parallel-layout {args.pipeline_model_parallel_layout}: m (the layers"
        " that predict more tokens) must be in the last stage, whose embedding is kept equal to"
        " the first one's",
    )
    stages = layout.virtual_pipeline_model_parallel_size
    args.virtual_pipeline_model_parallel_size = stages if stages > 1 else None


def divide_layers(check: Check) -> None:
    """Divide the layers evenly over stages, except a first and a last with numbers of their own."""
    args = check.args
    check.at_most_one(*INTERLEAVED)
    ends = [getattr(args, dest) for dest in UNEVEN if getattr(args, dest)]
    accounted = [check.flag(dest) for dest in ACCOUNTED if getattr(args, dest)]
    stages = args.pipeline_model_parallel_size - len(ends)
    layers = args.num_layers - sum(ends) + len(accounted)
    problem = uneven_division(check, stages, layers, accounted)
    if problem:
        check.problems.append(problem)
        return
    virtual = args.num_virtual_stages_per_pipeline_rank or 1
    if args.num_layers_per_virtual_pipeline_stage:
        if ends:
            check.problems.append(
                "--num-layers-per-virtual-pipeline-stage is for stages of one size: use"
                " --num-virtual-stages-per-pipeline-rank"
            )
            return
        per_stage, per_pipeline_stage = args.num_layers_per_virtual_pipeline_stage, layers // stages
        virtual = max(1, per_pipeline_stage // per_stage)
        check.require(
            per_pipeline_stage % per_stage == 0,
            f"--num-layers-per-virtual-pipeline-stage {per_stage} must divide the"
            f" {per_pipeline_stage} layers of a pipeline stage",
        )
    else:
        for count in sorted({*ends, *([layers // stages] if stages else [])}):
            check.require(
                count % virtual == 0,
                f"--num-virtual-stages-per-pipeline-rank {virtual} must divide the {count} layers"
                " of a pipeline stage",
            )
    args.virtual_pipeline_model_parallel_size = virtual if virtual > 1 else None


def uneven_division(check: Check, stages: int, layers: int, accounted: list[str]) -> str:
    """Return why layers cannot be divided over stages, or nothing.

    Args:
        check: the arguments.
        stages: number of stages whose number of layers is not given.
        layers: number of layers that are left for them, with those of `accounted`.
        accounted: flags that count the embedding or the output layer as a layer.
    """
    args = check.args
    named = [f"{check.flag(dest)} {getattr(args, dest)}" for dest in UNEVEN if getattr(args, dest)]
    if named and accounted:
        return f"{', '.join(accounted)} divide layers evenly: leave out {', '.join(named)}"
    if (stages == 0 and layers == 0) or (stages and layers > 0 and layers % stages == 0):
        return ""
    if named:
        return (
            f"{', '.join(named)}: {layers} layers are left for {stages} other pipeline stages, each"
            " of which must get the same number"
        )
    counted = f"--num-layers {args.num_layers}"
    if accounted:
        counted += f" and {', '.join(accounted)}: {layers} layers"
    return (
        f"{counted} must be a multiple of --pipeline-model-parallel-size {stages}, or give"
        " --decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers or"
        " --pipeline-model-parallel-layout"
    )


def check_microbatches(check: Check) -> None:
    """Check that the microbatches of an interleaved schedule are a multiple of the stages."""
    args = check.args
    if (
        args.virtual_pipeline_model_parallel_size is None
        or not args.micro_batch_size
        or args.micro_batch_size < 1
    ):
        return
    if args.microbatch_group_size_per_vp_stage:
        check_microbatch_groups(check)
        return
    stages = args.pipeline_model_parallel_size
    step = args.micro_batch_size * args.data_parallel_size * stages
    why = (
        f"virtual stages need a multiple of {stages} microbatches on each of"
        f" {args.data_parallel_size} data-parallel ranks"
    )
    check.require_multiple("global_batch_size", step, why)
    if args.rampup_batch_size:
        start, increment, _ = args.rampup_batch_size
        check.require(
            start % step == 0 and increment % step == 0,
            f"--rampup-batch-size: start {start} and increment {increment} must be multiples of"
            f" {step}: {why}",
        )


def check_microbatch_groups(check: Check) -> None:
    """Check the microbatches that a virtual stage works on in a row."""
    args = check.args
    stages, group = args.pipeline_model_parallel_size, args.microbatch_group_size_per_vp_stage
    batches = [args.global_batch_size]
    if args.rampup_batch_size is not None and args.rampup_batch_size[1] > 0:
        start, increment, _ = args.rampup_batch_size
        batches = [*range(start, args.global_batch_size + 1, increment)]
    flag = check.flag("microbatch_group_size_per_vp_stage")
    for batch in batches:
        check_microbatch_group(
            check, flag, group, stages, batch // (args.micro_batch_size * args.data_parallel_size)
        )


def check_microbatch_group(
    check: Check, flag: str, group: int, stages: int, microbatches: int
) -> None:
    """Check groups of microbatches beside the microbatches of a step."""
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
