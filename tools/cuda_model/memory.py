# SPDX-License-Identifier: Apache-2.0
"""Blocks of memory, each the life of one storage from its allocation to its release.

The rules are those of torch's caching allocator ("Memory management" in torch's notes on CUDA, and
`torch.Tensor.record_stream`): a block belongs to the stream that was current when it was allocated.
When it is freed, the next allocation on this stream may get it at once. Work on other streams must
have been ordered before that, or the streams must have been recorded on the block.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from tools.cuda_model.ranges import Ranges, bytes_of

Released = Callable[["MemoryBlock"], None]
Reused = Callable[[int], None]
real_device: Callable[[torch.Tensor], torch.device] = vars(torch._C.TensorBase)["device"].__get__
"""Returns where torch has the values of a tensor, whatever a program is told."""


class MemoryBlock:
    """The memory of one storage, from its allocation to its release."""

    def __init__(self, number: int, stream: int, num_bytes: int, name: str):
        self.number = number
        self.ranges = Ranges(num_bytes, number)
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
    """The blocks that are allocated, by storage.

    Args:
        released: called with a block that is freed.
        reused: called with a stream that allocates one.
        numbers: those of new blocks.
        has_host: storage is the host's unless :meth:`adopt` gives it to the device.
    """

    def __init__(
        self, released: Released, reused: Reused, numbers: Iterator[int], has_host: bool = False
    ):
        self._released, self._reused = released, reused
        self.has_host = has_host
        self._blocks: dict[int, MemoryBlock] = {}  # by the address of the storage's implementation
        self._names: dict[int, str] = {}  # by the address, too: what the program calls it
        self._watched: dict[int, weakref.finalize] = {}
        self._numbers = numbers
        self.allocated = self.peak = 0  # bytes
        self.reserved = 0  # bytes, with those that were freed and are cached
        self.pool: Pool | None = None  # in use now

    @property
    def num_storages(self) -> int:
        """The number of storages of the device that are alive, also of those without memory."""
        return len(self._watched)

    def of(self, tensor: torch.Tensor, stream: int) -> MemoryBlock | None:
        """Return the block of ``tensor``, which is new at first; None if it has no memory there."""
        storage = storage_of(tensor)
        if storage is None or not storage.nbytes() or not self.has(storage):
            return None
        block = self._blocks.get(storage._cdata)
        if block is not None:
            return block
        return self.allocate(storage, stream)

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Return True for storage of the device, with memory or without."""
        is_cpu = storage.device.type == "cpu"
        return is_cpu and (not self.has_host or storage._cdata in self._watched)

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Return True for a tensor of the device, or a subclass around one."""
        if real_device(tensor).type != "cpu":
            return False
        if not self.has_host:
            return True
        if hasattr(tensor, "__tensor_flatten__"):
            return any(self.is_on_device(part) for part in parts_of(tensor))
        storage = storage_of(tensor)
        return storage is not None and self.has(storage)

    def adopt(self, tensor: torch.Tensor) -> None:
        """Let the storage of ``tensor`` be the device's."""
        storage = storage_of(tensor)
        if storage is not None:
            self._watch(storage)

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._watched:
            self._watched[key] = weakref.finalize(storage, self._die, key)
            self._watched[key].atexit = False

    def known(self, tensor: torch.Tensor) -> MemoryBlock | None:
        """Return the block of ``tensor`` if it has one."""
        storage = storage_of(tensor)
        return None if storage is None else self._blocks.get(storage._cdata)

    def make(self, storage: torch.UntypedStorage, stream: int) -> MemoryBlock:
        """Return a block for ``storage``, which is the host's or the device's."""
        name = self._names.get(storage._cdata, "a tensor")
        return MemoryBlock(next(self._numbers), stream, storage.nbytes(), name)

    def allocate(self, storage: torch.UntypedStorage, stream: int) -> MemoryBlock:
        """Return a new block for ``storage``, which belongs to ``stream``."""
        self._reused(stream)
        block = self._blocks[storage._cdata] = self.make(storage, stream)
        if self.pool is not None:
            block.pool = self.pool
            self.pool.blocks.append(block)
        self._watch(storage)
        self.allocated += block.num_bytes
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.allocated)
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


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a tensor subclass is made of; none for a plain tensor."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return []
    values = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    # A mesh may be among them.
    return [value for value in values if isinstance(value, torch.Tensor)]


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a plain tensor on the CPU, which stands for the device."""
    if real_device(tensor).type != "cpu" or tensor.layout is not torch.strided:
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
    return storage.nbytes() >= bytes_of(tensor)[1]
