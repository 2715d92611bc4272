# SPDX-License-Identifier: Apache-2.0
"""The speed of a run: time of a step, tokens, FLOP/s and their part of the peak, time that is left.

A clock measures it from one line of the log to the next, without evaluations and checkpoints. The
peak of a GPU is the figure of its data sheet for dense matrix products in bf16 (fp16 where the GPU
has no bf16), whatever the run computes in, or --device-peak-tflops. A CPU is measured.
"""

from __future__ import annotations

import argparse
import functools
import time
from dataclasses import dataclass

import torch

from megatron.mcore_adapter.run.run_state import Progress
from megatron.pretrain.report.quantities import duration, significant

_SHEETS = """
    GB300 2500, GB200 2500, B300 2250, B200 2250, B100 1750, GH200 989, H200 NVL 835, H200 989,
    H100 NVL 835, H100 PCIe 756, H100 989, H800 989, H20 148, A100 312, A800 312, A40 150, A30 165,
    A10G 70, A10 125, L40S 362, L40 181, L4 121, RTX 6000 Ada 364, RTX A6000 155, RTX 4090 165,
    RTX 3090 71, V100 125, T4 65, MI355X 2516, MI325X 1307, MI300X 1307, MI250X 383"""
PEAK_TFLOPS = {" ".join(name): int(peak) for *name, peak in map(str.split, _SHEETS.split(","))}
"""Part of the name that CUDA gives a GPU -> TFLOP/s of its data sheet, dense. The first that fits
counts, so that a longer name stands before those that it contains."""

MATRIX_SIZE = 768
MEASURED_SECONDS = 0.1


@dataclass(frozen=True)
class Speed:
    """The speed of the steps of an interval."""

    seconds: float
    """Mean time of a step."""
    tokens: float
    """Tokens per second of all ranks."""
    flops: float
    """FLOP/s of the model for each device."""
    peak: float | None
    """FLOP/s that the device could reach; None if they are not known."""
    remaining: float
    """Seconds to the end of the run at this speed, with evaluations and checkpoints."""

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the part of the peak, 0 to 1. Source: arXiv:2204.02311."""
        if not self.peak:
            return None
        return self.flops / self.peak

    def parts(self) -> list[str]:
        """Return the parts of a line of the log, but for the time that remains."""
        tflops = f"{significant(self.flops / 1e12)} TFLOP/s"
        if self.mfu is not None:
            tflops += f" ({significant(100 * self.mfu, 2)} % MFU)"
        return [f"step {duration(self.seconds)}", f"{significant(self.tokens)} tokens/s", tflops]

    def scalars(self) -> dict[str, float]:
        """Return the numbers for TensorBoard; two have the names that Megatron-LM gives them."""
        numbers = {
            "iteration-time": self.seconds,
            "tokens-per-second": self.tokens,
            "throughput": self.flops / 1e12,
        }
        if self.mfu is not None:
            numbers["mfu"] = self.mfu
        return numbers


class SpeedClock:
    """The clock of a run, which counts time of training only."""

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self._peak: float | None = None
        self._interval_began = time.perf_counter()
        self._stopped = self._interval_began
        self._before = Progress()
        # End of the first step of this run, whose time has the start of many things in it.
        self._warm: tuple[float, int] | None = None

    def start(self, progress: Progress) -> bool:
        """Begin to measure from ``progress`` on; return False if the peak is not known.

        On a CPU all ranks measure the peak here, at the same time as in training.
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
        now = time.perf_counter()
        before = self._before
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
        self._before = Progress(**vars(progress))
        self._interval_began = now
        return speed

    def _remaining(
        self,
        iteration: int,
        now: float,
        seconds: float,
    ) -> float:
        if self._warm is None:
            self._warm = now, iteration
        elif iteration > self._warm[1]:
            seconds = (now - self._warm[0]) / (iteration - self._warm[1])
        return max(self._args.train_iters - iteration, 0) * seconds


def peak_flops(args: argparse.Namespace) -> float | None:
    """Return the peak FLOP/s of this rank's device, None for a GPU that is not known."""
    if args.device_peak_tflops:
        return args.device_peak_tflops * 1e12
    if not torch.cuda.is_available():
        return measured_flops(args.params_dtype)
    return known_flops(torch.cuda.get_device_name())


def known_flops(name: str) -> float | None:
    """Return the peak FLOP/s of the GPU that CUDA calls ``name``, None if it is not in the list."""
    words = name.replace("-", " ").split()
    for part, tflops in PEAK_TFLOPS.items():
        wanted = part.split()
        starts = range(len(words) - len(wanted) + 1)
        if any(words[start : start + len(wanted)] == wanted for start in starts):
            return tflops * 1e12
    return None


@functools.cache
def measured_flops(dtype: torch.dtype) -> float:
    """Return the FLOP/s of a matrix product on the threads of this process, measured once."""
    matrix = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype)
    out = torch.empty_like(matrix)
    best = float("inf")
    end = time.perf_counter() + MEASURED_SECONDS
    with torch.no_grad():
        torch.mm(matrix, matrix, out=out)  # the first one loads kernels
        while best == float("inf") or time.perf_counter() < end:
            started = time.perf_counter()
            torch.mm(matrix, matrix, out=out)
            best = min(best, time.perf_counter() - started)
    return 2 * MATRIX_SIZE**3 / best
