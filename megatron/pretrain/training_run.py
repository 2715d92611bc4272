# SPDX-License-Identifier: Apache-2.0
"""The parts of one training run, which the loop and its steps work on."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule

from megatron.pretrain.checkpoints.background_save import BackgroundSaves
from megatron.pretrain.progress import Progress
from megatron.pretrain.report.report import Report
from megatron.pretrain.watch.stopping import StopRequest


@dataclass
class TrainingRun:
    """The parts of one training run."""

    args: argparse.Namespace
    """The completed arguments, which no part of the run changes."""
    device: torch.device
    model: list[MegatronModule]
    """The model chunks of this pipeline stage: one, or one for each virtual stage."""
    optimizer: MegatronOptimizer | None
    """None for a run that only evaluates."""
    scheduler: OptimizerParamScheduler | None
    """The schedule of learning rate and weight decay; None for a run that only evaluates."""
    report: Report
    progress: Progress = field(default_factory=Progress)
    stop: StopRequest = field(default_factory=StopRequest)
    background: BackgroundSaves | None = None
    """With --async-save."""
    should_save: bool = False
    """The rerun machine asks for a checkpoint before the run ends."""
    exit_code: int = 0
    """Not 0 if the rerun machine asks to end the run, without the step that it has repeated."""

    @property
    def stops_here(self) -> bool:
        """True if the run ends after its last step; the same on every rank."""
        return (
            self.progress.iteration >= self.args.train_iters
            or self.stop.interrupted
            or self.stop.agreed
            or self.progress.is_multiple_of(self.args.exit_interval)
        )
