# SPDX-License-Identifier: Apache-2.0
"""Records of GPUs: slow ranks, energy and allocations. On a CPU the command line is refused."""

from __future__ import annotations

import argparse
import logging

import torch
import torch.distributed as dist
from megatron.core.energy_monitor import EnergyMonitor
from megatron.core.utils import StragglerDetector

from megatron.pretrain.report.decorations import Decorations

MAX_ALLOCATIONS = 100_000
"""Allocations and releases that --record-memory-history keeps, the last ones."""


class DeviceRecords:
    """The records that flags ask for, on this rank.

    Args:
        args: of the run.
        decorations: the guard around the file of allocations.
    """

    def __init__(self, args: argparse.Namespace, decorations: Decorations):
        self._args = args
        self._decorations = decorations
        self._has_started = False
        self._energy = EnergyMonitor() if args.log_energy else None

    def start(self) -> None:
        """Begin to record, before the first step."""
        args = self._args
        self._has_started = True
        if args.log_straggler:
            logging.getLogger("megatron.core.utils").setLevel(logging.INFO)  # its report
            StragglerDetector().configure(
                dist.get_world_size(),
                dist.get_rank(),
                mmcnt=args.straggler_minmax_count,
                enabled=not args.disable_straggler_on_startup,
                port=args.straggler_ctrlr_port,
            )
        if args.record_memory_history:
            # torch has no public name for its recorder, which it documents under these two.
            torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
        if self._energy is not None:
            self._energy.setup()
            self._energy.resume()

    def pause(self) -> None:
        """Leave what follows out of the energy of training."""
        if self._energy is not None:
            self._energy.pause()

    def resume(self) -> None:
        """Count energy again."""
        if self._energy is not None:
            self._energy.resume()

    def end_interval(self, num_iterations: int, seconds: float, flops: float) -> dict[str, float]:
        """Report an interval; a collective if slow ranks or energy are recorded.

        Args:
            num_iterations: of the interval.
            seconds: of each of them.
            flops: of all of them, on all ranks.

        Returns:
            Joules and watts of each device, by the names that Megatron-LM gives them.
        """
        if self._args.log_straggler:
            StragglerDetector().report(flops, num_iterations)
        if self._args.record_memory_history and dist.get_rank() == 0:
            path = self._args.memory_snapshot_path
            with self._decorations.guard(path, Exception):
                torch.cuda.memory._dump_snapshot(path)
        if self._energy is None:
            return {}
        joules = self._energy.lap() / num_iterations / dist.get_world_size()
        return {"iter-energy/gpu": joules, "power/gpu": joules / seconds}

    def end(self) -> None:
        """End recording."""
        if not self._has_started:
            return
        if self._args.record_memory_history:
            torch.cuda.memory._record_memory_history(enabled=None)
        if self._energy is not None:
            self._energy.shutdown()
