# SPDX-License-Identifier: Apache-2.0
"""The seconds of a layer by what they are spent on, and those of its recomputation."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.planning.costs.layer_memory import ATTENTION_CORE, FULL, LATENT, MLP, PRODUCTS


@dataclass
class Spent:
    """Seconds of the forward and of the backward of a part of a layer."""

    forward: float = 0.0
    backward: float = 0.0

    def add(self, other: Spent) -> None:
        """Add the seconds of another part."""
        self.forward += other.forward
        self.backward += other.backward


@dataclass(frozen=True)
class LayerSeconds:
    """The seconds of a layer on one rank, for one microbatch.

    Attributes:
        products: of matrix products, with casts to FP8.
        attention: of the core of attention.
        passes: of memory-bound operations.
        messages: that nothing overlaps.
        host: in which the host launches the operations.
        mlp_products: of the first matrix of an MLP, forward alone.
    """

    products: Spent
    attention: Spent
    passes: Spent
    messages: Spent
    host: Spent
    mlp_products: float

    @property
    def forward(self) -> float:
        """Seconds of the forward; see [Note: the host]."""
        busy = self.products.forward
        busy += self.attention.forward
        busy += self.passes.forward
        busy += self.messages.forward
        return max(busy, self.host.forward)

    def again(self, recompute: str, part: float) -> Spent:
        """Return the seconds that the backward spends on recomputation, and those of the host.

        Args:
            recompute: what the backward computes again; see ``layer_memory.py``.
            part: of the layers that are recomputed, if they are whole layers.
        """
        host = self.host.forward
        if recompute == FULL:
            return Spent(part * self.forward, part * host)
        if recompute == PRODUCTS:
            again = self.products.forward / 2
            again += self.passes.forward
            again += self.messages.forward
            return Spent(again, host)
        if recompute == ATTENTION_CORE:
            return Spent(self.attention.forward, 0.0)
        if recompute == LATENT:  # an estimate: the up-projections are a tenth of the products
            again = self.products.forward / 10
            again += self.passes.forward / 2
            return Spent(again, host / 3)
        if recompute == MLP:
            return Spent(self.mlp_products, host / 4)
        return Spent()

    def backward(self, again: Spent) -> float:
        """Return the seconds of the backward.

        Args:
            again: of the recomputation, the GPU's and the host's, as forward and backward.
        """
        busy = self.products.backward
        busy += self.attention.backward
        busy += self.passes.backward
        busy += self.messages.backward
        busy += again.forward
        launching = self.host.backward + again.backward
        return max(busy, launching)
