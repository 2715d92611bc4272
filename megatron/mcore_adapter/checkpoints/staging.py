# SPDX-License-Identifier: Apache-2.0
"""Host memory that a rank shares with its writer process: the copy of what a save writes.

[Note: copies during the next step] Between two steps of the optimizer nothing writes to weights and
optimizer state. So a thread copies them while the next forward and backward run, and is waited for
before the optimizer's step. All else is copied at once: the buffers of a model, which its forwards
write to, and what is small.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from math import prod
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from megatron.checkpoint.core.reading_threads import in_threads
from megatron.fsdp.dtensor.tensor_part import ChunkedTensor, TensorPart, as_chunked_tensor

_ALIGNMENT = 64
"""Bytes: the start of a staged tensor is a multiple."""
_LARGE = 1 << 16
"""Bytes: what is smaller is copied at once."""
_GROWTH = 1 << 22
"""Bytes: the size of a buffer is a multiple, so that it does not grow for a few bytes."""


class StagedContent(NamedTuple):
    """The size of the buffer, and the range in it of the pickled content, which follows tensors."""

    size: int
    begin: int
    end: int


@dataclass(frozen=True)
class StagedTensor:
    """The location of one tensor in the buffer, and its form.

    It stands for the tensor where the content is pickled.
    """

    offset: int
    """In bytes."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    part: TensorPart | None
    """The part of the whole tensor, if it is the local tensor of a DTensor."""

    @classmethod
    def at(cls, offset: int, tensor: torch.Tensor) -> StagedTensor:
        """Describe a copy of ``tensor``, which is dense, at ``offset``."""
        strides = tensor.stride()
        if not tensor.is_contiguous():
            # A copy has the strides that the writer of a blocking save would give it.
            strides = torch.empty_like(tensor, device="meta").stride()
        part = tensor.part if isinstance(tensor, ChunkedTensor) else None
        shape = tuple(tensor.shape)
        return cls(offset, tensor.dtype, shape, strides, tensor.requires_grad, part)

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in the buffer."""
        return prod(self.shape) * self.dtype.itemsize

    def fill(self, content: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy ``tensor`` to its part of a buffer with the bytes ``content``."""
        part = content[self.offset : self.offset + self.num_bytes]
        if self.strides != tensor.stride() or not tensor.is_contiguous():
            part = part.view(self.dtype).as_strided(self.shape, self.strides)
            part.copy_(tensor, non_blocking=True)
        elif tensor.is_cpu and not (tensor.is_conj() or tensor.is_neg()):
            # NumPy copies bytes as the C library does, which writes large tensors past the caches.
            # torch's copy first reads into them what it overwrites.
            np.copyto(part.numpy(), tensor.reshape(-1).view(torch.uint8).numpy())
        else:
            part.view(self.dtype).copy_(tensor.reshape(-1), non_blocking=True)

    def read(self, memory: mmap.mmap) -> torch.Tensor:
        """Return the tensor over its part of the buffer, as checkpoints take it.

        Its storage is that part alone, so that DCP writes it without another copy.
        """
        tensor = torch.empty(self.shape, dtype=self.dtype)
        if self.num_bytes:
            count, offset = self.num_bytes, self.offset
            part = torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=offset)
            tensor = part.view(self.dtype).as_strided(self.shape, self.strides)
        tensor.requires_grad_(self.requires_grad)
        return tensor if self.part is None else as_chunked_tensor(tensor, self.part)


