# SPDX-License-Identifier: Apache-2.0
"""Tables of the page on scale, in Markdown, and the table of all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.scaling.failures import (
    HOUR,
    LLAMA,
    OPT,
    PUBLISHED_GOODPUT,
    RATES,
    failure_cost,
)
from benchmarks.scaling.models import (
    MODELS,
    ModelOfScale,
    active_parameters,
    num_parameters,
)
from benchmarks.scaling.strategies import (
    FSDP_ALONE,
    FSDP_EXPERT,
    FSDP_TENSOR,
    HYBRID,
    HYBRID_EXPERT,
    HYBRID_TENSOR,
    MOST_EXPOSED,
    NUMBERS,
    ScaleRow,
    strategies_of,
)
from megatron.planning.machine import Cluster

PAIRS = (
    (MODELS[0], FSDP_ALONE.name, HYBRID.name),
    (MODELS[0], FSDP_TENSOR.name, HYBRID_TENSOR.name),
    (MODELS[1], FSDP_TENSOR.name, HYBRID_TENSOR.name),
    (MODELS[2], FSDP_EXPERT.name, HYBRID_EXPERT.name),
    (MODELS[3], FSDP_EXPERT.name, HYBRID_EXPERT.name),
)
"""Plain and hybrid sharding of the same kind."""

COLUMNS = (
    *("machine", "collectives", "model", "strategy", "gpus", "tensor", "pipeline", "virtual"),
    *(
        "context",
        "expert",
        "copies",
        "micro_batch",
        "sequences",
        "recompute",
        "gib",
        "fits",
        "seconds",
    ),
    *("mfu", "tokens_per_second", "exposed", "all_exposed", "bubble", "stops"),
)
"""Columns of the table of all rows."""


def header(first: str, columns: Sequence[str]) -> Iterator[str]:
    """Yield the header of a table.

    Args:
        first: titles of the first columns, separated by bars.
        columns: titles of the others.
    """
    titles = [*first.split("|"), *columns]
    yield f"| {' | '.join(title.strip() for title in titles)} |"
    yield "|" + "---|" * len(titles)


def of_numbers(numbers: Sequence[int] = NUMBERS) -> list[str]:
    """Return titles of columns for numbers of GPUs."""
    return [f"{number:,}" for number in numbers]


def model_lines() -> Iterator[str]:
    """Yield the table of the models."""
    titles = "parameters|of a token|layers|hidden|experts|batch|tokens|source of the batch"
    yield from header("model", titles.split("|"))
    for model in MODELS:
        sizes = model.sizes
        experts = "none"
        if sizes.experts is not None:
            experts = f"{sizes.experts.number}, top {sizes.experts.top_k}"
        yield (
            f"| {model.title} | {num_parameters(sizes) / 1e9:,.0f} B"
            f" | {active_parameters(sizes) / 1e9:,.0f} B | {sizes.layers} | {sizes.hidden:,}"
            f" | {experts} | {model.batch:,} x {sizes.sequence:,}"
            f" | {model.tokens / 1e6:.0f} M | {model.batch_source} |"
        )


def select(rows: Sequence[ScaleRow], model: ModelOfScale, strategy: str) -> dict[int, ScaleRow]:
    """Return the rows of a strategy by their number of GPUs.

    Args:
        rows: of all models.
        model: of the rows.
        strategy: its name.
    """
    found: dict[int, ScaleRow] = {}
    for row in rows:
        if row.model is model and row.strategy == strategy:
            found[row.mesh.gpus] = row
    return found


def sweep_lines(rows: Sequence[ScaleRow]) -> Iterator[str]:
    """Yield the table of all models, strategies and numbers of GPUs.

    Args:
        rows: of all models.
    """
    yield from header("model | strategy", of_numbers())
    for model in MODELS:
        for strategy in strategies_of(model.sizes):
            own = select(rows, model, strategy.name)
            cells = [cell_of(own.get(number)) for number in NUMBERS]
            yield f"| {model.title} | {strategy.name} | {' | '.join(cells)} |"


def fastest_lines(rows: Sequence[ScaleRow]) -> Iterator[str]:
    """Yield the table of the fastest strategy that fits and has the batch of the model's run.

    Args:
        rows: of all models.
    """
    yield from header("model", of_numbers())
    for model in MODELS:
        cells: list[str] = []
        for number in NUMBERS:
            fastest = fastest_of(rows, model, number)
            if fastest is None:
                cells.append("none fits")
            else:
                cells.append(f"{fastest.strategy}: {cell_of(fastest)}")
        yield f"| {model.title} | {' | '.join(cells)} |"


def fastest_of(rows: Sequence[ScaleRow], model: ModelOfScale, number: int) -> ScaleRow | None:
    """Return the fastest row that fits and has the batch of the model's run.

    Args:
        rows: of all models.
        model: that is trained.
        number: of GPUs.
    """
    fastest: ScaleRow | None = None
    for row in rows:
        if row.model is not model or row.mesh.gpus != number:
            continue
        if not row.fits or row.has_few_sequences:
            continue
        if fastest is None or row.utilization > fastest.utilization:
            fastest = row
    return fastest


def cell_of(row: ScaleRow | None) -> str:
    """Return a cell: GiB, seconds of a step, exposed messages, MFU."""
    if row is None:
        return ""
    if not row.fits:
        return f"no: {row.gib:.0f} GiB"
    star = "\\*" if row.has_few_sequences else ""
    text = f"{row.gib:.0f} GiB, {seconds_of(row.step.seconds)} s{star}, {row.exposed:.0%} of"
    text += f" {row.all_exposed:.0%}, **{row.utilization:.0%}**"
    if row.mesh.context > 1:
        text += f", CP {row.mesh.context}"
    if row.bubble > MOST_EXPOSED:
        text += f", bubble {row.bubble:.0%}"
    return text


def seconds_of(seconds: float) -> str:
    """Return seconds with three digits, and no exponent."""
    if seconds >= 100:
        return f"{seconds:,.0f}"
    return f"{seconds:.3g}"


def stop_lines(sweeps: dict[str, Sequence[ScaleRow]]) -> Iterator[str]:
    """Yield the table of where strategies stop.

    Args:
        sweeps: rows of all models, by the title of their column.
    """
    yield from header("model | strategy", list(sweeps))
    for model in MODELS:
        for strategy in strategies_of(model.sizes):
            cells: list[str] = []
            for rows in sweeps.values():
                cells.append(stops_of(select(rows, model, strategy.name)))
            yield f"| {model.title} | {strategy.name} | {' | '.join(cells)} |"


def stops_of(rows: dict[int, ScaleRow]) -> str:
    """Return where a strategy stops.

    Args:
        rows: by their number of GPUs.
    """
    too_large = [number for number, row in rows.items() if not row.fits]
    if len(too_large) == len(rows):
        return "memory everywhere"
    parts: list[str] = []
    if too_large:
        parts.append(f"memory up to {max(too_large):,}")
    for reason in ("batch", "messages", "bubble"):
        numbers = [n for n, row in rows.items() if row.fits and reason in row.stops]
        if numbers:
            parts.append(f"{reason} {place_of_stop(numbers, list(rows))}")
    return "; ".join(parts) or "nowhere"


def place_of_stop(numbers: Sequence[int], every: Sequence[int]) -> str:
    """Return from which number of GPUs on a strategy is stopped, or at which ones alone.

    Args:
        numbers: of GPUs at which it is.
        every: numbers of GPUs of the sweep, rising.
    """
    begin = min(numbers)
    if list(numbers) == [number for number in every if number >= begin]:
        return f"from {begin:,}"
    return f"at {', '.join(of_numbers(numbers))}"


def hybrid_lines(title: str, trees: Sequence[ScaleRow], rings: Sequence[ScaleRow]) -> Iterator[str]:
    """Yield the lines of what hybrid sharding wins on a machine.

    Args:
        title: of the machine.
        trees: rows with the planner's collectives.
        rings: rows with rings.
    """
    for model, plain, hybrid in PAIRS:
        cells: list[str] = []
        for number in NUMBERS[1:]:
            of_trees = hybrid_cell(trees, model, (plain, hybrid), number)
            of_rings = hybrid_cell(rings, model, (plain, hybrid), number)
            if "no" in (of_trees, of_rings):
                cells.append("does not fit")
            else:
                gib = (
                    select(rings, model, hybrid)[number].gib
                    - select(rings, model, plain)[number].gib
                )
                cells.append(f"{of_trees} / {of_rings}, {gib:+.0f} GiB")
        yield f"| {title} | {model.title} | {plain} | {' | '.join(cells)} |"


def hybrid_cell(
    rows: Sequence[ScaleRow], model: ModelOfScale, names: tuple[str, str], number: int
) -> str:
    """Return the tokens a second of hybrid sharding in those of plain sharding, or "no".

    Args:
        rows: of all models.
        model: of the table's row.
        names: of both strategies, the plain one first.
        number: of GPUs.
    """
    plain, hybrid = (select(rows, model, name)[number] for name in names)
    if not (plain.fits and hybrid.fits):
        return "no"
    return f"{hybrid.tokens_per_second / plain.tokens_per_second:.2f}"


def rate_lines() -> Iterator[str]:
    """Yield the table of published failures."""
    titles = ("GPUs", "reported", "GPU hours between two", "source")
    yield from header("run", titles)
    for rate in RATES:
        yield (
            f"| {rate.run} | {rate.gpus:,} | {rate.reported} | {rate.gpu_hours:,.0f}"
            f" | {rate.source} |"
        )


def failure_lines(machine: Cluster) -> Iterator[str]:
    """Yield the table of what failures cost.

    Args:
        machine: on which the models run.
    """
    titles = (
        "GPUs",
        "hours between two",
        "checkpoint",
        "written in",
        "copied in",
        "interval: blocking, background",
        "lost by one, GPU hours",
        "goodput: blocking",
        "background",
        "at the rate of OPT: background",
    )
    yield from header("model", titles)
    for model in (MODELS[1], MODELS[3]):
        parameters = num_parameters(model.sizes)
        for number in NUMBERS[3:]:
            cost = failure_cost(parameters, number, machine, LLAMA)
            worse = failure_cost(parameters, number, machine, OPT)
            yield (
                f"| {model.title} | {number:,} | {cost.between / HOUR:.1f}"
                f" | {cost.num_bytes / 1e12:.1f} TB | {cost.written:.0f} s | {cost.copied:.2f} s"
                f" | {cost.blocking_interval:.0f} s, {cost.background_interval:.0f} s"
                f" | {cost.lost_gpu_hours:,.0f} | {cost.blocking_goodput:.1%}"
                f" | {cost.background_goodput:.1%} | {worse.background_goodput:.1%} |"
            )


def published_goodput_lines(machine: Cluster) -> Iterator[str]:
    """Yield the table of published goodput beside this model's.

    Args:
        machine: on which the models run.
    """
    titles = ("GPUs", "published", "at the rate of Llama 3", "at that of OPT", "source")
    yield from header("run", titles)
    for run in PUBLISHED_GOODPUT:
        cells: list[str] = []
        for rate in (LLAMA, OPT):
            cost = failure_cost(run.parameters, run.gpus, machine, rate)
            cells.append(f"{cost.background_goodput:.0%}")
        yield (
            f"| {run.run} | {run.gpus:,} | {run.measured} | {' | '.join(cells)} | {run.source} |"
        )


def all_rows(sweeps: dict[tuple[str, str], Sequence[ScaleRow]]) -> Iterator[str]:
    """Yield the lines of the table of all rows, separated by tabs.

    Args:
        sweeps: rows by their machine and their collectives.
    """
    yield "\t".join(COLUMNS)
    for (machine, collectives), rows in sweeps.items():
        for row in rows:
            mesh = row.mesh
            values = (
                *(machine, collectives, row.model.title, row.strategy, mesh.gpus, mesh.tensor),
                *(
                    mesh.pipeline,
                    mesh.virtual,
                    mesh.context,
                    mesh.expert,
                    mesh.copies,
                    mesh.micro_batch,
                ),
                *(mesh.global_batch, row.step.recompute, f"{row.gib:.1f}", row.fits),
                *(f"{row.step.seconds:.4g}", f"{row.utilization:.4f}"),
                *(f"{row.tokens_per_second:.1f}", f"{row.exposed:.4f}"),
                *(f"{row.all_exposed:.4f}", f"{row.bubble:.4f}", " ".join(row.stops)),
            )
            yield "\t".join(map(str, values))
