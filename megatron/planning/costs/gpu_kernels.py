# SPDX-License-Identifier: Apache-2.0
"""Seconds of operations on a GPU: matrix products, attention, and passes over memory.

[Note: matrix products] A product of (m, k) and (k, n) is computed in tiles, a tile on a
multiprocessor. Tiles at the edges are computed whole, and in the last wave some multiprocessors
have none. Libraries choose among tiles; smaller ones waste less there, but read operands more
often, so they are slower by a part. A tile needs some time to begin and to end, as if k were
longer. And operands are read, and the result is written, once at least.

[Note: power] Large products draw all the power that a GPU may draw, and the clock is lowered until
they do not. With a limit below that of the data sheet they are slower by a power of its part.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil

from megatron.planning.costs.software import ATTENTION, Software
from megatron.planning.machine import Cluster

TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
"""Rows and columns of tiles, and the part of the FLOP/s of the largest one that they reach: the
tiles are those of cuBLAS and CUTLASS, the parts are estimates."""

SHORT_SEQUENCE = 400
"""Tokens at which attention reaches half of its speed: fitted to the lengths in the figures of
FlashAttention-2 and 3."""

HEAD = 128
"""Width of heads for which the speed of attention is stated; narrower ones lose half of the part by
which they are narrower, an estimate."""

BACKWARD_OF_ATTENTION = 2.5
"""FLOPs of the backward of attention in those of its forward: five products for two."""


FP32 = 4
"""Bytes of an element of fp32."""

TF32 = 0.5
"""FLOP/s of fp32 products in those of bf16: Transformer Engine multiplies fp32 as TF32, of which
the data sheets of A100 to B200 have half of bf16's."""


@dataclass(frozen=True)
class Fitted:
    """The constants that are fitted over all published runs together.

    Args:
        product: part of the FLOP/s of the best products that the large ones of layers reach.
        depth: length that k of a product is longer by; see [Note: matrix products].
        memory: part of the bandwidth of memory that a pass over it reaches.
        launch: seconds of the host for one operation.
        link: part of the bandwidth of links, besides ``link_efficiency``, that collectives reach.
        contention: part of compute that is lost while a collective is under way.
        power: exponent of the part of the data sheet's power; see [Note: power].
        expert_calls: operations that the host launches for router, permutations, exchanges and
            experts, in those of a dense layer's kind: it also waits for the tokens of each expert.
    """

    product: float = 0.8944
    depth: float = 38.16
    memory: float = 0.70
    launch: float = 1.2e-5
    link: float = 0.9265
    contention: float = 0.114
    power: float = 0.719
    expert_calls: float = 493.6


FITTED = Fitted()


class Kernels:
    """The operations of a GPU.

    Args:
        machine: of the GPU.
        software: of the run.
        fitted: constants of the model of time.
    """

    def __init__(
        self,
        machine: Cluster,
        software: Software,
        fitted: Fitted = FITTED,
    ):
        self._machine = machine
        self._software = software
        self._fitted = fitted
        self._memory = machine.memory_bytes_per_second * fitted.memory
        self._clock = machine.power_part**fitted.power
        reached = fitted.product * self._clock
        self._flops = machine.flops * machine.compute_efficiency * reached
        if software.compute_bytes == FP32:
            self._flops *= TF32
        self._fp8_flops = self._flops
        if machine.fp8_flops is not None:
            self._fp8_flops = machine.fp8_flops * machine.fp8_efficiency * reached

    def product(
        self,
        m: float,
        n: float,
        k: float,
        count: float = 1,
        is_fp8: bool = False,
    ) -> float:
        """Return the seconds of products of (m, k) and (k, n).

        Args:
            m: rows of the first operand.
            n: columns of the second operand.
            k: its rows.
            count: products that one launch computes.
            is_fp8: operands have one byte an element.
        """
        if min(m, n, k, count) <= 0:
            return 0.0
        processors = self._machine.processors
        part = part_of_tiles(ceil(m), ceil(n), ceil(count), processors)
        part *= k / (k + self._fitted.depth)
        of_result = self._software.compute_bytes
        of_operand = of_result
        per_second = self._flops
        if is_fp8:
            of_operand = 1
            per_second = self._fp8_flops
        flops = 2.0 * m * n * k * count
        num_bytes = of_operand * (m * k + k * n)
        num_bytes += of_result * m * n
        computing = flops / (per_second * part)
        moving = self.move(count * num_bytes)
        return max(computing, moving)

    def move(self, num_bytes: float) -> float:
        """Return the seconds of a pass that reads and writes so many bytes."""
        return num_bytes / self._memory

    def attention(
        self,
        sequences: float,
        queries: float,
        keys: float,
        width: float,
        head: int,
    ) -> tuple[float, float]:
        """Return the seconds of attention forward and backward.

        Args:
            sequences: of a microbatch.
            queries: tokens of a sequence that this rank has.
            keys: tokens that each of them sees, in the mean.
            width: of this rank's queries and of its values together.
            head: width of a head.
        """
        parts = ATTENTION[self._software.attention]
        part_forward, part_backward = parts[self._machine.generation]
        length = queries / (queries + SHORT_SEQUENCE)
        narrow = min(1.0, 0.5 + 0.5 * head / HEAD)
        flops = 2.0 * sequences * queries * keys * width
        per_second = self._machine.flops * self._clock
        once = flops / (per_second * length * narrow)
        forward = once / part_forward
        backward = BACKWARD_OF_ATTENTION * once / part_backward
        return forward, backward


@cache
def part_of_tiles(
    m: int,
    n: int,
    count: int,
    processors: int,
) -> float:
    """Return the part of the FLOP/s that tiles leave; see [Note: matrix products].

    Args:
        m: rows of the result.
        n: columns of the result.
        count: results.
        processors: multiprocessors of the GPU.
    """
    best = 0.0
    for rows, columns, speed in TILES:
        down = ceil(m / rows)
        across = ceil(n / columns)
        tiles = down * across * count
        waves = ceil(tiles / processors)
        filled = m * n * count / (tiles * rows * columns)
        busy = tiles / (waves * processors)
        best = max(best, speed * filled * busy)
    return best
