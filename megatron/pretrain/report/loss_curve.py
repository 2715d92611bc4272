# SPDX-License-Identifier: Apache-2.0
"""The plot of a run: training and validation loss over iterations."""

import os
from pathlib import Path

from megatron.pretrain.report.quantities import significant

Points = list[tuple[int, float]]


def draw_loss_curves(path: str | Path, train: Points, valid: Points) -> bool:
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
    if train:
        axes.plot(
            *zip(*train), color="tab:blue", linewidth=1.2, marker=_marker(train), label="training"
        )
    if valid:
        axes.plot(
            *zip(*valid),
            color="tab:orange",
            linewidth=1.8,
            marker=_marker(valid),
            label="validation",
        )
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(_title(train, valid))
    axes.grid(alpha=0.3)
    axes.legend()

    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format="png")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _marker(points: Points) -> str:
    # A single point is invisible without a marker; hundreds of markers hide the line.
    return "o" if len(points) <= 30 else ""


def _title(train: Points, valid: Points) -> str:
    last = [
        f"{name} {significant(points[-1][1], 4)}"
        for name, points in (("training", train), ("validation", valid))
        if points
    ]
    iteration = max(points[-1][0] for points in (train, valid) if points)
    return f"Loss after {iteration} iterations: {', '.join(last)}"
