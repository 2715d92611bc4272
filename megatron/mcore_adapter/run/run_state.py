# SPDX-License-Identifier: Apache-2.0
"""The state of a run that every step changes: its progress, and its random generators."""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import (
    convert_cuda_rng_state,
    is_graph_safe_cuda_rng_tracker,
)
from megatron.core.transformer.module import MegatronModule


@dataclass
class TrainedParts:
    """The parts of a run that steps change and checkpoints hold."""

    model: list[MegatronModule]
    """The model chunks of this pipeline stage: one, or one for each virtual stage."""
    optimizer: MegatronOptimizer | None = None
    """None for a run that only evaluates, or where its state is not saved or loaded."""
    scheduler: OptimizerParamScheduler | None = None
    """The schedule of learning rate and weight decay; None as the optimizer is."""


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
    """Sequences passed over without training."""
    consumed_valid_samples: int = 0
    """Sequences read from the validation data."""
    num_floating_point_operations_so_far: float = 0.0
    """Floating-point operations of the model in all training steps."""

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


def gather_random_state(*, differs_between_data_ranks: bool) -> list[dict[str, Any]]:
    """Return the generators' states on this rank, or those of all data ranks if they differ.

    A collective over the data-parallel group if ``differs_between_data_ranks``.
    """
    tracker_states = {}
    for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items():
        # Graphs advance a generator; the file has its state.
        tracker_states[name] = convert_cuda_rng_state(state)
    mine = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tracker_states,
    }
    if not differs_between_data_ranks:
        return [mine]
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def restore_random_state(states: list[dict[str, Any]]) -> None:
    """Set the generators of this rank to its entry of ``states``, which wraps around data ranks."""
    state = states[parallel_state.get_data_parallel_rank(with_context_parallel=True) % len(states)]
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    to_generator = is_graph_safe_cuda_rng_tracker(tracker)
    tracker_states = {}
    for name, saved in state["rng_tracker_states"].items():
        tracker_states[name] = convert_cuda_rng_state(saved, to_generator)
    tracker.set_states(tracker_states)
