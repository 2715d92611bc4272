# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's training loop on machines without CUDA: replacements for its own CUDA call sites.

:mod:`megatron.mcore_adapter.cpu` replaces those of Megatron-Core for good. The loop also asks
whether there is a device, of which number and architecture. Only modules of the loop get an answer
as of a GPU, no others in the process. The loop also chooses local layers and an early release of
pipeline outputs, for which a CPU needs replacements.
"""

from __future__ import annotations

import functools
import sys
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron.mcore_adapter.cpu import on_cpu
from megatron.mcore_adapter.local_layers import LocalAttention, LocalLatentAttention, LocalNorm
from megatron.mcore_adapter.megatron_lm.loaded_names import Arguments, Function

try:
    from megatron.core.models.hybrid import hybrid_block
except ImportError:  # releases before 0.18
    hybrid_block = None

LOOP = "megatron.training"
"""The package whose modules find a device."""

ARCHITECTURE = SimpleNamespace(major=9, minor=0, total_memory=0, name="CPU")
"""Properties of the device: the newest one of which the loop expects no settings of its own."""


class LoopOnCpu:
    """The replacements, from construction until :meth:`restore`.

    An error in the constructor undoes those that were made.
    """

    def __init__(self) -> None:
        with ExitStack() as undo:
            self._undo = undo
            self._replace_device()
            self._replace_layers()
            self._keep_pipeline_outputs()
            # A compiler run for each of the small fused functions takes ten seconds, and gains
            # nothing.
            undo.push(torch.compiler.set_stance("force_eager"))
            self._undo = undo.pop_all()

    def restore(self) -> None:
        """Undo the replacements; a second call does nothing."""
        self._undo.close()

    def _replace_device(self) -> None:
        """Answer the loop's questions about a device, and make its tensors on the CPU."""
        for name, answer in (("is_available", True), ("device_count", 1)):
            original = getattr(torch.cuda, name)
            replacement = _for_the_loop(original, answer=answer)
            self._replace(torch.cuda, name, replacement)
        self._replace(torch.cuda, "get_device_properties", lambda device=None: ARCHITECTURE)
        for name in ("set_device", "empty_cache", "reset_peak_memory_stats"):
            self._replace(torch.cuda, name, lambda *args, **kwargs: None)
        for name in ("memory_reserved", "max_memory_reserved", "device_memory_used"):
            self._replace(torch.cuda, name, lambda device=None: 0)
        for name in ("rand", "randn", "randint", "full", "arange"):
            original = getattr(torch, name)
            self._replace(torch, name, on_cpu(original))

    def _replace_layers(self) -> None:
        """Build local layers that know sequence and context parallelism, and latent attention."""
        self._replace(WrappedTorchNorm, "__new__", LocalNorm.__new__)
        self._replace(LocalSpecProvider, "core_attention", lambda provider: CoreAttention)
        self._replace(gpt_layer_specs, "MLASelfAttention", LocalLatentAttention)
        if hybrid_block is not None:  # its last norm is no part of a layer's specification
            self._replace(hybrid_block, "TENorm", LocalNorm)

    def _keep_pipeline_outputs(self) -> None:
        """Keep the outputs of a pipeline stage until their backward."""
        # The loop always has outputs freed, and an interleaved schedule may free one while its send
        # is under way. On a GPU the stream keeps the memory; gloo would read what is there by then.
        self._replace(schedules, "deallocate_output_tensor", lambda *args, **kwargs: None)
        self._replace(schedules, "custom_backward", torch.autograd.backward)

    def _replace(
        self,
        owner: Any,
        name: str,
        replacement: Any,
    ) -> None:
        original = vars(owner)[name]
        self._undo.callback(setattr, owner, name, original)
        setattr(owner, name, replacement)


def with_own_random_state(original: Function, given: Arguments) -> Any:
    """Build the data without a change of the random state, which a checkpoint may have set.

    A loader of torch draws a number from the CPU's generator. Dropout on a GPU has another one.
    """
    with torch.random.fork_rng(devices=[]):
        return original(**given)


class CoreAttention:
    """A factory of the attention of a local layer: ours where Megatron-Core's lacks a feature.

    It is a class, not a function, because layer specs take classes only.
    """

    def __new__(  # type: ignore[misc]  # layer specs call this and use the result
        cls,
        config: TransformerConfig,
        *args: Any,
        **kwargs: Any,
    ) -> nn.Module:
        """Make the attention; arguments are those of DotProductAttention."""
        is_split = config.context_parallel_size > 1
        if is_split or config.multi_latent_attention:
            return LocalAttention(config, *args, **kwargs)
        return DotProductAttention(config, *args, **kwargs)


def _for_the_loop(original: Function, answer: Any) -> Function:
    """Return a function that returns ``answer`` to the loop, and calls the original for others."""

    @functools.wraps(original)
    def ask(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        caller = frame.f_globals.get("__name__", "")
        if caller == LOOP or caller.startswith(LOOP + "."):
            return answer
        return original(*args, **kwargs)

    return ask
