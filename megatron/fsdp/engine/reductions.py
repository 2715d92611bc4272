# SPDX-License-Identifier: Apache-2.0
"""The reductions under way."""

from __future__ import annotations

from megatron.fsdp.engine.param_group import ParamGroup


class Reductions:
    """Gradient reductions that have started, in the order of their start.

    Args:
        overlap: overlap reductions with the backward of the next unit; otherwise wait for each one
            at once.
    """

    def __init__(self, overlap: bool):
        self._overlap = overlap
        self._groups: list[ParamGroup] = []

    def start(self, group: ParamGroup, over_inner: bool, over_outer: bool) -> None:
        """Start to reduce the gradients of ``group`` over one or both axes."""
        group.gradients.reduce(over_inner, over_outer)
        self._groups.append(group)
        if not self._overlap:
            self.wait()

    def advance(self) -> None:
        """Wait for every collective under way, and start the next one of each reduction.

        The schedule calls this before a unit accumulates its gradients. The flat gradient buffers
        of the previous unit are freed here, so only one unit's buffers are allocated at a time.
        """
        self._groups = [group for group in self._groups if group.gradients.advance_reduce()]

    def wait(self) -> None:
        """Wait until the results of all reductions are in the gradient shards."""
        while self._groups:
            self.advance()
