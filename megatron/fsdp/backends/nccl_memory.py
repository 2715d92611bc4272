# SPDX-License-Identifier: Apache-2.0
"""Memory that is registered with NCCL communicators. Not yet run on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.fsdp.backends.memory_slots import allocate_slots

# NCCL's collectives read and write registered memory without a copy of their own. Sources: "User
# Buffer Registration" in NVIDIA's NCCL user guide; ``torch.cuda.MemPool``.


class NcclMemory:
    """Allocates memory that is registered with the communicators of some process groups.

    Args:
        groups: process groups with an NCCL backend.
        device: a CUDA device.
        is_symmetric: register symmetric windows, for which every rank must allocate the same sizes
            in the same order; otherwise each rank registers its memory locally.
    """

    def __init__(
        self, groups: Sequence[dist.ProcessGroup], device: torch.device, is_symmetric: bool
    ):
        # Any: CPU builds of torch lack the class of the NCCL backend.
        self._backends: list[Any] = [group._get_backend(device) for group in dict.fromkeys(groups)]
        self._device = device
        self._is_symmetric = is_symmetric

    def allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return ``uint8`` tensors of these numbers of bytes, in registered memory."""
        if not sizes:
            return []
        pool = torch.cuda.MemPool(self._backends[0].mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            memory = allocate_slots(self._device, sizes)
        for backend in self._backends:
            backend.register_mem_pool(pool, symm=self._is_symmetric)
            # A communicator that is destroyed with memory registered reports an error.
            weakref.finalize(memory[0], _deregister, weakref.ref(backend), pool)
        return memory


def _deregister(backend: weakref.ref[Any], pool: torch.cuda.MemPool) -> None:
    alive = backend()
    if alive is not None and dist.is_initialized():
        alive.deregister_mem_pool(pool)
