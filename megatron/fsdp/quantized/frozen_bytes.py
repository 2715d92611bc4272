# SPDX-License-Identifier: Apache-2.0
"""Frozen weights of a tensor subclass, sharded and gathered as the bytes of the tensors inside."""

from __future__ import annotations

import torch
from torch import nn

from megatron.fsdp.engine.layout import Granularity
from megatron.fsdp.engine.param_group import StoredForm
from megatron.fsdp.quantized.byte_views import allocated, ends_of, parts_of
from megatron.fsdp.quantized.tensor_subclasses import tensors_inside

# A quantized base (4-bit weights with their scales) is never updated, so nothing need be known of
# its format: the tensors that `__tensor_flatten__` names are gathered, bit by bit, whatever they
# are, and the subclass itself stays in the module.


class BytesForm(StoredForm):
    """The bytes of the tensors inside a weight, one after the other, as a vector of uint8."""

    def __init__(self) -> None:
        super().__init__(Granularity("elements"))

    def values(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the bytes of a weight."""
        tensors = list(tensors_inside(parameter).values())
        flat = torch.zeros(ends_of(tensors)[-1], dtype=torch.uint8, device=parameter.device)
        for part, tensor in zip(parts_of(flat, tensors), tensors):
            part.copy_(tensor)
        return flat

    def point(self, parameter: nn.Parameter, view: torch.Tensor) -> nn.Parameter:
        """Make the tensors inside a weight parts of its bytes in the buffer."""
        inside = tensors_inside(parameter)
        with allocated(view) as flat:
            for name, part in zip(inside, parts_of(flat, list(inside.values()))):
                setattr(parameter, name, part)
        return parameter
