# SPDX-License-Identifier: Apache-2.0
"""The report of a comparison with published runs, and its picture: a point for each run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.planning.costs.gpu_kernels import FITTED
from megatron.planning.published.compared_runs import ComparedRun, NotPlanned, error_table, table
from megatron.planning.published.constant_fit import bound_of, cross_validation, without_profiles

MEANINGS = {
    "product": "FLOP/s that large products of layers reach, in those of the best",
    "depth": "length by which a product's inner dimension is longer",
    "memory": "bandwidth of memory that a pass reaches, in that of the data sheet",
    "launch": "seconds of the host for one operation",
    "link": "bandwidth of links that collectives reach, in 80 % of the data sheet's",
    "contention": "part of compute that is lost beside a collective",
    "power": "exponent of the power limit, in that of the data sheet",
    "expert_calls": "operations that the host launches for the experts of a layer",
}
"""The constants, for readers of the report."""

WITHIN = 0.2
"""The part by which the band around the diagonal of the picture is wider."""

OF_THE_FILE = """\
The file is a collection of published measurements, one run a line, each with its title, address and
place; it is no part of this repository. The titles stand above the runs at the end. Tests plan six
of the runs, which `tests/planning/published_runs.jsonl` has."""

OF_CONSTANTS = """\
Fitted over all runs together. All others have a source or are called an estimate, beside them in
the code."""

OF_CROSS_VALIDATION = """\
Cross-validation: they are fitted anew without each source, from the middle of their limits on, and
the errors are measured on that source, all by formulas. The profiles of frameworks
(`megatron/planning/published/run_software.py`) are the same in all fits. They were written with all
sources at hand, and most sources have one framework: so this tests the constants and not the
profiles. The last line has the errors where all frameworks have one profile, that of
`pretrain_gpt.py`."""

OF_THOSE_FAR_OFF = """\
The likely reasons are in `docs/planning.md`, section "What remains off"."""

OF_THOSE_ABOVE_MEMORY = """\
They ran, so their plans have too much memory."""


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
    compared: Sequence[ComparedRun],
    left_out: Sequence[NotPlanned],
    command: str,
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
    yield OF_THE_FILE
    yield ""
    if compared:
        yield "## Errors by source"
        yield ""
        yield from _block(error_table(compared))
        yield from _constants(compared)
        yield from _far_off(compared)
        yield from _above_memory(compared)
    yield "## All runs"
    yield ""
    yield from _block(result_lines(compared, left_out))


def _block(lines: Iterator[str]) -> Iterator[str]:
    """Yield a block of Markdown, and an empty line."""
    yield "```text"
    yield from lines
    yield "```"
    yield ""


def _constants(compared: Sequence[ComparedRun]) -> Iterator[str]:
    """Yield the section on the constants and their cross-validation."""
    runs = [comparison.run for comparison in compared]
    yield "## The constants of the model of time"
    yield ""
    yield OF_CONSTANTS
    yield ""
    yield "| constant | value | at a limit | of |"
    yield "|---|---|---|---|"
    for name, value in asdict(FITTED).items():
        yield f"| {name} | {value:.4g} | {bound_of(name, FITTED)} | {MEANINGS[name]} |"
    yield ""
    yield OF_CROSS_VALIDATION
    yield ""
    yield from _block(iter([*cross_validation(runs), without_profiles(runs)]))


def _far_off(compared: Sequence[ComparedRun]) -> Iterator[str]:
    """Yield the section on runs whose plans are far from what was measured."""
    yield f"## Runs that are off by more than {WITHIN:.0%}"
    yield ""
    yield OF_THOSE_FAR_OFF
    yield ""
    for comparison in sorted(compared, key=_error_of_seconds, reverse=True):
        if _error_of_seconds(comparison) > WITHIN:
            yield f"- {comparison.run.name}: {comparison.ratio_of_seconds - 1:+.0%}"
    yield ""


def _error_of_seconds(comparison: ComparedRun) -> float:
    return abs(comparison.ratio_of_seconds - 1)


def _above_memory(compared: Sequence[ComparedRun]) -> Iterator[str]:
    """Yield the section on runs that are planned with more memory than their GPU has."""
    above = [comparison for comparison in compared if comparison.is_above_memory]
    if not above:
        return
    yield "## Runs that are planned above the memory of their GPU"
    yield ""
    yield OF_THOSE_ABOVE_MEMORY
    yield ""
    for comparison in above:
        plan = comparison.plan
        yield f"- {comparison.run.name}: {plan.memory_gib:.1f} of {plan.capacity_gib:.1f} GiB"
    yield ""


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
    sources = sorted({comparison.run.source for comparison in compared})
    for number, source in enumerate(sources):
        style = {
            "s": 18,
            "color": f"C{number % 10}",
            "marker": "osv"[number // 10 % 3],
        }
        speeds: list[tuple[float, float]] = []
        memories: list[tuple[float, float]] = []
        for comparison in compared:
            if comparison.run.source != source:
                continue
            tokens = comparison.run.tokens_of_step / comparison.run["gpus"]
            speeds.append((tokens / comparison.run.seconds, tokens / comparison.plan.seconds))
            if comparison.run.memory_gib is not None:
                memories.append((comparison.run.memory_gib, comparison.plan.memory_gib))
        _draw_points(speed, speeds, **style, label=source)
        _draw_points(memory, memories, **style)
    _draw_diagonal(speed, "tokens a second and GPU")
    _draw_diagonal(memory, "GiB of a GPU")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path, format="png")


def _draw_points(
    panel: Any,
    points: list[tuple[float, float]],
    **style: Any,
) -> None:
    """Draw points: what was measured to the right, what is planned upwards."""
    measured = [point[0] for point in points]
    planned = [point[1] for point in points]
    panel.scatter(measured, planned, **style)


def _draw_diagonal(panel: Any, name: str) -> None:
    """Draw the diagonal with a band around it, and name the axes."""
    panel.set_xscale("log")
    panel.set_yscale("log")
    low, high = panel.get_xlim()
    lower = [(1 - WITHIN) * low, (1 - WITHIN) * high]
    upper = [(1 + WITHIN) * low, (1 + WITHIN) * high]
    panel.plot([low, high], [low, high], color="black", linewidth=0.8)
    panel.fill_between([low, high], lower, upper, color="tab:grey", alpha=0.2)
    panel.set_xlabel(f"{name}, measured")
    panel.set_ylabel(f"{name}, planned")
