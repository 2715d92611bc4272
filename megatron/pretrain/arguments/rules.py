# SPDX-License-Identifier: Apache-2.0
"""All rules about arguments, in their order, and those about flags that have no effect."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.store.stores import is_staged
from megatron.pretrain.arguments.check import Check
from megatron.pretrain.arguments.checkpoint_rules import (
    check_saves,
    note_flags_without_effect,
    replace_urls,
    take_checkpoint_arguments,
)
from megatron.pretrain.arguments.config_flags import STATE_DTYPES
from megatron.pretrain.arguments.data_parallel_rules import choose_data_parallelism
from megatron.pretrain.arguments.data_rules import check_data
from megatron.pretrain.arguments.further_rules import check_further_fields
from megatron.pretrain.arguments.machine_rules import fit_to_machine
from megatron.pretrain.arguments.model_rules import complete_model
from megatron.pretrain.arguments.not_built import NEEDS, NOT_BUILT, NOT_BUILT_VALUES
from megatron.pretrain.arguments.number_rules import check_numbers
from megatron.pretrain.arguments.observing_rules import check_observing
from megatron.pretrain.arguments.parallel_rules import check_microbatches, complete_parallelism
from megatron.pretrain.arguments.precision_rules import choose_precision
from megatron.pretrain.arguments.run_length_rules import complete_batch_and_length
from megatron.pretrain.arguments.same_here import note_what_is_the_same
from megatron.pretrain.arguments.schedule_rules import complete_schedule

DIRECTORIES = (
    "save",
    "load",
    "pretrained_checkpoint",
    "non_persistent_global_ckpt_dir",
    "data_cache_path",
    "tensorboard_dir",
    "wandb_save_dir",
    "log_dir",
)
"""Destinations of directories, which need not exist."""
SOURCES = ("load", "pretrained_checkpoint")
"""Destinations of the directories that --use-checkpoint-args reads."""


def refuse_not_built(check: Check) -> None:
    """Refuse flags and values that this version does not implement, each with the reason."""
    for dest, value in check.given.items():
        name = check.flag(dest)
        shown = " ".join(map(str, value)) if isinstance(value, list) else as_written(value)
        if dest in NOT_BUILT and check.changed(dest):
            spelled = name if isinstance(value, bool) else f"{name} {shown}"
            reason = NOT_BUILT[dest]
            check.problems.append(
                f"{spelled}: {'' if 'not built' in reason else 'not built: '}{reason}"
            )
        values = value if isinstance(value, list) else [value]
        for item in values:
            if item in NOT_BUILT_VALUES.get(dest, {}):
                check.problems.append(f"{name} {shown}: {NOT_BUILT_VALUES[dest][item]}")


def as_written(value: Any) -> str:
    """Return the word that stands for a value on the command line."""
    if isinstance(value, torch.dtype):
        return next(word for word, dtype in STATE_DTYPES.items() if dtype == value)
    return str(getattr(value, "name", value))


def check_directories(check: Check) -> None:
    """Refuse files where directories are needed."""
    # With --use-checkpoint-args an earlier rule has looked at those with checkpoints.
    is_read = check.args.use_checkpoint_args
    for dest in DIRECTORIES:
        given = getattr(check.args, dest)
        if not given or is_staged(given) or (is_read and dest in SOURCES):
            continue
        target = Path(given).absolute()
        nearest = next(path for path in (target, *target.parents) if path.exists())
        check.require(
            nearest.is_dir(),
            f"{check.flag(dest)} {given}: {nearest} is a file, not a directory",
        )


def check_checkpoints_and_logging(check: Check) -> None:
    """Check the intervals of saves and the profiler's steps."""
    args = check.args
    check.require(
        not (args.verify_integrity and args.no_verify_integrity),
        "--verify-integrity contradicts --no-verify-integrity",
    )
    if args.save_retain_interval and args.save_interval:
        check.require(
            args.save_retain_interval % args.save_interval == 0,
            f"--save-retain-interval {args.save_retain_interval} must be a multiple of"
            f" --save-interval {args.save_interval}",
        )
    if args.profile:
        start, ranks = args.profile_step_start, args.profile_ranks
        check.require(not args.skip_train, "--profile and --skip-train exclude each other")
        check.require(
            0 <= start < args.profile_step_end,
            "--profile-step-start must be less than --profile-step-end",
        )
        check.require(
            not args.train_iters or start < args.train_iters,
            f"--profile-step-start {start} must be less than --train-iters {args.train_iters}",
        )
        check.require(
            all(0 <= rank < check.machine.world_size for rank in ranks),
            f"--profile-ranks {' '.join(map(str, ranks))}: must be less than the number of ranks,"
            f" {check.machine.world_size}",
        )


def check_needs(check: Check) -> None:
    """Refuse flags that would have no effect beside the others."""
    for rule in NEEDS:
        if rule.is_met(check.args):
            continue
        for dest in rule.dests.split():
            if check.changed(dest):
                check.problems.append(f"{check.flag(dest)} {rule.remedy}")


RULES: tuple[Callable[[Check], None], ...] = (
    replace_urls,
    take_checkpoint_arguments,
    refuse_not_built,
    note_what_is_the_same,
    check_numbers,
    choose_data_parallelism,
    choose_precision,
    complete_parallelism,
    complete_model,
    complete_batch_and_length,
    check_microbatches,
    complete_schedule,
    check_data,
    check_directories,
    check_checkpoints_and_logging,
    check_saves,
    check_observing,
    fit_to_machine,
    check_needs,
    check_further_fields,
    note_flags_without_effect,
)
