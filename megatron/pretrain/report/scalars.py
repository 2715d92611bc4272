# SPDX-License-Identifier: Apache-2.0
"""Numbers of a run for TensorBoard and for Weights & Biases."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.mcore_adapter.run.run_state import Progress
from megatron.pretrain.report.run_files import Decorations

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

TENSORBOARD = "TensorBoard's file"
WANDB = "Weights & Biases"
SAMPLES = "samples vs steps"
"""The name under which Weights & Biases gets the samples of each step, for its x-axis."""


class ScalarWriters:
    """Numbers that go to TensorBoard with --tensorboard-dir, to W&B with --wandb-project.

    Where one of them fails, training continues without it.

    Args:
        args: arguments of the run.
        decorations: guard of both.
        writes: True on the first rank only; others write nothing.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        decorations: Decorations,
        writes: bool,
    ):
        self._decorations = decorations
        self._tensorboard: SummaryWriter | None = None
        self._wandb: Any = None
        if writes and args.tensorboard_dir:
            # Here, because TensorBoard takes a second to import.
            from torch.utils.tensorboard import SummaryWriter

            with decorations.guard(TENSORBOARD):
                self._tensorboard = SummaryWriter(args.tensorboard_dir)
        if writes and args.wandb_project:
            with decorations.guard(WANDB, Exception):
                self._wandb = _open_wandb(args)

    def __bool__(self) -> bool:
        """Return True if numbers are written anywhere."""
        return self._tensorboard is not None or self._wandb is not None

    def add(
        self,
        values: Mapping[str, float],
        progress: Progress,
        by_samples: tuple[str, ...] = (),
    ) -> None:
        """Write numbers of an iteration.

        Args:
            values: numbers by their names.
            progress: progress of the run at that iteration.
            by_samples: names of those that TensorBoard gets over the consumed samples too. In W&B
                any number can be drawn over ``samples vs steps``.
        """
        iteration = progress.iteration
        samples = progress.consumed_train_samples
        if self._tensorboard is not None:
            with self._decorations.guard(TENSORBOARD):
                for name, value in values.items():
                    self._tensorboard.add_scalar(name, value, iteration)
                    if name in by_samples:
                        self._tensorboard.add_scalar(f"{name} vs samples", value, samples)
        if self._wandb is not None and values:
            with self._decorations.guard(WANDB, Exception):
                self._wandb.log({SAMPLES: samples, **values}, step=iteration)

    def close(self) -> None:
        """Write what is still buffered and close the file and the run."""
        if self._tensorboard is not None:
            with self._decorations.guard(TENSORBOARD):
                self._tensorboard.close()
        if self._wandb is not None:
            with self._decorations.guard(WANDB, Exception):
                self._wandb.finish()
            self._wandb = None


def _open_wandb(args: argparse.Namespace) -> Any:
    """Open a run of Weights & Biases, with all arguments as its configuration."""
    import wandb  # an optional dependency; the command line is refused without it

    directory = Path(args.wandb_save_dir or Path(args.save or ".", "wandb"))
    directory.mkdir(parents=True, exist_ok=True)
    return wandb.init(
        dir=str(directory),
        project=args.wandb_project,
        name=args.wandb_exp_name,
        entity=args.wandb_entity,
        config=dict(vars(args)),
    )
