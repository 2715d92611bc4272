# SPDX-License-Identifier: Apache-2.0
"""Bytes of activations that layers keep for their backward, by software and recomputation.

[Note: kept activations] For each token, in elements of the compute dtype, with h the hidden size, f
the width of the MLP, q, k, v and o those of queries, keys, values and the result of attention:

    norms              4 h              their inputs, and their results, which products keep
    attention          q + k + v + o    and q + k again where rotary positions are not fused
    MLP                3 f or 2 f       gated or not; 4 f where the gate is not fused
    experts            k (h + 3 f)      for k chosen experts
    eager RMSNorm      4 h each         its input and its result in fp32

Source of the first three, with dropout: Korthikanti et al., arXiv:2205.05198, equation 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.planning.costs.model_sizes import ModelSizes, RunLayout
from megatron.planning.costs.software import COMPILED, EAGER, FUSED, UNFUSED, Software

NONE, FULL = "none", "full"
"""Nothing is recomputed; whole layers, all of them or a part."""

PRODUCTS, ATTENTION_CORE, LATENT, MLP = "products", "attention", "latent", "mlp"
"""Every second product and all that is not a product or attention (torchtitan's selective
recomputation); the core of attention; the up-projections of latent attention; the first products
of MLPs."""

RECOMPUTED = (NONE, ATTENTION_CORE, LATENT, MLP, PRODUCTS, FULL)
"""Ways of recomputation."""


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of activations of one rank.

    Args:
        sizes: of the model.
        mesh: the layout of the run.
        software: of the run.
        recompute: one of ``RECOMPUTED``.
        part: of the layers that are recomputed, if they are whole layers.
    """

    sizes: ModelSizes
    mesh: RunLayout
    software: Software
    recompute: str = NONE
    part: float = 1.0

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch that a rank has."""
        return self.mesh.micro_batch * self.sizes.sequence / self.mesh.context

    @property
    def input_bytes(self) -> float:
        """Bytes of the input of a layer."""
        divided = self.mesh.tensor if self.mesh.is_sequence_parallel else 1
        return self.software.compute_bytes * self.tokens * self.sizes.hidden / divided

    @property
    def gathered_input(self) -> float:
        """Bytes of the input of a layer that tensor ranks have gathered."""
        return self.software.compute_bytes * self.tokens * self.sizes.hidden

    def whole_layer(self, has_experts: bool) -> float:
        """Return the bytes that a layer keeps without recomputation; see [Note: kept activations].

        Args:
            has_experts: its MLP is experts.
        """
        sizes, software, tensor = self.sizes, self.software, self.mesh.tensor
        is_eager = software.fusion == EAGER
        norms = 4.0
        if is_eager and sizes.is_rms and not software.has_fused_norm:
            norms += 8
        if software.fusion == COMPILED:
            norms -= 1
        width = float(sizes.query_width + sizes.key_width + sizes.value_width + sizes.output_width)
        if is_eager and sizes.is_rotary:
            width += sizes.query_width + sizes.key_width
        if sizes.latent is not None:
            width += 2 * (sizes.latent.query_rank + sizes.latent.key_rank)
        matrices = 3.0 if sizes.is_gated else 2.0
        if is_eager and sizes.is_gated:
            matrices = 4
        scores = self._scores if software.attention == UNFUSED else 0.0
        if software.uses_fp8 and software.fusion == FUSED:  # inputs of products are kept in FP8
            norms -= 1
            width -= sizes.output_width / 2
            matrices -= 0.5
        kept = norms * self.input_bytes
        if has_experts:
            assert sizes.experts is not None
            experts = sizes.experts
            inner = experts.shared_width * matrices
            routed = self.input_bytes / sizes.hidden * experts.top_k * software.imbalance
            kept += routed * (sizes.hidden + matrices * experts.width)
            own_tokens = self.input_bytes / sizes.hidden / software.compute_bytes
            kept += 8 * own_tokens * experts.number
        else:
            inner = matrices * sizes.ffn
        if software.keeps_gathered and self.mesh.is_sequence_parallel:
            num_inputs = 1 if has_experts else 2
            kept += num_inputs * (1 - 1 / tensor) * self.gathered_input
        return kept + software.compute_bytes * self.tokens * (width + inner) / tensor + scores

    def kept(self, has_experts: bool) -> float:
        """Return the bytes that a layer keeps from its forward to its backward.

        Args:
            has_experts: its MLP is experts.
        """
        sizes, tensor = self.sizes, self.mesh.tensor
        whole = self.whole_layer(has_experts)
        tokens = self.software.compute_bytes * self.tokens / tensor
        if self.recompute == FULL:
            return self.part * self.input_bytes + (1 - self.part) * whole
        if self.recompute == PRODUCTS:
            width = sizes.query_width + sizes.value_width + sizes.output_width
            width += 0 if has_experts else sizes.ffn
            return 2 * self.input_bytes + tokens * width
        if self.recompute == ATTENTION_CORE and self.software.attention == UNFUSED:
            return whole - self._scores
        if self.recompute == LATENT and sizes.latent is not None:
            width = sizes.query_width + sizes.key_width + sizes.value_width
            return whole - tokens * width - 2 * self.input_bytes
        if self.recompute == MLP and not has_experts:
            return whole - tokens * 2 * sizes.ffn
        return whole

    def recomputed(self, has_experts: bool) -> float:
        """Return the bytes that the backward of a layer computes again, while it lasts.

        Args:
            has_experts: its MLP is experts.
        """
        if self.recompute == NONE:
            return 0.0
        kept = self.input_bytes if self.recompute == FULL else self.kept(has_experts)
        return self.whole_layer(has_experts) - kept

    @property
    def _scores(self) -> float:
        """Bytes of scores, their softmax, and a mask of dropout, without fused attention."""
        heads = self.sizes.heads * self.mesh.micro_batch / self.mesh.tensor
        num_scores = heads * self.sizes.sequence**2 / self.mesh.context
        return (2 * self.software.compute_bytes + 1) * num_scores

    @property
    def output_kept(self) -> float:
        """Bytes of the inputs of the output layer, and of its logits."""
        logits = self.tokens * self.sizes.vocabulary / self.mesh.tensor
        return 2 * self.input_bytes + logits * self.software.kept_logit_bytes
