# SPDX-License-Identifier: Apache-2.0
"""The losses of a run: their history beside its checkpoints, and a plot of them."""

from __future__ import annotations

import io
import json
from pathlib import Path

from megatron.checkpoint.store import durable
from megatron.mcore_adapter.run.files_beside import HISTORY
from megatron.pretrain.report.quantities import significant

Entry = dict[str, float]
"""``iteration``, and ``train`` or ``validation``: a loss in nats per token."""
Points = list[tuple[int, float]]


class LossHistory:
    """The losses of all iterations, one JSON object a line.

    The file is written before a checkpoint is published. A run that resumes takes the losses up to
    its checkpoint, so there is no gap for either the old or the new one.

    Args:
        folder: folder of the checkpoints.

    Attributes:
        entries: losses by rising iteration.
    """

    def __init__(self, folder: Path):
        self.entries: list[Entry] = []
        self._path = folder / HISTORY

    def resume(self, iteration: int) -> str | None:
        """Take up the history up to ``iteration``; return a note if lines were damaged."""
        if not self._path.is_file():
            return None
        lines = self._path.read_text(errors="replace").splitlines()
        sound = [entry for entry in map(_parsed, lines) if entry is not None]
        self.entries = [entry for entry in sound if entry["iteration"] <= iteration]
        num_damaged = len(lines) - len(sound)
        if not num_damaged:
            return None
        return f"{num_damaged} of {len(lines)} lines of {self._path} are damaged and left out"

    def write(self) -> None:
        """Write the history so far."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(entry) + "\n" for entry in self.entries]
        durable.write_text(self._path, "".join(lines))

    def curve(self, name: str) -> Points:
        """Return the points of ``train`` or ``validation``."""
        return [(int(entry["iteration"]), entry[name]) for entry in self.entries if name in entry]


def _parsed(line: str) -> Entry | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_entry = isinstance(entry, dict) and isinstance(entry.get("iteration"), int)
    if not is_entry or not all(isinstance(value, (int, float)) for value in entry.values()):
        return None
    return entry


def draw_loss_curves(path: Path, train: Points, valid: Points) -> bool:
    """Draw the loss curves of a run as a PNG of 1280 x 800 pixels.

    The file appears complete or not at all. Losses that are not finite leave a gap.

    Args:
        path: the PNG to write; missing folders are made.
        train: (iteration, training loss in nats per token), by rising iteration.
        valid: (iteration, validation loss in nats per token); may be empty.

    Returns:
        True if a plot was written; False without matplotlib, or without any point.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    curves = {"training": train, "validation": valid}
    drawn = {name: points for name, points in curves.items() if points}
    if not drawn:
        return False
    figure = Figure(figsize=(8, 5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in drawn.items():
        # A single point is invisible without a marker; hundreds of markers hide the line.
        axes.plot(*zip(*points), marker="o" if len(points) <= 30 else "", label=name)
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nats per token)")
    last = [f"{name} {significant(points[-1][1], 4)}" for name, points in drawn.items()]
    iteration = max(points[-1][0] for points in drawn.values())
    axes.set_title(f"Loss after {iteration} iterations: {', '.join(last)}")
    axes.grid(alpha=0.3)
    axes.legend()

    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.write_bytes(path, picture.getvalue())
    return True
