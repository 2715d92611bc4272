# SPDX-License-Identifier: Apache-2.0
"""The two scales of NVFP4: one of a tensor in float32, one of 16 values or of a tile in FP8.

value = FP4 value * scale of its block / scale of its tensor

Matrices are float32. FP4 data is uint8 with half as many columns. Scales of blocks are FP8 (E4M3),
stored as uint8, the scale and the largest value of a tensor float32 with one element.
"""

from __future__ import annotations

from typing import Any

import torch

from tools.transformer_engine_on_cpu.block_scales import (
    FLOAT32_LARGEST,
    amax_of_blocks,
    quotient,
    spread,
)
from tools.transformer_engine_on_cpu.number_formats import (
    FP4_LARGEST,
    from_float4,
    largest,
    swap_float4,
    to_float4,
)

BLOCK_LEN = 16
SCALE_DTYPE = torch.float8_e4m3fn
RANGE = largest(SCALE_DTYPE) * FP4_LARGEST


def scale_of_tensor(amax: torch.Tensor) -> torch.Tensor:
    """Return the factor with which the largest scale of a block fills its FP8 type."""
    scale = quotient(RANGE, amax.float()).clamp(max=FLOAT32_LARGEST)
    return torch.where(scale == 0, 1.0, scale)


def scales_of_blocks(amax: torch.Tensor, tensor_scale: torch.Tensor) -> torch.Tensor:
    """Return the FP8 scales of blocks with these largest values."""
    # The kernels multiply the scale of the tensor by 1/6 first.
    scales = amax * (tensor_scale * torch.reciprocal(torch.tensor(FP4_LARGEST)))
    return scales.clamp(max=largest(SCALE_DTYPE)).to(SCALE_DTYPE)


def factors(scales: torch.Tensor, tensor_scale: torch.Tensor) -> torch.Tensor:
    """Return the factors by which the values of blocks are multiplied before they are cast."""
    return (1 / (scales.float() * (1 / tensor_scale))).clamp(max=FLOAT32_LARGEST)


def encode(
    matrix: torch.Tensor, amax: torch.Tensor, square: bool, stochastic: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the FP4 bytes and the scale of every 16 values of a row.

    Args:
        matrix: float32 of shape (rows, columns).
        amax: largest absolute value of the tensor.
        square: scale tiles of 16 times 16 values, whose scales are repeated in each of their rows.
        stochastic: round at random, see `to_float4`.

    Returns:
        uint8 of shape (rows, columns / 2), and FP8 of shape (rows, columns / 16).
    """
    tensor_scale = scale_of_tensor(amax)
    block = (1, BLOCK_LEN)
    block_amax = amax_of_blocks(matrix, (BLOCK_LEN, BLOCK_LEN) if square else block)
    if square:
        block_amax = block_amax.repeat_interleave(BLOCK_LEN, 0)[: matrix.shape[0]]
    scales = scales_of_blocks(block_amax, tensor_scale)
    scaled = matrix * spread(factors(scales, tensor_scale), block, matrix.shape)
    return to_float4(scaled, stochastic), scales


def decode(tensor: Any, columnwise: bool = False) -> torch.Tensor:
    """Return the float32 matrix that the rowwise or the columnwise data stands for."""
    side = "columnwise" if columnwise else "rowwise"
    data = getattr(tensor, f"_{side}_data")
    if data is None:
        raise RuntimeError(f"{type(tensor).__name__} has no {side} data")
    rows = data.shape[0] if columnwise else data.numel() // data.shape[-1]
    matrix = from_float4(data.reshape(rows, -1))
    scales = getattr(tensor, f"_{side}_scale_inv").view(SCALE_DTYPE).float()
    amax = getattr(tensor, f"_amax_{side}")
    matrix = matrix * (spread(scales, (1, BLOCK_LEN), matrix.shape) * (amax / RANGE))
    return matrix.T if columnwise else matrix


def hadamard(matrix: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate every 16 values of a row. Values and results have the rotation's type, bfloat16."""
    blocks = matrix.to(rotation.dtype).reshape(-1, BLOCK_LEN)
    return (blocks @ rotation).reshape(matrix.shape).float()


def nvfp4_data_transpose(data: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Transpose a matrix of pairs of FP4 values."""
    result = swap_float4(data.reshape(-1, data.shape[-1]))
    return result if out is None else out.copy_(result.reshape(out.shape))


def nvfp4_2d_scale_transpose(
    rowwise: torch.Tensor, columnwise: torch.Tensor, row_tiles: int, column_tiles: int
) -> None:
    """Write the scales of tiles, which rows repeat, as those of the transposed matrix."""
    tiles = rowwise[: row_tiles * BLOCK_LEN : BLOCK_LEN, :column_tiles].T
    columnwise.zero_()
    columnwise[: column_tiles * BLOCK_LEN, :row_tiles].copy_(tiles.repeat_interleave(BLOCK_LEN, 0))


def nvfp4_2d_multi_tensor_transpose(*lists: list[Any]) -> None:
    """Make the columnwise data and scales of several matrices from the rowwise ones."""
    for data, data_t, scales, scales_t, rows, columns in zip(*lists):
        nvfp4_data_transpose(data, data_t)
        tiles = (-(-rows // BLOCK_LEN), -(-columns // BLOCK_LEN))
        nvfp4_2d_scale_transpose(scales, scales_t, *tiles)
