# SPDX-License-Identifier: Apache-2.0
"""Times of the phases of training, by Megatron-Core's timers.

At ``--timing-log-level 0`` nothing is measured and nothing communicates. From level 1 on every rank
has timers, and their times travel in an all-gather at each ``--log-interval``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.timers import Timers
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config

INTERVAL = "interval-time"
SAVE = "save-checkpoint"
LOAD = "load-checkpoint"
OPTIMIZER = "optimizer"
BATCH = "batch-generator"
LEVEL_1 = [
    INTERVAL,
    "forward-backward",
    "all-grads-sync",
    "conditional-embedder-grads-all-reduce",
    "non-tensor-parallel-grads-all-reduce",
    "embedding-grads-all-reduce",
    "params-all-gather",
    "optimizer-copy-to-main-grad",
    "optimizer-unscale-and-check-inf",
    "optimizer-clip-main-grad",
    "optimizer-count-zeros",
    "optimizer-inner-step",
    "optimizer-copy-main-to-model-params",
    OPTIMIZER,
]
"""Timers that run about once in an iteration, of this program and of Megatron-Core."""
LEVEL_2 = [
    BATCH,
    "forward-compute",
    "backward-compute",
    "forward-recv",
    "forward-send",
    "backward-recv",
    "backward-send",
    "forward-send-forward-recv",
    "forward-send-backward-recv",
    "backward-send-forward-recv",
    "backward-send-backward-recv",
    "forward-backward-send-forward-backward-recv",
]
"""Timers that run many times in an iteration."""


class PhaseTimes:
    """Timers of this rank, which all ranks report together."""

    def __init__(self, args: argparse.Namespace, log: Callable[[str], None]):
        level = args.timing_log_level
        self.timers: Timers | None = None
        """Megatron-Core's timers; None at level 0."""
        if level > 0:
            self.timers = Timers(level, args.timing_log_option)
        self._barrier = args.barrier_with_L1_time
        self._names = list(LEVEL_1)
        if level > 1:
            self._names += LEVEL_2
        self.writes = args.log_timers_to_tensorboard
        self._log = log
        self._configs: list[object] = []
        self._is_paused = False

    def connect(self, model: list[MegatronModule], optimizer: MegatronOptimizer | None) -> None:
        """Let Megatron-Core's schedules, gradient reductions and optimizers measure too."""
        self._configs = [get_model_config(chunk) for chunk in model]
        if optimizer is not None:
            chained = getattr(optimizer, "chained_optimizers", [optimizer])
            self._configs += [part.config for part in chained]
        self._let_megatron_core_measure(self.timers)

    def _let_megatron_core_measure(self, timers: Timers | None) -> None:
        for config in self._configs:
            config.timers = timers  # type: ignore[attr-defined]  # a field of both classes

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Measure nothing inside the context, which is an evaluation."""
        self._let_megatron_core_measure(None)
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
            self._let_megatron_core_measure(self.timers)

    @contextmanager
    def measured(self, name: str, level: int = 1) -> Iterator[None]:
        """Measure the time inside the context, on this rank, from a level of detail on.

        At level 1 ranks wait for each other first, unless --no-barrier-with-level-1-timing.
        """
        if self.timers is None or self._is_paused:
            yield
            return
        self.timers(name, log_level=level).start(barrier=level == 1 and self._barrier)
        yield
        self.timers(name).stop()

    def stop_interval(self) -> None:
        """Leave the time until :meth:`resume_interval` out of the interval; after every step."""
        if self.timers is not None:
            self.timers(INTERVAL).stop()

    def resume_interval(self) -> None:
        """Count time as that of the interval from now on."""
        if self.timers is not None:
            self.timers(INTERVAL, log_level=1).start()

    def report(self, num_iterations: int, name: str = "") -> dict[str, float]:
        """Report the times of an interval as means of its iterations; a collective from level 1 on.

        Args:
            num_iterations: number of iterations in the interval.
            name: a single timer to report, of work outside of iterations, such as a checkpoint; ""
                for all timers of iterations.

        Returns:
            Name -> seconds, for TensorBoard: the longest of all ranks, with
            --log-timers-to-tensorboard.
        """
        if self.timers is None:
            return {}
        names = [name] if name else self._names
        values: dict[str, float] = {}
        if self.writes:
            # Here, because TensorBoard takes a second to import.
            from torch.utils.tensorboard import SummaryWriter

            # Megatron-Core asks for this class. It has no file.
            writer: Any = SummaryWriter.__new__(SummaryWriter)
            writer.add_scalar = lambda name, value, _: values.update({name: float(value)})
            # Ranks without a file measure too.
            self.timers.write(names, writer, 0, num_iterations, reset=False)
        text = self.timers.get_all_timers_string(names, num_iterations, reset=True)
        if text is not None:
            self._log(text)
        return values
