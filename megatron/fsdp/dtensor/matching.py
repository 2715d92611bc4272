# SPDX-License-Identifier: Apache-2.0
"""DTensors that torch has divided, in the division of an uneven one.

Code that has computed a whole matrix divides it by ``distribute_tensor`` or ``redistribute``, which
cut it evenly. Its local tensor is then another part of the matrix than that of an uneven DTensor
with the same mesh and placements.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.chunks import gather_chunks, is_replicated, local_chunks
from megatron.fsdp.dtensor.uneven import UnevenDTensor, dtensor_over, full_tensor


def divided_like(value: DTensor, pattern: DTensor) -> UnevenDTensor:
    """Return ``value`` with the local tensors of the same parts of the whole as ``pattern``.

    This is an all-gather of ``value``, and a small all-reduce if only other ranks know their parts
    of ``pattern``.

    Args:
        value: divided as torch does, of the shape of ``pattern``.
        pattern: an uneven DTensor.
    """
    whole, local = full_tensor(value), pattern._local_tensor
    known = local_chunks(pattern)
    chunks = (gather_chunks([pattern])[0] if known is None else known).chunks
    parts = [whole.new_empty(0)]
    for offsets, sizes in chunks:
        box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes))
        parts.append(whole[box].reshape(-1))
    own = torch.cat(parts).view(local.shape)
    return dtensor_over(own, pattern.device_mesh, pattern.placements, pattern.shape)


def is_divided_by_torch(value: object, pattern: object) -> bool:
    """Return True if :func:`divided_like` is needed to combine both element by element.

    The answer is the same on all ranks.
    """
    return (
        isinstance(pattern, UnevenDTensor)
        and type(value) is DTensor
        and value.shape == pattern.shape
        and not is_replicated(pattern)
    )
