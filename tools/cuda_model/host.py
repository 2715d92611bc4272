# SPDX-License-Identifier: Apache-2.0
"""The host's memory: copies use it on their streams while the host goes on.

[Note: the host's memory] The rules are those of "API synchronization behavior" in CUDA's runtime
API, of `aten/src/ATen/native/cuda/Copy.cu`, and of torch's allocator of pinned memory.

- A copy that is not asked to go on (``non_blocking``) lets the host wait for its stream.
- Others use pinned memory after the call. Until the host has waited, it neither reads what one
  writes, nor writes to what one reads or writes.
- Pinned memory of torch may be freed in the meantime: `copy_` records an event for the allocator.
  Pages that are locked by `cudaHostRegister` may not: nobody waits for their copies.
- Memory that is not pinned is read before the call returns, which copies it to memory of the
  driver. A copy to it "might be synchronous": the host waits, and does not free it before.
- Memory that is not dense is copied through some that is and is not pinned, which the host reads or
  writes during the call: a copy to it that goes on reads too early.
- Copies that are captured into a graph have pinned memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from tools.cuda_model.memory import MemoryBlock, storage_of
from tools.cuda_model.ranges import Extent, bytes_of, extent_of

HOST = -1
"""In place of the stream that owns a block: the host does."""


class HostBlocks:
    """Storage of the host that is pinned, and blocks of what copies have used.

    Args:
        new_block: makes a block of a storage that a copy uses first.
        ended: called with a block that is freed, and True if it is pinned.
    """

    def __init__(
        self,
        new_block: Callable[[torch.UntypedStorage, int], MemoryBlock],
        ended: Callable[[MemoryBlock, bool], None],
    ):
        self._new_block, self._ended = new_block, ended
        self._blocks: dict[int, MemoryBlock] = {}  # by the address of the storage's implementation
        self._pinned: set[int] = set()  # by the address, too
        self._registered: dict[int, int] = {}  # the end of pages that are locked, by their start
        self._watched: dict[int, weakref.finalize] = {}

    @property
    def is_used(self) -> bool:
        """True if copies have used some of the memory that there is."""
        return bool(self._blocks)

    def pin(self, tensor: torch.Tensor) -> None:
        """Let the memory of ``tensor`` be pinned."""
        storage = storage_of(tensor)
        if storage is not None:
            self._watch(storage)
            self._pinned.add(storage._cdata)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return True if the memory of ``tensor`` is pinned."""
        storage = storage_of(tensor)
        if storage is None:
            return False
        start = storage.data_ptr()
        is_registered = any(first <= start < end for first, end in self._registered.items())
        return is_registered or storage._cdata in self._pinned

    def register(self, address: int, num_bytes: int, flags: int) -> int:
        """Lock pages, as `cudaHostRegister`; return that it has succeeded."""
        self._registered[address] = address + num_bytes
        return 0

    def unregister(self, address: int) -> int:
        """Unlock pages, as `cudaHostUnregister`; return that it has succeeded."""
        del self._registered[address]
        return 0

    def used(self, tensors: Iterable[torch.Tensor]) -> list[Extent]:
        """Return the memory of those tensors that copies have used."""
        extents = []
        for tensor in tensors:
            storage = storage_of(tensor)
            block = None if storage is None else self._blocks.get(storage._cdata)
            if block is not None:
                extents.append(extent_of(tensor, block))
        return extents

    def of_copy(self, tensors: Iterable[torch.Tensor]) -> list[Extent]:
        """Return the memory of tensors of the host that a copy uses."""
        extents = []
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is None or not tensor.numel():
                continue
            if storage._cdata not in self._blocks:
                self._watch(storage)
                self._blocks[storage._cdata] = self._new_block(storage, HOST)
            extents.append(extent_of(tensor, self._blocks[storage._cdata]))
        return extents

    def free(self, storage: torch.UntypedStorage) -> None:
        """End the block of a storage that is resized."""
        block = self._blocks.pop(storage._cdata, None)
        if block is not None:
            self._ended(block, storage._cdata in self._pinned)

    def close(self) -> None:
        """Watch no storage any more."""
        for watch in self._watched.values():
            watch.detach()

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._watched:
            self._watched[key] = weakref.finalize(storage, self._die, key)
            self._watched[key].atexit = False

    def _die(self, key: int) -> None:
        self._watched.pop(key, None)
        block = self._blocks.pop(key, None)
        if block is not None:
            self._ended(block, key in self._pinned)
        self._pinned.discard(key)


def is_direct(target: torch.Tensor, source: torch.Tensor, host: torch.Tensor) -> bool:
    """Return True if torch copies to or from ``host``, one of the two, with no copy on the host."""
    if host.is_contiguous():
        return True
    start, stop = bytes_of(host)
    is_dense = stop - start == host.nbytes
    return is_dense and target.dtype == source.dtype and target.stride() == source.stride()
