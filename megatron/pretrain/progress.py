# SPDX-License-Identifier: Apache-2.0
"""The progress of a training run: the part of its state that every step changes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """Counters of a training run, summed over all ranks and over earlier runs that it resumes.

    The fields have the names under which Megatron-LM keeps these counters in the ``args`` of a
    checkpoint.
    """

    iteration: int = 0
    """Training steps done, those that the loss scaler skipped included."""
    consumed_train_samples: int = 0
    """Sequences read from the training data."""
    skipped_train_samples: int = 0
    """Sequences passed over without training. This program passes over none but keeps the count."""
    consumed_valid_samples: int = 0
    """Sequences read from the validation data."""
    num_floating_point_operations_so_far: float = 0.0
    """FLOPs of the model in all training steps, see :mod:`megatron.pretrain.model.flops`."""

    @classmethod
    def of_checkpoint(cls, content: Mapping[str, Any]) -> Progress:
        """Return the progress that the ``content`` of a checkpoint records; what it lacks is 0.

        Raises:
            KeyError: the checkpoint has no ``iteration`` or no ``args``.
        """
        args = content["args"]
        return cls(
            iteration=content["iteration"],
            consumed_train_samples=getattr(args, "consumed_train_samples", 0),
            skipped_train_samples=getattr(args, "skipped_train_samples", 0),
            consumed_valid_samples=getattr(args, "consumed_valid_samples", 0),
            num_floating_point_operations_so_far=content.get(
                "num_floating_point_operations_so_far", 0.0
            ),
        )

    def written_into(self, args: argparse.Namespace) -> argparse.Namespace:
        """Return a copy of ``args`` with the counters put in, as in Megatron-LM's checkpoints."""
        return argparse.Namespace(**(vars(args) | asdict(self)))

    def count_step(self, num_samples: int, flops: float) -> None:
        """Count one training step over ``num_samples`` sequences that took ``flops`` operations."""
        self.iteration += 1
        self.consumed_train_samples += num_samples
        self.num_floating_point_operations_so_far += flops

    def is_multiple_of(self, interval: int | None) -> bool:
        """Return True if the iteration is a multiple of ``interval``; never of 0 or None."""
        return interval is not None and interval > 0 and self.iteration % interval == 0
