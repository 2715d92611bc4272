# SPDX-License-Identifier: Apache-2.0
"""The ranks of a run: process groups, devices, seeds, and printing on the first rank."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import os
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml  # type: ignore[import-untyped]
from megatron.core import parallel_state, tensor_parallel

from megatron.checkpoint.store import durable
from megatron.checkpoint.store.url_staging import with_urls
from megatron.fsdp.backends import rendezvous, slot_memory
from megatron.fsdp.config.problems import refuse_differences
from megatron.fsdp.trace import failed_collectives
from megatron.mcore_adapter import cpu
from megatron.mcore_adapter.captured_iterations import captures_iterations, release_graphs
from megatron.mcore_adapter.run.model_parallel import backend_for, initialize_model_parallel

SINGLE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
"""Environment of a program that was started without torchrun: a world of one rank."""
OF_ONE_MACHINE = (
    "data_cache_path",
    "tensorboard_dir",
    "config_logger_dir",
    "non_persistent_local_ckpt_dir",
    "wandb_project",
    "wandb_entity",
    "wandb_exp_name",
    "wandb_save_dir",
    "logging_level",
)
"""Arguments that may differ between ranks: folders of their machine, and reports from it."""


def start(args: argparse.Namespace) -> torch.device:
    """Create the process groups, choose this rank's device, and seed every generator.

    Returns:
        The device of the model.
    """
    cpu.install()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if args.deterministic_mode:
        torch.use_deterministic_algorithms(True)
    for name, value in SINGLE_RANK.items():
        os.environ.setdefault(name, value)
    dist.init_process_group(
        backend_for(args, device),
        init_method=rendezvous.INIT_METHOD,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
        device_id=device if device.type == "cuda" else None,
    )
    failed_collectives.watch()
    agree_on_arguments(args)
    initialize_model_parallel(args)
    if args.tp_comm_overlap:
        start_user_buffers(args)
    seed(args.seed, args.data_parallel_random_init, captures_iterations(args))
    return device


def agree_on_arguments(args: argparse.Namespace) -> None:
    """Raise one ``ValueError`` on all ranks if their command lines differ; a collective."""
    # Ranks with other sizes would wait for each other, and with other rates train other models.
    values = {}
    for name, value in vars(args).items():
        if name not in OF_ONE_MACHINE:
            values[f"--{name.replace('_', '-')}"] = with_urls(repr(value))
    refuse_differences(values, [None])


def start_user_buffers(args: argparse.Namespace) -> None:
    """Make the buffers of --tp-comm-overlap; a collective of the tensor-parallel ranks.

    In them Transformer Engine overlaps tensor-parallel communication with products.
    ``tp_comm_overlap_cfg`` names a YAML file with settings of single products.
    """
    base = importlib.import_module("transformer_engine.pytorch.module.base")
    settings: dict[str, Any] = {}
    if args.tp_comm_overlap_cfg:
        path = durable.file_at(Path(args.tp_comm_overlap_cfg))
        settings = yaml.safe_load(path.read_text()) or {}
    tokens = args.seq_length * args.micro_batch_size // args.context_parallel_size
    options = {
        "shape": [tokens, args.hidden_size],
        "tp_size": args.tensor_model_parallel_size,
        "ub_cfgs": settings,
        "bootstrap_backend": args.tp_comm_bootstrap_backend,
    }
    if "quantization_modes" in inspect.signature(base.initialize_ub).parameters:
        options["quantization_modes"] = [base.UserBufferQuantizationMode.NONE]
    else:
        options["use_fp8"] = False  # Transformer Engine before 2.7
    base.initialize_ub(**options)


def seed(
    number: int,
    differs_between_data_ranks: bool,
    is_captured: bool,
) -> None:
    """Seed every generator of this rank.

    Args:
        number: seed of the first rank. Pipeline stages have seeds of their own.
        differs_between_data_ranks: data ranks have seeds of their own too.
        is_captured: keep random states that CUDA graphs advance.
    """
    number += 100 * parallel_state.get_pipeline_model_parallel_rank()
    if differs_between_data_ranks:
        number += 10 * parallel_state.get_data_parallel_rank()
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    tensor_parallel.model_parallel_cuda_manual_seed(number, use_cudagraphable_rng=is_captured)


def stop() -> None:
    """Leave the process groups together, so that no rank reports another's exit as an error.

    A rank that wakes late finds in gloo that those it waited for have left the barrier and closed
    their connections. That is no error either: a rank that fails before the barrier reports it.
    """
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.barrier()
        slot_memory.deregister_all()
        release_graphs()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
