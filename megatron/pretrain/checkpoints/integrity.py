# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint: written at a save and compared at a load, by all ranks together."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from megatron.checkpoint.core.listing import listed
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.integrity.manifest import FileDigest, Manifest, digests_of_rank
from megatron.fsdp.engine.collectives import agree
from megatron.pretrain.checkpoints.url_saves import reading_share
from megatron.pretrain.errors import RunError, is_of_machine


def sign(target: Path) -> list[str]:
    """Write the manifest of a checkpoint whose files are complete; a collective.

    Every rank reads the files that it has written.

    Returns:
        The problems of all ranks, the same on every rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    digests: dict[str, FileDigest] = {}
    problem = None
    try:
        digests = digests_of_rank(target, rank, world_size)
    except OSError as error:
        problem = f"rank {rank}: {type(error).__name__}: {error}"
    of_ranks: list[dict[str, FileDigest]] = [{}] * world_size
    dist.all_gather_object(of_ranks, digests)
    if rank == 0:
        files: dict[str, FileDigest] = {}
        for each in of_ranks:
            files |= each
        try:
            Manifest(target, files).write()
        except OSError as error:
            problem = f"cannot write the manifest: {error}"
    return agree([problem] if problem else [])


def check(source: Path, verify: bool) -> None:
    """Check the files of a checkpoint before anything of it is loaded; a collective.

    Sizes are always compared. Digests, or checksums where there is no manifest, are compared if
    ``verify``; every rank reads its share of the files that it sees.

    Raises:
        ValueError: on every rank, naming the damaged files and the tensors in them.
        RunError: on every rank, if a rank could not read them.
    """
    refused, damaged, unread = [], [], []
    share = reading_share(source)
    try:
        stored = StoredCheckpoint(source, verify)
        damaged = stored.damaged_files(*share)
    except ValueError as error:
        refused = [str(error)]
    except Exception as error:  # files can hold anything, and the other ranks wait
        if is_of_machine(error):
            unread = [f"{source} cannot be read on rank {dist.get_rank()}: {error}"]
        else:
            refused = [f"{source} cannot be loaded: {type(error).__name__}: {error}"]
    unread = agree(unread)
    refused = agree(refused)
    damaged = agree(damaged)
    if unread:
        raise RunError("\n".join(unread))
    if refused:
        raise ValueError(refused[0])
    if damaged:
        raise ValueError(listed(f"{source} is damaged, nothing of it was loaded", damaged))
