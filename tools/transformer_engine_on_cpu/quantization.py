# SPDX-License-Identifier: Apache-2.0
"""Kernels that fill quantized tensors from plain ones, and read them.

The quantizers of Transformer Engine say which tensors a quantized one consists of. A kernel works
on a matrix: all dimensions but the last one are its rows. Functions that the package calls have the
arguments of the compiled ones of the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tools.transformer_engine_on_cpu import nvfp4
from tools.transformer_engine_on_cpu.block_scales import (
    amax_of_blocks,
    put,
    scale_of,
    spread,
)
from tools.transformer_engine_on_cpu.number_formats import (
    TORCH_DTYPES,
    from_e8m0,
    from_float8,
    inverse_of_e8m0,
    largest,
    to_e8m0,
    to_float8,
)

BLOCK_LEN = 128
"""Sides of the blocks of Float8BlockScaling."""
MX_LEN = 32
"""Values of a block of MXFP8."""


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor of any shape and dtype as a float32 matrix without a gradient."""
    tensor = tensor.detach()
    return tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1).float()


def quantize(
    source: torch.Tensor, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None
) -> Any:
    """Quantize a plain tensor, and return the quantized one.

    Args:
        source: values of any shape and floating dtype.
        quantizer: one of Transformer Engine's, which names the format.
        output: quantized tensor that is written; None makes a new one.
        noop: one element; where it is not 0, `output` stays as it is.
    """
    if output is None:
        output = create_empty_quantized_tensor(quantizer, source.shape, source.dtype)
    elif noop is not None and noop.item() != 0:
        return output
    else:
        _have_what_is_used(output, quantizer, source.shape)
    if source.numel() or _amax_group(quantizer) is not None:
        _fill_of(quantizer)(as_matrix(source), quantizer, output)
    return output


def create_empty_quantized_tensor(
    quantizer: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | None = None,
    pin_memory: bool = False,
) -> Any:
    """Allocate the tensors of a quantized one, on the CPU or on the meta device.

    Args:
        quantizer: one of Transformer Engine's, which names the format.
        shape: shape of the values.
        dtype: dtype that the quantized tensor reports.
        device: the meta device, or any other one, which stands for the CPU.
        pin_memory: without effect.
    """
    shape = tuple(shape)
    kind = getattr(device, "type", "cpu")
    tensors = {
        name: torch.zeros(size, dtype=of, device="meta" if kind == "meta" else "cpu")
        for name, (size, of) in _specs(quantizer, shape).items()
    }
    if _is_per_tensor(quantizer) and hasattr(quantizer, "scale"):
        tensors["_scale_inv"].copy_(1 / quantizer.scale)
    metadata = _metadata(quantizer, dtype)
    cls, words = metadata["cls"], metadata["nontensor_kwargs"]
    context = {
        "cls": cls,
        "is_tensor": not quantizer.internal,
        "requires_grad": False,
        "nontensor_kwargs": words,
    }
    strides = torch.empty(shape, device="meta").stride()
    return cls.__tensor_unflatten__(tensors, context, shape, strides)


def _specs(quantizer: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return name -> (shape, dtype) of the tensors that a quantizer makes."""
    if not _is_delayed(quantizer):
        return quantizer.inner_tensor_specs(shape)
    return _current_like(quantizer).inner_tensor_specs(shape)


def _metadata(quantizer: Any, dtype: torch.dtype) -> dict[str, Any]:
    if not _is_delayed(quantizer):
        return quantizer.storage_metadata(dtype)
    metadata = _current_like(quantizer).storage_metadata(dtype)
    metadata["nontensor_kwargs"]["quantizer"] = quantizer
    return metadata


def _current_like(quantizer: Any) -> Any:
    """Return a quantizer whose tensors are those of one with delayed scaling, which names none."""
    from transformer_engine.pytorch import Float8CurrentScalingQuantizer

    usage = {"rowwise": quantizer.rowwise_usage, "columnwise": quantizer.columnwise_usage}
    like = Float8CurrentScalingQuantizer(quantizer.dtype, torch.device("cpu"), **usage)
    like.internal = quantizer.internal
    return like


def _have_what_is_used(output: Any, quantizer: Any, shape: Sequence[int]) -> None:
    """Allocate tensors that the quantizer's usage asks for, drop those that it does not."""
    specs = _specs(quantizer, tuple(shape))
    for name, _ in type(output)._INNER_TENSORS:
        if name not in specs:
            setattr(output, name, None)
        elif getattr(output, name) is None:
            size, dtype = specs[name]
            setattr(output, name, torch.zeros(size, dtype=dtype))
    if _is_per_tensor(quantizer):
        output._transpose_invalid = output._transpose is None


def _is_delayed(quantizer: Any) -> bool:
    return type(quantizer).__name__ == "Float8Quantizer"


def _is_per_tensor(quantizer: Any) -> bool:
    return type(quantizer).__name__ in ("Float8Quantizer", "Float8CurrentScalingQuantizer")


def _amax_group(quantizer: Any) -> Any:
    """Return the ranks among which the largest values of a tensor are found, or None."""
    if not getattr(quantizer, "with_amax_reduction", False):
        return None
    return quantizer._canonicalized_amax_reduction_group()


def _amax(matrix: torch.Tensor, quantizer: Any) -> torch.Tensor:
    amax = matrix.abs().max().reshape(1) if matrix.numel() else torch.zeros(1)
    if _amax_group(quantizer) is not None:
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=_amax_group(quantizer))
    return amax


