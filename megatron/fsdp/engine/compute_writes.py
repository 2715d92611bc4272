# SPDX-License-Identifier: Apache-2.0
"""Writes to compute weights outside of forwards, which are copied into the main weights.

Code that reads a parameter by name outside of forwards may write to it. Where compute weights are
not the main weights, the write would last only until they are gathered or cast again. So a group
whose compute weights code has got keeps a copy of this rank's shard of them, and what differs from
it later is copied into the main weights: before the compute weights change, and before code looks
at the main weights. Version counters would not tell, because ``parameter.data`` has one of its
own. Nothing is communicated: all ranks write the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class ComputeWrites:
    """Finds what code writes to the compute weights of a parameter group.

    Args:
        gathered: this rank's shard of the inner axis in the buffer of the compute weights.
        sources: other tensors that compute weights are made from, of the whole shard or of the part
            that this rank owns. None: the optimizer updates the compute weights themselves.
        outer_rank: index of that part.
    """

    def __init__(self, gathered: torch.Tensor, sources: Sequence[torch.Tensor], outer_rank: int):
        self._gathered = gathered
        self._sources = sources
        self._outer_rank = outer_rank
        self._before: torch.Tensor | None = None

    def watch(self) -> None:
        """Note that code has got the compute weights, which are gathered."""
        if self._before is None and self._sources and self._gathered.numel():
            self._before = self._gathered.detach().clone()

    @torch.no_grad()
    def take(self, goes_on: bool = False) -> None:
        """Copy what was written since :meth:`watch` into the tensors that weights are made from.

        Args:
            goes_on: code may write more.
        """
        if self._before is None:
            return
        is_written = self._gathered != self._before
        for source in self._sources:
            written, mask = self._part(self._gathered, source), self._part(is_written, source)
            source.copy_(torch.where(mask, written, source))
        self._before = None
        if goes_on:
            self.watch()

    def _part(self, shard: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Return the part of a shard over the inner axis that ``source`` has."""
        parts = shard.view(-1, source.numel())
        return parts[self._outer_rank if len(parts) > 1 else 0]
