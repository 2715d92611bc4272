# SPDX-License-Identifier: Apache-2.0
"""Draw the traces of all ranks in a directory as a PNG.

    python benchmarks/trace_picture.py profile trace.png [--begin 20 --end 60]

The directory is that of `megatron.fsdp.trace.record` or of `pretrain_gpt.py --profile`. For every
rank the rows are the units in forward and backward, waits of the host, gathers and reductions, in
one colour for each unit, and below them the flat storage.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

ROWS = ("forward", "backward", "wait", "gathers", "reductions")
"""From top to bottom."""

THREAD_ROWS = {"gather": "gathers", "reduce": "reductions"}
"""Rows of the threads of collectives."""

Event = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="has rank0.json, rank1.json, ...")
    parser.add_argument("picture", type=Path, help="PNG to write")
    parser.add_argument("--begin", type=float, default=0.0, help="first millisecond that is shown")
    parser.add_argument("--end", type=float, help="last millisecond; by default the end")
    args = parser.parse_args()
    paths = sorted(args.directory.glob("rank*.json"), key=lambda path: int(path.stem[4:]))
    if not paths:
        parser.error(f"no rank*.json in {args.directory}")
    traces = [json.loads(path.read_text())["traceEvents"] for path in paths]
    draw(traces, args.picture, args.begin, args.end)


def draw(traces: list[list[Event]], picture: Path, begin: float, end: float | None) -> None:
    """Draw two panels for each rank, all with the same axis of time."""
    figure = Figure(figsize=(14, 3.6 * len(traces)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    heights = [3, 1] * len(traces)
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
    units = dict.fromkeys(event["args"]["unit"] for event in traces[0] if event["ph"] == "X")
    for without_colour in ("", "root"):
        units.pop(without_colour, None)
    shades = colormaps["tab20"].colors
    colours = {unit: shades[number % len(shades)] for number, unit in enumerate(units)}
    for rank, events in enumerate(traces):
        draw_spans(panels[2 * rank][0], events, colours)
        panels[2 * rank][0].set_title(f"rank {rank}", loc="left", fontsize=9)
        draw_storage(panels[2 * rank + 1][0], events)
    panels[-1][0].set_xlabel("milliseconds")
    panels[-1][0].set_xlim(begin, end or max(end_of(events) for events in traces))
    legend = [Patch(color=colour, label=unit) for unit, colour in colours.items()]
    figure.legend(handles=legend, loc="outside right upper", fontsize=7)
    figure.savefig(picture, format="png")


def end_of(events: list[Event]) -> float:
    """Return the last millisecond of a trace."""
    return max(event["ts"] + event.get("dur", 0) for event in events) / 1e3


def row_of(event: Event, threads: dict[int, str]) -> str:
    """Return the row of an event; an empty name if it is not drawn."""
    if event["ph"] != "X" or event["args"]["unit"] == "root":
        return ""
    # The host's work of starting a reduction is called "reduce" too, but is on the first thread.
    thread = threads[event["tid"]]
    first_word: str = event["name"].split(" ")[0]
    return first_word if thread == "compute" else THREAD_ROWS.get(thread, "")


def draw_spans(panel: Axes, events: list[Event], colours: dict[str, Any]) -> None:
    threads = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    for event in events:
        row = row_of(event, threads)
        if row in ROWS:
            panel.barh(
                ROWS.index(row),
                event["dur"] / 1e3,
                left=event["ts"] / 1e3,
                height=0.8,
                color=colours.get(event["args"]["unit"], "lightgrey"),
                edgecolor="black",
                linewidth=0.3,
                alpha=0.9,
            )
    panel.set_yticks(range(len(ROWS)), ROWS, fontsize=8)
    panel.invert_yaxis()
    panel.grid(axis="x", alpha=0.3)


def draw_storage(panel: Axes, events: list[Event]) -> None:
    changes = [event for event in events if event["ph"] == "C"]
    times = [event["ts"] / 1e3 for event in changes]
    sizes = [event["args"]["bytes"] / 2**20 for event in changes]
    panel.fill_between(times, sizes, step="post", color="tab:grey", alpha=0.6)
    panel.set_ylabel("MiB", fontsize=8)
    panel.set_ylim(bottom=0)


if __name__ == "__main__":
    main()
