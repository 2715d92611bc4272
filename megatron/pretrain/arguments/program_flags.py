# SPDX-License-Identifier: Apache-2.0
"""The flags of the training program itself, which are no fields of Megatron-Core's configs."""

from megatron.pretrain.arguments.checkpoint_flags import CHECKPOINT_FLAGS
from megatron.pretrain.arguments.config_flags import FLOATS_OR_AUTO
from megatron.pretrain.arguments.data_flags import DATA_FLAGS
from megatron.pretrain.arguments.flags import Flag, one_of, row
from megatron.pretrain.arguments.observing_flags import OBSERVING_FLAGS

float_dtype = one_of(FLOATS_OR_AUTO)["type"]

PROGRAM_GROUPS: dict[str, tuple[Flag, ...]] = {
    "data parallelism": (
        row("--megatron-fsdp-version", int, "generation of the engine", 1, choices=(1, 2)),
        row(
            "--megatron-fsdp-main-params-dtype",
            float_dtype,
            "weights the optimizer updates: fp32, bf16, fp16; auto: the model's own weights",
            FLOATS_OR_AUTO["fp32"],
        ),
        row(
            "--megatron-fsdp-main-grads-dtype",
            float_dtype,
            "accumulated gradients: fp32, bf16, fp16; auto: the parameter's dtype",
        ),
        row(
            "--megatron-fsdp-grad-comm-dtype",
            float_dtype,
            "gradients on the wire: fp32, bf16, fp16; auto: that of the accumulated gradients",
        ),
        row(
            "--megatron-fsdp-max-pool-double-buffer",
            "switch",
            "two buffers sized by the largest unit",
        ),
        row(
            "--fsdp-db-use-persist-buf-on-alloc-fail",
            "switch",
            "keep a permanent buffer where a slot cannot be had",
        ),
        row("--megatron-fsdp-enable-fine-grained-param-gather", "switch", "gather per submodule"),
        row("--create-all-gather-group", "switch", "a communicator of its own for gathers"),
        row("--enable-full-sharding-in-hsdp", "switch", "shard fully in hybrid sharding"),
        row("--grad-reduce-in-bf16", "switch", "reduce gradients in bf16 instead of fp32"),
        row("--ddp-num-buckets", int, "number of gradient buckets, instead of --ddp-bucket-size"),
        row(
            "--no-align-grad-reduce",
            "off",
            "pipeline stages start their gradient reduction independently",
            dest="align_grad_reduce",
        ),
        row("--use-torch-fsdp2", "switch", "wrap with PyTorch's FSDP2"),
        row(
            "--torch-fsdp2-no-reshard-after-forward",
            "off",
            "FSDP2 keeps gathered weights",
            dest="torch_fsdp2_reshard_after_forward",
        ),
        row("--use-sharp", "switch", "reduce in the network"),
        row(
            "--data-parallel-random-init",
            "switch",
            "ranks start from different seeds, then take the weights of the first rank",
        ),
        row(
            "--distributed-backend",
            str,
            "collectives library; gloo is used where there is no GPU",
            "nccl",
            choices=("nccl", "gloo"),
        ),
        row("--distributed-timeout-minutes", int, "minutes a collective may wait", 10),
        row(
            "--disable-gloo-process-groups",
            "off",
            "no gloo copies of the process groups",
            dest="enable_gloo_process_groups",
        ),
        row(
            "--high-priority-stream-groups",
            str,
            "process groups on high-priority streams",
            [],
            nargs="*",
        ),
        row("--local-rank", int, "device number on this node", 0),
        row("--lazy-mpu-init", "switch", "delay the set-up of model parallelism"),
        row("--tp-comm-overlap-cfg", str, "YAML file of Transformer Engine's user buffers"),
        row("--use-tp-pp-dp-mapping", "switch", "order of ranks: tensor, pipeline, data"),
        row("--num-layers-per-virtual-pipeline-stage", int, "interleaved schedule"),
        row(
            "--num-virtual-stages-per-pipeline-rank", int, "interleaved schedule, counted in stages"
        ),
    ),
    "learning rate and weight decay": (
        row(
            "--lr-decay-style",
            str,
            "shape of the decay",
            "linear",
            choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        ),
        row("--lr-decay-iters", int, "iterations of the decay; default: --train-iters"),
        row(
            "--lr-decay-samples",
            int,
            "samples over which the rate decays; default: --train-samples",
        ),
        row("--lr-warmup-fraction", float, "warm-up as a part of the decay length"),
        row("--lr-warmup-iters", int, "iterations of linear warm-up", 0),
        row("--lr-warmup-samples", int, "samples of linear warm-up", 0),
        row("--lr-warmup-init", float, "rate at the first step of the warm-up", 0.0),
        row("--lr-wsd-decay-iters", int, "length of the final decay of WSD"),
        row("--lr-wsd-decay-samples", int, "the same in samples"),
        row(
            "--lr-wsd-decay-style",
            str,
            "shape of the final decay of WSD",
            "exponential",
            choices=("exponential", "linear", "cosine", "minus_sqrt"),
        ),
        row("--start-weight-decay", float, "first weight decay of a style that grows"),
        row("--end-weight-decay", float, "last weight decay of a style that grows"),
        row(
            "--weight-decay-incr-style",
            str,
            "growth of weight decay",
            "constant",
            choices=("constant", "linear", "cosine"),
        ),
        row(
            "--use-checkpoint-opt_param-scheduler --use-checkpoint-opt-param-scheduler",
            "switch",
            "schedule values from the checkpoint",
        ),
        row(
            "--override-opt_param-scheduler --override-opt-param-scheduler",
            "switch",
            "schedule values from the command line",
        ),
    ),
    "checkpoints": CHECKPOINT_FLAGS,
    "model": (
        row("--seq-length --encoder-seq-length", int, "tokens per sequence"),
        row(
            "--max-position-embeddings",
            int,
            "longest sequence the model can see; default: --seq-length",
        ),
        row(
            "--group-query-attention",
            "switch",
            "keys and values shared by groups of heads, see --num-query-groups",
        ),
        row(
            "--position-embedding-type",
            str,
            "how positions enter",
            "learned_absolute",
            choices=("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
        ),
        row(
            "--use-rotary-position-embeddings",
            "switch",
            "the same as --position-embedding-type rope",
        ),
        row("--rotary-base", int, "base of the rotary frequencies", 10000),
        row("--rotary-percent", float, "part of each head that is rotated", 1.0),
        row(
            "--rotary-seq-len-interpolation-factor",
            int,
            "divide positions by this, to stretch a model to longer sequences",
        ),
        row("--use-rope-scaling", "switch", "stretch rotary frequencies as Llama 3 does"),
        row("--rope-scaling-factor", float, "factor of --use-rope-scaling", 8.0),
        row("--no-position-embedding", "off", "deprecated", dest="add_position_embedding"),
        row(
            "--make-vocab-size-divisible-by",
            int,
            "the vocabulary is padded to a multiple of this",
            128,
        ),
        row(
            "--padded-vocab-size", int, "vocabulary size after padding, instead of the computed one"
        ),
        row("--swiglu", "switch", "gated SiLU in the MLP"),
        row("--squared-relu", "switch", "squared ReLU in the MLP"),
        row("--openai-gelu", "switch", "GELU by its tanh formula in the MLP"),
        row(
            "--untie-embeddings-and-output-weights", "switch", "the output layer has its own weight"
        ),
        row("--no-persist-layer-norm", "switch", "no persistent layer-norm kernel"),
        row(
            "--no-bias-gelu-fusion",
            "off",
            "bias and GELU in separate kernels (GELU is then the exact one)",
            dest="bias_gelu_fusion",
        ),
        row(
            "--no-bias-swiglu-fusion",
            "off",
            "bias and gated SiLU in separate kernels",
            dest="bias_swiglu_fusion",
        ),
        row("--use-flash-attn", "switch", "the same as --attention-backend flash"),
        row(
            "--use-mcore-models",
            "switch",
            "deprecated: is the default",
            dest="deprecated_use_mcore_models",
        ),
        row("--spec", str, "module and attribute of a layer specification", nargs="*"),
        row("--recompute-activations", "switch", "the same as --recompute-granularity selective"),
        row("--export-te-mcore-model", "switch", "layers as ModelOpt exports them"),
        row("--export-kd-teacher-load", str, "checkpoint of a teacher to learn from"),
        row("--export-kd-cfg", str, "file that says what is learnt from the teacher"),
        row("--enable-experimental", "switch", "allow what Megatron-Core marks as experimental"),
    ),
    "length of the run and numerics": (
        row("--dry-run", "switch", "check the command line, print what follows from it, and stop"),
        row("--dry-run-ranks", int, "ranks of the run that is checked; default: WORLD_SIZE"),
        row("--micro-batch-size", int, "sequences per rank and microbatch"),
        row(
            "--global-batch-size",
            int,
            "sequences per iteration over all ranks; default: one microbatch each",
        ),
        row("--rampup-batch-size", int, "start, increment, samples", nargs=3),
        row("--train-iters", int, "iterations to train"),
        row("--train-samples", int, "sequences to train, instead of --train-iters"),
        row("--exit-interval", int, "save and stop at a multiple of this iteration"),
        row("--exit-duration-in-mins", int, "save and stop after this many minutes"),
        row("--exit-signal-handler", "switch", "save and stop on SIGTERM"),
        row("--skip-train", "switch", "evaluate only"),
        row("--eval-iters", int, "batches per evaluation", 100),
        row(
            "--eval-interval", int, "iterations between evaluations; default: none during training"
        ),
        row("--full-validation", "switch", "evaluate on all of the validation set, each time"),
        row(
            "--multiple-validation-sets",
            "switch",
            "each data set of --valid-data-path has a loss of its own",
        ),
        row("--seed", int, "seed of weights, dropout and sampling", 1234),
        row(
            "--empty-unused-memory-level",
            int,
            "give cached GPU memory back: 1 after an iteration, 2 more often",
            0,
            choices=(0, 1, 2),
        ),
        row("--manual-gc", "switch", "collect garbage at fixed iterations only"),
        row("--manual-gc-interval", int, "iterations between collections; 0: never", 0),
        row("--check-for-spiky-loss", "switch", "report a loss 10 times those of the first steps"),
        row("--check-weight-hash-across-dp-replicas-interval", int, "compare weights of replicas"),
        row(
            "--rerun-mode",
            str,
            "repeat iterations: those with suspicious results, or all for statistics",
            "disabled",
            choices=("disabled", "validate_results", "report_stats"),
        ),
        row("--error-injection-rate", int, "reject a result in so many, to try reruns; 0: none", 0),
        row(
            "--error-injection-type",
            str,
            "diagnosis that these get",
            "transient_error",
            choices=("correct_result", "transient_error", "persistent_error"),
        ),
        row("--result-rejected-tracker-filename", str, "file that rejected results are added to"),
    ),
    "data and tokenizer": DATA_FLAGS,
    "logging and profiling": OBSERVING_FLAGS,
}
