# SPDX-License-Identifier: Apache-2.0
"""The flags of the training program that concern its checkpoints."""

from megatron.pretrain.arguments.flags import Flag, row

STRICTNESS = (
    "assume_ok_unexpected",
    "log_unexpected",
    "log_all",
    "raise_unexpected",
    "raise_all",
    "return_unexpected",
    "return_all",
    "ignore_all",
)

CHECKPOINT_FLAGS: tuple[Flag, ...] = (
    row("--save", str, "directory, or URL, to save checkpoints in"),
    row("--overwrite", "switch", "begin anew in a --save directory that has checkpoints"),
    row("--load", str, "directory, or URL, to load the newest sound checkpoint from"),
    row("--no-load-fallback", "switch", "stop where the newest checkpoint of --load is damaged"),
    row("--save-interval", int, "iterations between saves"),
    row(
        "--save-retain-interval",
        int,
        "keep only checkpoints of multiples of this iteration, and the newest",
    ),
    row(
        "--ckpt-format",
        str,
        "layout of checkpoints; with --use-megatron-fsdp fsdp_dtensor unless torch_dist is given",
        "torch_dist",
        choices=("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"),
    ),
    row(
        "--no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load",
        "off",
        "a checkpoint that a run with FSDP loads may lack parameters, or have unknown ones",
        dest="strict_fsdp_dtensor_load",
    ),
    row("--auto-detect-ckpt-format", "switch", "find the format out from the directory"),
    row(
        "--dist-ckpt-strictness",
        str,
        "what missing and unexpected keys do",
        "assume_ok_unexpected",
        choices=STRICTNESS,
    ),
    row(
        "--dist-ckpt-optim-fully-reshardable",
        "switch",
        "torch_dist optimizer state that loads at any layout",
    ),
    row(
        "--distrib-optim-fully-reshardable-mem-efficient",
        "switch",
        "gather that state over gloo",
    ),
    row("--async-save", "switch", "write while training goes on"),
    row("--use-persistent-ckpt-worker", "switch", "one writer process for all saves"),
    row(
        "--async-strategy",
        str,
        "library that writes asynchronously",
        "nvrx",
        choices=("nvrx", "mcore"),
    ),
    row("--dist-ckpt-workers", int, "writer processes per rank", 1),
    row("--non-persistent-save-interval", int, "extra saves that are overwritten"),
    row(
        "--non-persistent-ckpt-type",
        str,
        "where they go",
        choices=("global", "local", "in_memory"),
    ),
    row("--non-persistent-global-ckpt-dir", str, "directory of those of type global"),
    row("--ckpt-assume-constant-structure", "switch", "reuse the plan of the save before"),
    row(
        "--ckpt-fully-parallel-save",
        "switch",
        "deprecated: is the default",
        dest="ckpt_fully_parallel_save_deprecated",
    ),
    row(
        "--no-ckpt-fully-parallel-save",
        "off",
        "the first rank of a data-parallel group writes",
        dest="ckpt_fully_parallel_save",
    ),
    row("--ckpt-fully-parallel-load", "switch", "ranks read parts and exchange them"),
    row("--no-save-optim", "switch", "save no optimizer state"),
    row("--no-save-rng", "switch", "save no random state"),
    row("--no-load-optim", "switch", "load no optimizer state"),
    row("--no-load-rng", "switch", "load no random state"),
    row("--finetune", "switch", "load weights only and start at iteration 0"),
    row("--ckpt-step", int, "iteration to load instead of the newest"),
    row("--exit-on-missing-checkpoint", "switch", "stop where --load holds no checkpoint"),
    row("--use-checkpoint-args", "switch", "arguments of the model from the checkpoint"),
    row("--no-check-checkpoint-args", "switch", "load the weights of another model too"),
    row("--pretrained-checkpoint", str, "load these weights where --load has no checkpoint"),
    row(
        "--dump-param-to-param-group-map",
        str,
        "write which optimizer group each parameter is in",
    ),
    row("--verify-integrity", "switch", "is the default"),
    row("--no-verify-integrity", "switch", "load without digests and checksums of the files"),
    row("--load-main-params-from-ckpt", "switch", "main weights from the file"),
)
