# SPDX-License-Identifier: Apache-2.0
"""Frozen weights of a tensor subclass, sharded and gathered as the bytes of the tensors inside."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import nn

from megatron.fsdp.engine.layout import Granularity
from megatron.fsdp.engine.param_group import StoredForm
from megatron.fsdp.quantized.freed_storage import allocated

# A quantized base (4-bit weights with their scales) is never updated, so nothing need be known of
# its format: the tensors that `__tensor_flatten__` names are gathered, bit by bit, whatever they
# are, and the subclass itself stays in the module.

# In bytes, of the starts of the tensors inside; every size of an element divides it.
ALIGNMENT = 16


class BytesForm(StoredForm):
    """The bytes of the tensors inside a weight, one after the other, as a vector of uint8."""

    def __init__(self) -> None:
        super().__init__(Granularity("elements"))

    def values(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the bytes of a weight."""
        tensors = tensors_inside(parameter)
        flat = torch.zeros(ends_of(tensors)[-1], dtype=torch.uint8, device=parameter.device)
        for part, tensor in zip(parts_of(flat, tensors), tensors):
            part.copy_(tensor)
        return flat

    def point(self, parameter: nn.Parameter, view: torch.Tensor) -> nn.Parameter:
        """Make the tensors inside a weight parts of its bytes in the buffer."""
        tensors = tensors_inside(parameter)
        names, _ = parameter.__tensor_flatten__()  # type: ignore[attr-defined]  # as below
        with allocated(view) as flat:
            for name, part in zip(names, parts_of(flat, tensors)):
                setattr(parameter, name, part)
        return parameter


def tensors_inside(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a subclass is made of, without a graph."""
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # checked by the caller
    return [getattr(tensor, name).detach() for name in names]


def ends_of(tensors: list[torch.Tensor]) -> list[int]:
    """Return the position behind each tensor in a vector of bytes, aligned."""
    return list(accumulate(tensor.nbytes + -tensor.nbytes % ALIGNMENT for tensor in tensors))


def parts_of(flat: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a vector of bytes with the shapes and dtypes of ``tensors``."""
    parts = []
    for stop, tensor in zip(ends_of(tensors), tensors):
        start = stop - tensor.nbytes - -tensor.nbytes % ALIGNMENT
        part = flat[start : start + tensor.nbytes].view(tensor.dtype)
        # Matrices that kernels want column by column keep their strides.
        extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
        if extent == tensor.numel():
            part = part.as_strided(tensor.shape, tensor.stride())
        parts.append(part.view(tensor.shape))
    return parts
