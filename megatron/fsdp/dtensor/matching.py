# SPDX-License-Identifier: Apache-2.0
"""DTensors that torch has divided, in the division of an uneven one.

Code that has computed a whole matrix divides it by ``distribute_tensor`` or ``redistribute``, which
cut it evenly. Its local tensor is then another part of the matrix than that of an uneven DTensor
with the same mesh and placements.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate

from megatron.fsdp.dtensor.chunks import gather_chunks, local_chunks
from megatron.fsdp.dtensor.gathering import is_replicated
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


def divided_evenly(value: DTensor, pattern: DTensor) -> DTensor:
    """Return ``value``, an uneven DTensor, divided as torch does; an all-gather.

    Args:
        value: an uneven DTensor.
        pattern: a DTensor with the mesh and the placements of the result.
    """
    mesh = pattern.device_mesh
    whole = DTensor.from_local(full_tensor(value), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=pattern.placements)


def matched(value: DTensor, pattern: DTensor) -> DTensor:
    """Return ``value`` in the division of ``pattern``, to combine both element by element.

    It is ``value`` itself where both are divided alike, or have other shapes. All ranks decide the
    same.
    """
    if value.shape != pattern.shape or is_replicated(value) or is_replicated(pattern):
        return value
    is_uneven = isinstance(value, UnevenDTensor)
    if is_uneven is isinstance(pattern, UnevenDTensor):
        return value
    return divided_evenly(value, pattern) if is_uneven else divided_like(value, pattern)
