# SPDX-License-Identifier: Apache-2.0
"""The GPT that every wrapper of the comparison trains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Workload:
    """One training step: the model, the batch and the precision.

    Args:
        layers: transformer layers.
        hidden: hidden size, a multiple of 64.
        length: tokens per sequence.
        batch: sequences per rank and microbatch.
        vocabulary: number of tokens.
        dtype: name of the dtype that the model computes in.
        microbatches: backward passes per step.
        recompute: recompute the activations of every layer in backward.
    """

    layers: int
    hidden: int
    length: int
    batch: int
    vocabulary: int
    dtype: str
    microbatches: int
    recompute: bool

    @property
    def label(self) -> str:
        """The workload in a few words."""
        label = "fp32" if self.dtype == "float32" else "bf16"
        label += f", {self.layers} x {self.hidden}, {self.batch} x {self.length} tokens"
        if self.microbatches > 1:
            label += f", {self.microbatches} microbatches"
        return label + (", recomputation" if self.recompute else "")


class CausalLayer(nn.Module):
    """A causal transformer layer, float (batch, length, hidden) to the same shape."""

    def __init__(self, hidden: int):
        super().__init__()
        self.heads = hidden // 64
        self.norms = nn.ModuleList([nn.LayerNorm(hidden), nn.LayerNorm(hidden)])
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        attention = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return result


class Gpt(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, workload: Workload):
        super().__init__()
        hidden = workload.hidden
        self.embedding = nn.Embedding(workload.vocabulary, hidden)
        self.positions = nn.Embedding(workload.length, hidden)
        self.layers = nn.ModuleList(CausalLayer(hidden) for _ in range(workload.layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, workload.vocabulary, bias=False)
        self.recompute = workload.recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def build(workload: Workload, device: str) -> Gpt:
    """Build the same model on every call."""
    torch.manual_seed(0)
    return Gpt(workload).to(device, getattr(torch, workload.dtype))
