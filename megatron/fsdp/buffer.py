# SPDX-License-Identifier: Apache-2.0
"""Flat storage of a group and the views into it."""

from __future__ import annotations

import torch

from megatron.fsdp import device as memory
from megatron.fsdp.layout import Layout


class FlatBuffer:
    """One flat tensor ``[layout.numel]`` over all parameters of a group, whose storage can come and go.

    The views keep their identity while the storage is away, so modules and autograd may hold on to them.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device):
        self.layout = layout
        self.flat = torch.empty(layout.numel, dtype=dtype, device=device)
        ends = [slot.stop for slot in layout.slots]
        starts = [slot.start for slot in layout.slots[1:]] + [layout.numel]
        self._gaps = [self.flat[end:start] for end, start in zip(ends, starts) if end < start]
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
        slot = self.layout.slots[index]
        return self.flat[slot.start : slot.stop].view(slot.shape)

    def shard(self, rank: int) -> torch.Tensor:
        """What ``rank`` owns, ``[layout.shard_size]``."""
        return self.flat[rank * self.layout.shard_size : (rank + 1) * self.layout.shard_size]


def shard_view(shard: torch.Tensor, layout: Layout, index: int, rank: int) -> torch.Tensor:
    """The piece of parameter ``index`` in ``rank``'s flat shard, in its local shape."""
    begin, end = layout.shard_range(index, rank)
    return shard[begin:end].view(layout.owned(index, rank).local_shape)
