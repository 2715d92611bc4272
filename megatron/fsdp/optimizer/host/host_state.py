# SPDX-License-Identifier: Apache-2.0
"""The moments of optimizers whose parameters may lie in host memory or in files."""

# [Note: moments without memory] The state of an optimizer is made before the first step, parameter
# by parameter, and becomes views of flat tensors then. Those of parameters in files are one value
# at first, expanded to their shape, so that the memory of the flat tensors is all that it needs.

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.fsdp.dtensor.sharded_param import is_linked, sharded_param_of
from megatron.fsdp.dtensor.uneven_dtensor import UnevenDTensor
from megatron.fsdp.engine.buffer import ShardMemory
from megatron.fsdp.engine.tensor_parallel import local_tensor
from megatron.fsdp.optimizer.host.host_memory import FileMemory, HostMemory


def new_moment(parameter: torch.Tensor, value: float) -> torch.Tensor:
    """Return a tensor like ``parameter`` whose elements are ``value``."""
    if not is_linked(parameter):
        return torch.full_like(parameter, value, memory_format=torch.preserve_format)
    sharded_param, local = sharded_param_of(parameter), local_tensor(parameter)
    if isinstance(sharded_param.group.memory, FileMemory):
        filled = torch.full((), value, dtype=local.dtype, device=local.device).expand(local.shape)
    else:
        filled = torch.full_like(local, value, memory_format=torch.preserve_format)
    return sharded_param.over(filled)


def moved(moment: UnevenDTensor, parameter: torch.Tensor) -> UnevenDTensor:
    """Move a new moment of a parameter in files into a file, where it takes no memory."""
    memory, local = sharded_param_of(parameter).group.memory, local_tensor(moment)
    if isinstance(memory, FileMemory):
        moment._local_tensor = memory.empty(local.numel(), local.dtype).view(local.shape)
        moment._local_tensor.copy_(local)
        memory.release(moment._local_tensor)
    return moment


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return True for a tensor of one value that has no memory yet."""
    return tensor.numel() > 1 and not any(tensor.stride())


def flat_moment(
    memory: ShardMemory, places: Sequence[tuple[int, torch.Tensor]], numel: int
) -> torch.Tensor:
    """Return a flat tensor ``[numel]`` with the values of tensors, each at its offset."""
    if isinstance(memory, HostMemory):
        own = _flat_around(memory, [(at, value) for at, value in places if value.numel()], numel)
        if own is not None:
            return own
    flat = memory.empty(numel, places[0][1].dtype)
    if not memory.is_offloaded:
        flat.zero_()
    for at, value in places:
        if not is_expanded(value) or value.any():  # zeros are there, and take no memory yet
            own = flat[at : at + value.numel()]
            own.view(value.shape).copy_(value)
            for used in (own, value):
                memory.release(used)
    return flat


def _flat_around(
    memory: HostMemory, places: Sequence[tuple[int, torch.Tensor]], numel: int
) -> torch.Tensor | None:
    """Return the flat tensor of which these are views at these offsets, if there is one."""
    offsets = {(own.untyped_storage()._cdata, own.storage_offset() - at) for at, own in places}
    if len(offsets) != 1 or not all(memory.has(own) and own.is_contiguous() for _, own in places):
        return None
    ((_, offset),), (_, first) = offsets, places[0]
    is_inside = 0 <= offset <= first.untyped_storage().nbytes() // first.itemsize - numel
    return first.as_strided((numel,), (1,), offset) if is_inside else None
