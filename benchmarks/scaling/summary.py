# SPDX-License-Identifier: Apache-2.0
"""The short version of the page on scale, with numbers of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.scaling.failures import LLAMA, OPT, failure_cost
from benchmarks.scaling.models import MODELS, num_parameters
from benchmarks.scaling.strategies import (
    DDP_STAGES,
    FSDP_ALONE,
    FSDP_CONTEXT,
    FSDP_EXPERT,
    FSDP_TENSOR,
    HYBRID,
    NUMBERS,
    USABLE_PART,
    ScaleRow,
)
from benchmarks.scaling.tables import fastest_of, hybrid_cell, select
from megatron.planning.machine import MACHINES

_SMALL, _DENSE, _DEEPSEEK, _LARGEST = MODELS
LARGE = 16384
MOST = NUMBERS[-1]


def summary_lines(trees: Sequence[ScaleRow], rings: Sequence[ScaleRow]) -> Iterator[str]:
    """Yield the items of the short version.

    Args:
        trees: rows on H100 with the planner's collectives.
        rings: rows on H100 with rings.
    """
    yield of_fsdp(trees)
    yield of_memory(trees)
    yield of_stages(trees)
    yield of_hybrid(trees, rings)
    yield of_batch(trees)
    yield of_goodput()


def of_fsdp(trees: Sequence[ScaleRow]) -> str:
    """Return the line on level 3 alone."""
    rows = select(trees, _SMALL, FSDP_ALONE.name)
    last = max(number for number, row in rows.items() if not row.stops)
    others = select(trees, _SMALL, DDP_STAGES.name)
    return (
        f"- Level 3 alone trains {_SMALL.title} on up to {last:,} H100, with"
        f" {rows[last].utilization:.0%} MFU (DDP with TP and PP: {others[last].utilization:.0%})."
        " Then its batch has fewer sequences than there are GPUs."
    )


def of_memory(trees: Sequence[ScaleRow]) -> str:
    """Return the line on what level 3 alone cannot do."""
    dense = min(row.gib for row in select(trees, _DENSE, FSDP_ALONE.name).values())
    least = _least_gpus(select(trees, _DENSE, FSDP_TENSOR.name))
    context = _least_gpus(select(trees, _DENSE, FSDP_CONTEXT.name))
    experts = min(row.gib for row in select(trees, _DEEPSEEK, FSDP_ALONE.name).values())
    limit = USABLE_PART * MACHINES["h100"].memory_bytes / 2**30
    deepseek = _least_gpus(select(trees, _DEEPSEEK, FSDP_EXPERT.name))
    largest = _least_gpus(select(trees, _LARGEST, FSDP_EXPERT.name))
    return (
        f"- Alone it does not train the others on H100, on any number of them: with their gathered"
        f" layers {_DENSE.title} needs at least {dense:.0f} GiB of a GPU and {_DEEPSEEK.title}"
        f" {experts:.0f}, of which {limit:.0f} may be used. With TP 8 the former fits from"
        f" {least:,} GPUs on, with CP 2 from {context:,}. With EP {_DEEPSEEK.title} fits from"
        f" {deepseek:,} on, and the model of 2 trillion from {largest:,} on."
    )


def _least_gpus(rows: dict[int, ScaleRow]) -> int:
    """Return the smallest number of GPUs of a row that fits."""
    return min(number for number, row in rows.items() if row.fits)


def of_stages(trees: Sequence[ScaleRow]) -> str:
    """Return the line on many GPUs with the batch of the run."""
    plain = select(trees, _DENSE, FSDP_TENSOR.name)[LARGE]
    stages = select(trees, _DENSE, DDP_STAGES.name)[LARGE]
    context = ""
    if stages.mesh.context > 1:
        context = f" CP {stages.mesh.context},"
    return (
        f"- On {LARGE:,} H100 with its own batch {_DENSE.title} has {stages.utilization:.0%} MFU"
        f" with TP, PP,{context} and DDP, and {plain.utilization:.0%} with level 3 and TP 8: one"
        f" sequence for each data rank is too little compute to hide {plain.exposed:.0%} of the"
        " step (by formulas; the engine's simulation is faster there, see below)."
    )


def of_hybrid(trees: Sequence[ScaleRow], rings: Sequence[ScaleRow]) -> str:
    """Return the line on hybrid sharding."""
    names = (FSDP_ALONE.name, HYBRID.name)
    gains: list[str] = []
    for number in (4096, LARGE, MOST):
        gains.append(f"{hybrid_cell(rings, _SMALL, names, number)} on {number:,}")
    with_trees = hybrid_cell(trees, _SMALL, names, MOST)
    return (
        f"- Hybrid sharding multiplies the speed of level 3 by {', '.join(gains)} H100"
        f" ({_SMALL.title}) if gathers are rings, and by {with_trees} if they are trees. No"
        " published step of level 3 says which of the two holds there."
    )


def of_batch(trees: Sequence[ScaleRow]) -> str:
    """Return the line on the most GPUs."""
    found: list[str] = []
    for model in MODELS:
        fastest = fastest_of(trees, model, MOST)
        assert fastest is not None
        found.append(f"{fastest.utilization:.0%} for {model.title} ({fastest.strategy})")
    return (
        f"- On {MOST:,} H100 with the batch of the run no strategy of this page has"
        f" more than {', '.join(found)}."
    )


def of_goodput() -> str:
    """Return the line on failures."""
    parameters = num_parameters(_DENSE.sizes)
    parts: list[str] = []
    for number in (LARGE, MOST):
        better = failure_cost(parameters, number, MACHINES["h100"], LLAMA)
        worse = failure_cost(parameters, number, MACHINES["h100"], OPT)
        parts.append(
            f"{worse.background_goodput:.0%} to {better.background_goodput:.0%} on {number:,}"
        )
    return (
        f"- Failures leave {' and '.join(parts)} GPUs, at two published rates, with saves in the"
        " background. Nearly all of the loss is the restart: there is more to win in a fast one"
        " than in faster saves."
    )
