# SPDX-License-Identifier: Apache-2.0
"""Directories of checkpoints.

They have a folder for each iteration, and a tracker file that names the newest complete one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.store import durable

METADATA = ".metadata"
"""File of a DCP directory that lists its entries."""
TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Stands for the iteration of initial weights that were converted from another program."""

CONVERSION_JOURNAL = ".conversion"
"""Directory in the staging directory of a conversion, with the result of every finished part."""
CONVERSION_IDENTITY = ".conversion_identity"
"""File in the output of a conversion that has not come to its end: the digest of the conversion."""

_ITERATION = re.compile(r"^iter_(\d{7,})$")
_TEMPORARY = (".*.tmp", f"{Path(TRACKER).stem}.new")
"""Files that are written before they replace another one; the second name is of older versions."""


def iteration_directory(root: str | Path, iteration: int | str) -> Path:
    """Return the directory of a complete iteration, or of a release."""
    name = RELEASE
    if iteration != RELEASE:
        name = f"iter_{iteration:07d}"
    return Path(root) / name


def iteration_of(name: str) -> int | None:
    """Return the iteration that a directory is named after; None for another name."""
    number = _ITERATION.match(name)
    if number is None:
        return None
    return int(number[1])


def is_checkpoint_name(name: str) -> bool:
    """Return True for the name of the directory of an iteration, or of a release."""
    return name == RELEASE or _ITERATION.match(name) is not None


def find(root: str | Path, iteration: int | str) -> Path | None:
    """Find the directory of a complete iteration; None if it is missing.

    A save that replaces an iteration and is killed between its two renames leaves the old one under
    another name, which is then found.
    """
    final = iteration_directory(root, iteration)
    for path in (final, _replaced(final)):
        if path.is_dir():
            return path
    return None


def _replaced(final: Path) -> Path:
    return final.with_name(f".old_{final.name}")


def iterations(root: str | Path) -> list[int]:
    """Return the iterations that :func:`find` finds in a directory, the newest first."""
    found = set()
    for path in Path(root).glob("*iter_*"):
        number = iteration_of(path.name.removeprefix(".old_"))
        if number is not None and path.is_dir():
            found.add(number)
    return sorted(found, reverse=True)


def staging_directory(root: str | Path, iteration: int | str) -> Path:
    """Return the directory in which an iteration is written before it is published.

    No reader looks there.
    """
    return Path(root) / f".writing_{iteration_directory('', iteration).name}"


def read_tracker(root: str | Path) -> int | str | None:
    """Read the newest complete iteration, or ``RELEASE``; None without a tracker file.

    Raises:
        ValueError: if the tracker names no iteration.
    """
    path = Path(root) / TRACKER
    if not path.is_file():
        return None
    with durable.naming(path):
        text = path.read_text(errors="replace").strip()
    if text == RELEASE:
        return RELEASE
    if not text.isdecimal():
        raise ValueError(f"{path} should hold an iteration number but holds {text[:40]!r}")
    return int(text)


def write_tracker(root: str | Path, iteration: int | str) -> None:
    """Name the newest complete iteration in the tracker file."""
    durable.write_text(Path(root) / TRACKER, str(iteration))


def locate(path: str | Path) -> Path:
    """Return the directory of one iteration: ``path``, or the one that its tracker names.

    Raises:
        ValueError: if there is no checkpoint; the message describes the directory.
    """
    path = Path(path)
    if path.is_file():
        raise ValueError(f"{path} is a file; a directory of a checkpoint is expected")
    if not path.is_dir():
        raise ValueError(f"{path} is not there; a directory of a checkpoint is expected")
    if (path / METADATA).is_file():
        return path
    iteration = read_tracker(path)
    if iteration is None:
        hint = ""
        inside = sorted(found.name for found in path.iterdir() if is_checkpoint_name(found.name))
        if inside:
            hint = f"; name one of {', '.join(inside)}"
        raise ValueError(f"{path} is no checkpoint: it has neither {METADATA} nor {TRACKER}{hint}")
    found = find(path, iteration)
    if found is None:
        raise ValueError(
            f"{path / TRACKER} names {iteration_directory('', iteration)}, which is not there"
        )
    return found


