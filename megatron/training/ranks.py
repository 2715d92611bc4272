# SPDX-License-Identifier: Apache-2.0
"""The ranks of a run: process groups, devices, seeds, and who prints."""

from __future__ import annotations

import argparse
import os
import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron.mcore_adapter import cpu


def environment_rank() -> int:
    """This process' rank, before there is a process group."""
    return int(os.environ.get("RANK", "0"))


def environment_world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def say(message: str) -> None:
    """Print on the first rank."""
    if environment_rank() == 0:
        print(message, flush=True)


def start(args: argparse.Namespace) -> torch.device:
    """Make the process groups, choose this rank's device, seed every generator.

    Returns:
        The device that the model is to live on.
    """
    cpu.install()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if args.deterministic_mode:
        torch.use_deterministic_algorithms(True)
    # Without torchrun: a world of one.
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group(
        args.distributed_backend,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
        device_id=device if device.type == "cuda" else None,
    )
    parallel_state.initialize_model_parallel(
        create_gloo_process_groups=args.enable_gloo_process_groups,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
    )
    seed(args)
    return device


def seed(args: argparse.Namespace) -> None:
    """The same seed on every data rank, or one for each with --data-parallel-random-init."""
    number = args.seed + (10 * data_parallel_rank() if args.data_parallel_random_init else 0)
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    tensor_parallel.model_parallel_cuda_manual_seed(number, te_rng_tracker=args.te_rng_tracker)


def data_parallel_rank() -> int:
    return parallel_state.get_data_parallel_rank(with_context_parallel=True)


def data_parallel_size() -> int:
    return parallel_state.get_data_parallel_world_size(with_context_parallel=True)


def data_parallel_group() -> dist.ProcessGroup:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def stop() -> None:
    """Leave the process groups together, so that no rank reports another's exit as an error."""
    if dist.is_initialized():
        dist.barrier()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
