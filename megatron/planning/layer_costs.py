# SPDX-License-Identifier: Apache-2.0
"""The cost of the modules of a GPT model: seconds of their forward and backward, and activations.

The seconds are those of ``layer_seconds.py``, the activations those of ``layer_memory.py``.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron.planning.costs.gpu_kernels import FP32, Kernels
from megatron.planning.costs.layer_memory import (
    ATTENTION_CORE,
    FULL,
    LATENT,
    MLP,
    NONE,
    LayerMemory,
)
from megatron.planning.costs.layer_seconds import LayerWork
from megatron.planning.costs.model_sizes import mesh_of_arguments, sizes_of_arguments
from megatron.planning.costs.software import UNFUSED, Software
from megatron.planning.costs.spent_seconds import Spent
from megatron.planning.costs.update_bytes import CLIPPED, ONE_PASS
from megatron.planning.machine import Cluster
from megatron.planning.skeleton import NO_COST, Cost

MEGATRON_CORE = Software(loss_bytes=30, kept_logit_bytes=8)
"""The layers of ``pretrain_gpt.py``: Transformer Engine's, and Megatron-Core's fused loss."""

RECOMPUTED_MODULES = {"mla_up_proj": LATENT, "mlp": MLP, "core_attn": ATTENTION_CORE}
"""Modules of --recompute-modules that are planned: the first of them that is given."""


class GptCosts:
    """The costs of the modules of a GPT model.

    Args:
        args: the completed arguments, with ``padded_vocab_size``.
        machine: on which the model is trained.
        software: of the run; None: that of ``pretrain_gpt.py``, as the arguments ask for it.
        recompute: what the backward computes again, and the part of layers that are recomputed;
            None: as the arguments ask for it.

    Attributes:
        gathered_part: bytes of a gathered weight in those of the compute dtype.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        machine: Cluster,
        software: Software | None = None,
        recompute: tuple[str, float] | None = None,
    ):
        sizes = sizes_of_arguments(args)
        mesh = mesh_of_arguments(args)
        if software is None:
            software = software_of_arguments(args)
        if recompute is None:
            recompute = (recompute_of_arguments(args), 1.0)
        self._recompute, self._part = recompute
        self._update_bytes = software.update_bytes
        self.gathered_part = software.gather_bytes / software.compute_bytes
        self._kernels = Kernels(machine, software)
        self._num_outputs = 1 + sizes.predicted_tokens
        self._work = LayerWork(sizes, mesh, machine, software)
        self._memory = LayerMemory(sizes, mesh, software, self._recompute, self._part)

    def update_seconds(self, num_elements: int) -> float:
        """Return the seconds in which the device updates weights, with clipping."""
        return self._kernels.move(self._update_bytes * num_elements)

    def of(self, module: nn.Module) -> Cost:
        """Return the cost of a module of the model that has no unit inside."""
        if isinstance(module, TransformerLayer):
            return self.of_layer(isinstance(module.mlp, MoELayer))
        if isinstance(module, LanguageModelEmbedding):
            return NO_COST
        if _is_output_layer(module):
            return self.of_output()
        return NO_COST

    def of_layer(self, has_experts: bool) -> Cost:
        """Return the cost of a transformer layer."""
        forward, backward = self._work.forward_and_backward(
            has_experts, self._recompute, self._part
        )
        return Cost(
            forward=forward,
            backward=backward,
            kept_bytes=int(self._memory.kept(has_experts)),
            recomputed_bytes=int(self._memory.recomputed(has_experts)),
        )

    def of_output(self) -> Cost:
        """Return the cost of the output layer, with the loss."""
        seconds = self._work.of_output()
        times = self._num_outputs
        return Cost(
            forward=times * seconds.forward,
            backward=times * seconds.backward(Spent()),
            kept_bytes=int(times * self._memory.output_kept),
        )


def software_of_arguments(args: argparse.Namespace) -> Software:
    """Return the software of a run of ``pretrain_gpt.py`` by its completed arguments."""
    is_half = bool(args.bf16 or args.fp16)
    # Fused attention has half precision alone.
    is_unfused = not is_half or args.attention_backend.name in ("unfused", "local")
    attention = MEGATRON_CORE.attention
    if is_unfused:
        attention = UNFUSED
    size = 2 if is_half else FP32
    of_gradient = 2 if args.grad_reduce_in_bf16 else FP32
    update_bytes = ONE_PASS
    if args.clip_grad > 0:
        update_bytes = CLIPPED
    return replace(
        MEGATRON_CORE,
        attention=attention,
        compute_bytes=size,
        weight_bytes=size,
        gather_bytes=size,
        overlaps_tensor=bool(getattr(args, "tp_comm_overlap", False)),
        overlaps_data=bool(args.overlap_grad_reduce),
        uses_fp8=bool(args.fp8 or args.fp4),
        uses_graphs=getattr(args, "cuda_graph_impl", "none") != "none",
        update_bytes=update_bytes,
        reduce_bytes=of_gradient,
        gradient_bytes=of_gradient,
        imbalance=args.expert_imbalance,
    )


def recompute_of_arguments(args: argparse.Namespace) -> str:
    """Return what the backward of a run of ``pretrain_gpt.py`` computes again."""
    if args.recompute_granularity == "full":
        return FULL
    if args.recompute_granularity != "selective":
        return NONE
    for module in args.recompute_modules or ():
        if module in RECOMPUTED_MODULES:
            return RECOMPUTED_MODULES[module]
    return ATTENTION_CORE


def _is_output_layer(module: nn.Module) -> bool:
    return hasattr(module, "output_size") and hasattr(module, "gather_output")
