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


def num_writes_to_weights(model: Sequence[MegatronModule], is_fully_sharded: bool) -> int:
    """Return a number that grows with writes to weights, but those through ``parameter.data``."""
    if is_fully_sharded:  # a forward writes to the parameters of the module inside
        groups = itertools.chain.from_iterable(chunk.module.groups for chunk in model)
        return sum(sum(group.guard.versions) for group in groups)
    weights = itertools.chain.from_iterable(chunk.parameters() for chunk in model)
    return sum(weight._version for weight in weights)
