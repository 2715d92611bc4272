# SPDX-License-Identifier: Apache-2.0
"""Repeated steps give what steps give that are not repeated; rejected results end the run."""

import inspect
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core import rerun_state_machine
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron.pretrain import loop, training_step
from megatron.pretrain.watch.rerun import RerunExitError
from tests.support.pretrain.saved_runs import DROPOUT, FSDP, saved_at
from tests.support.pretrain.training_runs import Record, pretrain, trained
from tests.support.rank_pool import run_ranks

SHORT = f"{DROPOUT} --exit-interval 4 --log-interval 1"
SHARDED = f"{FSDP} --data-parallel-sharding-strategy"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss"
    " --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --moe-router-score-function sigmoid"
    " --moe-router-enable-expert-bias --disable-bias-linear"
)
MACHINE = inspect.getsource(rerun_state_machine)
SAVES_BEFORE_17 = "can be resumed from a previous checkpoint" not in MACHINE
"""The machine of Megatron-Core 0.18 and newer asks for no checkpoint before exit code 17."""
COUNTS_ONE_MORE = "iteration={self.current_iteration + 1}" in MACHINE
"""That of 0.17 and newer adds one to the iteration, in Megatron-LM's loop as in ours."""
VALIDATE = "--rerun-mode validate_results --error-injection-rate 1 --error-injection-type"


def train_counted(command_line: str) -> tuple[Record, int]:
    """Job: train, and count how often the forward and backward of a step was run."""
    count = 0
    forward_backward = training_step.forward_backward

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return forward_backward(*args, **kwargs)

    with patch.object(training_step, "forward_backward", counted):
        return pretrain(command_line), count


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "flags",
    [
        "",
        f"{SHARDED} optim_grads",
        f"{SHARDED} optim_grads_params",
        f"{SHARDED} optim_grads_params {EXPERTS}",
    ],
    ids=["ddp", "zero2", "zero3", "experts"],
)
def test_a_repeated_step_is_the_step_that_is_not_repeated(flags: str) -> None:
    line = f"{SHORT} {flags}"
    once, num_once = run_ranks(2, train_counted, line)[0]
    twice, num_twice = run_ranks(2, train_counted, f"{line} --rerun-mode report_stats")[0]
    assert num_twice == 2 * num_once == 8
    assert once.steps == twice.steps  # losses of routers and gradient norms among them
    told = [each for each in twice.lines if each.startswith("repeated steps, found NaN in ")]
    assert told and all(each.endswith("samples, all identical") for each in told)
    assert ("load_balancing_loss" in once.steps[0]) == ("experts" in flags)


def stopped(command_line: str, node: str = "first") -> tuple[int, Record | None]:
    """Job: the exit code of a run on a machine of this name, and its record if it is 0."""
    uname = os.uname()
    with patch.object(os, "uname", lambda: (uname[0], node, *uname[2:])):
        try:
            return 0, pretrain(command_line)
        except RerunExitError as request:
            return request.code, None


@pytest.mark.always("zero3")
@pytest.mark.parametrize("flags", [f"{SHARDED} optim_grads_params", ""], ids=["zero3", "ddp"])
def test_an_error_that_is_gone_ends_the_run_with_17(flags: str, tmp_path: Path) -> None:
    line = f"{SHORT} {flags} --save {tmp_path} --save-interval 4 {VALIDATE} transient_error"
    assert [code for code, _ in run_ranks(2, stopped, line)] == [17, 17]
    if SAVES_BEFORE_17:
        saved_at(tmp_path, 1)  # the first step is not validated, and the second was not taken
    else:
        assert list(tmp_path.glob("iter_*")) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("persistent_error", f"{SHARDED} optim_grads_params"),
        ("correct_result", f"{SHARDED} optim --ckpt-format torch_dist"),
    ],
    ids=["fsdp_dtensor", "torch_dist"],
)
def test_an_error_that_stays_is_looked_at_on_another_machine(
    kind: str, flags: str, tmp_path: Path
) -> None:
    line = f"{SHORT} {flags} --save {tmp_path} --save-interval 1 {VALIDATE} {kind}"
    assert [code for code, _ in run_ranks(2, stopped, line)] == [16, 16]
    saved_at(tmp_path, 1)
    resumed = f"{line} --load {tmp_path}"
    assert [code for code, _ in run_ranks(2, stopped, resumed)] == [16, 16]  # the same machine
    assert [code for code, _ in run_ranks(2, stopped, resumed, "second")] == [17, 17]
    # Without the machine the run goes on, as if it had never been stopped.
    rest, whole = trained(f"{SHORT} {flags} --load {tmp_path}", f"{SHORT} {flags}")
    assert rest.steps == whole.steps[1:]


def train_with_low_limits(command_line: str, name: str) -> tuple[Record, int]:
    """Job: train with a machine that has seen only tiny values of this name."""
    step = loop.train_step

    def train_step(*args: Any) -> None:
        machine = get_rerun_state_machine()
        machine.large_value_counts[name] = 100
        machine.max_values[name] = 1e-9
        step(*args)

    with patch.object(loop, "train_step", train_step):
        return train_counted(command_line)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("flag", "name", "flags"),
    [
        ("--check-for-spiky-loss", "loss", ""),
        ("--check-for-large-grads", "grads", f"{SHARDED} optim_grads_params"),
    ],
    ids=["loss", "gradients"],
)
def test_spikes_are_repeated_and_training_goes_on(flag: str, name: str, flags: str) -> None:
    line = f"{SHORT} {flags}"
    plain = trained(line)[0]
    checked = f"{line} {flag} --rerun-mode validate_results"
    record, count = run_ranks(2, train_with_low_limits, checked, name)[0]
    assert record.steps == plain.steps
    assert count == 4 + 3  # every step but the first, which is not validated


def train_with_nan(command_line: str, rank: int) -> int:
    """Job: the exit code of a run in which a gradient of one rank is NaN, from step 2 on."""
    forward_backward = training_step.forward_backward

    def spoiled(run: Any, *args: Any, **kwargs: Any) -> Any:
        losses = forward_backward(run, *args, **kwargs)
        if run.progress.iteration and torch.distributed.get_rank() == rank:
            parameter = next(p for p in run.model[0].parameters() if p.to_local().numel())
            parameter.grad.to_local().view(-1)[0] = float("nan")
        return losses

    with patch.object(training_step, "forward_backward", spoiled):
        return stopped(command_line)[0]


@pytest.mark.exhaustive
def test_a_nan_in_sharded_gradients_is_repeated_before_the_run_ends(tmp_path: Path) -> None:
    line = f"{SHORT} {SHARDED} optim_grads --rerun-mode validate_results --save {tmp_path}"
    log = tmp_path / "rejected.txt"
    flags = f"--save-interval 4 --result-rejected-tracker-filename {log}"
    assert run_ranks(2, train_with_nan, f"{line} {flags}", 1) == [16, 16]
    told = f"rank=1 iteration={2 + COUNTS_ONE_MORE} status="
    assert f"{told}RerunValidationStatus.FIRST_RERUN_REPRODUCIBLE" in log.read_text()
