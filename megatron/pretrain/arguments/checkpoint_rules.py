# SPDX-License-Identifier: Apache-2.0
"""Rules of checkpoints: where they lie, --use-checkpoint-args, and flags of saves and loads."""

from __future__ import annotations

import argparse
import errno
import os
from pathlib import Path

from megatron.checkpoint.hugging_face.model_arguments import ARGUMENTS, Argument, completed
from megatron.checkpoint.store.stores import fetch, is_staged, local_path, store_of
from megatron.mcore_adapter.checkpoints.checkpoint_arguments import (
    is_stored,
    means_something,
    stored_arguments,
)
from megatron.mcore_adapter.checkpoints.checkpoint_source import find_source
from megatron.mcore_adapter.run.errors import RunError
from megatron.pretrain.arguments.check import Check

LOCATIONS = ("save", "load", "pretrained_checkpoint")
"""Directories of checkpoints, or URLs."""
EXTRA_SAVES = "non_persistent_global_ckpt_dir"
"""A directory, or a URL ``file://``."""
PATHS = (EXTRA_SAVES, "data_cache_path", "tensorboard_dir", "wandb_save_dir")
"""Further directories, which need not exist."""
ENDS_OF_PATHS = ("_path", "_dir", "_file", "_filename", "_cfg", "_model")
SOURCES = ("load", "pretrained_checkpoint")
"""Directories that --use-checkpoint-args reads."""
LEFT_TO_THE_RUN = ("bf16", "fp16", "apply_layernorm_1p")
"""Precision is no property of weights. The last is another name of an argument that is taken."""
UNLESS_GIVEN = ("max_position_embeddings", "padded_vocab_size")
"""Sizes that a later run may change, like arguments of training such as dropout."""


def check_names(check: Check) -> None:
    """Refuse paths that the file system cannot follow: too long ones, and links that go in circles.

    Their flags are taken as not given, for the rules that look at what is there.
    """
    for dest, value in list(check.given.items()):
        if dest not in LOCATIONS and not dest.endswith(ENDS_OF_PATHS):
            continue
        words = value if isinstance(value, list) else [value]
        for word in words:
            try:
                if isinstance(word, str) and "://" not in word:
                    os.stat(word)
            except OSError as error:
                if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
                    problem = f"{check.flag(dest)} {shortened(word)}: {error.strerror}"
                    check.problems.append(problem)
                    check.set_default(dest)
                    break


def shortened(text: str) -> str:
    """Return the beginning and the end of a long text."""
    return text if len(text) < 100 else f"{text[:40]}...{text[-40:]} ({len(text)} characters)"


def replace_urls(check: Check) -> None:
    """Replace URLs by paths: of this machine, or of the directories in which they are staged."""
    args = check.args
    for dest in (*LOCATIONS, EXTRA_SAVES):
        if getattr(args, dest):
            try:
                setattr(args, dest, _path_of(check, dest))
            except ValueError as error:
                check.problems.append(f"{check.flag(dest)} {error}")
    staged = [dest for dest in ("save", "load") if is_staged(getattr(args, dest) or "")]
    for dest in ("non_persistent_save_interval", "non_persistent_ckpt_type"):
        check.require(
            not (staged and getattr(args, dest)),
            f"{check.flag(dest)} {getattr(args, dest)}: not with"
            f" {' and '.join(map(check.flag, staged))} at a URL",
        )
    check.require(
        not (args.overwrite and "save" in staged),
        "--overwrite: nothing can be moved aside at a URL: name another --save, or remove what is"
        " there",
    )


def _path_of(check: Check, dest: str) -> str:
    location: str = getattr(check.args, dest)
    is_elsewhere = "://" in location and not location.startswith("file://")
    if is_elsewhere and dest not in LOCATIONS:
        raise ValueError(f"{location}: only checkpoints are written to URLs; name a directory")
    path = local_path(location)
    store = store_of(path)
    # Ranks and the writers of --async-save are processes of their own.
    has_several = check.machine.world_size > 1 or check.args.async_save
    if has_several and store is not None and store.is_of_process:
        raise ValueError(
            f"{location} is the memory of one process: it needs one rank, and no --async-save"
        )
    return path


