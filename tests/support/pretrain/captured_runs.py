# SPDX-License-Identifier: Apache-2.0
"""Runs of the training program on the model of a CUDA device, with captured iterations."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import full_cuda_graph
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.cuda_graphs import CudaGraphManager

from megatron.mcore_adapter import cpu
from megatron.pretrain.captured_iterations import CheckedBuffers
from megatron.pretrain.errors import RunError
from tests.support.cuda_model.machine import CudaModel, cuda_model
from tests.support.pretrain import training_runs

CAPTURED = {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}
"""Arguments after all rules: on a machine without CUDA these refuse the flags."""


def fork_outside(model: CudaModel) -> Any:
    """Return a method that forks no random state in a capture: there is no dropout."""
    # Megatron-Core compares states of the CPU's generator, which for the model is the device's.
    fork = CudaRNGStatesTracker.fork

    def fork_or_not(tracker: CudaRNGStatesTracker, *names: str) -> Any:
        is_captured = model.detector.graphs.current is not None
        return nullcontext() if is_captured else fork(tracker, *names)

    return fork_or_not


def run_on_the_model(line: str) -> Any:
    """Job: a captured run; return its record, the number of replays, and what was reported."""
    cpu.install()
    prepare = training_runs.prepare
    iterations = {"training": 0, "validation": 0}

    def prepared(command_line: str) -> tuple[Any, torch.device]:
        args, device = prepare(command_line)
        vars(args).update(CAPTURED, cuda_graph_warmup_steps=2)
        # Megatron-Core asks for states that graphs can register, which CPU generators are not.
        tracker = get_cuda_rng_tracker()
        patches.enter_context(patch.object(tracker, "use_cudagraphable_rng", True))
        return args, device

    with ExitStack() as patches:
        for owner, name, value in (
            (FullCudaGraphWrapper, "curr_iteration", iterations),
            (FullCudaGraphWrapper, "cuda_graph", dict.fromkeys(iterations)),
            (FullCudaGraphWrapper, "result", dict.fromkeys(iterations)),
            (StaticBufferLoader, "static_buffers", {name: [] for name in iterations}),
            (CudaGraphManager, "global_mempool", None),
            (torch.cuda, "get_device_capability", lambda device=None: (10, 0)),
        ):
            patches.enter_context(patch.object(owner, name, value))
        for name in ("_shared_capture_stream", "_shared_graph_pool"):  # since 0.19
            patches.enter_context(patch.object(full_cuda_graph, name, None, create=True))
        patches.enter_context(patch.object(training_runs, "prepare", prepared))
        model = patches.enter_context(cuda_model())
        patches.enter_context(patch.object(CudaRNGStatesTracker, "fork", fork_outside(model)))
        record = training_runs.pretrain(line)
    return record, model.detector.graphs.num_replays, [str(each) for each in model.reports]


def give_another_size() -> str:
    """Job: give a graph a microbatch of another size; return the error."""
    cpu.install()
    with cuda_model(), patch.object(StaticBufferLoader, "static_buffers", {"training": []}):
        buffers = CheckedBuffers()
        buffers({"tokens": torch.zeros(2, 4)}, "training", 0)
        try:
            buffers({"tokens": torch.zeros(1, 4)}, "training", 0)
        except RunError as error:
            return str(error)
    return "no error"