@dataclass(frozen=True)
class OutputDirectory:
    """A directory that appears when it is complete.

    Attributes:
        final: path of the directory.
        tracked: its iteration, which the tracker file then names; None for a directory without a
            tracker.
        must_be_new: paths where nothing may be, but for what an interrupted conversion has left.
    """

    final: Path
    tracked: int | str | None = None
    must_be_new: tuple[Path, ...] = ()

    @property
    def staging(self) -> Path:
        """Directory in which it is written before; no reader looks there."""
        return self.final.with_name(f".writing_{self.final.name}")

    @property
    def tracker(self) -> Path:
        """The tracker file, in the directory above."""
        return self.final.parent / TRACKER

    def is_published(self, identity: str) -> bool:
        """Return True if a conversion with this identity was interrupted after it was renamed.

        Raises:
            ValueError: if there is anything else.
        """
        is_own = has_identity(self.final, identity)
        leftovers = set()
        if is_own:
            leftovers = {self.final, durable.temporary_of(self.tracker)}
            if self.tracker.is_file() and self.tracker.read_text() == str(self.tracked):
                leftovers.add(self.tracker)
        for path in self.must_be_new:
            is_link = path == self.final and path.is_symlink()  # which no rename replaces
            if is_link or not (path in leftovers or leftovers.issuperset(_content(path))):
                raise ValueError(
                    f"{path} exists; nothing is overwritten: name a new directory, or remove it"
                )
        return is_own

    def publish(self) -> None:
        """Make the directory visible; called on one rank, when the disk has its files.

        Each step is on the disk before the next one, as in :func:`publish`.
        """
        _sync_directories(self.staging)
        if self.final.exists():
            self.final.rmdir()  # it was empty
        durable.rename(self.staging, self.final)
        self.track()

    def track(self) -> None:
        """Name the iteration in the tracker file."""
        if self.tracked is not None:
            write_tracker(self.final.parent, self.tracked)

    def complete(self) -> None:
        """Forget what a conversion would be continued by; the last step of one, on one rank."""
        (self.final / CONVERSION_IDENTITY).unlink(missing_ok=True)


def has_identity(path: Path, identity: str) -> bool:
    """Return True for the staging or final directory of a conversion with this identity."""
    known = path / CONVERSION_IDENTITY
    return known.is_file() and known.read_bytes() == identity.encode()


def new_checkpoint(path: str | Path, iteration: int | str) -> OutputDirectory:
    """Return the directory for a new checkpoint of ``iteration``.

    It is in the directory ``path``, or ``path`` itself if that is the name of an iteration.

    Raises:
        ValueError: if ``path`` is the name of another iteration.
    """
    path = Path(path)
    if not is_checkpoint_name(path.name):
        return OutputDirectory(iteration_directory(path, iteration), iteration, (path,))
    if path.name != iteration_directory("", iteration).name:
        raise ValueError(
            f"{path}: the checkpoint is of {iteration_directory('', iteration)}, not {path.name}"
        )
    # A tracker that is there would name this iteration instead of the newest.
    return OutputDirectory(path, iteration, (path, path.parent / TRACKER))


def same_iteration(source: Path, path: str | Path) -> OutputDirectory:
    """Return the directory for a changed copy of ``source``: of its iteration, if it has one."""
    if not is_checkpoint_name(source.name):
        return new_directory(path)
    number = iteration_of(source.name)
    if number is None:
        return new_checkpoint(path, RELEASE)
    return new_checkpoint(path, number)


def new_directory(path: str | Path) -> OutputDirectory:
    """Return a new directory without iterations."""
    path = Path(os.path.abspath(path))
    return OutputDirectory(path, must_be_new=(path,))


