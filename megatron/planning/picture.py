# SPDX-License-Identifier: Apache-2.0
"""The picture of a plan: memory over time, and the timeline of the streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.planning.gpt_simulation import StagePrediction
from megatron.planning.search import GIB, Prediction
from megatron.planning.simulation import HOST, Interval

STREAMS = ("compute", "gather", "reduce", HOST)
"""From top to bottom; that of copies from and to the host where there are any."""

COLOURS = {
    "forward": "tab:blue",
    "backward": "tab:orange",
    "step": "tab:purple",
    "all_gather": "tab:green",
    "reduce_scatter": "tab:red",
    "all_reduce": "tab:pink",
    "copy": "tab:brown",
}
SHORT_UNITS = 8
"""Units around the middle of a step that the lower timeline shows."""


def draw_plan(
    prediction: Prediction,
    memory_limit: float,
    path: Path,
) -> None:
    """Draw the first pipeline stage of a prediction as a PNG.

    Args:
        prediction: the settings and their simulated step.
        memory_limit: bytes of a GPU that the plan may use.
        path: of the PNG.
    """
    # matplotlib is optional, and needed for pictures alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    stage = prediction.stages[0]
    intervals = stage.step.intervals
    figure = Figure(figsize=(12, 8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    memory, whole, part = figure.subplots(3, 1, height_ratios=[2, 1, 1])
    draw_memory(memory, stage, memory_limit)
    whole.sharex(memory)
    draw_streams(whole, intervals, "streams")
    begin, end = excerpt(intervals)
    shown = [interval for interval in intervals if overlaps(interval, begin, end)]
    draw_streams(part, shown, "streams, an excerpt of the backward")
    part.set_xlim(begin, end)
    names = {interval.name for interval in intervals}
    handles: list[Patch] = []
    for name, colour in COLOURS.items():
        if name in names:
            handles.append(Patch(color=colour, label=name))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        fontsize=9,
    )
    figure.suptitle(title(prediction, stage), fontsize=11)
    figure.savefig(path, format="png")


def title(prediction: Prediction, stage: StagePrediction) -> str:
    """Return what the picture shows."""
    num_gpus = prediction.args.world_size
    shown = f"{stage.num_simulated} microbatches"
    if stage.num_simulated < stage.num_microbatches:
        shown = f"{stage.num_simulated} of {stage.num_microbatches} microbatches"
    return (
        f"{num_gpus} GPUs of {prediction.machine.name}, pipeline stage {stage.stage}:"
        f" {shown} of a step"
    )


def draw_memory(
    panel: Any,
    stage: StagePrediction,
    memory_limit: float,
) -> None:
    """Draw the bytes of a rank over time.

    Args:
        panel: to draw on.
        stage: with its simulated step.
        memory_limit: bytes of a GPU that the plan may use.
    """
    times: list[float] = []
    sizes: list[float] = []
    for seconds, num_bytes in stage.step.memory:
        times.append(seconds)
        sizes.append(num_bytes / GIB)
    lasting = sizes[0]
    text = f" {lasting:.1f} GiB when the step begins"
    panel.fill_between(times, sizes, step="post", color="tab:grey", alpha=0.5)
    panel.axhline(lasting, color="black", linewidth=0.8, linestyle=":")
    panel.text(0, lasting, text, va="bottom", fontsize=8)
    panel.axhline(memory_limit / GIB, color="tab:red", linewidth=1)
    panel.set_title("memory of a rank", loc="left", fontsize=10)
    panel.set_ylabel("GiB")
    panel.set_ylim(bottom=0)
    panel.margins(x=0)


def draw_streams(
    panel: Any,
    intervals: list[Interval],
    text: str,
) -> None:
    """Draw what each stream does.

    Args:
        panel: to draw on.
        intervals: of work.
        text: the title.
    """
    used = {interval.stream for interval in intervals}
    streams: list[str] = []
    for stream in STREAMS:
        if stream in used or stream != HOST:
            streams.append(stream)
    edge = "none"
    if len(intervals) < 100:
        edge = "white"
    for row, stream in enumerate(streams):
        for name, colour in COLOURS.items():
            panel.broken_barh(
                spans_of(intervals, stream, name),
                (row - 0.4, 0.8),
                color=colour,
                edgecolor=edge,
                linewidth=0.5,
            )
    panel.set_yticks(range(len(streams)), streams)
    panel.invert_yaxis()
    panel.margins(x=0)
    panel.set_title(text, loc="left", fontsize=10)
    panel.set_xlabel("seconds")


def spans_of(
    intervals: list[Interval],
    stream: str,
    name: str,
) -> list[tuple[float, float]]:
    """Return the begin and the length of work.

    Args:
        intervals: of all work.
        stream: that does it.
        name: of it.
    """
    spans: list[tuple[float, float]] = []
    for interval in intervals:
        if interval.stream != stream or interval.name != name:
            continue
        if interval.end > interval.begin:
            spans.append((interval.begin, interval.end - interval.begin))
    return spans


def excerpt(intervals: list[Interval]) -> tuple[float, float]:
    """Return the time of a few units in the middle of the last backward."""
    backward: list[Interval] = []
    for interval in intervals:
        if interval.name == "backward" and interval.end > interval.begin:
            backward.append(interval)
    first = max(len(backward) - 2 * SHORT_UNITS, 0)
    shown = backward[first : first + SHORT_UNITS]
    return shown[0].begin, shown[-1].end


def overlaps(
    interval: Interval,
    begin: float,
    end: float,
) -> bool:
    """Return True if work takes place between two times.

    Args:
        interval: of the work.
        begin: the first time.
        end: the second one.
    """
    return interval.begin < end and interval.end > begin
