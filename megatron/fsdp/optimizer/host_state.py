# SPDX-License-Identifier: Apache-2.0
"""The moments of optimizers whose parameters may lie in host memory or in files."""

# [Note: moments without memory] The state of an optimizer is made before the first step, parameter
# by parameter, and becomes views of flat tensors then. Those of parameters in files are one value
# at first, expanded to their shape, so that the memory of the flat tensors is all that it needs.

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.fsdp.backends.host_memory import FileMemory, HostMemory
from megatron.fsdp.dtensor.sharded_param import is_linked, sharded_param_of
from megatron.fsdp.dtensor.uneven_dtensor import UnevenDTensor
from megatron.fsdp.engine.buffer import ShardMemory
from megatron.fsdp.engine.tensor_parallel import local_tensor

Values = Sequence[tuple[int, torch.Tensor]]  # parts of a flat tensor, each with its offset


def new_moment(parameter: torch.Tensor, value: float) -> torch.Tensor:
    """Return a tensor like ``parameter`` whose elements are ``value``."""
    if not is_linked(parameter):
        return torch.full_like(parameter, value, memory_format=torch.preserve_format)
    sharded_param = sharded_param_of(parameter)
    local = local_tensor(parameter)
    if isinstance(sharded_param.group.memory, FileMemory):
        one_value = local.new_full((), value)
        filled = one_value.expand(local.shape)
    else:
        filled = torch.full_like(local, value, memory_format=torch.preserve_format)
    return sharded_param.over(filled)


def moved(moment: UnevenDTensor, parameter: torch.Tensor) -> UnevenDTensor:
    """Move a new moment of a parameter in files into a file, where it takes no memory."""
    memory = sharded_param_of(parameter).group.memory
    if isinstance(memory, FileMemory):
        local = local_tensor(moment)
        flat = memory.empty(local.numel(), local.dtype)
        in_file = flat.view(local.shape)
        in_file.copy_(local)
        memory.release(in_file)
        moment._local_tensor = in_file
    return moment


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return True for a tensor of one value that has no memory yet."""
    if tensor.numel() < 2:
        return False
    return not any(tensor.stride())


def flat_moment(
    memory: ShardMemory,
    values: Values,
    numel: int,
) -> torch.Tensor:
    """Return a flat tensor with the values of a moment's tensors.

    Args:
        memory: that of the parameters' group, in which the result lies.
        values: tensors of one dtype, each with its offset in the result; all other elements are 0.
        numel: the number of elements of the result.
    """
    if isinstance(memory, HostMemory):
        known = _flat_around(memory, values, numel)
        if known is not None:
            return known
    _, first = values[0]
    flat = memory.empty(numel, first.dtype)
    if not memory.is_offloaded:
        flat.zero_()
    for offset, value in values:
        if is_expanded(value) and not value.any():
            continue  # zeros are there, and take no memory yet
        stop = offset + value.numel()
        part = flat[offset:stop]
        part.view(value.shape).copy_(value)
        memory.release(part)
        memory.release(value)
    return flat


def _flat_around(
    memory: HostMemory,
    values: Values,
    numel: int,
) -> torch.Tensor | None:
    """Return the flat tensor of which these are views at these offsets, if there is one."""
    origins = set()  # storage, and the position in it of the flat tensor's first element
    for offset, value in values:
        if not value.numel():
            continue
        if not memory.has(value):
            return None
        if not value.is_contiguous():
            return None
        source = value
        storage = value.untyped_storage()
        origin = value.storage_offset() - offset
        origins.add((storage._cdata, origin))
    if len(origins) != 1:
        return None
    _, start = origins.pop()
    stored = storage.nbytes() // source.itemsize
    if start < 0:
        return None
    if start + numel > stored:
        return None
    return source.as_strided((numel,), (1,), start)
