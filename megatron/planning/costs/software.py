# SPDX-License-Identifier: Apache-2.0
"""The software of a run: kernels, fusion, what overlaps, and dtypes besides the compute dtype."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.planning.costs.update_bytes import CLIPPED

EAGER = "eager"
"""Operations of torch, one by one."""

FUSED = "fused"
"""Kernels of Transformer Engine and Megatron-Core."""

COMPILED = "compiled"
"""Kernels of a compiler."""

ATTENTION = {
    "flash2": {"ampere": (0.66, 0.58), "hopper": (0.38, 0.31), "blackwell": (0.25, 0.20)},
    "flash3": {"ampere": (0.66, 0.58), "hopper": (0.65, 0.54), "blackwell": (0.45, 0.35)},
    "cudnn": {"ampere": (0.66, 0.58), "hopper": (0.62, 0.52), "blackwell": (0.60, 0.45)},
    "triton2023": {"ampere": (0.46, 0.34), "hopper": (0.23, 0.17), "blackwell": (0.12, 0.09)},
}
"""Parts of the data sheet's dense bf16 FLOP/s that attention reaches forward and backward, with
causal masks, long sequences and heads of 128, by implementation and generation of GPU. Sources:
FlashAttention-2 (arXiv:2307.08691), figures 4 to 6, with Triton's kernel of that year on A100, and
figure 7 on H100; FlashAttention-3 (arXiv:2407.08608), figures 5 and 6, with cuDNN. On Blackwell,
cuDNN's published 1.2 to 1.6 PFLOP/s forward on B200; others are estimates. Triton's of 2023 on H100
is that on A100, with the gain of FlashAttention-2 between the two: kernels without Hopper's
instructions gain no more."""

UNFUSED = "unfused"
"""Attention by two batched products with scores in memory."""


@dataclass(frozen=True)
class Software:
    """The software of a run.

    Args:
        attention: a key of ``ATTENTION``, or ``UNFUSED``.
        fusion: ``EAGER``, ``FUSED`` or ``COMPILED``.
        has_fused_norm: norms are one kernel also where the rest is eager.
        loss_bytes: that forward and backward of the loss read and write for each logit.
        kept_logit_bytes: of a logit that exist at once while the loss is computed.
        overlaps_tensor: messages of tensor parallelism run while products do.
        overlaps_data: gradients are reduced during backward, and weights gathered during forward.
        compute_bytes: of an element of activations and of operands: 4 for fp32.
        uses_fp8: matrix products of layers are in FP8.
        weight_bytes: of a weight that a rank stores, without the optimizer's.
        gather_bytes: of a weight that is gathered.
        reduce_bytes: of a gradient that is reduced.
        gradient_bytes: of an accumulated gradient.
        optimizer_bytes: of main weight and moments of a weight.
        update_bytes: that the update reads and writes for each weight; see ``update_bytes.py``.
        copies_of_heads: times that queries, keys, values and the result are copied.
        overlaps_exchange: tokens are exchanged while another microbatch computes.
        deduplicates_tokens: a token goes to another node once, however many experts it has there.
        keeps_gathered: products keep what tensor ranks have gathered, and do not gather again.
        balances_stages: pipeline stages have as many layers as make their work alike.
        uses_graphs: the host launches CUDA graphs.
        imbalance: tokens of the busiest expert rank, in those of the mean.
        reserves: part by which the allocator reserves more than is allocated.
    """

    attention: str = "cudnn"
    fusion: str = FUSED
    has_fused_norm: bool = True
    loss_bytes: float = 36
    kept_logit_bytes: float = 14
    overlaps_tensor: bool = False
    overlaps_data: bool = True
    compute_bytes: int = 2
    uses_fp8: bool = False
    weight_bytes: int = 2
    gather_bytes: float = 2
    reduce_bytes: int = 4
    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    update_bytes: int = CLIPPED
    copies_of_heads: float = 1
    overlaps_exchange: bool = False
    deduplicates_tokens: bool = False
    keeps_gathered: bool = False
    balances_stages: bool = False
    uses_graphs: bool = False
    imbalance: float = 1.0
    reserves: float = 1.0
