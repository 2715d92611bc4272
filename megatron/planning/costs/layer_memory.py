# SPDX-License-Identifier: Apache-2.0
"""Bytes of activations that layers keep for their backward, by software and recomputation.

[Note: kept activations] For each token, in elements of the compute dtype, with h the hidden size, f
the width of the MLP, q, k, v and o those of queries, keys, values and the result of attention:

    norms              4 h              their inputs, and their results, which products keep
    attention          q + k + v + o    and q + k again where rotary positions are not fused
    MLP                3 f or 2 f       gated or not; 4 f where the gate is not fused
    experts            k (h + 3 f)      for k chosen experts
    eager RMSNorm      4 h each         its input and its result in fp32

Source of the first three, with dropout: Korthikanti et al., arXiv:2205.05198, equation 2. The
others are counted by what autograd saves, and have no other source.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.planning.costs.model_sizes import ExpertSizes, ModelSizes, RunLayout
from megatron.planning.costs.software import COMPILED, EAGER, FUSED, UNFUSED, Software

NONE = "none"
FULL = "full"
"""Whole layers are recomputed, all of them or a part."""

PRODUCTS = "products"
"""Every second product is, and all that is not a product or attention: torchtitan's selective
recomputation."""

ATTENTION_CORE = "attention"
LATENT = "latent"
"""The up-projections of latent attention are."""

MLP = "mlp"
"""The first products of MLPs are."""


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of activations of one rank.

    Args:
        sizes: of the model.
        mesh: the layout of the run.
        software: of the run.
        recompute: one of the ways above.
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
        if self.mesh.is_sequence_parallel:
            return self.gathered_input / self.mesh.tensor
        return self.gathered_input

    @property
    def gathered_input(self) -> float:
        """Bytes of the input of a layer that tensor ranks have gathered."""
        return self._element * self.tokens * self.sizes.hidden

    @property
    def _element(self) -> int:
        """Bytes of an element of activations."""
        return self.software.compute_bytes

    @property
    def _of_width(self) -> float:
        """Bytes of a width of 1 that tensor ranks divide."""
        return self._element * self.tokens / self.mesh.tensor

    def whole_layer(self, has_experts: bool) -> float:
        """Return the bytes that a layer keeps without recomputation; see [Note: kept activations].

        Args:
            has_experts: its MLP is experts.
        """
        sizes = self.sizes
        matrices = self._kept_of_mlp()
        kept = self._kept_norms() * self.input_bytes
        inner = matrices * sizes.ffn
        if has_experts:
            assert sizes.experts is not None
            inner = matrices * sizes.experts.shared_width
            kept += self._experts(sizes.experts, matrices)
        kept += self._of_width * (self._kept_width() + inner)
        if self.software.keeps_gathered and self.mesh.is_sequence_parallel:
            num_inputs = 1 if has_experts else 2
            kept += num_inputs * (self.gathered_input - self.input_bytes)
        if self.software.attention == UNFUSED:
            kept += self._scores
        return kept

    @property
    def _is_eager(self) -> bool:
        return self.software.fusion == EAGER

    @property
    def _keeps_fp8(self) -> bool:
        """True if inputs of products are kept in FP8."""
        return self.software.uses_fp8 and self.software.fusion == FUSED

    def _kept_norms(self) -> float:
        """Return how many times a layer keeps its input for its norms."""
        kept = 4.0
        if self._is_eager and self.sizes.is_rms and not self.software.has_fused_norm:
            kept += 8
        if self.software.fusion == COMPILED:
            kept -= 1
        if self._keeps_fp8:
            kept -= 1
        return kept

    def _kept_width(self) -> float:
        """Return the width that attention keeps of each token."""
        sizes = self.sizes
        width: float = sizes.query_width + sizes.key_width
        if self._is_eager and sizes.is_rotary:
            width *= 2
        width += sizes.value_width + sizes.output_width
        if self._keeps_fp8:
            width -= sizes.output_width / 2
        if sizes.latent is not None:
            width += 2 * (sizes.latent.query_rank + sizes.latent.key_rank)
        return width

    def _kept_of_mlp(self) -> float:
        """Return how many times an MLP keeps its width of each token."""
        kept = 2.0
        if self.sizes.is_gated:
            kept = 3.0
            if self._is_eager:
                kept = 4.0
        if self._keeps_fp8:
            kept -= 0.5
        return kept

    def _experts(self, experts: ExpertSizes, matrices: float) -> float:
        """Return the bytes that routed experts keep, and their router's two tables in fp32."""
        own_tokens = self.input_bytes / self.sizes.hidden / self._element
        routed = own_tokens * experts.top_k * self.software.imbalance
        width = self.sizes.hidden + matrices * experts.width
        tables = 8 * own_tokens * experts.number
        return self._element * routed * width + tables

    def kept(self, has_experts: bool) -> float:
        """Return the bytes that a layer keeps from its forward to its backward.

        Args:
            has_experts: its MLP is experts.
        """
        sizes = self.sizes
        whole = self.whole_layer(has_experts)
        if self.recompute == FULL:
            return self.part * self.input_bytes + (1 - self.part) * whole
        if self.recompute == PRODUCTS:
            width = sizes.query_width + sizes.value_width + sizes.output_width
            if not has_experts:
                width += sizes.ffn
            return 2 * self.input_bytes + self._of_width * width
        if self.recompute == ATTENTION_CORE and self.software.attention == UNFUSED:
            return whole - self._scores
        if self.recompute == LATENT and sizes.latent is not None:
            width = sizes.query_width + sizes.key_width + sizes.value_width
            return whole - self._of_width * width - 2 * self.input_bytes
        if self.recompute == MLP and not has_experts:
            return whole - self._of_width * 2 * sizes.ffn
        return whole

    def recomputed(self, has_experts: bool) -> float:
        """Return the bytes that the backward of a layer computes again, while it lasts.

        Args:
            has_experts: its MLP is experts.
        """
        if self.recompute == NONE:
            return 0.0
        whole = self.whole_layer(has_experts)
        if self.recompute == FULL:
            return whole - self.input_bytes
        return whole - self.kept(has_experts)

    @property
    def _scores(self) -> float:
        """Bytes of scores, their softmax, and a mask of dropout, without fused attention."""
        heads = self.sizes.heads * self.mesh.micro_batch / self.mesh.tensor
        num_scores = heads * self.sizes.sequence**2 / self.mesh.context
        return (2 * self._element + 1) * num_scores

    @property
    def output_kept(self) -> float:
        """Bytes of the inputs of the output layer, and of its logits."""
        num_logits = self.tokens * self.sizes.vocabulary / self.mesh.tensor
        logits = self.software.kept_logit_bytes * num_logits
        return 2 * self.input_bytes + logits
