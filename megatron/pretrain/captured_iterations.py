# SPDX-License-Identifier: Apache-2.0
"""Whole iterations as CUDA graphs, which Megatron-Core captures and replays."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron.mcore_adapter.captured_iterations import captures_iterations
from megatron.mcore_adapter.run.errors import RunError


def schedule_of(args: argparse.Namespace) -> Callable[..., Any]:
    """Return the pipeline schedule, captured if that is asked for."""
    schedule = get_forward_backward_func()
    if not captures_iterations(args):
        return schedule
    captured = FullCudaGraphWrapper(schedule, args.cuda_graph_warmup_steps)
    captured.static_loader = CheckedBuffers()  # the graphs and these belong to the process
    return captured


class CheckedBuffers(StaticBufferLoader):
    """The inputs of the graphs, which have the sizes of the first iteration."""

    def __call__(
        self,
        inputs: dict[str, Any],
        stage: str,
        microbatch: int,
    ) -> Any:
        """Copy a microbatch to where the graph reads it.

        Raises:
            RunError: its tensors have other sizes; a copy would repeat values or fail.
        """
        buffers = self.static_buffers[stage]
        if microbatch < len(buffers):
            for name, value in inputs.items():
                captured = buffers[microbatch][name]
                if value.shape != captured.shape:
                    raise RunError(
                        f"{name} has shape {tuple(value.shape)}, but the graph of an iteration was"
                        f" captured with {tuple(captured.shape)}: sizes must not change"
                    )
        # Megatron-Core's stream would copy while the last replay still reads.
        self.stream.wait_stream(torch.cuda.current_stream())
        return super().__call__(inputs, stage, microbatch)
