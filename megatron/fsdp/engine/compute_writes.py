# SPDX-License-Identifier: Apache-2.0
"""Writes to compute weights by code, which are copied into the main weights.

Where compute weights are not the main weights, a write would last only until they are gathered or
cast again. Nothing is communicated: all ranks write the same.

Outside of forwards, code that reads a parameter by name may write to it. A group whose compute
weights code has got keeps a copy of this rank's shard of them, and what differs from it later is
copied into the main weights: before the compute weights change, and before code looks at the main
weights. Version counters would not tell, because ``parameter.data`` has one of its own.

In a forward, where every weight is read, a copy would cost too much. There the version counters
tell whether weights were written to; what they were made from has the values from before.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

_version = attrgetter("_version")


class ComputeWrites:
    """Finds what code writes to the compute weights of a parameter group.

    Args:
        parameters: the compute parameters.
        gathered: this rank's shard of the inner axis in the buffer of the compute weights.
        sources: other tensors that compute weights are made from, of the whole shard or of the part
            that this rank owns, the first of which is cast or gathered. None: the optimizer updates
            the compute weights themselves.
        outer_rank: index of that part.

    Attributes:
        are_sources_newer: an optimizer has stepped, and its weights are not installed yet. What a
            forward writes until then is lost.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        gathered: torch.Tensor,
        sources: Sequence[torch.Tensor],
        outer_rank: int,
    ):
        self._parameters = parameters
        self._gathered = gathered
        self._sources = sources
        self._outer_rank = outer_rank
        self.are_sources_newer = False
        self._before: torch.Tensor | None = None
        self._versions = 0  # the sum of the version counters, which only grow
        self._num_found = 0

    @property
    def number(self) -> int:
        """A number that grows when a forward writes, between two steps of the optimizer."""
        return self._num_found if self._sources else sum(map(_version, self._parameters))

    def watch(self) -> None:
        """Note that code has got the compute weights, which are gathered."""
        if self._before is None and self._sources and self._gathered.numel():
            self._before = self._gathered.detach().clone()

    def begin_use(self) -> None:
        """Note that compute weights are made now: what a forward writes, it writes later."""
        if self._sources:
            self._versions = sum(map(_version, self._parameters))

    def end_use(self) -> None:
        """Take what a forward has written in place."""
        if self._sources and self._versions != sum(map(_version, self._parameters)):
            self._take_written()

    @torch.no_grad()
    def _take_written(self) -> None:
        self._num_found += 1
        is_watched = self._before is not None
        if not (is_watched or self.are_sources_newer) and self._gathered.numel():
            # The first source may be a part of the shard; other ranks look at the rest.
            self._before = self._gathered.clone()
            self._part(self._before, self._sources[0]).copy_(self._sources[0])
        self.take(goes_on=is_watched)
        self.begin_use()

    def take(self, goes_on: bool = False) -> None:
        """Copy what was written since :meth:`watch` into the tensors that weights are made from.

        Args:
            goes_on: code may write more.
        """
        if self._before is None:
            return
        with torch.no_grad():
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
