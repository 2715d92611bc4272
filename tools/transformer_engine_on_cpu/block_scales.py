# SPDX-License-Identifier: Apache-2.0
"""Scales of a matrix, of its blocks, and their largest absolute values.

A block of `(1, 32)` is 32 neighbors in a row, one of `(128, 128)` a square tile. Scales of blocks
are a small matrix, with one entry for each block.
"""

from __future__ import annotations

import math

import torch

FLOAT32_LARGEST = torch.finfo(torch.float32).max


def amax_of_blocks(matrix: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return the largest absolute value of each block.

    Args:
        matrix: shape (rows, columns), of any dtype.
        block: rows and columns of a block; those at the edges may be smaller.

    Returns:
        float32 of shape (rows / block[0], columns / block[1]), rounded up.
    """
    rows, columns = (math.ceil(size / step) for size, step in zip(matrix.shape, block))
    missing = (0, columns * block[1] - matrix.shape[1], 0, rows * block[0] - matrix.shape[0])
    padded = torch.nn.functional.pad(matrix.float().abs(), missing)
    return padded.reshape(rows, block[0], columns, block[1]).amax(dim=(1, 3))


def spread(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    """Return the scale of every element of a matrix.

    Args:
        scales: one entry for each block.
        block: rows and columns of a block.
        shape: rows and columns of the matrix, which is the shape of the result.
    """
    rows = scales.repeat_interleave(block[0], dim=0)[: shape[0]]
    return rows.repeat_interleave(block[1], dim=1)[:, : shape[1]]


def put(scales: torch.Tensor, into: torch.Tensor) -> None:
    """Write scales into the corner of a matrix whose sides are rounded up, and zeros elsewhere."""
    into.zero_()
    into[: scales.shape[0], : scales.shape[1]].copy_(scales)


def quotient(number: float, by: torch.Tensor) -> torch.Tensor:
    """Divide a number, and round once. `number / by` multiplies by the rounded inverse."""
    return torch.div(torch.tensor(number), by)


def scale_of(
    amax: torch.Tensor, largest: float, power_of_two: bool = False, epsilon: float = 0.0
) -> torch.Tensor:
    """Return the factors with which values up to `amax` fill the range up to `largest`.

    Args:
        amax: largest absolute values, in any shape.
        largest: largest value of the type that values are cast to.
        power_of_two: round factors down to powers of two.
        epsilon: smallest value that is taken for `amax`.

    Returns:
        float32 in the shape of `amax`; 1 where that is 0 or infinite.
    """
    amax = amax.float().clamp(min=epsilon)
    scale = quotient(largest, amax)
    scale = torch.where(torch.isinf(scale), FLOAT32_LARGEST, scale)
    if power_of_two:  # cut the mantissa off
        scale = (scale.contiguous().view(torch.int32) & -0x800000).view(torch.float32)
    return torch.where((amax == 0) | torch.isinf(amax), 1.0, scale)
