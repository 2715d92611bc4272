# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's combined 1F1B schedule with FSDP: results have the bits of the plain schedule."""

from dataclasses import dataclass
from unittest.mock import patch

import pytest
from megatron.core.models.common import model_chunk_schedule_plan as plans
from megatron.core.pipeline_parallel import combined_1f1b
from torch import nn

from megatron.mcore_adapter.overlapped_experts import drive_combined_schedule
from megatron_fsdp import MegatronFSDP, fully_shard_model
from megatron_fsdp.utils import find_megatron_fsdp
from tests.support.fsdp.reference import on_ranks
from tests.support.mcore_adapter.runs_on_cuda_model import GATHERS
from tests.support.pretrain.parity import ALLTOALL, Combination
from tests.support.pretrain.training_runs import pretrain
from tests.support.rank_pool import run_ranks

EVALUATED = "--eval-interval 1 --eval-iters 1"  # by the plain schedule, between two steps


def results(command_line: str) -> tuple[object, bool]:
    """Job: train; return losses, norms and evaluations, and whether a schedule drove the engine."""
    pre_forward = MegatronFSDP.pre_forward
    with patch.object(MegatronFSDP, "pre_forward", autospec=True, side_effect=pre_forward) as calls:
        record = pretrain(command_line)
    return (record.steps, record.evaluations), calls.called


@dataclass(frozen=True)
class ScheduledRun:
    """A layout; the batch is three microbatches a step, four with virtual stages."""

    ranks: int
    layout: str
    level: int
    batch: int
    layers: int = 2

    def line(self, flags: str) -> str:
        """Return the command line of a run."""
        flags = f"{GATHERS} {EVALUATED} --bf16 --global-batch-size {self.batch} {flags}"
        row = Combination(self.ranks, self.layout, self.level, ALLTOALL, flags, layers=self.layers)
        return row.ours


CASES = {
    "zero0": ScheduledRun(2, "ep2", 0, 6),
    "zero2": ScheduledRun(2, "ep2", 2, 6, layers=4),
    "zero3": ScheduledRun(2, "ep2", 3, 6),
    "zero3-dp2": ScheduledRun(4, "ep2", 3, 12),
    "zero3-vpp2": ScheduledRun(4, "pp2 vpp2 ep2", 3, 8, layers=4),
}


@on_ranks(1)
def test_a_schedule_that_looks_for_the_published_class_does_not_call_it_too() -> None:
    engine = fully_shard_model(nn.Sequential(nn.Linear(2, 2)), fsdp_unit_modules=[nn.Linear])
    finder = patch.object(combined_1f1b, "find_megatron_fsdp", find_megatron_fsdp, create=True)
    plan = plans.TransformerModelChunkSchedulePlan, plans.TransformerLayerSchedulePlan
    with finder, patch.object(plan[0], "run"), patch.object(plan[1], "run"):
        assert combined_1f1b.find_megatron_fsdp(engine) is engine
        drive_combined_schedule(engine, delays_gradients=False)
        assert combined_1f1b.find_megatron_fsdp(engine) is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_the_combined_schedule_has_the_bits_of_the_plain_one(name: str) -> None:
    case = CASES[name]
    plain, overlapped = (
        run_ranks(case.ranks, results, case.line(flags))
        for flags in ("", "--overlap-moe-expert-parallel-comm")
    )
    for (expected, is_driven), (found, drives) in zip(plain, overlapped, strict=True):
        assert (found, is_driven, drives) == (expected, False, True)
