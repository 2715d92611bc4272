# SPDX-License-Identifier: Apache-2.0
"""Trainings of Megatron-Core models through the adapter, under its schedules, on the model."""

from __future__ import annotations

from megatron.mcore_adapter import cpu
from tests.support.cuda_model.machine import cuda_model
from tests.support.pretrain.parity import ALLTOALL, LLAMA, MOE, Combination
from tests.support.pretrain.training_runs import pretrain_with

OVERLAP = "--overlap-grad-reduce --train-iters 2 --lr-decay-iters 20"
GATHERS = f"{OVERLAP} --overlap-param-gather"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

RUNS = {
    "level3": Combination(2, "", 3, LLAMA, GATHERS),
    "level1 bf16": Combination(2, "", 1, LLAMA, f"{OVERLAP} --bf16"),
    "tp2 sp": Combination(2, "tp2 sp", 3, LLAMA, GATHERS),
    "pp2": Combination(2, "pp2", 3, LLAMA, OVERLAP),
    "cp2": Combination(2, "cp2", 3, LLAMA, OVERLAP),
    "experts": Combination(2, "", 3, MOE, OVERLAP),
    "ep2": Combination(2, "ep2", 3, ALLTOALL, OVERLAP),
    "pp2 vpp2": Combination(2, "pp2 vpp2", 3, LLAMA, OVERLAP, layers=4),
    "recomputed": Combination(2, "", 3, LLAMA, f"{GATHERS} {RECOMPUTED}"),
}
"""By name."""

OF_MEGATRON_CORE = {
    # It makes a NumPy view of the sizes at once, and waits for the copy before it reads them.
    "ep2": "MoEAlltoAllTokenDispatcher",
    # It keeps no handle of messages that it sends while it receives others.
    "pp2 vpp2": "in P2PCommunicator._communicate",
}
"""What is reported of Megatron-Core's own code, by a text that each such report has."""


def reports_of_run(name: str) -> list[str]:
    """Run one of the trainings on this rank; return what was reported of the project's code."""
    cpu.install()
    with cuda_model() as model:
        pretrain_with(RUNS[name].ours)
    reports = [str(report) for report in model.reports]
    known = OF_MEGATRON_CORE.get(name)
    return [report for report in reports if known is None or known not in report]
