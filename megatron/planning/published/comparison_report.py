# SPDX-License-Identifier: Apache-2.0
"""The report of a comparison with published runs, and its picture: a point for each run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from megatron.planning.costs.gpu_kernels import FITTED
from megatron.planning.published.compared_runs import ComparedRun, NotPlanned, error_table, table
from megatron.planning.published.constant_fit import bound_of, cross_validation

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
    yield "Each run has its source as the title above it; the file itself, a collection of such rows,"
    yield "is no part of this repository, whose tests plan six of them"
    yield "(`tests/planning/published_runs.jsonl`)."
    yield ""
    if compared:
        yield "## Errors by source"
        yield ""
        yield "```text"
        yield from error_table(compared)
        yield "```"
        yield ""
        yield "## The constants of the model of time"
        yield ""
        yield "Fitted over all runs together. All others have a source or are called an estimate,"
        yield "beside them in the code."
        yield ""
        yield "| constant | value | at a limit | of |"
        yield "|---|---|---|---|"
        for name, value in asdict(FITTED).items():
            yield f"| {name} | {value:.4g} | {bound_of(name, FITTED)} | {MEANINGS[name]} |"
        yield ""
        yield "Cross-validation: they are fitted anew without each source, from the middle of their"
        yield "limits on, and the errors are measured on that source, all by formulas. The profiles of"
        yield "frameworks are the same in all fits, so this tests the constants and not the profiles."
        yield ""
        yield "```text"
        yield from cross_validation([each.run for each in compared])
        yield "```"
        yield ""
        far = sorted(compared, key=lambda each: -abs(each.ratio_of_seconds - 1))
        yield f"## Runs that are off by more than {WITHIN:.0%}"
        yield ""
        yield 'The likely reasons are in `docs/planning.md`, section "What remains off".'
        yield ""
        for each in far:
            if abs(each.ratio_of_seconds - 1) > WITHIN:
                yield f"- {each.run.name}: {each.ratio_of_seconds - 1:+.0%}"
        yield ""
    above = [each for each in compared if each.is_above_memory]
    if above:
        yield "## Runs that are planned above the memory of their GPU"
        yield ""
        yield "They ran, so their plans have too much memory."
        yield ""
        for each in above:
            capacity = each.plan.capacity_gib
            yield f"- {each.run.name}: {each.plan.memory_gib:.1f} of {capacity:.1f} GiB"
        yield ""
    yield "## All runs"
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
