# SPDX-License-Identifier: Apache-2.0
"""The picture of a plan: memory over time, and the timeline of the streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.planning.gpt_simulation import StagePrediction
from megatron.planning.search import Prediction
from megatron.planning.simulation import Interval

STREAMS = ("compute", "gather", "reduce", "host")
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
GIB = 2**30
SHORT_UNITS = 8
"""Units around the middle of a step that the lower timeline shows."""


def draw_plan(prediction: Prediction, memory_limit: float, path: Path) -> None:
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
    figure = Figure(figsize=(12, 8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    memory, whole, part = figure.subplots(3, 1, height_ratios=[2, 1, 1])
    draw_memory(memory, stage, memory_limit)
    whole.sharex(memory)
    draw_streams(whole, stage.step.intervals)
    whole.set_title("streams", loc="left", fontsize=10)
    whole.set_xlabel("seconds")
    begin, end = excerpt(stage.step.intervals)
    draw_streams(part, [each for each in stage.step.intervals if overlaps(each, begin, end)])
    part.set_xlim(begin, end)
    part.set_title("streams, an excerpt of the backward", loc="left", fontsize=10)
    part.set_xlabel("seconds")
    names = {each.name for each in stage.step.intervals}
    handles = [Patch(color=COLOURS[name], label=name) for name in COLOURS if name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9)
    figure.suptitle(title(prediction, stage), fontsize=11)
    figure.savefig(path, format="png")


def title(prediction: Prediction, stage: StagePrediction) -> str:
    """Return what the picture shows."""
    args = prediction.args
    shown = stage.num_simulated
    of_all = f"{shown} of {stage.num_microbatches}" if shown < stage.num_microbatches else shown
    return (
        f"{args.world_size} GPUs of {prediction.machine.name}, pipeline stage {stage.stage}:"
        f" {of_all} microbatches of a step"
    )


def draw_memory(panel: Any, stage: StagePrediction, memory_limit: float) -> None:
    """Draw the bytes of a rank over time."""
    times = [seconds for seconds, _ in stage.step.memory]
    sizes = [num_bytes / GIB for _, num_bytes in stage.step.memory]
    panel.fill_between(times, sizes, step="post", color="tab:grey", alpha=0.5)
    lasting = stage.step.memory[0][1] / GIB
    panel.axhline(lasting, color="black", linewidth=0.8, linestyle=":")
    panel.text(0, lasting, f" {lasting:.1f} GiB when the step begins", va="bottom", fontsize=8)
    panel.axhline(memory_limit / GIB, color="tab:red", linewidth=1)
    panel.set_title("memory of a rank", loc="left", fontsize=10)
    panel.set_ylabel("GiB")
    panel.set_ylim(bottom=0)
    panel.margins(x=0)


def draw_streams(panel: Any, intervals: list[Interval]) -> None:
    """Draw what each stream does."""
    used = {each.stream for each in intervals}
    streams = [stream for stream in STREAMS if stream in used or stream != "host"]
    for row, stream in enumerate(streams):
        for name, colour in COLOURS.items():
            own = [each for each in intervals if (each.stream, each.name) == (stream, name)]
            spans = [(each.begin, each.end - each.begin) for each in own if each.end > each.begin]
            edge = "white" if len(intervals) < 100 else "none"
            panel.broken_barh(spans, (row - 0.4, 0.8), color=colour, edgecolor=edge, linewidth=0.5)
    panel.set_yticks(range(len(streams)), streams)
    panel.invert_yaxis()
    panel.margins(x=0)


def excerpt(intervals: list[Interval]) -> tuple[float, float]:
    """Return the time of a few units in the middle of the last backward."""
    backward = [each for each in intervals if each.name == "backward" and each.end > each.begin]
    first = max(len(backward) - 2 * SHORT_UNITS, 0)
    shown = backward[first : first + SHORT_UNITS]
    return shown[0].begin, shown[-1].end


def overlaps(interval: Interval, begin: float, end: float) -> bool:
    """Return True if work takes place between two times."""
    return interval.begin < end and interval.end > begin
