# SPDX-License-Identifier: Apache-2.0
"""The plan of a published run.

Runs that the engine can run, with whole units sharded by ZeRO levels 2 and 3 in one stage, are
simulated by it, as in every plan. Others, such as those of DDP with the distributed optimizer, have
their step by formulas, with the same costs. Memory is that of the formulas for all of them: it has
what the engine's has not, workspaces and what other frameworks keep.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.planning.costs.gpu_kernels import FITTED, Fitted
from megatron.planning.costs.layer_memory import ATTENTION_CORE, FULL, LATENT, NONE
from megatron.planning.costs.model_sizes import ModelSizes
from megatron.planning.costs.software import UNFUSED, Software
from megatron.planning.costs.step_formula import FormulaStep, StepFormula
from megatron.planning.gpt_simulation import simulate_stage
from megatron.planning.layer_costs import GptCosts
from megatron.planning.published.published_runs import PublishedRun
from megatron.planning.published.run_flags import flags_of
from megatron.planning.published.run_machine import machine_of
from megatron.planning.published.run_software import (
    mesh_of,
    recompute_of,
    sizes_of,
    software_of,
)
from megatron.planning.search import GIB, arguments_on
from megatron.pretrain.arguments import CommandLineError

FITTING = 0.92
"""Part of a GPU's memory that a run may need whose recomputation is unknown; an estimate."""

PARTS = 8
"""Whole layers are recomputed in parts of so many, where it is unknown how many are."""


@dataclass(frozen=True)
class PlannedRun:
    """The prediction for a published run.

    Attributes:
        seconds: of a step.
        memory_gib: of a GPU: of the one whose memory was measured, or the most of all.
        capacity_gib: of the memory of a GPU.
        flops_per_second: of a GPU, by the FLOPs of the model.
        utilization: these, as a part of the data sheet's in bf16.
        is_simulated: by the engine, otherwise by formulas.
    """

    seconds: float
    memory_gib: float
    capacity_gib: float
    flops_per_second: float
    utilization: float
    is_simulated: bool


def plan_run(run: PublishedRun) -> PlannedRun:
    """Return the plan of a published run.

    Raises:
        NotExpressibleError: with the reason, if it cannot be planned.
    """
    machine = machine_of(run)
    step = formula_of(run)
    seconds = step.seconds
    simulated = simulated_seconds(run, step)
    if simulated is not None:
        seconds = simulated
    tokens = run.tokens_of_step / run["gpus"]
    flops = sizes_of(run).flops_per_token * tokens
    per_second = flops / seconds
    num_bytes = step.peak_bytes
    if "rank 0" in str(run["measured"].get("memory_kind")):
        num_bytes = step.first_bytes
    reserved = num_bytes * software_of(run).reserves
    return PlannedRun(
        seconds=seconds,
        memory_gib=reserved / GIB,
        capacity_gib=machine.memory_bytes / GIB,
        flops_per_second=per_second,
        utilization=per_second / machine.flops,
        is_simulated=simulated is not None,
    )


def simulated_seconds(run: PublishedRun, step: FormulaStep) -> float | None:
    """Return the seconds of a step that the engine simulates; None: it does not run the layout.

    Args:
        run: the published run.
        step: of the run by formulas, with its recomputation.
    """
    if not mesh_of(run).is_fsdp or run["pp"] > 1 or sizes_of(run).window:
        return None
    software = software_of(run)
    if not software.overlaps_data:  # the engine's streams always overlap
        return None
    machine = machine_of(run)
    try:
        args = arguments_on(flags_of(run), run["gpus"])
    except CommandLineError:
        return None
    # Set here, since the flag has rules about a run's other flags.
    args.grad_reduce_in_bf16 = software.reduce_bytes == 2
    costs = GptCosts(args, machine, software, (step.recompute, step.part))
    stage = simulate_stage(args, machine, max_microbatches=2, costs=costs)
    return stage.seconds


def formula_of(
    run: PublishedRun,
    fitted: Fitted = FITTED,
    profile: Software | None = None,
) -> FormulaStep:
    """Return the step of a published run by formulas.

    Where its recomputation is unknown, it is the least with which the run fits the memory.

    Args:
        run: the published run.
        fitted: constants of the model of time.
        profile: of the software; None: that of the run's framework.

    Raises:
        NotExpressibleError: with the reason, if it cannot be planned.
    """
    machine = machine_of(run)
    software = software_of(run, profile)
    sizes = sizes_of(run)
    mesh = mesh_of(run)
    stated = recompute_of(run)
    ways = ways_of(sizes, software)
    if stated is not None:
        ways = [stated]
    for way, part in ways:
        formula = StepFormula(
            sizes=sizes,
            mesh=mesh,
            machine=machine,
            software=software,
            recompute=way,
            part=part,
            fitted=fitted,
        )
        step = formula.step()
        if step.peak_bytes <= FITTING * machine.memory_bytes:
            break
    return step


def ways_of(sizes: ModelSizes, software: Software) -> list[tuple[str, float]]:
    """Return ways of recomputation, and the part of the layers, those that cost least first.

    Args:
        sizes: of the model.
        software: of the run.
    """
    ways = [(NONE, 1.0)]
    if software.attention == UNFUSED:
        ways = [(ATTENTION_CORE, 1.0)]
    if sizes.latent is not None:
        ways.append((LATENT, 1.0))
    for number in range(1, PARTS + 1):
        ways.append((FULL, number / PARTS))
    return ways
