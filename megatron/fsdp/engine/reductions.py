# SPDX-License-Identifier: Apache-2.0
"""The reductions under way."""

from __future__ import annotations

from megatron.fsdp.engine.param_group import ParamGroup


class Reductions:
    """Gradient reductions that have begun, in the order in which they began.

    Args:
        overlap: run reductions beside the backward of the next unit; otherwise every one is waited
            for at once.
    """

    def __init__(self, overlap: bool):
        self._overlap = overlap
        self._groups: list[ParamGroup] = []

    def start(self, group: ParamGroup, over_inner: bool, over_outer: bool) -> None:
        """Begin to reduce the gradients of ``group`` over one or both axes."""
        group.gradients.reduce(over_inner, over_outer)
        self._groups.append(group)
        if not self._overlap:
            self.wait()

    def advance(self) -> None:
        """Wait for every collective under way, and begin those that follow it.

        Called before a unit accumulates its gradients: the flat buffers of the previous unit are
        freed here, so that those of one unit are alive at a time.
        """
        self._groups = [group for group in self._groups if group.gradients.advance_reduce()]

    def wait(self) -> None:
        """Return when every reduction that has begun is in its gradient shard."""
        while self._groups:
            self.advance()
