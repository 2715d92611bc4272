# SPDX-License-Identifier: Apache-2.0
"""Points of the page on scale beside the engine's simulation, and beside published runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.scaling.models import MODELS, ModelOfScale
from benchmarks.scaling.strategies import (
    FSDP_ALONE,
    FSDP_EXPERT,
    FSDP_TENSOR,
    HYBRID,
    HYBRID_TENSOR,
    ScaleRow,
    ScaleStrategy,
    best_row,
    step_of,
)
from benchmarks.scaling.tables import header
from megatron.planning.candidates import Candidate
from megatron.planning.costs.layer_memory import FULL
from megatron.planning.costs.model_sizes import RunLayout
from megatron.planning.gpt_simulation import StagePrediction, simulate_stage
from megatron.planning.machine import MACHINES, Cluster

_LLAMA_70B, _LLAMA_405B, _DEEPSEEK, _ = MODELS

SIMULATED: tuple[tuple[ModelOfScale, ScaleStrategy, int], ...] = (
    (_LLAMA_70B, FSDP_ALONE, 1024),
    (_LLAMA_70B, HYBRID, 1024),
    (_LLAMA_70B, FSDP_TENSOR, 4096),
    (_LLAMA_70B, FSDP_TENSOR, 16384),
    (_LLAMA_405B, FSDP_TENSOR, 1024),
    (_LLAMA_405B, HYBRID_TENSOR, 1024),
    (_LLAMA_405B, FSDP_TENSOR, 16384),
    (_DEEPSEEK, FSDP_EXPERT, 1024),
)
"""Points that the engine simulates too."""


@dataclass(frozen=True)
class MeasuredRun:
    """A published run of Llama 3 405B.

    Args:
        gpus: of the run.
        data: ranks that read different samples.
        teraflops: measured for each GPU.
    """

    gpus: int
    data: int
    teraflops: float


MEASURED_RUNS = (MeasuredRun(8192, 64, 430), MeasuredRun(16384, 128, 400))
"""H100, TP 8, 16 pipeline stages, 2,048 sequences of 8,192 tokens: The Llama 3 Herd of Models,
arXiv:2407.21783, table 4."""

MEASURED_STAGES = 16
VIRTUAL_OF_MEASURED = (4, 8)
"""The report does not say how many virtual stages there were."""


def simulate(row: ScaleRow) -> StagePrediction:
    """Return the engine's simulation of a row at level 3."""
    mesh = row.mesh
    candidate = Candidate(
        tensor=mesh.tensor,
        pipeline=mesh.pipeline,
        context=mesh.context,
        expert=mesh.expert,
        level=mesh.level,
        outer=mesh.copies,
        recomputes=row.step.recompute == FULL,
        micro_batch=mesh.micro_batch,
    )
    words = candidate.flags(row.model.sizes.experts is not None)
    words += ["--global-batch-size", str(mesh.global_batch)]
    args = row.model.arguments(" ".join(words), mesh.gpus)
    return simulate_stage(args, row.machine, max_microbatches=2)


def simulated_lines(machine: Cluster) -> Iterator[str]:
    """Yield a table of points that the engine simulates too, in Markdown."""
    titles = ("strategy", "GPUs", "formulas, s", "engine, s", "difference", "exposed", "GiB")
    yield from header("model", titles)
    for model, strategy, num_gpus in SIMULATED:
        row = best_row(model, strategy, num_gpus, machine)
        assert row is not None
        stage = simulate(row)
        difference = row.step.seconds / stage.seconds - 1
        exposed = stage.exposed_seconds / stage.seconds
        yield (
            f"| {model.title} | {strategy.name} | {num_gpus:,} | {row.step.seconds:.2f}"
            f" | {stage.seconds:.2f} | {difference:+.1%} | {row.exposed:.1%}, {exposed:.1%}"
            f" | {row.gib:.0f}, {stage.peak_bytes / 2**30:.0f} |"
        )


def measured_lines() -> Iterator[str]:
    """Yield a table of the largest published runs, in Markdown."""
    titles = ("measured TFLOP/s a GPU", "planned, 4 virtual stages", "8 virtual stages")
    yield from header("GPUs", titles)
    for run in MEASURED_RUNS:
        cells = [f"{run.gpus:,}", f"{run.teraflops:.0f}"]
        for virtual in VIRTUAL_OF_MEASURED:
            planned = planned_teraflops(run, virtual)
            cells.append(f"{planned:.0f} ({planned / run.teraflops - 1:+.0%})")
        yield f"| {' | '.join(cells)} |"


def planned_teraflops(run: MeasuredRun, virtual: int) -> float:
    """Return the TFLOP/s of a GPU by formulas.

    Args:
        run: the published run.
        virtual: stages of each pipeline stage.
    """
    mesh = RunLayout(
        gpus=run.gpus,
        tensor=run.gpus // MEASURED_STAGES // run.data,
        pipeline=MEASURED_STAGES,
        virtual=virtual,
        level=1,
        global_batch=_LLAMA_405B.batch,
        is_fsdp=False,
    )
    step = step_of(_LLAMA_405B, mesh, MACHINES["h100"])
    of_gpu = _LLAMA_405B.tokens / run.gpus * _LLAMA_405B.sizes.flops_per_token
    return of_gpu / step.seconds / 1e12
