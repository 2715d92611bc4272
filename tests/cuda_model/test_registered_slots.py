# SPDX-License-Identifier: Apache-2.0
"""Memory slots that are registered with NCCL: training with them, on the model of a device."""

from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.mcore_adapter import cpu
from megatron.pretrain import ranks as program
from megatron.pretrain.arguments import parse_arguments
from tests.support.cuda_model.machine import cuda_model
from tests.support.cuda_model.scenarios import stack_on, step
from tests.support.fsdp.meshes import Meshes
from tests.support.fsdp.reference import Ranks
from tests.support.mcore_adapter.runs_on_cuda_model import PLAIN
from tests.support.pretrain import training_runs
from tools.cuda_model.pools import ModelBackend

REGISTERED = {"nccl_ub": True}
BY_HAND = {**REGISTERED, "fsdp_manual_registration": True}
LOCAL = {**REGISTERED, "disable_symmetric_registration": True}


def trained(level: int, has_windows: bool, settings: dict[str, bool]) -> list[torch.Tensor]:
    """Train on the model, of which nothing is reported; return the weights."""
    with cuda_model() as machine, patch.object(ModelBackend, "has_windows", has_windows):
        model, optimizer = stack_on(level, Meshes(), **settings)
        for number in range(4):
            step(model, optimizer, number)
            before = sum(map(len, machine.nccl.calls.values()))
            model.manual_buffer_registration()
            num_collectives = sum(map(len, machine.nccl.calls.values())) - before
            assert (num_collectives > 0) == (settings == BY_HAND and number == 0)
        pools = {id(pool) for pool in machine.pools.alive if pool.groups}
        calls = list(chain.from_iterable(machine.nccl.calls.values()))
        with patch.object(program.parallel_state, "destroy_model_parallel"):
            program.stop()
    assert not machine.reports, "\n".join(map(str, machine.reports))
    assert bool(pools) == bool(settings)
    are_windows = bool(settings) and has_windows and settings != LOCAL
    assert any(call.startswith("windows of") for call in calls) == are_windows
    return [parameter.to_local().clone() for parameter in model.parameters()]


WAYS = {
    1: [(True, REGISTERED), (False, BY_HAND)],
    2: [(True, BY_HAND), (True, LOCAL)],
    3: [(True, REGISTERED), (False, REGISTERED)],
}
"""By level: whether NCCL has windows, and the settings."""


def train_in_ways(level: int) -> None:
    """Compare the weights of training with registered slots with those of training without."""
    expected = trained(level, True, {})
    for has_windows, settings in WAYS[level]:
        weights = trained(level, has_windows, settings)
        assert all(map(torch.equal, weights, expected)) and len(weights) == len(expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", WAYS)
def test_registered_slots_train_with_the_bits_of_a_run_without(ranks: Ranks, level: int) -> None:
    ranks(2, train_in_ways, level)


def pretrain_registered(is_registered: bool) -> tuple[list[float], int, list[str]]:
    """Run the training program; return losses, the number of its windows, and reports."""

    def parse(*args: Any, **kwargs: Any) -> Any:  # --use-nccl-ub needs GPUs
        found, notes = parse_arguments(*args, **kwargs)
        found.nccl_ub = found.fsdp_double_buffer = found.fsdp_manual_registration = True
        return found, notes

    cpu.install()
    parser = parse if is_registered else parse_arguments
    with cuda_model() as model, patch.object(training_runs, "parse_arguments", parser):
        record, _ = training_runs.pretrain_with(PLAIN.ours)
    calls = chain.from_iterable(model.nccl.calls.values())
    num_windows = sum(each.startswith("windows of") for each in calls)
    return [each["lm loss"] for each in record.steps], num_windows, list(map(str, model.reports))


@pytest.mark.exhaustive
def test_pretrain_registers_slots_after_the_first_step(ranks: Ranks) -> None:
    losses, *_ = ranks(2, pretrain_registered, False)[0]
    for registered, num_windows, reports in ranks(2, pretrain_registered, True):
        assert not reports, "\n".join(reports)
        assert registered == losses and num_windows > 0
