# SPDX-License-Identifier: Apache-2.0
"""The plan of a published run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.planning.published.published_runs import PublishedRun
from megatron.planning.published.run_flags import NotExpressibleError, candidate_of, flags_of
from megatron.planning.published.run_machine import machine_of
from megatron.planning.search import GIB, arguments_on, predict
from megatron.pretrain.arguments import CommandLineError
from megatron.pretrain.model.flops import training_flops


@dataclass(frozen=True)
class PlannedRun:
    """The prediction for a published run.

    Attributes:
        seconds: of a step.
        memory_gib: the most memory of a GPU.
        flops_per_second: of a GPU, by the FLOPs of the model.
        utilization: these, as a part of the data sheet's.
    """

    seconds: float
    memory_gib: float
    flops_per_second: float
    utilization: float


def plan_run(run: PublishedRun) -> PlannedRun:
    """Return the plan of a published run.

    Raises:
        NotExpressibleError: says why it cannot be planned.
    """
    machine = machine_of(run)
    if run.get("vpp", 1) > 1:
        raise NotExpressibleError("interleaved stages are not planned")
    try:
        args = arguments_on(flags_of(run), run["gpus"])
    except CommandLineError as error:
        raise NotExpressibleError("; ".join(error.problems)) from None
    prediction = predict(candidate_of(run), flags_of(run), args, machine)
    per_second = training_flops(args, args.global_batch_size) / prediction.seconds / run["gpus"]
    return PlannedRun(
        seconds=prediction.seconds,
        memory_gib=prediction.peak_bytes / GIB,
        flops_per_second=per_second,
        utilization=per_second / machine.flops,
    )
