# SPDX-License-Identifier: Apache-2.0
"""The persistent checkpoint that a non-persistent one followed.

A newer non-persistent checkpoint goes before the one that the tracker file names, but not where a
person has edited the tracker file to go back, or a run has gone on from an earlier ``--ckpt-step``:
then it is of a branch that was given up. So each non-persistent checkpoint has a file that says
what the tracker file named when it was saved. It is written before the checkpoint is published, and
appears with it.
"""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint.store import directory, durable
from megatron.pretrain.checkpoints.abandoned_checkpoints import newest_kept

FOLLOWED = "followed_iteration.txt"
"""Name of the file in the directory of a non-persistent checkpoint."""


def tracked_in(root: str | Path) -> str | None:
    """Return what the tracker file of a directory names; None if it is damaged or not there."""
    try:
        tracked = directory.read_tracker(root)
    except (ValueError, OSError):
        return None
    return None if tracked is None else str(tracked)


def followed_now(save: str | Path, under_way: int | None = None) -> str:
    """Return the names that the tracker file may have beside what is saved now, with blanks.

    Args:
        save: the directory of the persistent checkpoints.
        under_way: iteration of a checkpoint that is being written there in the background.
    """
    names = [tracked_in(save), under_way, newest_kept(save)]
    return " ".join(str(name) for name in names if name is not None)


def write_followed(save: str | Path, checkpoint: Path) -> None:
    """Write what a non-persistent checkpoint follows into its directory, before it is published."""
    durable.write_text(checkpoint / FOLLOWED, followed_now(save))


def followed_by(checkpoint: Path) -> str | None:
    """Return what a non-persistent checkpoint followed, None if it does not say so."""
    file = checkpoint / FOLLOWED
    return file.read_text(errors="replace") if file.is_file() else None


def is_given_up(iteration: int, followed: str | None, tracked: str | None) -> bool:
    """Return True if a non-persistent checkpoint is of a branch that was given up.

    A tracker file that names a later checkpoint, which turned out to be damaged, does not go back.

    Args:
        iteration: of the non-persistent checkpoint.
        followed: by it; None: it does not say.
        tracked: what the tracker file names; None: nothing that could be compared.
    """
    if followed is None or tracked is None or tracked in followed.split():
        return False
    return not (tracked.isdecimal() and int(tracked) > iteration)
