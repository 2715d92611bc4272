# SPDX-License-Identifier: Apache-2.0
"""Blocks of memory, each the life of one storage from its allocation to its release.

The rules are those of torch's caching allocator ("Memory management" in torch's notes on CUDA, and
`torch.Tensor.record_stream`): a block belongs to the stream that was current when it was allocated.
When it is freed, work that this stream launches later may use it at once. Work on other streams
must have been ordered before, or the streams must have been recorded on the block.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import count
from typing import Protocol

import torch

Released = Callable[["MemoryBlock"], None]


class MemoryBlock:
    """The memory of one storage, from its allocation to its release."""

    def __init__(self, number: int, stream: int, num_bytes: int, name: str):
        self.number = number
        self.stream = stream  # that was current when it was allocated
        self.num_bytes = num_bytes
        self.name = name
        self.recorded: set[int] = set()  # streams, by `record_stream`
        self.is_known = True  # False: it was allocated before the model was entered
        self.pool: Pool | None = None

    def __str__(self) -> str:
        return f"{self.name} (block {self.number}, {self.num_bytes} bytes)"


class Pool(Protocol):
    """A memory pool, which may be registered."""

    blocks: list[MemoryBlock]
    groups: set[str]

    def release(self, block: MemoryBlock) -> None:
        """Take memory back."""


class Blocks:
    """The blocks that are allocated, by storage; ``released`` is called when a storage dies."""

    def __init__(self, released: Released):
        self._released = released
        self._blocks: dict[int, MemoryBlock] = {}  # by the address of the storage's implementation
        self._names: dict[int, str] = {}  # what the engine calls a flat buffer's storage
        self._watched: dict[int, weakref.finalize] = {}
        self._numbers = count(1)
        self.allocated = self.peak = 0  # bytes
        self.pool: Pool | None = None  # in use now

    def of(self, tensor: torch.Tensor, stream: int) -> tuple[MemoryBlock, bool] | None:
        """Return the block of ``tensor`` and True if it is new; None if it has no memory."""
        storage = storage_of(tensor)
        if storage is None or not storage.nbytes():
            return None
        block = self._blocks.get(storage._cdata)
        if block is not None:
            return block, False
        return self.allocate(storage, stream), True

    def known(self, tensor: torch.Tensor) -> MemoryBlock | None:
        """Return the block of ``tensor`` if it has one."""
        storage = storage_of(tensor)
        return None if storage is None else self._blocks.get(storage._cdata)

    def allocate(self, storage: torch.UntypedStorage, stream: int) -> MemoryBlock:
        """Return a new block for ``storage``, which belongs to ``stream``."""
        key = storage._cdata
        name = self._names.get(key, "a tensor")
        block = self._blocks[key] = MemoryBlock(next(self._numbers), stream, storage.nbytes(), name)
        if self.pool is not None:
            block.pool = self.pool
            self.pool.blocks.append(block)
        if key not in self._watched:
            self._watched[key] = weakref.finalize(storage, self._die, key)
            self._watched[key].atexit = False
        self.allocated += block.num_bytes
        self.peak = max(self.peak, self.allocated)
        return block

    def free(self, storage: torch.UntypedStorage) -> None:
        """End the block of a storage that is resized; another one may follow."""
        self._end(storage._cdata)

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Give the storage of ``tensor`` a name for reports."""
        storage = storage_of(tensor)
        if storage is not None:
            self._names[storage._cdata] = name
            if storage._cdata in self._blocks:
                self._blocks[storage._cdata].name = name

    def name_of(self, tensor: torch.Tensor) -> str:
        """Return the name of the storage of ``tensor``."""
        storage = storage_of(tensor)
        return "a tensor" if storage is None else self._names.get(storage._cdata, "a tensor")

    def __iter__(self) -> Iterator[MemoryBlock]:
        return iter(list(self._blocks.values()))

    def close(self) -> None:
        """Watch no storage any more."""
        for watch in list(self._watched.values()):
            watch.detach()

    def _die(self, key: int) -> None:
        self._watched.pop(key, None)
        self._end(key)
        self._names.pop(key, None)

    def _end(self, key: int) -> None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self.allocated -= block.num_bytes
            if block.pool is not None:
                block.pool.release(block)
            self._released(block)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a plain tensor on the CPU, which stands for the device."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # of a subclass without storage of its own
        return None


def has_memory(tensor: torch.Tensor) -> bool:
    """Return False for a tensor whose storage is smaller than it, because it was released."""
    storage = storage_of(tensor)
    if storage is None or not tensor.numel():
        return True
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return storage.nbytes() >= (tensor.storage_offset() + last + 1) * tensor.element_size()
