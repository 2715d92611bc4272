# SPDX-License-Identifier: Apache-2.0
"""Writes of forwards to buffers, and to the weights of some models, during a background save."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from megatron.core.transformer.module import MegatronModule


def is_buffer_of(model: Sequence[MegatronModule]) -> Callable[[torch.Tensor], bool]:
    """Return a function that checks whether a tensor shares storage with a buffer of the model.

    Forwards and the end of a backward write to buffers, such as the biases of routers.
    """
    storages = set()
    for chunk in model:
        for module in chunk.modules():
            # Not buffers(): Megatron-Core's DDP has an attribute of that name.
            for buffer in module._buffers.values():
                if buffer is not None:
                    storages.add(buffer.untyped_storage().data_ptr())
    return lambda tensor: tensor.untyped_storage().data_ptr() in storages


def num_writes_to_weights(model: Sequence[MegatronModule], is_fully_sharded: bool) -> int:
    """Return the number of writes to weights so far, without those through ``parameter.data``.

    Args:
        model: chunks of this rank.
        is_fully_sharded: True with FSDP, where forwards write to the unsharded parameters.
    """
    total = 0
    for chunk in model:
        if is_fully_sharded:
            for group in chunk.module.groups:
                total += sum(group.guard.versions)
        else:
            for weight in chunk.parameters():
                total += weight._version
    return total
