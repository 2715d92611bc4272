# SPDX-License-Identifier: Apache-2.0
"""Casts between float32 and the bytes of FP8, E8M0 and FP4, as the kernels round.

E8M0 is a power of two, stored as its biased exponent. FP4 (E2M1) packs two values in a byte, the
first one in the low half.
"""

from __future__ import annotations

import torch

TORCH_DTYPES = {
    0: torch.uint8,
    2: torch.int32,
    4: torch.float32,
    5: torch.float16,
    6: torch.bfloat16,
    7: torch.float8_e4m3fn,
    8: torch.float8_e5m2,
}
"""The numbers of Transformer Engine's `DType`."""

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_LARGEST = FP4_VALUES[-1]


def largest(dtype: torch.dtype) -> float:
    """Return the largest finite value of an FP8 type."""
    return torch.finfo(dtype).max


def to_float8(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float32 values of any shape to FP8, ties to even, and return the bytes as uint8.

    Values that are too large for the type become its largest one.
    """
    # torch turns what is too large into NaN
    limit = largest(dtype)
    return values.clamp(-limit, limit).to(dtype).view(torch.uint8)


def from_float8(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the float32 values of FP8 bytes, which have the dtype uint8, in the same shape."""
    return data.view(dtype).float()


def to_e8m0(values: torch.Tensor) -> torch.Tensor:
    """Round positive float32 values up to powers of two, and return their exponents.

    Returns:
        The exponents plus 127 as uint8, in the same shape; 254 for infinity, 255 for NaN.
    """
    bits = values.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # The smallest power, 2**-127, is denormal in float32: its mantissa is 0x400000.
    is_smallest = (exponent == 0) & (mantissa <= 0x400000)
    exponent = exponent + ((mantissa > 0) & (exponent != 0xFE) & ~is_smallest)
    exponent = torch.where(torch.isinf(values), 0xFE, exponent)
    exponent = torch.where(torch.isnan(values), 0xFF, exponent)
    return torch.where(values == 0, 0, exponent).to(torch.uint8)


def from_e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """Return the float32 powers of two that biased exponents, uint8, stand for."""
    return _power_of_two(exponents.int() - 127)


def inverse_of_e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """Return the float32 factors by which values are multiplied before they are cast.

    Args:
        exponents: biased exponents as uint8. 0 stands for a block of zeros, whose factor is 1.
    """
    factor = _power_of_two(127 - exponents.int())
    return torch.where(exponents == 0, 1.0, factor)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    # In two factors: the smallest powers are denormal, the largest ones leave float32 otherwise.
    half = exponent // 2
    ones = torch.ones_like(exponent, dtype=torch.float32)
    return torch.ldexp(ones, half) * torch.ldexp(ones, exponent - half)


def to_float4(values: torch.Tensor, stochastic: bool = False) -> torch.Tensor:
    """Round float32 values to FP4, ties to even, and return the bytes of pairs of columns.

    Args:
        values: shape (..., columns), with an even number of columns.
        stochastic: round to either neighbor, to the nearer one with the higher probability, by
            the random numbers of torch.

    Returns:
        uint8 of shape (..., columns / 2). Values larger than 6 become 6.
    """
    size = values.abs().clamp(max=FP4_LARGEST)
    if stochastic:
        table = torch.tensor(FP4_VALUES)
        below = torch.searchsorted(table, size, right=True) - 1
        above = (below + 1).clamp(max=len(FP4_VALUES) - 1)
        gap = (table[above] - table[below]).clamp(min=torch.finfo(torch.float32).tiny)
        code = torch.where(torch.rand_like(size) < (size - table[below]) / gap, above, below)
    else:
        code = (size > 0.25).long() + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
        code = code + (size > 2.5) + (size >= 3.5) + (size > 5.0)
    code = (code + 8 * (values < 0)).to(torch.uint8)
    return code[..., ::2] | (code[..., 1::2] << 4)


def from_float4(data: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of FP4 bytes, uint8: twice as many columns."""
    codes = torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2).long()
    size = torch.tensor(FP4_VALUES)[codes & 7]
    return torch.where(codes >= 8, -size, size)


def swap_float4(data: torch.Tensor) -> torch.Tensor:
    """Transpose a matrix of FP4 bytes of shape (rows, columns / 2)."""
    codes = torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2).T
    return (codes[:, ::2] | (codes[:, 1::2] << 4)).contiguous()
