# SPDX-License-Identifier: Apache-2.0
"""Flat storage of a group and the views into it."""

from __future__ import annotations

import torch

from megatron.fsdp.engine import device as memory
from megatron.fsdp.engine.layout import Layout


class FlatBuffer:
    """One flat tensor ``[layout.numel]`` over all parameters of a group, whose storage can come and go.

    The views keep their identity while the storage is away, so modules and autograd may hold on to
    them.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device):
        self.layout = layout
        self.flat = torch.empty(layout.numel, dtype=dtype, device=device)
        used = sorted((slot.start, slot.stop) for slot in layout.slots if slot.numel)
        ends = [0] + [stop for _, stop in used]
        starts = [start for start, _ in used] + [layout.numel]
        self._gaps = [self.flat[end:start] for end, start in zip(ends, starts) if end < start]
        # Made now: there is no slicing while the storage is away.
        self._views = [self.flat[slot.start : slot.stop].view(slot.shape) for slot in layout.slots]
        self._is_allocated = True

    def allocate(self) -> None:
        if not self._is_allocated:
            memory.allocate(self.flat)
            self._is_allocated = True

    def free(self) -> None:
        if self._is_allocated:
            memory.free(self.flat)
            self._is_allocated = False

    def zero_padding(self) -> None:
        """Set to zero what lies between the parameters, so that sums over the flat tensor mean something."""
        if self._gaps:
            torch._foreach_zero_(self._gaps)

    def view(self, index: int) -> torch.Tensor:
        """Parameter ``index``, whole, in its logical shape."""
        return self._views[index]

    def slice(self, index: int, count: int) -> torch.Tensor:
        """Number ``index`` of ``count`` equal slices."""
        size = self.layout.numel // count
        return self.flat[index * size : (index + 1) * size]


class RunningSum:
    """A flat tensor ``[numel]`` that the first addend fills and others add to; it takes storage with the first."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device):
        self.dtype = dtype
        self.is_empty = True
        self._numel = numel
        self._device = device
        self._total: torch.Tensor | None = None

    @property
    def total(self) -> torch.Tensor:
        """The sum, zeros where nothing was added; the same tensor until :meth:`free`."""
        return self._own().zero_() if self.is_empty else self._own()

    def place_for(self, dtype: torch.dtype) -> torch.Tensor:
        """Where an addend of ``dtype`` may be computed: in the sum itself if it would only be copied there."""
        if self.is_empty and dtype == self.dtype:
            return self._own()
        return torch.empty(self._numel, dtype=dtype, device=self._device)

    def add(self, addend: torch.Tensor) -> None:
        """Add ``addend`` ``[numel]``, which may be what :meth:`place_for` gave."""
        if addend is not self._total:
            self._own().copy_(addend) if self.is_empty else self._own().add_(addend)
        self.is_empty = False

    def clear(self) -> None:
        """Begin a new sum in the same tensor."""
        self.is_empty = True

    def free(self) -> None:
        """Begin a new sum and give the storage back."""
        self.is_empty, self._total = True, None

    def _own(self) -> torch.Tensor:
        if self._total is None:
            self._total = torch.empty(self._numel, dtype=self.dtype, device=self._device)
        return self._total


def shard_view(shard: torch.Tensor, layout: Layout, index: int, rank: int) -> torch.Tensor:
    """The piece of parameter ``index`` in ``rank``'s flat shard, in its local shape."""
    begin, end = layout.shard_range(index, rank)
    return shard[begin:end].view(layout.owned(index, rank).local_shape)