def check_directories(check: Check) -> None:
    """Refuse files where directories are needed."""
    # With --use-checkpoint-args an earlier rule has looked at those with checkpoints.
    is_read = check.args.use_checkpoint_args
    for dest in (*LOCATIONS, *PATHS):
        given = getattr(check.args, dest)
        if not given or is_staged(given) or (is_read and dest in SOURCES):
            continue
        target = Path(given).absolute()
        nearest = next(path for path in (target, *target.parents) if path.exists())
        check.require(
            nearest.is_dir(),
            f"{check.flag(dest)} {given}: {nearest} is a file, not a directory",
        )


def take_checkpoint_arguments(check: Check) -> None:
    """Give the model's arguments the values in the checkpoint, as if the command line had them."""
    args = check.args
    if not args.use_checkpoint_args or not (args.load or args.pretrained_checkpoint):
        return
    try:
        # The load reports what it passes over, and also compares the tensors.
        source = find_source(args, lambda line: None, {})
        if source is not None:
            fetch(source.path)
        saved = stored_arguments(source.path) if source else None
    except (ValueError, OSError, RunError) as error:
        check.problems.append(f"--use-checkpoint-args: {error}")
        return
    if source is None:
        check.notes.append(
            f"--use-checkpoint-args: {args.load} has no checkpoint yet, the model is that of the"
            " command line"
        )
        return
    if saved is None:
        check.problems.append(f"--use-checkpoint-args: {source.path} has no arguments")
        return
    replaced = _take(check, saved)
    instead = f", instead of {', '.join(replaced)}" if replaced else ""
    check.notes.append(f"--use-checkpoint-args: the model is that of {source.path}{instead}")


def _take(check: Check, saved: argparse.Namespace) -> list[str]:
    """Take the arguments that a checkpoint has, and return the given flags that lose by it."""
    whole = completed(saved)
    replaced = []
    for argument in (*ARGUMENTS, Argument("seq_length", in_outputs=False)):
        dest = argument.name
        if dest in LEFT_TO_THE_RUN or not is_stored(argument, saved):
            continue
        is_forced = means_something(argument) and dest not in UNLESS_GIVEN
        if dest in check.given and not is_forced:
            continue
        value = getattr(whole, dest) if argument.counts(whole) else argument.default
        if dest not in check.flags:
            check.require(
                value == argument.default,
                f"--use-checkpoint-args: the file's {dest} {value} has no flag here",
            )
            continue
        if dest in check.given and check.given[dest] != value:
            given = check.given[dest]
            shown = "" if isinstance(given, bool) else f" {given}"
            replaced.append(check.flag(dest) + shown)
        setattr(check.args, dest, value)
        check.given[dest] = value
        if dest == "position_embedding_type" and check.args.use_rotary_position_embeddings:
            # The older spelling of one value, rope.
            check.args.use_rotary_position_embeddings = False
            if value != "rope":
                replaced.append("--use-rotary-position-embeddings")
    return replaced


def check_saves(check: Check) -> None:
    """Check the flags of saves in the background and of non-persistent ones."""
    args = check.args
    check.at_most_one("verify_integrity", "no_verify_integrity")
    if args.save_retain_interval and args.save_interval:
        check.require(
            args.save_retain_interval % args.save_interval == 0,
            f"--save-retain-interval {args.save_retain_interval} must be a multiple of"
            f" --save-interval {args.save_interval}",
        )
    if args.save_interval and args.non_persistent_save_interval:
        check.require(
            args.non_persistent_save_interval % args.save_interval,
            f"--non-persistent-save-interval {args.non_persistent_save_interval} must be no"
            f" multiple of --save-interval {args.save_interval}, which saves there anyway",
        )
    is_gathered = args.distrib_optim_fully_reshardable_mem_efficient
    if is_gathered and not args.use_megatron_fsdp:
        flag = check.flag("distrib_optim_fully_reshardable_mem_efficient")
        check.require(
            args.use_distributed_optimizer and args.dist_ckpt_optim_fully_reshardable,
            f"{flag} needs --use-distributed-optimizer and --dist-ckpt-optim-fully-reshardable,"
            " whose state it gathers",
        )
        check.require(
            args.enable_gloo_process_groups,
            f"{flag} gathers over gloo: leave out --disable-gloo-process-groups",
        )
    if args.async_save and "async_strategy" in check.given:
        check.require(
            args.async_strategy == "mcore",
            "--async-strategy nvrx: nvidia-resiliency-ext is not used; leave it out",
        )
        check.notes.append(
            "--async-strategy: each rank's writer process runs torch.distributed.checkpoint or"
            " Megatron-Core's dist_checkpointing"
        )