# ---- one scale for a tensor


def _fill_delayed(matrix: torch.Tensor, quantizer: Any, output: Any) -> None:
    if quantizer.amax.numel():  # an empty one: the caller knows the amax
        largest_yet = torch.maximum(quantizer.amax, matrix.abs().max())
        quantizer.amax.copy_(largest_yet.reshape(quantizer.amax.shape))
    _fill_per_tensor(matrix, quantizer, output, quantizer.scale.float())


def _fill_current(matrix: torch.Tensor, quantizer: Any, output: Any) -> None:
    limit = largest(TORCH_DTYPES[quantizer.dtype])
    amax = _amax(matrix, quantizer)
    scale = scale_of(amax, limit, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
    _fill_per_tensor(matrix, quantizer, output, scale)


def _fill_per_tensor(
    matrix: torch.Tensor, quantizer: Any, output: Any, scale: torch.Tensor
) -> None:
    data = to_float8(matrix * scale, TORCH_DTYPES[quantizer.dtype])
    output._scale_inv.copy_((1 / scale).reshape(output._scale_inv.shape))
    if output._data is not None:
        output._data.copy_(as_bytes(data).reshape(output._data.shape))
    if output._transpose is not None:
        output._transpose.copy_(data.T.reshape(output._transpose.shape))


def as_bytes(data: torch.Tensor) -> torch.Tensor:
    """Return FP8 data as bytes; it may be kept with its own type."""
    return data.view(torch.uint8)


# ---- one scale for a block


def _fill_mxfp8(matrix: torch.Tensor, quantizer: Any, output: Any) -> None:
    dtype = TORCH_DTYPES[quantizer.dtype]
    square = quantizer.with_2d_quantization
    for side, block in (("rowwise", (1, MX_LEN)), ("columnwise", (MX_LEN, 1))):
        data = getattr(output, f"_{side}_data")
        if data is None:
            continue
        amax = amax_of_blocks(matrix, (MX_LEN, MX_LEN) if square else block)
        if square:
            amax = amax.repeat_interleave(MX_LEN // block[0], 0)
            amax = amax.repeat_interleave(MX_LEN // block[1], 1)
        exponents = mx_exponents(amax, dtype)
        factors = spread(inverse_of_e8m0(exponents), block, matrix.shape)
        data.copy_(to_float8(matrix * factors, dtype).reshape(data.shape))
        put(exponents, getattr(output, f"_{side}_scale_inv"))


def mx_exponents(amax: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """Return the E8M0 scales of blocks with these largest values."""
    return to_e8m0(amax.float() * (1 / torch.tensor(largest(dtype))))


def _fill_block_scaling(matrix: torch.Tensor, quantizer: Any, output: Any) -> None:
    dtype = TORCH_DTYPES[quantizer.dtype]
    square = quantizer.block_scaling_dim == 2
    for side in ("rowwise", "columnwise"):
        data = getattr(output, f"_{side}_data")
        if data is None:
            continue
        # Columnwise data is that of the transposed matrix, whose rows are scaled in blocks.
        source = matrix if side == "rowwise" else matrix.T
        block = (BLOCK_LEN if square else 1, BLOCK_LEN)
        scale = scale_of(
            amax_of_blocks(source, block),
            largest(dtype),
            quantizer.force_pow_2_scales,
            quantizer.amax_epsilon,
        )
        values = to_float8(source * spread(scale, block, source.shape), dtype)
        data.copy_(values.reshape(data.shape))
        # Matrix products read the scales of rows column by column.
        scale_inv = 1 / scale if square else (1 / scale).T
        put(scale_inv, getattr(output, f"_{side}_scale_inv"))


def _fill_nvfp4(matrix: torch.Tensor, quantizer: Any, output: Any) -> None:
    if quantizer.row_scaled_nvfp4 or quantizer.nvfp4_use_4over6:
        raise NotImplementedError("NVFP4 with scales of rows or four-over-six is not emulated")
    for side in ("rowwise", "columnwise"):
        data = getattr(output, f"_{side}_data")
        if data is None:
            continue
        source = matrix
        if side == "columnwise":
            source = matrix.T.contiguous()
            if quantizer.with_rht:
                source = nvfp4.hadamard(source, quantizer.rht_matrix)
        amax = _amax(source, quantizer)
        codes, scales = nvfp4.encode(
            source, amax, quantizer.with_2d_quantization, quantizer.stochastic_rounding
        )
        data.copy_(codes.reshape(data.shape))
        put(scales.view(torch.uint8), getattr(output, f"_{side}_scale_inv"))
        getattr(output, f"_amax_{side}").copy_(amax)


FILL: dict[str, Callable[[torch.Tensor, Any, Any], None]] = {
    "Float8Quantizer": _fill_delayed,
    "Float8CurrentScalingQuantizer": _fill_current,
    "MXFP8Quantizer": _fill_mxfp8,
    "Float8BlockQuantizer": _fill_block_scaling,
    "NVFP4Quantizer": _fill_nvfp4,
}
"""Name of a quantizer -> the kernel that fills its tensors."""


def _fill_of(quantizer: Any) -> Callable[[torch.Tensor, Any, Any], None]:
    name = type(quantizer).__name__
    if name not in FILL:
        raise NotImplementedError(f"{name} is not emulated")
    return FILL[name]


# ---- reading


def values(tensor: Any, columnwise: bool = False) -> torch.Tensor:
    """Return the float32 matrix that a tensor, quantized or plain, stands for.

    Args:
        tensor: of any shape; all dimensions but the last one are rows of the matrix.
        columnwise: read the columnwise data, as matrix products do that contract over rows. NVFP4
            may have rotated the rows of that one; it cancels out in the product of two.

    Raises:
        RuntimeError: the tensor has no data for that direction.
    """
    if not hasattr(tensor, "_quantizer"):
        return as_matrix(tensor)
    if hasattr(tensor, "_fp4_dtype"):
        return nvfp4.decode(tensor, columnwise)
    dtype = TORCH_DTYPES[tensor._fp8_dtype]
    if hasattr(tensor, "_transpose"):
        return _per_tensor_values(tensor, dtype, columnwise)
    side = "columnwise" if columnwise else "rowwise"
    data = getattr(tensor, f"_{side}_data")
    scales = getattr(tensor, f"_{side}_scale_inv")
    if data is None:
        raise RuntimeError(f"{type(tensor).__name__} has no {side} data")
    transposed = columnwise and hasattr(tensor, "_is_2D_scaled")
    shape = (data.shape[0], -1) if transposed else (-1, data.shape[-1])
    matrix = from_float8(data.reshape(shape), dtype)
    if not hasattr(tensor, "_is_2D_scaled"):
        block = (MX_LEN, 1) if columnwise else (1, MX_LEN)
        return matrix * spread(from_e8m0(scales), block, matrix.shape)
    scales = scales if tensor._is_2D_scaled else scales.T
    block = (BLOCK_LEN if tensor._is_2D_scaled else 1, BLOCK_LEN)
    matrix = matrix * spread(scales, block, matrix.shape)
    return matrix.T if columnwise else matrix


def _per_tensor_values(tensor: Any, dtype: torch.dtype, columnwise: bool) -> torch.Tensor:
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    # Devices that multiply in every layout read the one copy that there is. Others read the
    # transposed copy: where it is stale, so is the product.
    if columnwise and not is_non_tn_fp8_gemm_supported():
        if tensor._transpose is None or tensor._transpose_invalid:
            raise RuntimeError(f"{type(tensor).__name__} has no columnwise data")
        data = tensor._transpose.reshape(tensor._transpose.shape[0], -1).T.contiguous()
    elif tensor._data is not None:
        data = as_bytes(tensor._data).reshape(-1, tensor._data.shape[-1])
    else:
        raise RuntimeError(f"{type(tensor).__name__} has no rowwise data")
    return from_float8(data, dtype) * tensor._scale_inv.reshape(())


def dequantize(tensor: Any, dtype: int) -> torch.Tensor:
    """Return a quantized tensor as a plain one of a type."""
    rowwise = getattr(tensor, "_rowwise_data", getattr(tensor, "_data", None))
    return values(tensor, rowwise is None).reshape(tensor.size()).to(TORCH_DTYPES[dtype])


# ---- other kernels on quantized tensors


def split_quantize(
    tensor: torch.Tensor, splits: Sequence[int], quantizers: Sequence[Any], **settings: object
) -> list[Any]:
    """Quantize parts of the first dimension, which have `splits` rows, by a quantizer each."""
    return [quantize(part, by) for part, by in zip(tensor.split(list(splits)), quantizers)]


def bgrad_quantize(grad: torch.Tensor, quantizer: Any) -> list[Any]:
    """Return the gradient of the bias and the quantized gradient."""
    return [as_matrix(grad).sum(dim=0).to(grad.dtype), quantize(grad, quantizer)]


def fp8_transpose(data: torch.Tensor, dtype: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return bytes with their last dimension first."""
    matrix = data.reshape(-1, data.shape[-1]).T
    result = matrix.reshape(data.shape[-1], *data.shape[:-1]).contiguous()
    return result if out is None else out.copy_(result)


def compute_amax(tensor: torch.Tensor, amax: torch.Tensor) -> None:
    """Write the largest absolute value of a tensor."""
    amax.copy_(tensor.abs().max().float() if tensor.numel() else torch.zeros(()))


def swizzle_scales_for_gemm_(tensor: Any) -> None:
    """Leave the scales as they are: the products here read them in rows."""
    tensor._with_gemm_swizzled_scales = True


def swap_first_dims(tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Exchange the first two dimensions."""
    result = tensor.transpose(0, 1).contiguous()
    return result if out is None else out.copy_(result)
