# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm, and their gradients, with the result quantized where it is wanted.

Functions have the arguments of the compiled ones of the same names. Rows are normalized in float32;
means and inverse deviations are float32 with one entry a row, and gradients have the dtypes of
their tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from tools.transformer_engine_on_cpu.number_formats import TORCH_DTYPES
from tools.transformer_engine_on_cpu.quantization import as_matrix, quantize


def layernorm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    out_dtype: int,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Any, torch.Tensor | None, torch.Tensor]:
    """Return the normalized rows, their means and the inverses of their deviations."""
    rows = as_matrix(x)
    mean = rows.mean(dim=-1)
    centered = rows - mean[:, None]
    rsigma = torch.rsqrt(centered.square().mean(dim=-1) + eps)
    result = centered * rsigma[:, None] * gamma_of(weight, zero_centered)
    if bias is not None:
        result += bias.detach().float()
    return _output(result, x, ln_out, quantizer, out_dtype), mean, rsigma


def rmsnorm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    out_dtype: int,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Any, None, torch.Tensor]:
    """Return the normalized rows, nothing, and the inverses of their root mean squares."""
    rows = as_matrix(x)
    rsigma = torch.rsqrt(rows.square().mean(dim=-1) + eps)
    result = rows * rsigma[:, None] * gamma_of(weight, zero_centered)
    return _output(result, x, ln_out, quantizer, out_dtype), None, rsigma


def gamma_of(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    """Return the factors of the columns; some weights are those less one."""
    gamma = weight.detach().float()
    return gamma + 1 if zero_centered else gamma


def _output(
    result: torch.Tensor, like: torch.Tensor, out: Any, quantizer: Any, out_dtype: int
) -> Any:
    result = result.reshape(like.shape).to(TORCH_DTYPES[out_dtype])
    if quantizer is not None:
        return quantize(result, quantizer, out)
    return result if out is None else out.copy_(result)


def layernorm_bwd(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rsigma: torch.Tensor,
    weight: torch.Tensor,
    sm_margin: int,
    zero_centered: bool,
) -> list[torch.Tensor]:
    """Return the gradients of the input, the weight and the bias."""
    rows, dy = as_matrix(x), as_matrix(grad)
    normal = (rows - mean[:, None]) * rsigma[:, None]
    wdy = dy * gamma_of(weight, zero_centered)
    along = (wdy * normal).mean(dim=-1, keepdim=True)
    dx = (wdy - wdy.mean(dim=-1, keepdim=True) - normal * along) * rsigma[:, None]
    dgamma, dbeta = (dy * normal).sum(dim=0), dy.sum(dim=0)
    return [dx.reshape(x.shape).to(x.dtype), dgamma.to(weight.dtype), dbeta.to(weight.dtype)]


def rmsnorm_bwd(
    grad: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    weight: torch.Tensor,
    sm_margin: int,
    zero_centered: bool,
) -> list[torch.Tensor]:
    """Return the gradients of the input and the weight."""
    rows, dy = as_matrix(x), as_matrix(grad)
    normal = rows * rsigma[:, None]
    wdy = dy * gamma_of(weight, zero_centered)
    dx = (wdy - normal * (wdy * normal).mean(dim=-1, keepdim=True)) * rsigma[:, None]
    return [dx.reshape(x.shape).to(x.dtype), (dy * normal).sum(dim=0).to(weight.dtype)]


def rmsnorm_bwd_add(
    grad: torch.Tensor, x: torch.Tensor, add: torch.Tensor, *rest: Any
) -> list[torch.Tensor]:
    """Return the gradients, with another one added to that of the input."""
    dx, dgamma = rmsnorm_bwd(grad, x, *rest)
    return [dx + add.reshape(dx.shape).to(dx.dtype), dgamma]
