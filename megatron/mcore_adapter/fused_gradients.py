# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that layers write themselves (``gradient_accumulation_fusion``), for autograd.

A layer gets a buffer from the weight by ``get_main_grad()``, writes its product there or adds it,
and sets ``grad_added_to_main_grad``. To autograd it returns a dummy gradient of the right shape.
The buffer of the first call is the weight's part of the flat tensor in which local gradients
accumulate, as long as that has no gradients yet and the dtype is the weight's: such a product is
never copied. Every other call gets a buffer of its own, so a weight that is used twice in one
backward (tied embeddings, multi-token prediction) keeps both products.
"""

from __future__ import annotations

import torch
from torch import nn

from megatron.fsdp.engine.device import current_pass
from megatron.fsdp.engine.gradients import GroupGradients


class FusedGradient:
    """The products that layers have written for a weight and autograd has not brought yet.

    Args:
        parameter: the weight, a compute parameter of a layer.
        gradients: gradients of the weight's group. The first product is written to their flat
            tensor.
        index: number of the weight in its group.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        gradients: GroupGradients,
        index: int,
    ):
        self._parameter = parameter
        self._gradients = gradients
        self._index = index
        # By backward pass: recomputation runs passes inside of others, and a pass may fail. None
        # stands for a product in the flat tensor.
        self._products: dict[int, list[torch.Tensor | None]] = {}
        self._num_forgotten = 0  # see GroupGradients

    def new_product(self) -> torch.Tensor:
        """Return zeros of the weight's shape and dtype: some kernels overwrite, others add."""
        num_forgotten = self._gradients.num_forgotten
        if num_forgotten != self._num_forgotten:
            # Passes have failed, or wanted no gradient of the weight.
            self._num_forgotten = num_forgotten
            self._products.clear()
        products = self._products.setdefault(current_pass(), [])
        if not products:
            view = self._gradients.view_to_write(self._index)
            if view is not None:
                products.append(None)
                return view
        product = torch.zeros_like(self._parameter, requires_grad=False)
        products.append(product)
        return product

    def real_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient that autograd accumulates instead of ``gradient``."""
        products = self._products.pop(current_pass(), None)
        if products is None:
            return gradient
        total, *others = products
        if total is None:
            total = self._gradients.written(self._index)
        if getattr(self._parameter, "zero_out_wgrad", False):
            # With this mark the layer's gradient is zeros, and others may have added theirs.
            # Without it the gradient is uninitialised memory.
            others.append(gradient)
        # The layer has left its buffer in `main_grad`, which would keep it alive.
        set_attributes(self._parameter, grad_added_to_main_grad=False, main_grad=None)
        with torch.no_grad():
            for other in others:
                assert other is not None  # only the first product is in the flat tensor
                total.add_(other)
        # Autograd keeps a tensor that nobody else has, and copies any other.
        return total.detach()


def accept_fused_gradients(
    parameter: nn.Parameter,
    gradients: GroupGradients,
    index: int,
) -> None:
    """Set the attributes that fused kernels look for, and pass their products to autograd.

    Args:
        parameter: the weight, a compute parameter of a layer.
        gradients: gradients of the weight's group.
        index: number of the weight in its group.
    """
    fused = FusedGradient(parameter, gradients, index)
    set_attributes(parameter, get_main_grad=fused.new_product, grad_added_to_main_grad=False)
    parameter.register_hook(fused.real_gradient)


def set_attributes(parameter: torch.Tensor, **attributes: object) -> None:
    """Set attributes that Megatron-Core or its layers look for on a parameter."""
    for name, value in attributes.items():
        setattr(parameter, name, value)
