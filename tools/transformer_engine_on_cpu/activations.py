# SPDX-License-Identifier: Apache-2.0
"""Activations, gated ones, and their gradients, with the result quantized where it is wanted.

They are computed in float32 and cast to the dtype of their input, whose shape they keep; gated ones
return half of the columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tools.transformer_engine_on_cpu.quantization import bgrad_quantize, quantize

Function = Callable[[torch.Tensor], torch.Tensor]
Kernel = Callable[..., Any]


def gelu_of(x: torch.Tensor) -> torch.Tensor:
    """Return GELU by its approximation with tanh, as the kernels compute it."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Function] = {
    "gelu": gelu_of,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x) ** 2,
    "silu": F.silu,
}
GATED: dict[str, Function] = {
    "glu": torch.sigmoid,
    "geglu": ACTIVATIONS["gelu"],
    "qgeglu": ACTIVATIONS["qgelu"],
    "reglu": ACTIVATIONS["relu"],
    "sreglu": ACTIVATIONS["srelu"],
    "swiglu": ACTIVATIONS["silu"],
}
"""Name -> the function of the first half of the columns, by which the second half is multiplied."""


def derivative(function: Function, at: torch.Tensor) -> torch.Tensor:
    """Return the derivative of a function of single values at these, float32 in their shape."""
    x = at.detach().float()
    return gradient(function, x, torch.ones_like(x))


def gradient(function: Function, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the function's input, float32, from that of its output.

    Args:
        function: differentiable function of a tensor.
        x: its input, of any floating dtype.
        grad: gradient of its output, in the output's shape.
    """
    with torch.enable_grad():
        x = x.detach().float().requires_grad_()
        (result,) = torch.autograd.grad(function(x), x, grad.detach().float())
    return result


def gated(function: Function) -> Function:
    """Return the function of rows whose left half goes through `function` and scales the other."""

    def of_row(row: torch.Tensor) -> torch.Tensor:
        first, second = row.chunk(2, dim=-1)
        return function(first) * second

    return of_row


def forward_kernel(function: Function) -> Kernel:
    """Return the kernel of an activation."""

    def kernel(x: torch.Tensor, quantizer: Any = None) -> Any:
        result = function(x.detach().float()).to(x.dtype)
        return result if quantizer is None else quantize(result, quantizer)

    return kernel


def backward_kernel(function: Function) -> Kernel:
    """Return the kernel of an activation's gradient."""

    def kernel(grad: torch.Tensor, x: torch.Tensor, quantizer: Any = None) -> Any:
        result = gradient(function, x, grad.reshape(function(x).shape)).to(grad.dtype)
        return result if quantizer is None else quantize(result, quantizer)

    return kernel


def bias_kernel(function: Function) -> Kernel:
    """Return the kernel of an activation's gradient, with that of the bias before it."""

    def kernel(grad: torch.Tensor, x: torch.Tensor, quantizer: Any) -> list[Any]:
        result = gradient(function, x, grad.reshape(function(x).shape)).to(grad.dtype)
        return bgrad_quantize(result, quantizer)

    return kernel


def kernels() -> dict[str, Kernel]:
    """Return the kernels by their names in Transformer Engine."""
    found: dict[str, Kernel] = {}
    functions = {**ACTIVATIONS, **{name: gated(inner) for name, inner in GATED.items()}}
    for name, function in functions.items():
        found[name] = forward_kernel(function)
        found[f"d{name}"] = backward_kernel(function)
        if name in ACTIVATIONS:
            found[f"dbias_d{name}"] = bias_kernel(function)
    return found
