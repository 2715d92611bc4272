# SPDX-License-Identifier: Apache-2.0
"""Trainings on the model of CUDA: the lines that they execute, and what comes out of them.

What comes out is what the model reports, a number for each gradient and weight of every step,
memory, and what tells whether communication is as fast as it may be: kernels beside it, and
collectives in registered memory.
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.stream_defects.changed_function import changed_function, lines_noted
from benchmarks.stream_defects.grammar import DrawnDefect
from megatron.fsdp.module.sharded_module import ShardedModule
from tests.support.cuda_model.graph_runs import trained
from tests.support.cuda_model.machine import cuda_model
from tests.support.cuda_model.roots_in_place import train_roots
from tests.support.cuda_model.scenarios import SCENARIOS, run
from tests.support.fsdp.meshes import Meshes
from tests.support.mcore_adapter.runs_on_cuda_model import (
    RUNS,
    reports_of_run,
    run_with_the_drop_in,
)
from tests.support.pretrain.captured_runs import run_on_the_model
from tests.support.pretrain.parity import LLAMA, Combination
from tools.cuda_model.machine import CudaModel


@dataclass
class RunOutcome:
    """The results of a training on one rank.

    Args:
        reports: the first lines of what the model has reported.
        values: a number for each gradient and weight of every step.
        peak: bytes, the most that were allocated.
        held: bytes that were allocated when the model had been sharded, and after each step.
        storages: how many storages were alive then, also those whose memory was released.
        num_beside: kernels between an event of another stream and the first wait for it.
        num_registered: collectives with an operand in registered memory.
        problem: how its weights differ from those of the unsharded model.
        lines: (file, line) of places of the grammar that were executed, where they were noted.
        seconds: how long it took.
    """

    reports: list[str] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    peak: int = 0
    held: list[int] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)
    num_beside: int = 0
    num_registered: int = 0
    problem: str = ""
    lines: set[tuple[str, int]] = field(default_factory=set)
    seconds: float = 0.0


@dataclass(frozen=True)
class ModelRun:
    """A training, and the number of ranks that it runs on.

    ``run`` takes a folder that all ranks share, and returns what was reported and a function that
    compares its weights afterwards.
    """

    num_ranks: int
    run: Callable[[str], tuple[list[str], Callable[[], None] | None]]
    uses_core: bool = False  # it calls `cpu.install()`


class DefectFound(Exception):  # noqa: N818 (what is looked for, not an error)
    """A training has failed, or stopped in the middle of a report."""


def _scenario(name: str, folder: str) -> tuple[list[str], Callable[[], None] | None]:
    meshes, scenario = Meshes(), SCENARIOS[name]
    with cuda_model(names_cuda=True, backend=scenario.backend) as model:
        compare = run(scenario.program, meshes, model)
    return [str(report) for report in model.reports], compare


def _graphs(captures: str, level: int, folder: str) -> tuple[list[str], None]:
    *_, reports = trained(captures, "flat", torch.float32, zero_dp_strategy=level, **HELD)
    return reports, None


def _roots_in_place(folder: str) -> tuple[list[str], None]:
    return train_roots(3, False), None


def _captured(folder: str) -> tuple[list[str], None]:
    *_, reports = run_on_the_model(CAPTURED.with_few_microbatches().ours)
    return reports, None


def _core_run(name: str, folder: str) -> tuple[list[str], None]:
    return reports_of_run(name, folder), None


def _drop_in(level: str, folder: str) -> tuple[list[str], None]:
    settings = {"data_parallel_sharding_strategy": level, "bf16": True}
    reports, _, _ = run_with_the_drop_in(folder, **settings)
    return reports, None


CAPTURED = Combination(
    *(2, "", 3, LLAMA),
    "--no-check-for-nan-in-loss-and-grad --train-iters 4 --lr-decay-iters 20 --eval-interval 2"
    " --eval-iters 3 --overlap-grad-reduce --overlap-param-gather",
)
HELD = {"cuda_graph_mode": True}
PROGRAMS: dict[str, ModelRun] = {
    **{
        name: ModelRun(each.num_ranks, functools.partial(_scenario, name))
        for name, each in SCENARIOS.items()
    },
    "graphs of units": ModelRun(2, functools.partial(_graphs, "units", 3)),
    "graphs of iterations": ModelRun(2, functools.partial(_graphs, "iteration", 1)),
    "roots in place": ModelRun(2, _roots_in_place),
    "pretrain: captured iterations": ModelRun(2, _captured, True),
    **{
        f"pretrain: {name}": ModelRun(each.ranks, functools.partial(_core_run, name), True)
        for name, each in RUNS.items()
    },
    "drop-in": ModelRun(2, functools.partial(_drop_in, "optim"), True),
}
"""By name."""


def outcome_of(
    name: str, folder: str, defect: DrawnDefect | None, notes_lines: bool, *unused: Any
) -> RunOutcome:
    """Run a training on this rank, with a defect if one is given.

    Args:
        name: key of ``PROGRAMS``.
        folder: a folder that all ranks share.
        defect: the defect, which is made while the training runs.
        notes_lines: note the places of the grammar that are executed.
        unused: functions that say to the pool which ranks to take.

    Raises:
        DefectFound: it has failed.
    """
    outcome, models = RunOutcome(), list[CudaModel]()
    gc.collect()
    gc.freeze()  # what there is now is not looked at in each step
    make = CudaModel.__init__

    def make_noted(model: CudaModel, *args: Any, **kwargs: Any) -> None:
        make(model, *args, **kwargs)
        models.append(model)

    begin = time.monotonic()
    with (
        changed_function(defect),
        patch.object(CudaModel, "__init__", make_noted),
        values_noted(outcome.values),
        lines_noted(outcome.lines) if notes_lines else nullcontext(),
        memory_noted(outcome, models),
    ):
        try:
            reports, compare = PROGRAMS[name].run(folder)
        except Exception as error:
            found = list(chain.from_iterable(model.reports for model in models))
            message = f"{type(error).__name__}: {error}"
            if found:
                message = f"reported: {_first_line(str(found[0]))}"
            raise DefectFound(message) from error
        finally:
            gc.unfreeze()
    outcome.seconds = time.monotonic() - begin
    outcome.reports = [_first_line(each) for each in reports]
    outcome.peak = max((model.detector.blocks.peak for model in models), default=0)
    outcome.num_beside = sum(model.detector.num_beside for model in models)
    outcome.num_registered = sum(model.nccl.num_registered for model in models)
    if compare is not None and not reports:
        try:
            compare()
        except AssertionError as error:
            outcome.problem = _first_line(str(error))
    return outcome


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


@contextmanager
def values_noted(values: list[float]) -> Iterator[None]:
    """Add a number for each gradient before a step of an optimizer, and each weight after it."""

    def note(optimizer: torch.optim.Optimizer, of: Callable[[Any], Any]) -> None:
        with _disable_current_modes(), torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    tensor = of(parameter)
                    if tensor is not None:
                        values.append(number_of(getattr(tensor, "_local_tensor", tensor)))

    before = register_optimizer_step_pre_hook(
        lambda optimizer, args, kwargs: note(optimizer, lambda parameter: parameter.grad)
    )
    after = register_optimizer_step_post_hook(
        lambda optimizer, args, kwargs: note(optimizer, lambda parameter: parameter)
    )
    try:
        yield
    finally:
        before.remove()
        after.remove()


@contextmanager
def memory_noted(outcome: RunOutcome, models: list[CudaModel]) -> Iterator[None]:
    """Note what is held when a model has been sharded, and after each step."""

    def note() -> None:
        gc.collect()  # garbage in cycles goes at any time
        if models:
            outcome.held.append(models[-1].detector.blocks.allocated)
            outcome.storages.append(models[-1].detector.blocks.num_storages)

    shard, end_step = ShardedModule.__init__, ShardedModule.install_optimized_model_weights

    def shard_noted(module: ShardedModule, *args: Any, **kwargs: Any) -> None:
        shard(module, *args, **kwargs)
        note()

    def end_step_noted(module: ShardedModule, *args: Any, **kwargs: Any) -> None:
        end_step(module, *args, **kwargs)
        note()

    functions = {"__init__": shard_noted, "install_optimized_model_weights": end_step_noted}
    with patch.multiple(ShardedModule, **functions):
        yield


def number_of(tensor: torch.Tensor) -> float:
    """Return a number that depends on all values of a tensor, each in its own way."""
    if tensor.untyped_storage().nbytes() == 0:
        return 0.0
    flat = tensor.detach().double().flatten()
    weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64).cos()
    return float(flat.dot(weights))


def are_same(values: list[float], others: list[float]) -> bool:
    """Return True if two lists have the same numbers, but for the last bits."""
    return len(values) == len(others) and all(
        math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12) for one, other in zip(values, others)
    )
