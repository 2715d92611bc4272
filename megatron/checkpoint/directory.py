# SPDX-License-Identifier: Apache-2.0
"""Directories of checkpoints: one folder per iteration, and a tracker file that names the newest complete one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"


def iteration_directory(root: str | Path, iteration: int) -> Path:
    return Path(root) / f"iter_{iteration:07d}"


def find(root: str | Path, iteration: int) -> Path | None:
    """The directory of a complete iteration; None where there is none.

    A save that replaces an iteration and is killed between its two renames leaves the old one under another name.
    """
    final = iteration_directory(root, iteration)
    return next((path for path in (final, _replaced(final)) if path.is_dir()), None)


def _replaced(final: Path) -> Path:
    return final.with_name(f".old_{final.name}")


def staging_directory(root: str | Path, iteration: int) -> Path:
    """Where an iteration is written before it is published. No reader looks there."""
    return Path(root) / f".writing_iter_{iteration:07d}"


def read_tracker(root: str | Path) -> int | None:
    """The newest complete iteration; None without a tracker file.

    Raises:
        ValueError: where the tracker names no iteration.
    """
    path = Path(root) / TRACKER
    if not path.is_file():
        return None
    text = path.read_text().strip()
    if not text.isdigit():
        raise ValueError(f"{path} should hold an iteration number but holds {text[:40]!r}")
    return int(text)


def prepare(root: str | Path, iteration: int) -> Path:
    """An empty staging directory. Called on one rank."""
    staging = staging_directory(root, iteration)
    if staging.exists():  # left by a save that was interrupted
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    return staging


def publish(root: str | Path, iteration: int) -> Path:
    """Make a completely written checkpoint visible: rename it, then point the tracker at it. Called on one rank."""
    staging, final = staging_directory(root, iteration), iteration_directory(root, iteration)
    old = _replaced(final)
    if final.exists():
        if old.exists():
            shutil.rmtree(old)
        final.rename(old)
    staging.rename(final)
    tracker = Path(root) / TRACKER
    new = tracker.with_suffix(".new")
    with open(new, "w") as file:
        file.write(str(iteration))
        file.flush()
        os.fsync(file.fileno())
    new.replace(tracker)
    shutil.rmtree(old, ignore_errors=True)
    return final


def discard(root: str | Path, iteration: int) -> None:
    """Remove what a failed save has written. Called on one rank."""
    shutil.rmtree(staging_directory(root, iteration), ignore_errors=True)


def retain(root: str | Path, interval: int, newest: int) -> None:
    """Delete the checkpoints whose iteration is no multiple of ``interval``, but not the newest. Called on one rank."""
    for path in sorted(Path(root).glob("iter_*")):
        number = path.name.removeprefix("iter_")
        if number.isdigit() and int(number) != newest and int(number) % interval:
            shutil.rmtree(path)
