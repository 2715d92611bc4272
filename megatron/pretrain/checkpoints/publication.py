# SPDX-License-Identifier: Apache-2.0
"""The end of a save on the first rank: publish a checkpoint, and delete those that it replaces."""

from __future__ import annotations

import argparse

from megatron.checkpoint.store import directory, stores
from megatron.pretrain.checkpoints import abandoned_checkpoints, url_saves
from megatron.pretrain.checkpoints.followed_checkpoint import write_followed


def publish(args: argparse.Namespace, root: str, iteration: int) -> None:
    """Make a checkpoint visible that is completely written.

    Args:
        args: of the run.
        root: directory of the checkpoint; it is a non-persistent one if this is not ``args.save``.
        iteration: of the checkpoint.
    """
    if stores.is_staged(root):
        url_saves.publish(root, iteration)
        return
    staging = directory.staging_directory(root, iteration)
    if root != args.save:
        write_followed(args.save, staging)
    abandoned_checkpoints.mark(args.save, staging)
    directory.publish(root, iteration)


def delete_others(args: argparse.Namespace, root: str, iteration: int) -> None:
    """Delete the checkpoints that are not kept beside one which has just been published.

    Under another ``root`` than ``args.save`` only the newest is kept.
    """
    abandoned_checkpoints.delete(args.save, iteration)
    if root != args.save:
        directory.keep_only(root, iteration)
    elif args.save_retain_interval:
        place = url_saves if stores.is_staged(root) else directory
        place.retain(root, args.save_retain_interval, iteration)
