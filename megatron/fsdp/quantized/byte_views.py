# SPDX-License-Identifier: Apache-2.0
"""Views of vectors of bytes, as tensors of any dtype, also while their storage is freed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

# In bytes, of the starts of tensors; every size of an element divides it.
ALIGNMENT = 16


@contextmanager
def allocated(view: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return ``view``, ``uint8``, with memory inside of the context, if its storage is freed."""
    # torch makes views of allocated storage only.
    storage = view.untyped_storage()
    size = storage.nbytes()
    if not size:
        storage.resize_(int(view.storage_offset()) + view.numel())
    yield view.data
    storage.resize_(size)


def ends_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the position behind each tensor in a vector of bytes; a single one fills it."""
    if len(tensors) == 1:
        return [tensors[0].nbytes]
    return list(accumulate(tensor.nbytes + -tensor.nbytes % ALIGNMENT for tensor in tensors))


def parts_of(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a vector of bytes with the shapes and dtypes of ``tensors``."""
    parts = []
    for start, tensor in zip([0, *ends_of(tensors)], tensors):
        part = flat[start : start + tensor.nbytes].view(tensor.dtype)
        # Matrices that kernels want column by column keep their strides.
        extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
        if extent == tensor.numel():
            part = part.as_strided(tensor.shape, tensor.stride())
        parts.append(part.view(tensor.shape))
    return parts
