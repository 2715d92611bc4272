# SPDX-License-Identifier: Apache-2.0
"""Rows of the flags of a run: parallelism, rates, model and length."""

from megatron.pretrain.arguments.flags import (
    AT_LEAST_0,
    AT_LEAST_1,
    DEPRECATED_DEFAULT,
    DIVIDED,
    ENGINE,
    IN_SHORT_HELP,
    REQUIRED,
    SIZE,
    Flag,
    Needs,
    NotCaptured,
    Range,
    Refused,
    choice,
    integer,
    number,
    off_switch,
    only_in_other_loop,
    switch,
    text,
)
from megatron.pretrain.arguments.tables.model_fields import (
    NEEDS_EXPERTS,
    NEEDS_ROPE,
    NOT_WITH_LATENT_ATTENTION,
    OTHER_LAYERS,
)
from megatron.pretrain.arguments.tables.training_fields import (
    LEVELS,
    NEEDS_FSDP,
    NEEDS_OVERLAPPED_REDUCTION,
    NEEDS_STAGES,
    NEEDS_TP_OVERLAP,
    NO_REPEATED_STEPS,
)
from megatron.pretrain.arguments.values import FLOATS_OR_AUTO, one_of

float_dtype = one_of(FLOATS_OR_AUTO)
NEEDS_GATHERS = Needs(
    "data_parallel_sharding_strategy",
    LEVELS[1:],
    "does nothing with --data-parallel-sharding-strategy no_shard, which gathers nothing",
)
# datetime.timedelta ends soon after it.
SHORT_TIME = Range(lambda minutes: minutes <= 10**9, f"at most {10**9}")
NEEDS_WSD = Needs("lr_decay_style", ("WSD",))
NEEDS_ROPE_OR_LATENT_ATTENTION = Needs(
    "position_embedding_type", ("rope",), unless="multi_latent_attention"
)
NO_GROWTH = only_in_other_loop("batches and weight decay do not grow")
NO_FSDP2 = Refused("PyTorch's FSDP2 is not a choice here; use --use-megatron-fsdp")
NO_TEACHER = Refused("learning from a teacher with ModelOpt is not built")
ONE_VALIDATION_SET = only_in_other_loop("evaluations are over --eval-iters batches of one set")


