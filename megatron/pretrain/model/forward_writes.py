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
    """Finds out whether forwards write to weights.

    Writes show in the version counters of weights, but those through ``parameter.data`` do not.
    Therefore the first forward and backward that are watched must also leave the content of all
    weights as it was. Later, writes through ``parameter.data`` alone are not found.

    Attributes:
        may_come: forwards have been found to write, or have not been watched yet.
    """

    def __init__(self, is_fully_sharded: bool):
        self._is_fully_sharded = is_fully_sharded
        self._model: Sequence[MegatronModule] = ()
        self._number = 0
        self._content: list[int] | None = None
        self.may_come = True

    def watch(self, model: Sequence[MegatronModule], with_content: bool = False) -> None:
        """Begin to watch, between two steps of the optimizer; note the content of weights too."""
        self._model, self._number = model, self._number_of(model)
        if with_content:
            self._content = self._content_of(model)

    @property
    def have_come(self) -> bool:
        """True if a forward has written since :meth:`watch`."""
        return self._number_of(self._model) != self._number

    def end(self) -> bool:
        """Return whether a forward has written since :meth:`watch`, and stop to watch.

        Call it after forward and backward, before the step of the optimizer.
        """
        have_come = self.have_come
        if self._content is not None:
            have_come |= self._content_of(self._model) != self._content
            self.may_come = have_come
        self.may_come |= have_come
        self._model, self._number, self._content = (), 0, None
        return have_come

    def _number_of(self, model: Sequence[MegatronModule]) -> int:
        """Return a number that grows with writes."""
        if self._is_fully_sharded:  # a forward writes to the parameters of the module inside
            groups = itertools.chain.from_iterable(chunk.module.groups for chunk in model)
            return sum(sum(group.versions) for group in groups)
        weights = itertools.chain.from_iterable(chunk.parameters() for chunk in model)
        return sum(weight._version for weight in weights)

    def _content_of(self, model: Sequence[MegatronModule]) -> list[int]:
        """Return the sum of the bits of every weight that the optimizer or DDP has."""
        weights: list[torch.Tensor] = []
        for chunk in model:
            if self._is_fully_sharded:
                weights += [group.main_shard for group in chunk.module.groups]
            else:
                weights += chunk.parameters()
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        bits = [weight.detach().contiguous().view(integers[weight.itemsize]) for weight in weights]
        return [int(part.sum()) for part in bits]
