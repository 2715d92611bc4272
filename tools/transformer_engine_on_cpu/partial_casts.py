# SPDX-License-Identifier: Apache-2.0
"""Casts of a part of a matrix, as a rank does that has a part of the master weights.

A part is a range of the flattened matrix. First each rank writes the largest values of the blocks
that its part touches (0 for others), then the largest of all ranks are found, then each casts its
part with the scales that follow from them.

Functions have the arguments of the compiled ones of the same names: `start` is the index of a
part's first value in the matrix of `rows` times `columns`. Parts have any floating dtype, largest
values are float32, and what is written is uint8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tools.transformer_engine_on_cpu import nvfp4
from tools.transformer_engine_on_cpu.block_scales import amax_of_blocks, put, spread
from tools.transformer_engine_on_cpu.number_formats import (
    TORCH_DTYPES,
    inverse_of_e8m0,
    to_float4,
    to_float8,
)
from tools.transformer_engine_on_cpu.quantization import MX_LEN

FP8 = torch.float8_e4m3fn


def _in_matrix(part: torch.Tensor, rows: int, columns: int, start: int) -> torch.Tensor:
    """Return a matrix of zeros with a part of it filled in."""
    flat = torch.zeros(rows * columns)
    flat[start : start + part.numel()] = part.reshape(-1).float()
    return flat.reshape(rows, columns)


def _factors_of_part(factors: torch.Tensor, part: torch.Tensor, start: int) -> torch.Tensor:
    return factors.reshape(-1)[start : start + part.numel()]


def _write(data: torch.Tensor, into: torch.Tensor) -> None:
    into.view(torch.uint8).copy_(data.reshape(into.shape))


# ---- Float8BlockScaling


def fp8_block_scaling_compute_partial_amax(
    part: torch.Tensor, amax: torch.Tensor, rows: int, columns: int, start: int, block_len: int
) -> None:
    """Write the largest values that a part has in each tile."""
    put(amax_of_blocks(_in_matrix(part, rows, columns, start), (block_len, block_len)), amax)


def fp8_block_scaling_partial_cast(
    part: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    rows: int,
    columns: int,
    start: int,
    block_len: int,
    dtype: int,
) -> None:
    """Cast a part with the scales of its tiles."""
    factors = spread(scale, (block_len, block_len), (rows, columns))
    scaled = part.reshape(-1).float() * _factors_of_part(factors, part, start)
    _write(to_float8(scaled, TORCH_DTYPES[dtype]), out)


# ---- MXFP8


def mxfp8_scaling_compute_partial_amax(
    part: torch.Tensor,
    amax_rowwise: torch.Tensor,
    amax_columnwise: torch.Tensor,
    rows: int,
    columns: int,
    start: int,
) -> None:
    """Write the largest values that a part has in each block of a row, and of a column."""
    matrix = _in_matrix(part, rows, columns, start)
    put(amax_of_blocks(matrix, (1, MX_LEN)), amax_rowwise)
    put(amax_of_blocks(matrix, (MX_LEN, 1)), amax_columnwise)


def mxfp8_scaling_partial_cast(
    part: torch.Tensor,
    rowwise: torch.Tensor,
    columnwise: torch.Tensor,
    rowwise_scale_inv: torch.Tensor,
    columnwise_scale_inv: torch.Tensor,
    rows: int,
    columns: int,
    start: int,
) -> None:
    """Cast a part twice: with the scales of blocks of rows, and of columns."""
    for out, exponents, block in (
        (rowwise, rowwise_scale_inv, (1, MX_LEN)),
        (columnwise, columnwise_scale_inv, (MX_LEN, 1)),
    ):
        factors = spread(inverse_of_e8m0(exponents), block, (rows, columns))
        scaled = part.reshape(-1).float() * _factors_of_part(factors, part, start)
        _write(to_float8(scaled, FP8), out)


# ---- NVFP4


def nvfp4_multi_tensor_compute_partial_amax(
    parts: Sequence[torch.Tensor],
    block_amaxes: Sequence[torch.Tensor],
    tensor_amaxes: Sequence[torch.Tensor],
    rows: Sequence[int],
    columns: Sequence[int],
    starts: Sequence[int],
    block_len: int,
) -> None:
    """Write the largest values that parts have in each tile, and of all."""
    for part, amax, total, height, width, start in zip(
        parts, block_amaxes, tensor_amaxes, rows, columns, starts
    ):
        matrix = _in_matrix(part, height, width, start)
        put(amax_of_blocks(matrix, (block_len, block_len)), amax)
        total.copy_(torch.maximum(total, matrix.abs().max()))


def nvfp4_compute_global_scale(amaxes: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the scales of tensors with these largest values."""
    scales.copy_(nvfp4.scale_of_tensor(amaxes))


def nvfp4_multi_tensor_fused_scale(
    block_amaxes: Sequence[torch.Tensor],
    tensor_amaxes: Sequence[torch.Tensor],
    block_scales: Sequence[torch.Tensor],
    scale_invs: Sequence[torch.Tensor],
    amaxes: Sequence[torch.Tensor],
    tile_rows: Sequence[int],
    tile_columns: Sequence[int],
    padded_rows: Sequence[int],
    block_len: int,
) -> None:
    """Write the scales of tiles: one for each, for the cast, and one for each row of a tile."""
    for amax, total, scale, scale_inv, target in zip(
        block_amaxes, tensor_amaxes, block_scales, scale_invs, amaxes
    ):
        scales = nvfp4.scales_of_blocks(amax, nvfp4.scale_of_tensor(total))
        scale.copy_(scales.float())
        in_rows = scales.view(torch.uint8).repeat_interleave(block_len, 0)
        put(in_rows[: scale_inv.shape[0]], scale_inv)
        target.copy_(total.reshape(target.shape))


def nvfp4_multi_tensor_2d_partial_cast(
    parts: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    block_scales: Sequence[torch.Tensor],
    tensor_scales: Sequence[torch.Tensor],
    rows: Sequence[int],
    columns: Sequence[int],
    starts: Sequence[int],
    block_len: int,
) -> None:
    """Cast parts with the scales of their tiles. `outs` begin at the byte of the first value."""
    for part, out, scale, total, height, width, start in zip(
        parts, outs, block_scales, tensor_scales, rows, columns, starts
    ):
        factors = spread(nvfp4.factors(scale, total), (block_len, block_len), (height, width))
        scaled = part.reshape(-1).float() * _factors_of_part(factors, part, start)
        _write_halves(scaled, out.view(-1), start % 2)


def _write_halves(scaled: torch.Tensor, out: torch.Tensor, first: int) -> None:
    """Write FP4 values from a half of the first byte on; keep other halves as they are."""
    halves = torch.stack((out & 0xF, out >> 4), dim=-1).reshape(-1)
    padded = torch.nn.functional.pad(scaled, (0, scaled.numel() % 2))
    codes = to_float4(padded)
    codes = torch.stack((codes & 0xF, codes >> 4), dim=-1).reshape(-1)[: scaled.numel()]
    halves[first : first + scaled.numel()] = codes
    out.copy_(halves[::2] | (halves[1::2] << 4))
