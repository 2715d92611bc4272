# SPDX-License-Identifier: Apache-2.0
"""Runs of the training program on the model of a CUDA device, with captured iterations."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.full_cuda_graph import StaticBufferLoader
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron.mcore_adapter import cpu
from megatron.mcore_adapter.run.errors import RunError
from megatron.pretrain import ranks
from megatron.pretrain.captured_iterations import CheckedBuffers
from tests.support.cuda_model.core_graphs import core_graphs
from tests.support.cuda_model.machine import cuda_model
from tests.support.pretrain import training_runs

CAPTURED = {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}
"""Arguments after all rules: on a machine without CUDA these refuse the flags."""


def run_on_the_model(line: str) -> Any:
    """Job: a captured run; return its record, the number of replays, and what was reported."""
    cpu.install()
    prepare = training_runs.prepare

    def prepared(command_line: str) -> tuple[Any, torch.device]:
        args, device = prepare(command_line)
        vars(args).update(CAPTURED, cuda_graph_warmup_steps=2)
        # Megatron-Core asks for states that graphs can register, which CPU generators are not.
        tracker = get_cuda_rng_tracker()
        patches.enter_context(patch.object(tracker, "use_cudagraphable_rng", True))
        return args, device

    with ExitStack() as patches:
        patches.enter_context(patch.object(training_runs, "prepare", prepared))
        model = patches.enter_context(cuda_model())
        patches.enter_context(core_graphs(model))
        capability = patch.object(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
        patches.enter_context(capability)
        record = training_runs.pretrain(line)
        with patch.object(ranks.parallel_state, "destroy_model_parallel"):
            ranks.stop()
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
