# SPDX-License-Identifier: Apache-2.0
"""Matrix products of quantized and plain tensors: read both as float32, multiply, and cast.

The arguments are those of cuBLAS, which stores matrices column by column. In terms of rows:

    TN, forward:                output[m, n] = B[m, k] @ A[n, k].T      A: weight, B: input
    NN, gradient of the input:  output[m, k] = B[m, n] @ A[n, k]        A: weight, B: gradient
    NT, gradient of the weight: output[n, k] = B[m, n].T @ A[m, k]      A: input,  B: gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tools.transformer_engine_on_cpu.activations import derivative, gelu_of
from tools.transformer_engine_on_cpu.number_formats import TORCH_DTYPES
from tools.transformer_engine_on_cpu.quantization import quantize, values


def generic_gemm(
    a: Any,
    transa: bool,
    b: Any,
    transb: bool,
    out: torch.Tensor | None,
    quantizer: Any,
    out_dtype: int | None,
    bias: torch.Tensor | None,
    bias_dtype: int,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: torch.Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: object = None,
    comm_type: object = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the product, the gradient of the bias, the input of the activation and `None`."""
    if comm_overlap is not None:
        raise NotImplementedError("communication overlapped with products is not emulated")
    left = values(b, columnwise=transb)
    right = values(a, columnwise=not transa)
    product = (left.T if transb else left) @ (right.T if transa else right) * alpha
    bias_grad = None
    if bias is not None and bias.numel():
        if grad:
            bias_grad = left.sum(dim=0).to(TORCH_DTYPES[bias_dtype])
        else:
            product += bias.float()
    dtype = TORCH_DTYPES[out_dtype] if out_dtype is not None else a.dtype
    if gelu and grad and gelu_in is not None:
        product = product * derivative(gelu_of, gelu_in.reshape(product.shape))
    elif gelu:
        gelu_in = product.to(dtype)
        product = gelu_of(gelu_in.float())
    shape = product.shape if transb else (*b.size()[:-1], product.shape[-1])
    if out is not None:
        product = product.reshape(out.shape)
        out.copy_(out.float() + product if accumulate else product)
    else:
        out = product.to(dtype).reshape(shape)
        if quantizer is not None:
            out = quantize(out, quantizer)
    return out, bias_grad, gelu_in if gelu else None, None


def te_general_grouped_gemm(
    a: Sequence[Any],
    transa: bool,
    b: Sequence[Any],
    transb: bool,
    out: Sequence[torch.Tensor],
    out_dtype: int,
    m_splits: Sequence[int],
    bias: Sequence[torch.Tensor],
    bias_dtype: int,
    single_output: bool,
    pre_gelu_out: Sequence[torch.Tensor],
    grad: bool,
    workspace: Sequence[torch.Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    sm_count: int,
) -> list[torch.Tensor]:
    """Write one product for each pair, and return the biases or their gradients."""
    if pre_gelu_out[0].numel():
        raise NotImplementedError("an activation in grouped products is not emulated")
    outs = out[0].split(list(m_splits)) if single_output else out
    biases = []
    for left, right, target, own_bias in zip(a, b, outs, bias):
        if target.numel() == 0:
            biases.append(own_bias)
            continue
        _, bias_grad, _, _ = generic_gemm(
            *(left, transa, right, transb, target, None, out_dtype, own_bias, bias_dtype),
            *(False, None, grad, workspace[0], workspace_size, accumulate, True),
        )
        if bias_grad is not None:
            own_bias.copy_(bias_grad)
        biases.append(own_bias)
    return biases


def fused_multi_row_padding(
    rows: torch.Tensor, out: torch.Tensor, splits: Sequence[int], padded: Sequence[int]
) -> None:
    """Write groups of rows, each filled up with zeros to its padded number."""
    out.zero_()
    for source, target in zip(rows.split(list(splits)), out.split(list(padded))):
        target[: len(source)] = source


def fused_multi_row_unpadding(
    rows: torch.Tensor, out: torch.Tensor, padded: Sequence[int], splits: Sequence[int]
) -> None:
    """Write groups of rows without those that they were filled up with."""
    for source, target in zip(rows.split(list(padded)), out.split(list(splits))):
        target.copy_(source[: len(target)])


def get_num_cublas_streams() -> int:
    """Return the number of workspaces that grouped products get."""
    return 1


def get_cublasLt_version() -> int:  # noqa: N802 (the name in Transformer Engine)
    """Return a version that is new enough for every format."""
    return 130200
