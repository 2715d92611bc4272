# SPDX-License-Identifier: Apache-2.0
"""The speed of a run: time of a step, tokens, FLOP/s and their part of the peak, time that is left.

A clock measures it from one line of the log to the next, without evaluations and checkpoints.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from megatron.pretrain.progress import Progress
from megatron.pretrain.report.device_peak import peak_flops
from megatron.pretrain.report.quantities import clock, duration, significant


@dataclass(frozen=True)
class Speed:
    """The speed of the steps of an interval."""

    seconds: float
    """Of a step, the mean."""
    tokens: float
    """Tokens per second of all ranks."""
    flops: float
    """FLOP/s of the model for each device."""
    peak: float | None
    """FLOP/s that the device could reach; None if they are not known."""
    remaining: float
    """Seconds to the end of the run, evaluations and checkpoints included, if it goes on so."""

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the part of the peak, 0 to 1. Source: arXiv:2204.02311."""
        return self.flops / self.peak if self.peak else None

    def parts(self) -> list[str]:
        """Return the parts of a line of the log, but for the time that remains."""
        tflops = f"{significant(self.flops / 1e12)} TFLOP/s"
        if self.mfu is not None:
            tflops += f" ({significant(100 * self.mfu, 2)} % MFU)"
        return [f"step {duration(self.seconds)}", f"{significant(self.tokens)} tokens/s", tflops]

    def left(self) -> str:
        """Return the time that remains, as a part of a line of the log."""
        return f"ETA {clock(self.remaining)}"

    def scalars(self) -> dict[str, float]:
        """Return the numbers for TensorBoard; two have the names that Megatron-LM gives them."""
        numbers = {
            "iteration-time": self.seconds,
            "tokens-per-second": self.tokens,
            "throughput": self.flops / 1e12,
        }
        return numbers if self.mfu is None else numbers | {"mfu": self.mfu}


class SpeedClock:
    """The clock of a run, which counts time of training only.

    Args:
        args: of the run.
    """

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self._peak: float | None = None
        self._interval_began = self._stopped = time.perf_counter()
        self._before = Progress()
        # End of the first step of this run, whose time has the start of many things in it.
        self._warm: tuple[float, int] | None = None

    def start(self, progress: Progress) -> bool:
        """Begin to measure from ``progress`` on; return False if there is no MFU to be had.

        On a CPU all ranks measure the peak here, each what its threads reach beside the others.
        """
        self._peak = peak_flops(self._args)
        self._before = Progress(**vars(progress))
        self._interval_began = time.perf_counter()
        return self._peak is not None

    def stop(self) -> None:
        """Leave the time until :meth:`restart` out of the time of training."""
        self._stopped = time.perf_counter()

    def restart(self) -> None:
        """Count time as that of training again."""
        self._interval_began += time.perf_counter() - self._stopped

    def end_interval(self, progress: Progress) -> Speed:
        """Return the speed since the last call, or the start, in at least one step."""
        now, before = time.perf_counter(), self._before
        steps = progress.iteration - before.iteration
        elapsed = max(now - self._interval_began, 1e-9)
        samples = progress.consumed_train_samples - before.consumed_train_samples
        flops = (
            progress.num_floating_point_operations_so_far
            - before.num_floating_point_operations_so_far
        )
        speed = Speed(
            seconds=elapsed / steps,
            tokens=samples * self._args.seq_length / elapsed,
            flops=flops / elapsed / self._args.world_size,
            peak=self._peak,
            remaining=self._remaining(progress.iteration, now, elapsed / steps),
        )
        self._before, self._interval_began = Progress(**vars(progress)), now
        return speed

    def _remaining(self, iteration: int, now: float, seconds: float) -> float:
        if self._warm is None:
            self._warm = now, iteration
        elif iteration > self._warm[1]:
            seconds = (now - self._warm[0]) / (iteration - self._warm[1])
        return max(self._args.train_iters - iteration, 0) * seconds