class _StagingPickler(pickle.Pickler):
    """A pickler that leaves tensors out and assigns them their locations.

    A DTensor becomes its local tensor, which knows its chunks: the mesh stays with the run.
    """

    def __init__(self) -> None:
        self.pickled = io.BytesIO()
        super().__init__(self.pickled, protocol=pickle.HIGHEST_PROTOCOL)
        self.end = 0
        self.copies: list[tuple[torch.Tensor, StagedTensor]] = []

    def persistent_id(self, value: Any) -> StagedTensor | None:
        if not isinstance(value, torch.Tensor):
            return None
        local = value._local_tensor if isinstance(value, DTensor) else value
        if isinstance(value, DTensor) and not isinstance(local, ChunkedTensor):
            raise TypeError(f"a DTensor of shape {tuple(value.shape)} without known chunks")
        staged = StagedTensor.at(self.end, local)
        self.copies.append((local, staged))
        self.end += -(-staged.num_bytes // _ALIGNMENT) * _ALIGNMENT
        return staged


Copies = Sequence[tuple[torch.Tensor, StagedTensor]]
"""Tensors and their locations in the buffer."""


def _copy(copies: Copies, content: torch.Tensor) -> None:
    """Copy tensors into a buffer with the bytes ``content``."""

    def copy(item: tuple[torch.Tensor, StagedTensor]) -> None:
        tensor, staged = item
        staged.fill(content, tensor.detach())

    if any(tensor.is_cuda for tensor, _ in copies):  # copied by the GPU, while this goes on
        for item in copies:
            copy(item)
        torch.cuda.current_stream().synchronize()
    else:
        in_threads(copy, copies)


class _CopyingThread:
    """A thread that copies tensors which nobody writes to; see [Note: copies during the next step].

    On a GPU the copies have a stream of their own. Not yet run on a GPU.
    """

    def __init__(self, copies: Copies, content: torch.Tensor, then: Callable[[], None]):
        self._copies, self._content, self._then = copies, content, then
        self._error: Exception | None = None
        # Streams and the current device belong to threads.
        self._device = next((tensor.device for tensor, _ in copies if tensor.is_cuda), None)
        self._stream = torch.cuda.Stream(self._device) if self._device is not None else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._thread = Thread(target=self._run, name="copy to host memory", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._device is not None:
                # A new thread is on GPU 0, to which the end of a stream's context would return:
                # each rank would have a CUDA context there, of some hundred MiB.
                torch.cuda.set_device(self._device)
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                _copy(self._copies, self._content)
            self._then()
        except Exception as error:  # raised by finish()
            self._error = error

    def finish(self) -> None:
        """Wait for the end, and raise the error of the thread if there was one."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def _pickled(content: Any) -> tuple[_StagingPickler, int]:
    """Pickle content; return with it the bytes that it takes in a buffer."""
    pickler = _StagingPickler()
    pickler.dump(content)
    return pickler, pickler.end + pickler.pickled.tell()


class _StagedUnpickler(pickle.Unpickler):
    """The counterpart of the pickler: tensors lie in the buffer."""

    def __init__(self, file: io.BytesIO, memory: mmap.mmap):
        super().__init__(file)
        self._memory = memory

    def persistent_load(self, staged: StagedTensor) -> torch.Tensor:
        return staged.read(self._memory)


class StagingBuffer:
    """Host memory that is allocated for the first save and reused by all others.

    It is an anonymous file in memory, not a segment of /dev/shm, which containers limit to 64 MB.

    Args:
        file_descriptor: descriptor of the buffer of another process; None for a new one. The
            writer process inherits the attribute of this name.
    """

    def __init__(self, file_descriptor: int | None = None):
        if file_descriptor is None:
            file_descriptor = os.memfd_create("checkpoint")
        self.file_descriptor = file_descriptor
        self._memory: mmap.mmap | None = None
        self._pinned = 0
        self._reserving: Thread | None = None
        self._copying: _CopyingThread | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the memory that is allocated."""
        return 0 if self._memory is None else len(self._memory)

    def reserve(self, content: Any) -> None:
        """Begin to allocate in a thread what :meth:`stage` will need for content like this.

        The pages of new memory take several times as long as the copy into them.

        Raises:
            TypeError: the content has a tensor that cannot be staged.
        """
        self._end_reserving()
        _, end = _pickled(content)

        def allocate() -> None:
            with suppress(OSError):  # which the save is to report, if there still is no memory then
                memory = self._grown_to(end)
                # One byte of each page. Python's lock is not held.
                torch.frombuffer(memory, dtype=torch.uint8)[:: mmap.PAGESIZE].sum()

        self._reserving = Thread(target=allocate, name="allocation of host memory", daemon=True)
        self._reserving.start()

    def _end_reserving(self) -> None:
        if self._reserving is not None:
            self._reserving.join()
        self._reserving = None

    def stage(
        self,
        content: Any,
        is_changing: Callable[[torch.Tensor], bool] = lambda tensor: True,
        then: Callable[[StagedContent], None] = lambda where: None,
    ) -> StagedContent:
        """Copy ``content`` into the buffer; complete when this returns, or after :meth:`finish`.

        Args:
            content: anything that can be pickled, with tensors.
            is_changing: False for tensors that keep their values until :meth:`finish`; the large
                ones of these are copied in a thread.
            then: called with the result when all is copied, in the thread if there is one.

        Raises:
            OSError: the machine has no memory for the copy.
            TypeError: the content has a tensor that cannot be staged.
        """
        self.finish()
        pickler, end = _pickled(content)
        self._end_reserving()
        memory = self._grown_to(end)
        self._pin(memory)
        content_bytes = torch.frombuffer(memory, dtype=torch.uint8)
        now: list[tuple[torch.Tensor, StagedTensor]] = []
        later: list[tuple[torch.Tensor, StagedTensor]] = []
        for tensor, staged in pickler.copies:
            is_kept = staged.num_bytes >= _LARGE and not is_changing(tensor)
            if staged.num_bytes:
                (later if is_kept else now).append((tensor, staged))
        _copy(now, content_bytes)
        memory[pickler.end : end] = pickler.pickled.getbuffer()
        where = StagedContent(len(memory), pickler.end, end)
        if later:
            self._copying = _CopyingThread(later, content_bytes, lambda: then(where))
        else:
            then(where)
        return where

    def finish(self) -> bool:
        """Wait until what was staged is copied; from then on everything may be written to.

        Raises whatever the copies or ``then`` have raised.

        Returns:
            True if something was copied in a thread.
        """
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.finish()
        return copying is not None

    def read(self, where: StagedContent) -> Any:
        """Return the content that another process has staged; its tensors lie in the buffer."""
        if self._memory is None or len(self._memory) < where.size:
            self._memory = mmap.mmap(self.file_descriptor, where.size)
        file = io.BytesIO(self._memory[where.begin : where.end])
        return _StagedUnpickler(file, self._memory).load()

    def _grown_to(self, num_bytes: int) -> mmap.mmap:
        if self._memory is None or self.num_bytes < num_bytes:
            size = -(-num_bytes // _GROWTH) * _GROWTH
            self._unpin()
            os.truncate(self.file_descriptor, size)
            # Otherwise a machine without memory would kill the process in the midst of a copy.
            os.posix_fallocate(self.file_descriptor, 0, size)
            self._memory = mmap.mmap(self.file_descriptor, size)
        return self._memory

    def _pin(self, memory: mmap.mmap) -> None:
        """Lock the pages, so that copies from a GPU pass through no other buffer."""
        if torch.cuda.is_available() and not self._pinned:
            address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0))
            self._pinned = address

    def _unpin(self) -> None:
        if self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._pinned))
            self._pinned = 0

    def close(self) -> None:
        """Give the memory back; the buffer cannot be used any more."""
        with suppress(Exception):
            self.finish()
        self._end_reserving()
        self._unpin()
        self._memory = None
        os.close(self.file_descriptor)
