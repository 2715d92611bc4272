# SPDX-License-Identifier: Apache-2.0
"""Saves of local checkpoints: every rank writes its own part, and all publish them together."""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from megatron.checkpoint.store import directory
from megatron.pretrain.checkpoints import (
    abandoned_checkpoints,
    checkpointing,
    fsdp_dtensor_checkpoint,
)
from megatron.pretrain.checkpoints.checkpoint_source import Say
from megatron.pretrain.checkpoints.followed_checkpoint import followed_now
from megatron.pretrain.checkpoints.local_checkpoint import (
    identity,
    layout_of,
    part_root,
    remove_parts_of_moved_ranks,
)
from megatron.pretrain.checkpoints.run_identity import run_in
from megatron.pretrain.errors import RunError
from megatron.pretrain.first_rank import on_first_rank


def save(
    args: argparse.Namespace,
    content: Mapping[str, Any],
    iteration: int,
    say: Say,
    under_way: int | None = None,
) -> None:
    """Write the state of the run into a new local checkpoint; a collective.

    Ranks exchange whether they have succeeded. A part is published when all ranks have written
    theirs, and the one before is removed when all have published, so a kill leaves one of the two
    on every rank.

    Args:
        args: of the run.
        content: what :func:`checkpointing.collect` returns for the format fsdp_dtensor.
        iteration: that is saved.
        say: prints a line.
        under_way: iteration of a persistent checkpoint that is being written in the background.

    Raises:
        RunError: on every rank, if any rank has failed.
    """
    root = part_root(args, args.save)
    run, own_save, followed = on_first_rank(
        lambda: (run_in(args.save), uuid.uuid4().hex, followed_now(args.save, under_way))
    )
    part = {**content, **identity(layout_of(args, content), run, own_save, followed)}

    def write() -> None:
        fsdp_dtensor_checkpoint.write_part(part, directory.prepare(root, iteration))

    def publish() -> None:
        directory.publish(root, iteration)

    def give_way() -> None:
        if dist.get_rank() == 0:
            abandoned_checkpoints.succeed(args.save)

    def clean_up() -> None:
        directory.keep_only(root, iteration)
        remove_parts_of_moved_ranks(root, iteration)

    problems = checkpointing.attempt(write)
    if problems:
        checkpointing.attempt(lambda: directory.discard(root, iteration))
    problems = problems or checkpointing.attempt(publish)
    problems = problems or checkpointing.attempt(give_way)
    problems = problems or checkpointing.attempt(clean_up)
    if problems:
        raise RunError(
            f"the save of the local checkpoint of iteration {iteration} failed:\n"
            + "\n".join(problems)
        )
    say(
        f"saved local checkpoint of iteration {iteration} to"
        f" {directory.iteration_directory(root, iteration)} and those of the other ranks"
    )
