# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that a run loads: which one --load and --pretrained-checkpoint name."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.core import directory

Say = Callable[[str], None]
"""Prints one line for the user, on the first rank."""

NON_PERSISTENT = "non_persistent"
"""Directory of the checkpoint that --non-persistent-save-interval overwrites, beside the others."""


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint to load."""

    path: Path
    weights_only: bool
    """Load the weights and start anew: no optimizer state, no schedule, no progress."""


def find_source(args: argparse.Namespace, say: Say) -> CheckpointSource | None:
    """Return the checkpoint to load, None to start from scratch.

    Args:
        args: ``load`` goes first, at iteration ``ckpt_step`` or the newest; only weights of it are
            loaded with ``finetune``. Of ``pretrained_checkpoint`` only weights are ever loaded.
            ``exit_on_missing_checkpoint`` refuses a ``load`` without a checkpoint.
        say: prints a line.

    Raises:
        ValueError: there is no such checkpoint, or it is not clear which one is meant.
    """
    load, pretrained = args.load, args.pretrained_checkpoint
    for root, weights_only in ((load, args.finetune), (pretrained, True)):
        if not root:
            continue
        if root == load and args.ckpt_step is not None:
            iteration: int | str | None = args.ckpt_step
        elif root == load:
            root, iteration = _newer_of_both(args, load, say)
        else:
            iteration = _newest(root)
        if iteration is None:
            continue
        path = directory.find(root, iteration)
        if path is None:
            missing = directory.iteration_directory(root, iteration)
            inside = ", ".join(_checkpoints_in(root)) or "none"
            raise ValueError(f"there is no checkpoint {missing}; in {root} are: {inside}")
        return CheckpointSource(path, weights_only or iteration == directory.RELEASE)
    if pretrained:
        raise ValueError(f"--pretrained-checkpoint {pretrained} has no {directory.TRACKER}")
    if load and (args.exit_on_missing_checkpoint or args.finetune):
        flag = "--exit-on-missing-checkpoint" if args.exit_on_missing_checkpoint else "--finetune"
        raise ValueError(f"{flag}: {load} has no {directory.TRACKER}")
    if load:
        say(f"{load} has no {directory.TRACKER}: starting from scratch")
    return None


def non_persistent_root(args: argparse.Namespace, root: str) -> str:
    """Return the directory of the non-persistent checkpoint that belongs to those in ``root``."""
    return args.non_persistent_global_ckpt_dir or str(Path(root) / NON_PERSISTENT)


def _newer_of_both(args: argparse.Namespace, load: str, say: Say) -> tuple[str, int | str | None]:
    """Return the directory and the iteration of the newest checkpoint, non-persistent or not."""
    newest = _newest(load)
    extra_root = non_persistent_root(args, load)
    extra = directory.read_tracker(extra_root)
    if not isinstance(extra, int) or (isinstance(newest, int) and newest >= extra):
        return load, newest
    if args.non_persistent_ckpt_type == "global":
        return extra_root, extra
    say(
        f"{extra_root} has a newer one, of iteration {extra}, which only"
        " --non-persistent-ckpt-type global loads"
    )
    return load, newest


def _newest(root: str) -> int | str | None:
    """Return the newest complete iteration of a directory, None if it has no checkpoint at all.

    Raises:
        ValueError: it is a file, or has checkpoints and does not say which one is the newest. A run
            must not begin from scratch beside them.
    """
    path = Path(root)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{root} is a file; a directory with checkpoints is expected")
    iteration = directory.read_tracker(root)
    if iteration is not None:
        return iteration
    if (path / ".metadata").is_file():
        raise ValueError(
            f"{root} is itself the directory of one checkpoint: name the directory above it, and"
            " its iteration by --ckpt-step"
        )
    inside = _checkpoints_in(root)
    if inside:
        raise ValueError(
            f"{root} has checkpoints ({', '.join(inside)}) but no {directory.TRACKER}, which names"
            " the newest complete one: choose one by --load and --ckpt-step, or write its iteration"
            " into that file"
        )
    return None


def _checkpoints_in(root: str) -> list[str]:
    """Return the names of the checkpoints of a directory."""
    found = [path.name for path in Path(root).glob("iter_*")]
    found += [path.name for path in Path(root).glob(directory.RELEASE)]
    return sorted(found)
