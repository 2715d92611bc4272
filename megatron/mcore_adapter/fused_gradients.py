# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that layers write themselves (``gradient_accumulation_fusion``), brought back to autograd's way.

A layer asks the weight for a buffer by ``get_main_grad()``, writes its product there, or adds it,
says so by ``grad_added_to_main_grad``, and hands autograd a gradient of the right shape that means
nothing. Every call gets a buffer
of its own here: a weight that is used twice in one backward (tied embeddings, multi-token
prediction) keeps both products.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn


def accept_fused_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give ``parameters``, those that the layers compute with, what fused kernels ask for."""
    for parameter in parameters:
        products: list[torch.Tensor] = []
        parameter.get_main_grad = partial(_new_product, parameter, products)
        parameter.grad_added_to_main_grad = False
        parameter.register_hook(partial(_real_gradient, parameter, products))


def _new_product(parameter: nn.Parameter, products: list[torch.Tensor]) -> torch.Tensor:
    """Zeros of the weight's shape and dtype: some kernels overwrite, others add."""
    products.append(torch.zeros_like(parameter, requires_grad=False))
    return products[-1]


def _real_gradient(
    parameter: nn.Parameter, products: list[torch.Tensor], gradient: torch.Tensor
) -> torch.Tensor:
    """What autograd is to accumulate instead of ``gradient``."""
    if not products:
        return gradient
    # Without this mark the gradient is uninitialised memory; with it, zeros and what others than
    # the layer have added.
    parts = [*products, gradient] if getattr(parameter, "zero_out_wgrad", False) else list(products)
    products.clear()
    parameter.grad_added_to_main_grad = False
    parameter.main_grad = None  # the layer has left the buffer there, which would live on
    return sum(parts[1:], parts[0])