RUN_FLAGS: dict[str, tuple[Flag, ...]] = {
    "data parallelism": (
        integer(
            "--megatron-fsdp-version",
            "generation of the engine",
            NEEDS_FSDP,
            ENGINE,
            default=1,
            choices=(1, 2),
        ),
        text(
            "--megatron-fsdp-main-params-dtype",
            "weights the optimizer updates; auto: the model's own",
            NEEDS_FSDP,
            ENGINE,
            default=FLOATS_OR_AUTO["fp32"],
            type=float_dtype,
        ),
        text(
            "--megatron-fsdp-main-grads-dtype",
            "dtype of accumulated gradients; auto: the parameter's",
            NEEDS_FSDP,
            ENGINE,
            type=float_dtype,
        ),
        text(
            "--megatron-fsdp-grad-comm-dtype",
            "dtype of gradient reductions; auto: as accumulated",
            NEEDS_FSDP,
            ENGINE,
            type=float_dtype,
        ),
        switch(
            "--megatron-fsdp-max-pool-double-buffer",
            "give every memory slot the size of the largest unit",
            NEEDS_FSDP,
            ENGINE,
        ),
        switch(
            "--fsdp-db-use-persist-buf-on-alloc-fail",
            "if memory slots cannot be allocated, give each buffer its own storage",
            NEEDS_FSDP,
            ENGINE,
        ),
        switch(
            "--megatron-fsdp-enable-fine-grained-param-gather",
            "all-gather each submodule on its own",
            NEEDS_FSDP,
            NEEDS_GATHERS,
            ENGINE,
        ),
        choice(
            "--expert-data-parallel-sharding-strategy",
            "|".join(LEVELS),
            "ZeRO level of expert parameters, if it differs",
            NEEDS_FSDP,
            NEEDS_EXPERTS,
            ENGINE,
        ),
        choice(
            "--expert-outer-dp-sharding-strategy",
            "no_shard|optim",
            "outer strategy of expert parameters, if it differs",
            NEEDS_FSDP,
            NEEDS_EXPERTS,
            ENGINE,
        ),
        choice(
            "--embedding-data-parallel-sharding-strategy",
            "|".join(LEVELS[1:]),
            "ZeRO level of embeddings and output layer, if it differs",
            NEEDS_FSDP,
            Needs("data_parallel_sharding_strategy", LEVELS[1:]),
            ENGINE,
        ),
        switch(
            "--create-all-gather-group",
            "a communicator of its own for gathers",
            NEEDS_FSDP,
            NEEDS_GATHERS,
            ENGINE,
        ),
        switch(
            "--enable-full-sharding-in-hsdp",
            Refused("no release of Megatron-Core reads it; use --outer-dp-sharding-strategy optim"),
        ),
        switch("--grad-reduce-in-bf16", "reduce gradients in bf16 instead of fp32", Needs("bf16")),
        integer("--ddp-num-buckets", only_in_other_loop("use --ddp-bucket-size")),
        off_switch(
            "--no-align-grad-reduce",
            "pipeline stages reduce gradients independently",
            NEEDS_OVERLAPPED_REDUCTION,
        ),
        switch("--use-torch-fsdp2", NO_FSDP2),
        off_switch("--torch-fsdp2-no-reshard-after-forward", NO_FSDP2),
        switch("--use-sharp", "reduce in the network"),
        choice(
            "--sharp-enabled-group",
            "dp|dp_replica",
            "groups that --use-sharp is for",
            Needs("use_sharp"),
        ),
        text("--nccl-communicator-config-path", "YAML file: group -> settings of NCCL"),
        switch("--data-parallel-random-init", "the first rank's random weights are taken"),
        choice(
            "--distributed-backend", "nccl|gloo", "collectives; gloo without GPUs", default="nccl"
        ),
        integer(
            "--distributed-timeout-minutes",
            "minutes a collective may wait",
            AT_LEAST_1,
            SHORT_TIME,
            default=10,
        ),
        off_switch("--disable-gloo-process-groups", "no gloo copies of the process groups"),
        text(
            "--high-priority-stream-groups",
            "groups on high-priority streams",
            default=[],
            nargs="*",
        ),
        integer(
            "--local-rank",
            Refused("start the program with torchrun, which sets LOCAL_RANK"),
            default=0,
        ),
        switch("--lazy-mpu-init", Refused("process groups are always built at the start")),
        text(
            "--tp-comm-overlap-cfg",
            "YAML file of Transformer Engine's user buffers",
            NEEDS_TP_OVERLAP,
        ),
        switch("--use-tp-pp-dp-mapping", "order of ranks: tensor, pipeline, data"),
        integer(
            "--num-layers-per-virtual-pipeline-stage",
            "interleaved schedule",
            SIZE,
            NEEDS_STAGES,
        ),
        integer(
            "--num-virtual-stages-per-pipeline-rank",
            "interleaved schedule, in stages",
            SIZE,
            NEEDS_STAGES,
        ),
    ),
    "loop": (
        choice("--loop", "own|megatron-lm", "this program's loop, or Megatron-LM's", default="own"),
    ),
    "learning rate and weight decay": (
        choice(
            "--lr-decay-style",
            "constant|linear|cosine|inverse-square-root|WSD",
            "shape of the decay",
            default="linear",
        ),
        integer("--lr-decay-iters", "iterations of the decay; default: --train-iters", AT_LEAST_1),
        integer("--lr-decay-samples", "samples of the decay; default: --train-samples", AT_LEAST_1),
        number("--lr-warmup-fraction", "warm-up as a part of the decay length"),
        integer("--lr-warmup-iters", "iterations of linear warm-up", AT_LEAST_0, default=0),
        integer("--lr-warmup-samples", "samples of linear warm-up", AT_LEAST_0, default=0),
        number(
            "--lr-warmup-init", "rate at the first step of the warm-up", AT_LEAST_0, default=0.0
        ),
        integer("--lr-wsd-decay-iters", "length of the final decay of WSD", AT_LEAST_1, NEEDS_WSD),
        integer("--lr-wsd-decay-samples", "the same in samples", AT_LEAST_1, NEEDS_WSD),
        choice(
            "--lr-wsd-decay-style",
            "exponential|linear|cosine|minus_sqrt",
            "shape of WSD's final decay",
            NEEDS_WSD,
            default="exponential",
        ),
        number("--start-weight-decay", NO_GROWTH),
        number("--end-weight-decay", NO_GROWTH),
        choice(
            "--weight-decay-incr-style", "constant|linear|cosine", NO_GROWTH, default="constant"
        ),
        switch(
            "--use-checkpoint-opt_param-scheduler --use-checkpoint-opt-param-scheduler",
            "schedule values from the checkpoint",
        ),
        switch(
            "--override-opt_param-scheduler --override-opt-param-scheduler",
            "schedule values from the command line",
        ),
    ),
    "model": (
        integer(
            "--seq-length --encoder-seq-length",
            "tokens per sequence",
            REQUIRED,
            IN_SHORT_HELP,
            SIZE,
        ),
        integer("--max-position-embeddings", "longest sequence; default: --seq-length", SIZE),
        switch("--group-query-attention", "--num-query-groups for keys and values"),
        choice(
            "--position-embedding-type",
            "learned_absolute|rope|yarn|mrope|relative|none",
            "how positions enter",
            IN_SHORT_HELP,
            Refused("not built yet; use rope", ("yarn",)),
            Refused("is for images and video; use rope", ("mrope",)),
            Refused("GPT has no relative positions; use rope", ("relative",)),
            default="learned_absolute",
        ),
        switch("--use-rotary-position-embeddings", "--position-embedding-type rope"),
        integer(
            "--rotary-base",
            "base of the rotary frequencies",
            SIZE,
            NEEDS_ROPE_OR_LATENT_ATTENTION,
            default=10000,
        ),
        number(
            "--rotary-percent",
            "part of each head that is rotated",
            Range(lambda value: 0 < value <= 1, "above 0 and at most 1"),
            NEEDS_ROPE_OR_LATENT_ATTENTION,
            default=1.0,
        ),
        integer(
            "--rotary-seq-len-interpolation-factor",
            "divide positions by this",
            SIZE,
            NEEDS_ROPE,
        ),
        switch(
            "--use-rope-scaling",
            "stretch rotary frequencies as Llama 3 does",
            NOT_WITH_LATENT_ATTENTION,
            NEEDS_ROPE,
        ),
        number(
            "--rope-scaling-factor",
            "factor of --use-rope-scaling",
            NEEDS_ROPE,
            Needs("use_rope_scaling"),
            default=8.0,
        ),
        off_switch(
            "--no-position-embedding",
            Refused("deprecated; use --position-embedding-type none"),
            dest="add_position_embedding",
        ),
        integer(
            "--make-vocab-size-divisible-by",
            "the vocabulary is padded to multiples",
            SIZE,
            default=128,
        ),
        integer(
            "--padded-vocab-size",
            "vocabulary after padding, instead of computing it",
            SIZE,
            DIVIDED,
        ),
        switch("--swiglu", "gated SiLU in the MLP", IN_SHORT_HELP),
        switch("--squared-relu", "squared ReLU in the MLP"),
        switch("--openai-gelu", "GELU by its tanh formula in the MLP"),
        switch("--untie-embeddings-and-output-weights", "an output layer of its own"),
        switch("--no-persist-layer-norm", "no persistent layer-norm kernel"),
        off_switch("--no-bias-gelu-fusion", "bias and GELU, then the exact one, in two kernels"),
        off_switch("--no-bias-swiglu-fusion", "bias and gated SiLU in separate kernels"),
        switch("--use-flash-attn", "the same as --attention-backend flash"),
        switch(
            "--use-mcore-models",
            "is the default",
            DEPRECATED_DEFAULT,
            dest="deprecated_use_mcore_models",
        ),
        text("--spec", OTHER_LAYERS, nargs="*"),
        text("--hybrid-layer-pattern", OTHER_LAYERS),
        switch("--recompute-activations", "--recompute-granularity selective"),
        switch("--export-te-mcore-model", NO_TEACHER),
        text("--export-kd-teacher-load", NO_TEACHER),
        text("--export-kd-cfg", NO_TEACHER),
        switch("--enable-experimental", "allow what Megatron-Core marks as experimental"),
    ),
    "length of the run and numerics": (
        switch("--dry-run", "check the command line, print what follows, and stop", IN_SHORT_HELP),
        integer(
            "--dry-run-ranks",
            "ranks of the run that is checked; default: WORLD_SIZE",
            SIZE,
            Needs("dry_run"),
        ),
        integer(
            "--micro-batch-size", "sequences per rank and microbatch", REQUIRED, IN_SHORT_HELP, SIZE
        ),
        integer(
            "--global-batch-size",
            "sequences per iteration; default: one microbatch each",
            IN_SHORT_HELP,
            SIZE,
        ),
        integer("--rampup-batch-size", NO_GROWTH, nargs=3),
        integer("--train-iters", "iterations to train", IN_SHORT_HELP, SIZE),
        integer("--train-samples", "sequences to train, instead of --train-iters", SIZE),
        integer("--exit-interval", "save and stop at a multiple of this iteration", AT_LEAST_1),
        integer("--exit-duration-in-mins", "save and stop after this many minutes", AT_LEAST_1),
        switch("--exit-signal-handler", "save and stop on SIGTERM"),
        switch(
            "--skip-train",
            "evaluate only",
            NotCaptured("steps without a graph must find the memory first"),
        ),
        integer("--eval-iters", "batches per evaluation", AT_LEAST_0, default=100),
        integer(
            "--eval-interval",
            "iterations between evaluations; default: none in training",
            SIZE,
        ),
        switch("--full-validation", ONE_VALIDATION_SET),
        switch("--multiple-validation-sets", ONE_VALIDATION_SET),
        integer("--seed", "seed of weights, dropout and sampling", AT_LEAST_0, default=1234),
        integer(
            "--empty-unused-memory-level", "times a step frees memory", default=0, choices=(0, 1, 2)
        ),
        switch("--manual-gc", "collect garbage at fixed iterations only"),
        integer(
            "--manual-gc-interval",
            "iterations between collections; 0: never",
            AT_LEAST_0,
            Needs("manual_gc"),
            default=0,
        ),
        switch("--check-for-spiky-loss", NO_REPEATED_STEPS),
        integer(
            "--check-weight-hash-across-dp-replicas-interval",
            only_in_other_loop("replicas are not compared here"),
        ),
        choice(
            "--rerun-mode",
            "disabled|validate_results|report_stats",
            NO_REPEATED_STEPS,
            default="disabled",
        ),
        integer("--error-injection-rate", NO_REPEATED_STEPS, default=0),
        choice(
            "--error-injection-type",
            "correct_result|transient_error|persistent_error",
            NO_REPEATED_STEPS,
            default="transient_error",
        ),
        text("--result-rejected-tracker-filename", NO_REPEATED_STEPS),
    ),
}
"""Title of a group in --help -> rows."""
