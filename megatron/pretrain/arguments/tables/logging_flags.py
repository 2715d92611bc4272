# SPDX-License-Identifier: Apache-2.0
"""Rows of the flags of logging and profiling."""

from megatron.pretrain.arguments.flags import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    DEFAULT,
    DEPRECATED_DEFAULT,
    EMPTY_IS_NONE,
    Flag,
    Idle,
    Needs,
    NotCaptured,
    Redundant,
    Refused,
    choice,
    integer,
    number,
    off_switch,
    switch,
    text,
)
from megatron.pretrain.arguments.tables.file_flags import NEEDS_SAVE
from megatron.pretrain.arguments.tables.model_fields import NOT_WRITTEN

NEEDS_PROFILE = Needs("profile")
NEEDS_SCALARS = Needs("tensorboard_dir", unless="wandb_project")
NEEDS_WANDB = Needs("wandb_project")
USE_TIMERS = Refused("use --timing-log-level 1 --timing-log-option all, or --profile")
PRIVATE_LOGGER = Redundant("names a logger that is not public; nothing is sent")
IDLE_WITHOUT_TIMERS = Idle(lambda args: not args.timing_log_level, "with --timing-log-level 0")


LOGGING_FLAGS: dict[str, tuple[Flag, ...]] = {
    "logging and profiling": (
        integer("--log-interval", "iterations per line", AT_LEAST_1, default=100),
        text(
            "--log-dir",
            Refused("torchrun has it: torchrun --log-dir DIR --redirects 3 --local-ranks-filter 0"),
        ),
        switch("--log-throughput", "is always there: TFLOP/s per device", DEFAULT),
        number(
            "--device-peak-tflops", "peak of a device, for MFU; default: known or measured", ABOVE_0
        ),
        switch("--log-params-norm", "norm of all weights"),
        switch("--log-energy", Refused("nvidia-smi and DCGM measure energy")),
        switch(
            "--log-timers-to-tensorboard",
            "timers in TensorBoard",
            NEEDS_SCALARS,
            IDLE_WITHOUT_TIMERS,
        ),
        switch("--log-validation-ppl-to-tensorboard", "validation perplexity there", NEEDS_SCALARS),
        switch("--log-memory-to-tensorboard", "memory use in TensorBoard", NEEDS_SCALARS),
        off_switch(
            "--no-log-loss-scale-to-tensorboard", "no loss scale in TensorBoard", NEEDS_SCALARS
        ),
        switch("--log-world-size-to-tensorboard", NOT_WRITTEN),
        switch(
            "--log-batch-size-to-tensorboard", "deprecated: is always there", DEPRECATED_DEFAULT
        ),
        switch(
            "--log-learning-rate-to-tensorboard", "deprecated: is always there", DEPRECATED_DEFAULT
        ),
        integer("--log-memory-interval", NOT_WRITTEN),
        switch("--log-progress", "append to progress.txt in the --save directory", NEEDS_SAVE),
        integer("--logging-level", "level of Python's logging, e.g. 20 for INFO", AT_LEAST_0),
        integer(
            "--timing-log-level",
            "1 times phases, 2 every microbatch",
            NotCaptured("timers wait for the device"),
            default=0,
            choices=(0, 1, 2),
        ),
        choice(
            "--timing-log-option",
            "max|minmax|all",
            "how times of ranks are shown",
            IDLE_WITHOUT_TIMERS,
            default="minmax",
        ),
        switch(
            "--barrier-with-L1-time",
            "ranks meet before a phase: is the default",
            IDLE_WITHOUT_TIMERS,
            default=True,
        ),
        off_switch(
            "--no-barrier-with-level-1-timing",
            "they do not",
            IDLE_WITHOUT_TIMERS,
            dest="barrier_with_L1_time",
        ),
        text("--tensorboard-dir", "directory of TensorBoard files"),
        integer("--tensorboard-log-interval", NOT_WRITTEN, default=1),
        integer("--tensorboard-queue-size", NOT_WRITTEN, default=1000),
        text(
            "--wandb-project",
            "project in Weights & Biases, which gets all numbers too",
            EMPTY_IS_NONE,
        ),
        text("--wandb-exp-name", "name of the run there", EMPTY_IS_NONE, NEEDS_WANDB),
        text("--wandb-entity", "owner of the project there", EMPTY_IS_NONE, NEEDS_WANDB),
        text("--wandb-save-dir", "directory of its files; default: wandb in --save", NEEDS_WANDB),
        switch(
            "--profile",
            "write traces of steps to --tensorboard-dir, or to profile/",
            Needs("skip_train", (False,), "and --skip-train exclude each other"),
        ),
        integer(
            "--profile-step-start",
            "first of them, counted from 0 in this run",
            NEEDS_PROFILE,
            default=10,
        ),
        integer(
            "--profile-step-end", "step before which the profile ends", NEEDS_PROFILE, default=12
        ),
        integer(
            "--profile-ranks", "ranks that write traces", NEEDS_PROFILE, default=[0], nargs="+"
        ),
        switch("--use-pytorch-profiler", "write those of torch.profiler too", NEEDS_PROFILE),
        switch("--record-memory-history", "record GPU allocations"),
        text(
            "--memory-snapshot-path",
            "file for them",
            Needs("record_memory_history"),
            default="snapshot.pickle",
        ),
        switch("--log-straggler", USE_TIMERS),
        switch("--disable-straggler-on-startup", USE_TIMERS),
        integer("--straggler-ctrlr-port", USE_TIMERS, default=65535),
        integer("--straggler-minmax-count", USE_TIMERS, default=1),
        off_switch(
            "--no-one-logger",
            "no NVIDIA one-logger",
            Redundant("that logger is not public; nothing is sent anyway"),
            dest="enable_one_logger",
        ),
        text(
            "--one-logger-project",
            "project of an external logger",
            PRIVATE_LOGGER,
            default="megatron-lm",
        ),
        text("--one-logger-run-name", "run of that logger", PRIVATE_LOGGER),
        switch("--one-logger-async", "send to that logger in the background", PRIVATE_LOGGER),
        text("--app-tag-run-name", "name of the job in that logger", PRIVATE_LOGGER),
        text(
            "--app-tag-run-version",
            "version of the job in that logger",
            PRIVATE_LOGGER,
            default="0.0.0",
        ),
    ),
}
"""Title of a group in --help -> rows."""
