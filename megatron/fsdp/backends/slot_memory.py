# SPDX-License-Identifier: Apache-2.0
"""The memory of slots: plain, or registered with NCCL."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from megatron.fsdp.engine.collectives import connect

_logger = logging.getLogger(__name__)


def allocate_slots(device: torch.device, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return ``uint8`` tensors of these numbers of bytes.

    Raises:
        RuntimeError: if memory runs out.
    """
    return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]


class NcclMemory:
    """Allocates memory in pools, and registers these with the communicators of process groups.

    NCCL's collectives read and write registered memory without a copy.

    Args:
        groups: the process groups that gather and reduce in this memory.
        device: that of the memory.
        is_symmetric: register symmetric windows, for which ranks must allocate the same sizes in
            one order.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
        is_symmetric: bool,
    ):
        # Not yet run on a GPU. Source: "User Buffer Registration" in NVIDIA's NCCL user guide.
        self.groups = list(dict.fromkeys(groups))
        # Any: CPU builds of torch lack the class of the NCCL backend.
        self._backends: list[Any] = [group._get_backend(device) for group in self.groups]
        self._device = device
        self._is_symmetric = is_symmetric
        self._pools: list[torch.cuda.MemPool] = []  # pools that are not registered yet
        self._registered: list[tuple[Any, torch.cuda.MemPool]] = []
        weakref.finalize(self, _deregister, self._registered)
        _registering.add(self)

    def allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return ``uint8`` tensors of these numbers of bytes, in a pool of NCCL's allocator."""
        if not sizes:
            return []
        # While a pool is in use, torch's allocator does not free cached memory to make room, as if
        # a graph were captured. After a step that is the memory that all buffers have used.
        torch.cuda.empty_cache()
        pool = torch.cuda.MemPool(self._backends[0].mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            memory = allocate_slots(self._device, sizes)
        self._pools.append(pool)
        return memory

    def register(self) -> list[str]:
        """Register the new pools; return error messages if NCCL refuses. A collective."""
        connect(self.groups, self._device)
        pools = self._pools
        self._pools = []
        try:
            for pool in pools:
                for backend in self._backends:
                    self._register(backend, pool)
        except RuntimeError as error:
            reason = first_line(error)
            return [f"NCCL cannot register the memory slots ({reason}): train without nccl_ub"]
        return []

    def _register(self, backend: Any, pool: torch.cuda.MemPool) -> None:
        if self._is_symmetric:
            try:
                backend.register_mem_pool(pool, symm=True)
            except RuntimeError as error:  # without NVLink
                self._is_symmetric = False
                _deregister([(backend, pool)])  # torch has recorded the attempt
                if dist.get_rank() == 0:
                    reason = first_line(error)
                    _logger.warning("no windows, so slots are registered locally: %s", reason)
        if not self._is_symmetric:
            backend.register_mem_pool(pool)
        self._registered.append((backend, pool))

    def withdraw(self) -> None:
        """Give up the new pools, and all registrations: the error ends the training."""
        _deregister(self._registered)
        self._pools.clear()


_registering: weakref.WeakSet[NcclMemory] = weakref.WeakSet()


def deregister_all() -> None:
    """Deregister all memory of models that are alive, before their process groups are destroyed."""
    for memory in _registering:
        _deregister(memory._registered)


def _deregister(registered: list[tuple[Any, torch.cuda.MemPool]]) -> None:
    while registered:
        backend, pool = registered.pop()
        if dist.is_initialized():
            with suppress(RuntimeError):  # it was destroyed before, and its registrations with it
                backend.deregister_mem_pool(pool)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().splitlines()[0]
