# SPDX-License-Identifier: Apache-2.0
"""Iterations of sharded models that Megatron-Core captures as CUDA graphs."""

import functools
from typing import Any

from megatron.core.full_cuda_graph import FullCudaGraphWrapper

_original_call = FullCudaGraphWrapper.__call__


def captures_iterations(settings: Any) -> bool:
    """Return True if a TransformerConfig, or arguments, ask for graphs of whole iterations.

    Raises:
        ValueError: they ask for graphs of layers.
    """
    impl = settings.cuda_graph_impl
    if impl == "none":
        return False
    scope = getattr(settings, "cuda_graph_scope", None) or []
    names = [getattr(entry, "name", entry) for entry in scope]
    if impl != "full_iteration" and not (impl == "local" and names == ["full_iteration"]):
        raise ValueError(
            f"cuda_graph_impl {impl}: Megatron-Core calls captured layers past the hooks that"
            " gather their weights; capture full_iteration"
        )
    return True


def release_graphs() -> None:
    """Free all graphs of iterations, before the process groups are destroyed.

    NCCL destroys a communicator only when no graph has collectives of it any more: it would wait
    for graphs that Megatron-Core's class keeps until the process ends.
    """
    graphs = FullCudaGraphWrapper.cuda_graph
    for stage, graph in graphs.items():
        if graph is not None:
            graph.reset()
            graphs[stage] = None


@functools.wraps(_original_call)
def call_with_new_weights(
    wrapper: FullCudaGraphWrapper,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run, capture or replay an iteration; a graph must gather the weights of every step."""
    # An evaluation may have gathered them: the capture would then have no gathers.
    stage = "validation" if kwargs["forward_only"] else "training"
    if wrapper.curr_iter(stage) == wrapper.cuda_graph_warmup_steps:
        chunks = kwargs["model"]
        if not isinstance(chunks, list):
            chunks = [chunks]
        for chunk in chunks:
            if hasattr(chunk, "param_and_grad_buffer"):
                chunk.param_and_grad_buffer.copy_main_weights_to_model_weights()
    return _original_call(wrapper, *args, **kwargs)
