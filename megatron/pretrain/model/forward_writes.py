# SPDX-License-Identifier: Apache-2.0
"""Writes of forwards to buffers, and to the weights of some models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from megatron.core.transformer.module import MegatronModule


def is_buffer_of(model: Sequence[MegatronModule]) -> Callable[[torch.Tensor], bool]:
    """Return a function that tells whether a tensor shares storage with a buffer of the model.

    Forwards and the end of a backward write to buffers, such as the biases of routers.
    """
    modules = itertools.chain.from_iterable(chunk.modules() for chunk in model)
    # Not buffers(): Megatron-Core's DDP has an attribute of that name.
    buffers = itertools.chain.from_iterable(module._buffers.values() for module in modules)
    storages = {buffer.untyped_storage().data_ptr() for buffer in buffers if buffer is not None}
    return lambda tensor: tensor.untyped_storage().data_ptr() in storages


class WeightWrites:
    """Finds out whether forwards write to weights, by the version counters of weights.

    Writes through ``parameter.data`` do not count there.

    Attributes:
        may_come: forwards have been found to write, or have not been watched yet.
    """

    def __init__(self, is_fully_sharded: bool):
        self._is_fully_sharded = is_fully_sharded
        self._model: Sequence[MegatronModule] = ()
        self._number = 0
        self._has_written = False
        self.may_come = True

    def watch(self, model: Sequence[MegatronModule]) -> None:
        """Begin to watch the chunks of this pipeline stage, between two steps of the optimizer."""
        self._model, self._number = model, self._number_of(model)

    @property
    def have_come(self) -> bool:
        """True if a forward has written since :meth:`watch`."""
        return self._number_of(self._model) != self._number

    def end(self) -> bool:
        """Return whether a forward has written since :meth:`watch`, and stop to watch.

        Call it after forward and backward, before the step of the optimizer.
        """
        have_come = self.have_come
        if self._model:
            self._has_written |= have_come
            self.may_come = self._has_written
        self._model, self._number = (), 0
        return have_come

    def _number_of(self, model: Sequence[MegatronModule]) -> int:
        """Return a number that grows with writes."""
        return sum(map(self._number_of_chunk, model))

    def _number_of_chunk(self, chunk: MegatronModule) -> int:
        if self._is_fully_sharded:
            return sum(group.writes.number for group in chunk.module.groups)
        return sum(parameter._version for parameter in chunk.parameters())
