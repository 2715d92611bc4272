# SPDX-License-Identifier: Apache-2.0
"""Iterations that Megatron-Core captures on the model: what a machine without CUDA refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from megatron.core import full_cuda_graph
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.cuda_graphs import CudaGraphManager

from tools.cuda_model.machine import CudaModel


@contextmanager
def core_graphs(model: CudaModel) -> Iterator[None]:
    """Let Megatron-Core capture iterations; the process has no graph before and after."""
    stages = ("training", "validation")
    with ExitStack() as patches:
        for owner, name, value in (
            (FullCudaGraphWrapper, "curr_iteration", dict.fromkeys(stages, 0)),
            (FullCudaGraphWrapper, "cuda_graph", dict.fromkeys(stages)),
            (FullCudaGraphWrapper, "result", dict.fromkeys(stages)),
            (StaticBufferLoader, "static_buffers", {stage: [] for stage in stages}),
            (CudaGraphManager, "global_mempool", None),
            (CudaRNGStatesTracker, "__init__", without_graphs(CudaRNGStatesTracker.__init__)),
            (CudaRNGStatesTracker, "fork", outside(model, CudaRNGStatesTracker.fork)),
        ):
            patches.enter_context(patch.object(owner, name, value))
        for name in ("_shared_capture_stream", "_shared_graph_pool"):  # since 0.19
            patches.enter_context(patch.object(full_cuda_graph, name, None, create=True))
        yield


def without_graphs(make: Any) -> Any:
    """Return a constructor of states that no graph registers: CPU generators are none of those."""

    def make_plain(
        tracker: CudaRNGStatesTracker,
        use_cudagraphable_rng: bool = False,
        is_inference_rng_tracker: bool = False,
    ) -> None:
        make(tracker, False, is_inference_rng_tracker)

    return make_plain


def outside(model: CudaModel, fork: Any) -> Any:
    """Return a method that forks no random state in a capture: there is no dropout."""

    # Megatron-Core compares states of the CPU's generator, which for the model is the device's.
    def fork_or_not(tracker: CudaRNGStatesTracker, *names: str) -> Any:
        is_captured = model.detector.graphs.current is not None
        return nullcontext() if is_captured else fork(tracker, *names)

    return fork_or_not
