# SPDX-License-Identifier: Apache-2.0
"""The report of a comparison with published runs, and its picture: a point for each run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.planning.published.compared_runs import ComparedRun, NotPlanned, error_table, table

WITHIN = 0.2
"""The part by which the band around the diagonal of the picture is wider."""


def result_lines(compared: Sequence[ComparedRun], left_out: Sequence[NotPlanned]) -> Iterator[str]:
    """Yield the lines that are printed: the table, the errors, and what was not planned.

    Args:
        compared: runs with their plans.
        left_out: runs that were not planned.
    """
    if compared:
        yield from table(compared)
        yield ""
        yield from error_table(compared)
    for run, reason in left_out:
        yield f"not planned: {run.name}: {reason}"


def report_lines(
    compared: Sequence[ComparedRun], left_out: Sequence[NotPlanned], command: str
) -> Iterator[str]:
    """Yield the lines of the report, which is Markdown.

    Args:
        compared: runs with their plans.
        left_out: runs that were not planned.
        command: that writes the report.
    """
    yield "# Plans beside published runs"
    yield ""
    yield f"Written by `{command}`."
    yield ""
    yield "```text"
    yield from result_lines(compared, left_out)
    yield "```"


def draw_comparison(compared: Sequence[ComparedRun], path: Path) -> None:
    """Draw measured and planned tokens a second, and memory, as a PNG.

    Args:
        compared: runs with their plans.
        path: of the PNG.
    """
    # matplotlib is optional, and needed for pictures alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    speed, memory = figure.subplots(1, 2)
    sources = sorted({each.run.source for each in compared})
    for number, source in enumerate(sources):
        own = [each for each in compared if each.run.source == source]
        colour = f"C{number % 10}"
        marker = "osv"[number // 10 % 3]
        tokens = [each.run.tokens_of_step / each.run["gpus"] for each in own]
        speed.scatter(
            [count / each.run.seconds for count, each in zip(tokens, own)],
            [count / each.plan.seconds for count, each in zip(tokens, own)],
            s=18,
            color=colour,
            marker=marker,
            label=source,
        )
        with_memory = [each for each in own if each.run.memory_gib is not None]
        memory.scatter(
            [each.run.memory_gib for each in with_memory],
            [each.plan.memory_gib for each in with_memory],
            s=18,
            color=colour,
            marker=marker,
        )
    for panel, name in ((speed, "tokens a second and GPU"), (memory, "GiB of a GPU")):
        panel.set_xscale("log")
        panel.set_yscale("log")
        low, high = panel.get_xlim()
        panel.plot([low, high], [low, high], color="black", linewidth=0.8)
        lower = [(1 - WITHIN) * low, (1 - WITHIN) * high]
        upper = [(1 + WITHIN) * low, (1 + WITHIN) * high]
        panel.fill_between([low, high], lower, upper, color="tab:grey", alpha=0.2)
        panel.set_xlabel(f"{name}, measured")
        panel.set_ylabel(f"{name}, planned")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path, format="png")
