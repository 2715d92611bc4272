# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that layers write themselves (``gradient_accumulation_fusion``), for autograd.

A layer gets a buffer from the weight by ``get_main_grad()``, writes its product there or adds it,
and sets ``grad_added_to_main_grad``. To autograd it returns a dummy gradient of the right shape.
Here every call gets a buffer of its own, so a weight that is used twice in one backward (tied
embeddings, multi-token prediction) keeps both products.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from megatron.mcore_adapter.parameter_attributes import set_attributes


def accept_fused_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Set the attributes that fused kernels look for, and pass their products to autograd.

    Args:
        parameters: the compute parameters of the layers.
    """
    for parameter in parameters:
        products: list[torch.Tensor] = []
        new_product = partial(_new_product, parameter, products)
        set_attributes(parameter, get_main_grad=new_product, grad_added_to_main_grad=False)
        parameter.register_hook(partial(_real_gradient, parameter, products))


def _new_product(parameter: nn.Parameter, products: list[torch.Tensor]) -> torch.Tensor:
    """Return zeros of the weight's shape and dtype: some kernels overwrite, others add."""
    products.append(torch.zeros_like(parameter, requires_grad=False))
    return products[-1]


def _real_gradient(
    parameter: nn.Parameter, products: list[torch.Tensor], gradient: torch.Tensor
) -> torch.Tensor:
    """Return the gradient that autograd accumulates instead of ``gradient``."""
    if not products:
        return gradient
    summands = list(products)
    if getattr(parameter, "zero_out_wgrad", False):
        # With this mark the layer's gradient is zeros, and others may have added theirs. Without it
        # the gradient is uninitialised memory.
        summands.append(gradient)
    products.clear()
    # The layer has left its buffer in `main_grad`, which would keep it alive.
    set_attributes(parameter, grad_added_to_main_grad=False, main_grad=None)
    return sum(summands[1:], summands[0])
