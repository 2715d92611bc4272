# SPDX-License-Identifier: Apache-2.0
"""The losses of a run: their history in the directory of checkpoints, and a plot of them."""

from __future__ import annotations

import io
import json
from pathlib import Path

from megatron.checkpoint.store import durable
from megatron.mcore_adapter.run.report_files import HISTORY
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
        self.entries = []
        num_damaged = 0
        for line in lines:
            entry = _parsed(line)
            if entry is None:
                num_damaged += 1
            elif entry["iteration"] <= iteration:
                self.entries.append(entry)
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
        points = []
        for entry in self.entries:
            if name in entry:
                points.append((int(entry["iteration"]), entry[name]))
        return points


def _parsed(line: str) -> Entry | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_entry = isinstance(entry, dict) and isinstance(entry.get("iteration"), int)
    if not is_entry or not all(isinstance(value, (int, float)) for value in entry.values()):
        return None
    return entry


def draw_loss_curves(
    path: Path,
    train: Points,
    valid: Points,
) -> bool:
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
    if not train and not valid:
        return False
    figure = Figure(figsize=(8, 5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    last_losses = []
    last_iteration = 0
    for name, points in (("training", train), ("validation", valid)):
        if not points:
            continue
        iterations, losses = zip(*points)
        # A single point is invisible without a marker; hundreds of markers hide the line.
        axes.plot(iterations, losses, marker="o" if len(points) <= 30 else "", label=name)
        last_losses.append(f"{name} {significant(losses[-1], 4)}")
        last_iteration = max(last_iteration, iterations[-1])
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(f"Loss after {last_iteration} iterations: {', '.join(last_losses)}")
    axes.grid(alpha=0.3)
    axes.legend()

    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.write_bytes(path, picture.getvalue())
    return True