def _content(path: Path) -> list[Path]:
    """Return what is at a path: it itself, or what is in the directory, without what is staged."""
    if path.is_dir():
        complete = []
        for found in path.iterdir():
            if not found.name.startswith(".writing_"):
                complete.append(found)
        return complete
    if os.path.lexists(path):
        return [path]
    return []


def prepare(root: str | Path, iteration: int | str) -> Path:
    """Return an empty staging directory; called on one rank.

    What saves that were killed have left is removed.
    """
    if Path(root).is_dir():
        tidy(root)
    staging = staging_directory(root, iteration)
    shutil.rmtree(staging, ignore_errors=True)  # a conversion of the same iteration
    staging.mkdir(parents=True)
    return staging


def tidy(root: str | Path) -> None:
    """Remove what saves that were killed have left; called on one rank.

    An iteration that was to be replaced, and was not yet, gets its name back.
    """
    root = Path(root)
    for staging in root.glob(".writing_*"):
        if not (staging / CONVERSION_JOURNAL).exists():  # a conversion can be continued
            remove(staging)
    for old in root.glob(".old_*"):
        final = old.with_name(old.name.removeprefix(".old_"))
        if final.exists() or not old.is_dir():
            remove(old)
        else:
            durable.rename(old, final)
    for deleted in root.glob(".deleted_*"):
        remove(deleted)
    for pattern in _TEMPORARY:
        for temporary in root.glob(pattern):
            if temporary.is_file():
                temporary.unlink()


def remove(path: Path) -> None:
    """Remove a directory with all that is in it, or whatever else has that name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def publish(root: str | Path, iteration: int | str) -> Path:
    """Make a completely written checkpoint visible: rename it, then point the tracker at it.

    Called on one rank, when the disk has the content of the files. Each step is on the disk before
    the next one, so that a loss of power leaves what a kill leaves.
    """
    staging = staging_directory(root, iteration)
    final = iteration_directory(root, iteration)
    old = _replaced(final)
    _sync_directories(staging)
    if final.exists():
        if old.exists():
            shutil.rmtree(old)
        durable.rename(final, old)
    durable.rename(staging, final)
    write_tracker(root, iteration)
    shutil.rmtree(old, ignore_errors=True)
    return final


def _sync_directories(path: Path) -> None:
    for directory, _, _ in os.walk(path, topdown=False):
        durable.sync_directory(Path(directory))


def discard(root: str | Path, iteration: int) -> None:
    """Remove the files of a failed save; called on one rank."""
    shutil.rmtree(staging_directory(root, iteration), ignore_errors=True)


def retain(
    root: str | Path,
    interval: int | None,
    newest: int,
) -> None:
    """Delete all checkpoints but some; called on one rank.

    Args:
        root: directory of the checkpoints.
        interval: iterations that are multiples of it are kept; None keeps no others.
        newest: the newest iteration, which is kept.
    """
    for iteration in not_retained(iterations(root), interval, newest):
        delete(root, iteration)


def not_retained(
    there: Iterable[int],
    interval: int | None,
    newest: int,
) -> list[int]:
    """Return the iterations that are to be deleted.

    Args:
        there: the iterations that there are.
        interval: multiples of it are kept; None keeps no others.
        newest: the newest iteration, which is kept.
    """
    deleted = []
    for iteration in there:
        is_multiple = interval is not None and iteration % interval == 0
        if iteration != newest and not is_multiple:
            deleted.append(iteration)
    return deleted


def delete(root: str | Path, iteration: int) -> None:
    """Delete a checkpoint, if it is there; called on one rank."""
    path = iteration_directory(root, iteration)
    if path.is_dir():
        # A kill must not leave a part of it under the name of a checkpoint.
        deleted = path.with_name(f".deleted_{path.name}")
        durable.rename(path, deleted)
        shutil.rmtree(deleted)
