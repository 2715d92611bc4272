# SPDX-License-Identifier: Apache-2.0
"""The states of all random generators, as checkpoints keep them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel


def gather_random_state(*, differs_between_data_ranks: bool) -> list[dict[str, Any]]:
    """Return the generators' states on this rank, or those of all data ranks if they differ.

    A collective over the data-parallel group if ``differs_between_data_ranks``.
    """
    mine = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
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
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])
