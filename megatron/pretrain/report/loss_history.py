# SPDX-License-Identifier: Apache-2.0
"""The history of a run's losses, in a file beside its checkpoints, whose truth it follows."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from megatron.checkpoint.store import durable

HISTORY = "losses.jsonl"
STAGED_HISTORIES = ".losses_*.jsonl"

Entry = dict[str, float]
"""``iteration``, and ``train`` or ``validation``: a loss in nats per token."""


class LossHistory:
    """The losses of all iterations up to the last, one JSON object a line.

    The file belongs to the newest checkpoint. While one is saved, the history up to it is in a
    second file, which replaces the first when the checkpoint is published. So at any time there is
    a history without a gap for both.

    Args:
        folder: of the checkpoints.

    Attributes:
        entries: by rising iteration.
    """

    def __init__(self, folder: Path):
        self.entries: list[Entry] = []
        self._path = folder / HISTORY
        self._staged: Path | None = None

    def resume(self, iteration: int) -> str | None:
        """Take up the history of the checkpoint of ``iteration``, without what came after it.

        Returns:
            A note, if a file was damaged. It is set aside, and its sound lines are taken.
        """
        staged = self._staged_of(iteration)
        # It is there if the run was killed when the checkpoint had just been published.
        path = staged if staged.is_file() else self._path
        if not path.is_file():
            return None
        lines = path.read_text(errors="replace").splitlines()
        sound = [entry for entry in map(_parsed, lines) if entry is not None]
        self.entries = [entry for entry in sound if entry["iteration"] <= iteration]
        if len(sound) == len(lines):
            return None
        aside = _set_aside(path)
        damaged = len(lines) - len(sound)
        return f"{damaged} of {len(lines)} lines of {path} are damaged: it is now {aside.name}"

    def stage(self, iteration: int) -> None:
        """Write the history up to ``iteration``, whose checkpoint is about to be published."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        staged = self._staged_of(iteration)
        durable.write_text(staged, self._text())
        self._staged = staged

    def keep(self) -> None:
        """Make the history that of the newest checkpoint."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._staged is not None:
            durable.rename(self._staged, self._path)
            self._staged = None
        else:
            durable.write_text(self._path, self._text())
        for staged in self._path.parent.glob(STAGED_HISTORIES):
            staged.unlink()  # of a checkpoint that was never published, or is not the newest

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Return the points of ``train`` or ``validation``."""
        return [(int(entry["iteration"]), entry[name]) for entry in self.entries if name in entry]

    def _staged_of(self, iteration: int) -> Path:
        return self._path.with_name(f".{self._path.stem}_{iteration:07d}.jsonl")

    def _text(self) -> str:
        return "".join(json.dumps(entry) + "\n" for entry in self.entries)


def _set_aside(path: Path) -> Path:
    """Rename a damaged file and return its new path."""
    numbered = (path.with_name(f"{path.name}.damaged_{number}") for number in itertools.count(1))
    aside = next(each for each in numbered if not each.exists())
    durable.rename(path, aside)
    return aside


def _parsed(line: str) -> Entry | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_entry = isinstance(entry, dict) and isinstance(entry.get("iteration"), int)
    if not is_entry or not all(isinstance(value, (int, float)) for value in entry.values()):
        return None
    return {str(name): value for name, value in entry.items()}
