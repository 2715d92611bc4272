# SPDX-License-Identifier: Apache-2.0
"""Softmax with a scale and a mask, and the answer that no fused attention is there.

Scores have the shape (batch, heads, queries, keys). They are computed in float32, and results have
the dtype of the input.
"""

from __future__ import annotations

import torch


def get_cudnn_version() -> int:
    """Return a version that is new enough for everything."""
    return 91400


def get_fused_attn_backend(*args: object, **settings: object) -> tuple[int, str]:
    """Return the number of "no backend", and why."""
    return -1, "fused attention is not emulated"


def scaled_softmax_forward(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the softmax of scaled scores."""
    return torch.softmax(x.float() * scale, dim=-1).to(x.dtype)


def scaled_softmax_backward(grad: torch.Tensor, result: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the gradient of the scores. Masked ones have a result of 0, thus no gradient."""
    grad32, result32 = grad.float(), result.float()
    inner = (grad32 * result32).sum(dim=-1, keepdim=True)
    return (scale * result32 * (grad32 - inner)).to(grad.dtype)


def scaled_masked_softmax_forward(
    x: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the softmax of scaled scores, without those where the mask is true."""
    scores = (x.float() * scale).masked_fill(mask.bool(), -10000.0)
    result = torch.softmax(scores, dim=-1)
    # a row without any score
    return result.masked_fill(mask.bool().all(dim=-1, keepdim=True), 0.0).to(x.dtype)


def scaled_aligned_causal_masked_softmax_forward(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the softmax of scaled scores of earlier positions; the last ones are aligned."""
    queries, keys = x.shape[-2:]
    later = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    scores = (x.float() * scale).masked_fill(later, float("-inf"))
    return torch.softmax(scores, dim=-1).to(x.dtype)


scaled_masked_softmax_backward = scaled_softmax_backward
scaled_upper_triang_masked_softmax_forward = scaled_aligned_causal_masked_softmax_forward
scaled_upper_triang_masked_softmax_backward = scaled_softmax_backward
scaled_aligned_causal_masked_softmax_backward = scaled_softmax_backward
