# SPDX-License-Identifier: Apache-2.0
"""Trainings of Megatron-Core models through the adapter, under its schedules, on the model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron.core.pipeline_parallel import utils

from benchmarks.stream_defects.defect import Defect
from megatron.mcore_adapter import cpu
from megatron.mcore_adapter.checkpoints import staging
from megatron.mcore_adapter.checkpoints.background_save import BackgroundSaves
from tests.support.cuda_model.machine import cuda_model
from tests.support.mcore_adapter.dropped_in import LoopRun, dropped_in
from tests.support.pretrain.parity import ALLTOALL, LLAMA, MOE, Combination
from tests.support.pretrain.training_runs import pretrain_with
from tests.support.pretrain.warm_writers import warm_writers
from tools.cuda_model.streams import ModelStream

OVERLAP = "--overlap-grad-reduce --train-iters 2 --lr-decay-iters 20"
GATHERS = f"{OVERLAP} --overlap-param-gather"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

THREE_MICROBATCHES = "--global-batch-size 6"
OVERLAPPED = f"{GATHERS} --bf16 --overlap-moe-expert-parallel-comm {THREE_MICROBATCHES}"
"""The combined schedule, in which the second of three microbatches meets both of the others."""

PLAIN = Combination(2, "", 3, LLAMA, GATHERS).with_few_microbatches()

ROWS = {
    "level1 bf16": Combination(2, "", 1, LLAMA, f"{OVERLAP} --bf16"),
    "tp2 sp": Combination(2, "tp2 sp", 3, LLAMA, GATHERS),
    "pp2": Combination(2, "pp2", 3, LLAMA, OVERLAP),
    "cp2": Combination(2, "cp2", 3, LLAMA, OVERLAP),
    "experts": Combination(2, "", 3, MOE, OVERLAP),
    "ep2": Combination(2, "ep2", 3, ALLTOALL, OVERLAP),
    "pp2 vpp2": Combination(2, "pp2 vpp2", 3, LLAMA, OVERLAP, layers=4),
    "background saves": Combination(
        *(2, "", 3, LLAMA),
        f"{GATHERS} {RECOMPUTED} --async-save --use-persistent-ckpt-worker --save-interval 1",
    ),
}
RUNS = {name: row.with_few_microbatches() for name, row in ROWS.items()}
RUNS["overlapped"] = Combination(2, "ep2", 3, ALLTOALL, OVERLAPPED)
"""By name."""

WITH_ENGINE = {
    "delayed": Combination(
        *(2, "ep2", 3, f"{ALLTOALL} --moe-grouped-gemm"),
        f"{OVERLAPPED} --delay-wgrad-compute --transformer-impl transformer_engine",
    )
}
"""Those with Transformer Engine's layers, on ranks that have it."""

OF_MEGATRON_CORE = {
    # It makes a NumPy view of the sizes at once, and waits for the copy before it reads them.
    "ep2": "MoEAlltoAllTokenDispatcher",
    "overlapped": "MoEAlltoAllTokenDispatcher",
    "delayed": "MoEAlltoAllTokenDispatcher",
    # It keeps no handle of messages that it sends while it receives others.
    "pp2 vpp2": "in P2PCommunicator._communicate",
}
"""What is reported of Megatron-Core's own code, by a text that each such report has."""


class ConcurrentThread:
    """A thread whose waits for the device hold up nobody else until somebody waits for it.

    Its work is done at once, in this thread: others would not be seen.
    """

    def __init__(self, target: Callable[[], None], **unused: Any):
        self._work = target
        self._streams: list[ModelStream] = []

    def start(self) -> None:
        """Do the work."""
        with patch.object(ModelStream, "synchronize", lambda stream: self._streams.append(stream)):
            self._work()

    def join(self) -> None:
        """Wait for what the thread has waited for."""
        while self._streams:
            self._streams.pop().synchronize()


def reports_of_run(name: str, folder: str) -> list[str]:
    """Run one of the trainings on this rank; return what was reported of the project's code.

    Checkpoints go into ``folder``.
    """
    cpu.install()
    threads = patch.multiple(staging, Thread=ConcurrentThread, _LARGE=0)
    run = {**RUNS, **WITH_ENGINE}[name]
    save = f" --save {folder}" if "--async-save" in run.flags else ""
    # Megatron-Core keeps the streams of its first schedule, which may not have been the model's.
    streams = patch.multiple(utils, _COMP_STREAM=None, _COMM_STREAM=None)
    with warm_writers(), threads, streams, cuda_model() as model:
        pretrain_with(run.ours + save)
    reports = [str(report) for report in model.reports]
    known = OF_MEGATRON_CORE.get(name)
    return [report for report in reports if known is None or known not in report]


def run_with_the_drop_in(folder: str, **changes: Any) -> tuple[list[str], list[float], list[float]]:
    """Train, evaluate, save and load in the stand-in for Megatron-LM's loop, with the drop-in.

    Returns:
        what was reported, the losses, and those without the model.
    """
    with dropped_in() as loop:
        plain = LoopRun(loop, **changes).train(3)
        with cuda_model() as model:
            run = LoopRun(loop, **changes)
            losses = run.train(2)
            run.evaluate()
            run.save(Path(folder))
            run.load(Path(folder))
            losses += run.train(1)
    return [str(report) for report in model.reports], losses, plain


def reports_with(defect: Defect, folder: str) -> list[str]:
    """Run the stand-in with a defect at level 1; return what was reported."""
    with defect.made():
        return run_with_the_drop_in(folder, data_parallel_sharding_strategy="optim", bf16=True)[0]


def reports_of_unawaited_copies(folder: str) -> list[str]:
    """Save in the background where the next save waits for the copies, but no optimizer step."""
    finish_copying = BackgroundSaves.finish_copying

    def finish(saves: BackgroundSaves) -> None:
        if sys._getframe(1).f_code is BackgroundSaves.wait.__code__:
            finish_copying(saves)

    with patch.object(BackgroundSaves, "finish_copying", finish):
        return reports_of_run("background saves", folder)
