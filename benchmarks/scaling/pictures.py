# SPDX-License-Identifier: Apache-2.0
"""Pictures of the page on scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.scaling.failures import LLAMA, OPT, FailureRate, failure_cost
from benchmarks.scaling.models import MODELS, ModelOfScale, num_parameters
from benchmarks.scaling.strategies import (
    NUMBERS,
    USABLE_PART,
    ScaleRow,
    strategies_of,
)
from megatron.planning.machine import MACHINES, Cluster

MARKERS = "osD^vP"
"""Of the strategies of a model."""
GIB_TICKS = (8, 16, 32, 64, 128, 256, 512)
STYLES: tuple[tuple[str, FailureRate], ...] = (("-", LLAMA), ("--", OPT))


def new_figure(height: float) -> Figure:
    """Return an empty figure."""
    figure = Figure(figsize=(11, height), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_speed(of_trees: Sequence[ScaleRow], of_rings: Sequence[ScaleRow], path: Path) -> None:
    """Draw utilization over the number of GPUs, a panel for each model.

    Args:
        of_trees: rows with the planner's collectives.
        of_rings: rows with rings.
        path: of the PNG.
    """
    figure = new_figure(7.5)
    panels = figure.subplots(2, 2).flat
    for panel, model in zip(panels, MODELS):
        for rows, style in ((of_trees, "-"), (of_rings, ":")):
            _draw_lines(panel, model, rows, "utilization", style)
        panel.set_ylabel("MFU")
        panel.set_ylim(bottom=0)
    figure.suptitle(
        "H100: MFU of what fits (dotted: gathers and scatters as rings;"
        " open: one sequence a data rank, more than the run's batch)",
        fontsize=10,
    )
    figure.savefig(path, format="png")


def draw_memory_of_gpus(rows: Sequence[ScaleRow], path: Path) -> None:
    """Draw memory over the number of GPUs, a panel for each model.

    Args:
        rows: with the planner's collectives.
        path: of the PNG.
    """
    figure = new_figure(7.5)
    panels = figure.subplots(2, 2).flat
    for panel, model in zip(panels, MODELS):
        _draw_lines(panel, model, rows, "gib", "-")
        for name in ("h100", "gb200"):
            limit = USABLE_PART * MACHINES[name].memory_bytes / 2**30
            title = f"{USABLE_PART:.0%} of {name}"
            panel.axhline(limit, color="tab:grey", linewidth=1)
            panel.text(NUMBERS[-1], limit, title, va="bottom", ha="right", fontsize=7)
        panel.set_ylabel("GiB of a GPU")
        panel.set_yscale("log", base=2)
        panel.set_yticks(GIB_TICKS, [str(number) for number in GIB_TICKS])
        panel.set_ylim(8, 800)
    figure.suptitle("H100: memory of the layout that was chosen (crosses: it does not fit)")
    figure.savefig(path, format="png")


def _draw_lines(
    panel: Any, model: ModelOfScale, rows: Sequence[ScaleRow], value: str, style: str
) -> None:
    """Draw a line for each strategy of a model.

    Args:
        panel: to draw on.
        model: of the panel.
        rows: of all models.
        value: attribute of a row.
        style: of the line; dotted ones have no label.
    """
    for number, strategy in enumerate(strategies_of(model.sizes)):
        colour = f"C{number}"
        own = [row for row in rows if row.model is model and row.strategy == strategy.name]
        drawn = [row for row in own if row.fits or value == "gib"]
        gpus = [row.mesh.gpus for row in drawn]
        values = [getattr(row, value) for row in drawn]
        label = strategy.name if style == "-" else None
        panel.plot(gpus, values, style, color=colour, linewidth=1.2, label=label)
        for row in drawn:
            marker = MARKERS[number] if row.fits else "x"
            face = "white" if row.has_few_sequences else colour
            if not row.fits:
                face = colour
            panel.plot(
                row.mesh.gpus,
                getattr(row, value),
                marker,
                markersize=5,
                markeredgecolor=colour,
                markerfacecolor=face,
            )
    panel.set_xscale("log", base=4)
    panel.set_xticks(NUMBERS, [f"{number:,}" for number in NUMBERS], fontsize=8)
    panel.set_title(model.title, loc="left", fontsize=10)
    panel.legend(fontsize=7)


def draw_goodput(machine: Cluster, path: Path) -> None:
    """Draw goodput over the number of GPUs, for two models and two rates of failures.

    Args:
        machine: on which they run.
        path: of the PNG.
    """
    figure = new_figure(3.8)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, model in zip(panels, (MODELS[1], MODELS[3])):
        parameters = num_parameters(model.sizes)
        for style, rate in STYLES:
            costs = [failure_cost(parameters, number, machine, rate) for number in NUMBERS]
            blocking = [cost.blocking_goodput for cost in costs]
            background = [cost.background_goodput for cost in costs]
            label = f"at the rate of {rate.run}"
            panel.plot(NUMBERS, blocking, style, color="C1", label=f"blocking, {label}")
            panel.plot(NUMBERS, background, style, color="C0", label=f"background, {label}")
        panel.set_xscale("log", base=4)
        panel.set_xticks(NUMBERS, [f"{number:,}" for number in NUMBERS], fontsize=8)
        panel.set_title(model.title, loc="left", fontsize=10)
        panel.set_ylim(0, 1.02)
        panel.legend(fontsize=7)
    panels[0].set_ylabel("goodput")
    figure.savefig(path, format="png")
