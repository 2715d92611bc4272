# SPDX-License-Identifier: Apache-2.0
"""Microbatches: the backward passes of a step, and which of them synchronise gradients."""

from __future__ import annotations


class Microbatches:
    """The caller's statements about the backward passes to come.

    Gradients of a pass that does not synchronise accumulate: on this rank where a ZeRO level keeps
    whole gradients, otherwise in the gradient shards. What is not reduced then is reduced before
    the optimizer's step.

    Args:
        sync_each: every pass ends with final gradients on the parameters.
    """

    def __init__(self, sync_each: bool):
        self.sync_each = sync_each
        self._is_last = True
        self._are_marked = False  # by `no_sync`: a pass outside of it is the last one of its step

    @property
    def is_last(self) -> bool:
        """True outside of ``no_sync``; may be assigned."""
        return self._is_last

    @is_last.setter
    def is_last(self, value: bool) -> None:
        self._is_last = value
        self._are_marked = self._are_marked or not value

    @property
    def are_synchronised(self) -> bool:
        """True if gradients of the pass under way are reduced completely."""
        return self._is_last and (self.sync_each or self._are_marked)

    def end_pass(self) -> None:
        """Note that a backward pass is over: marks count until the last pass of their step."""
        if self._is_last:
            self._are_marked = False

    def set_sync_each(self, sync_each: bool) -> None:
        """Choose whether every pass ends with final gradients, and forget earlier marks."""
        self.sync_each = sync_each
        self._are_marked = False
