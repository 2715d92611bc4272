# SPDX-License-Identifier: Apache-2.0
"""Memory pools, and their registration with the communicators of groups.

The rules are those of `ProcessGroupNCCL` and of "User Buffer Registration" in NCCL's user guide.
Two are stricter than torch's. It keeps free memory of a pool for as long as the pool: here memory
that is registered is neither freed nor resized, as what comes in its place may not be. And while a
pool is in use, torch's allocator gives nothing back that it has cached (`captures_underway` in
`CUDACachingAllocator.cpp`), so that a full device runs out of memory: here the cache is emptied
before, however much the device has.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.distributed.distributed_c10d import ProcessGroup

from tools.cuda_model.detector import Detector
from tools.cuda_model.groups import NcclOptions
from tools.cuda_model.memory import MemoryBlock
from tools.cuda_model.nccl import Nccl
from tools.cuda_model.reports import POOL, CallStack


class ModelPool:
    """A pool: it has the memory that is allocated while it is in use."""

    def __init__(self, pools: Pools, allocator: object = None):
        self._pools = pools
        self.is_of_nccl = allocator is Pools.ALLOCATOR
        self.blocks: list[MemoryBlock] = []
        self.groups: set[str] = set()  # it is registered with their communicators
        pools.alive.add(self)

    def release(self, block: MemoryBlock) -> None:
        """Note that some of the memory is given back, which must not be registered."""
        self.blocks.remove(block)
        if self.groups:
            self._pools.report(f"{block} of a registered pool is freed or resized")

    def __del__(self) -> None:
        if self.groups:
            self._pools.report("a pool is dropped that is registered")


class ModelBackend:
    """The backend of a group: that of gloo, and what NCCL's has for pools."""

    has_windows = True  # False: torch before 2.9, or GPUs without NVLink
    supports_coalescing = True

    def __init__(self, pools: Pools, group: str, real: Any, options: NcclOptions):
        self.mem_allocator = Pools.ALLOCATOR
        self._pools = pools
        self._group = group
        self._real = real
        self.options = options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def register_mem_pool(self, pool: ModelPool, symm: bool = False) -> None:
        """Register the memory of ``pool``; as windows, together with all ranks of the group."""
        launches = self._pools.launches
        sizes = [block.num_bytes for block in pool.blocks]
        if self._group not in launches.connected:
            self._pools.report(f"{self._group} has no communicator yet")
        if self._group in pool.groups:
            self._pools.report(f"a pool is registered with {self._group} a second time")
        if not sizes or not pool.is_of_nccl:
            self._pools.report("a pool is registered that has no memory of NCCL's allocator")
        pool.groups.add(self._group)  # as torch does, before NCCL may refuse
        if symm and not self.has_windows:
            raise RuntimeError("NCCL error: invalid usage")
        if symm:
            launches.calls[self._group].append(f"windows of {sizes} bytes")

    def deregister_mem_pool(self, pool: ModelPool) -> None:
        """Deregister the memory of ``pool``."""
        if self._group not in pool.groups:
            raise RuntimeError("the pool is not registered")
        pool.groups.remove(self._group)


class Pools:
    """All pools of the machine."""

    ALLOCATOR = object()
    """NCCL's allocator."""

    def __init__(self, detector: Detector, nccl: Nccl):
        self._detector, self._nccl = detector, nccl
        self.launches = detector.launches
        self.alive: weakref.WeakSet[ModelPool] = weakref.WeakSet()

    def replacements_of_cuda(self) -> dict[str, Callable[..., Any]]:
        """Return what takes the place of functions and classes of `torch.cuda`."""
        return {
            "MemPool": partial(ModelPool, self),
            "use_mem_pool": self._in_use,
            "empty_cache": self._empty_cache,
        }

    def destroy_groups(self, group: ProcessGroup | None = None) -> None:
        """Check that no pool or graph needs them; groups outlive the model, whose ranks do."""
        self._detector.graphs.destroy_groups(None if group is None else group.group_name)
        for pool in self.alive:
            if pool.groups and (group is None or group.group_name in pool.groups):
                self.report(f"{sorted(pool.groups)} are destroyed with a registered pool")

    def report(self, text: str) -> None:
        """Report a broken rule and its place, unless the model was left."""
        if not self._nccl.is_closed:
            stack = CallStack(sys._getframe(1)).format()
            self._detector.report(POOL, f"{text}\n{stack}", (text, stack))

    def _empty_cache(self) -> None:
        blocks = self._detector.blocks
        blocks.reserved = blocks.allocated

    @contextmanager
    def _in_use(self, pool: ModelPool, device: object = None) -> Iterator[None]:
        blocks = self._detector.blocks
        cached = blocks.reserved - blocks.allocated
        if cached:
            self.report(f"a pool is used while {cached} bytes are cached, which it cannot get")
        before, blocks.pool = blocks.pool, pool
        try:
            yield
        finally:
            blocks.pool = before
