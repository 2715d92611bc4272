# SPDX-License-Identifier: Apache-2.0
"""Tensors as vectors of bytes: views of any dtype, and the form of frozen weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from megatron.fsdp.engine.layout import Granularity
from megatron.fsdp.engine.param_group import StoredForm
from megatron.fsdp.quantized.tensor_subclasses import tensors_inside

# In bytes, of the starts of tensors; every size of an element divides it.
ALIGNMENT = 16


@contextmanager
def allocated(view: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return a uint8 view whose storage, which may be freed, has memory inside of the context."""
    # torch makes views of allocated storage only.
    storage = view.untyped_storage()
    size = storage.nbytes()
    if not size:
        end = view.storage_offset() + view.numel()
        storage.resize_(int(end))
    yield view.data
    storage.resize_(size)


def ends_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the position after each tensor in a vector of bytes; a single one fills it."""
    if len(tensors) == 1:
        return [tensors[0].nbytes]
    ends = []
    end = 0
    for tensor in tensors:
        padding = -tensor.nbytes % ALIGNMENT
        end += tensor.nbytes + padding
        ends.append(end)
    return ends


def parts_of(
    flat: torch.Tensor,
    tensors: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Return views of a vector of bytes with the shapes and dtypes of ``tensors``."""
    parts = []
    starts = [0, *ends_of(tensors)]
    for start, tensor in zip(starts, tensors):
        stop = start + tensor.nbytes
        part = flat[start:stop].view(tensor.dtype)
        # Matrices that kernels want column by column keep their strides.
        strides = tensor.stride()
        extent = 1  # elements in memory from the first to the last
        for size, step in zip(tensor.shape, strides):
            extent += (size - 1) * step
        if extent == tensor.numel():
            part = part.as_strided(tensor.shape, strides)
        parts.append(part.view(tensor.shape))
    return parts


# A quantized base (4-bit weights with their scales) is never updated, so its format does not
# matter: the bytes of the tensors that `__tensor_flatten__` names are gathered, and the subclass
# itself stays in the module.


class BytesForm(StoredForm):
    """The bytes of the tensors inside a weight, one after the other, as a vector of uint8."""

    def __init__(self) -> None:
        super().__init__(Granularity("elements"))

    def values(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the bytes of a weight."""
        tensors = list(tensors_inside(parameter).values())
        flat = torch.zeros(
            ends_of(tensors)[-1],
            dtype=torch.uint8,
            device=parameter.device,
        )
        parts = parts_of(flat, tensors)
        for part, tensor in zip(parts, tensors):
            part.copy_(tensor)
        return flat

    def point(
        self,
        parameter: nn.Parameter,
        view: torch.Tensor,
    ) -> nn.Parameter:
        """Make the tensors inside a weight parts of its bytes in the buffer."""
        inside = tensors_inside(parameter)
        with allocated(view) as flat:
            parts = parts_of(flat, list(inside.values()))
            for name, part in zip(inside, parts):
                setattr(parameter, name, part)
        return parameter
