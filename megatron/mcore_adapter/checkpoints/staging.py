# SPDX-License-Identifier: Apache-2.0
"""Host memory that a rank shares with its writer process: the copy of what a save writes.

[Note: copies during the next step] Between two steps of the optimizer nothing writes to weights and
optimizer state. So a thread copies them while the next forward and backward run, and the optimizer
waits for the thread before its step. Everything else is copied at once: small tensors, and the
buffers of a model, to which its forwards write.
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
"""Bytes: each staged tensor starts at a multiple."""
_LARGE = 1 << 16
"""Bytes: smaller tensors are copied at once."""
_GROWTH = 1 << 22
"""Bytes: the size of a buffer is a multiple, so that it does not grow for a few bytes."""


class StagedContent(NamedTuple):
    """The location of a content in the buffer.

    Attributes:
        size: bytes of the buffer.
        begin: offset in bytes of the pickled content, which follows the tensors.
        end: offset in bytes of its end.
    """

    size: int
    begin: int
    end: int


@dataclass(frozen=True)
class StagedTensor:
    """The location and the layout of one tensor in the buffer, pickled in place of the tensor.

    Attributes:
        offset: offset in the buffer in bytes.
        dtype: dtype of the tensor.
        shape: shape of the tensor.
        strides: strides in elements.
        requires_grad: True for a parameter.
        part: the part of the whole tensor, if this is the local tensor of a DTensor.
    """

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    part: TensorPart | None

    @classmethod
    def at(cls, offset: int, tensor: torch.Tensor) -> StagedTensor:
        """Describe a dense copy of ``tensor`` at ``offset`` bytes."""
        strides = tensor.stride()
        if not tensor.is_contiguous():
            # A copy has the strides that the writer of a blocking save would give it.
            strides = torch.empty_like(tensor, device="meta").stride()
        return cls(
            offset=offset,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            strides=strides,
            requires_grad=tensor.requires_grad,
            part=tensor.part if isinstance(tensor, ChunkedTensor) else None,
        )

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in the buffer."""
        return prod(self.shape) * self.dtype.itemsize

    def fill(self, content: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy a tensor into the buffer.

        Args:
            content: the bytes of the whole buffer, uint8.
            tensor: the tensor that this object describes, on any device.
        """
        part = content[self.offset : self.offset + self.num_bytes]
        is_as_stored = self.strides == tensor.stride() and tensor.is_contiguous()
        is_lazy = tensor.is_conj() or tensor.is_neg()
        if not is_as_stored:
            part = part.view(self.dtype).as_strided(self.shape, self.strides)
            part.copy_(tensor, non_blocking=True)
        elif tensor.is_cpu and not is_lazy:
            # NumPy copies bytes by the C library, which writes large tensors past the caches.
            # torch's copy first reads into the caches what it overwrites.
            source = tensor.reshape(-1).view(torch.uint8)
            np.copyto(part.numpy(), source.numpy())
        else:
            elements = part.view(self.dtype)
            elements.copy_(tensor.reshape(-1), non_blocking=True)

    def read(self, memory: mmap.mmap) -> torch.Tensor:
        """Return the tensor over its part of the buffer, in the form that checkpoints contain.

        Its storage is that part alone, so that DCP writes it without another copy.
        """
        if self.num_bytes:
            part = torch.frombuffer(
                memory, dtype=torch.uint8, count=self.num_bytes, offset=self.offset
            )
            elements = part.view(self.dtype)
            tensor = elements.as_strided(self.shape, self.strides)
        else:
            tensor = torch.empty(self.shape, dtype=self.dtype)
        tensor.requires_grad_(self.requires_grad)
        if self.part is None:
            return tensor
        return as_chunked_tensor(tensor, self.part)


Copy = tuple[torch.Tensor, StagedTensor]
"""A tensor and its location in the buffer."""


class _StagingPickler(pickle.Pickler):
    """A pickler that leaves tensors out and assigns locations to them.

    A DTensor is replaced by its local tensor, which has its chunks: the mesh belongs to the run.

    Attributes:
        pickled: the pickled content, without tensors.
        end: end of the last tensor in the buffer, in bytes, aligned for the next one.
        copies: tensors and their locations.
    """

    def __init__(self) -> None:
        self.pickled = io.BytesIO()
        super().__init__(self.pickled, protocol=pickle.HIGHEST_PROTOCOL)
        self.end = 0
        self.copies: list[Copy] = []

    def persistent_id(self, value: Any) -> StagedTensor | None:
        if not isinstance(value, torch.Tensor):
            return None
        local = value
        if isinstance(value, DTensor):
            local = value._local_tensor
            if not isinstance(local, ChunkedTensor):
                raise TypeError(f"a DTensor of shape {tuple(value.shape)} without known chunks")
        staged = StagedTensor.at(self.end, local)
        self.copies.append((local, staged))
        self.end += _rounded_up(staged.num_bytes, _ALIGNMENT)
        return staged


def _rounded_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple


def _copy(copies: Sequence[Copy], content: torch.Tensor) -> None:
    """Copy tensors into a buffer whose bytes are ``content``, and wait for the copies."""

    def copy(item: Copy) -> None:
        tensor, staged = item
        staged.fill(content, tensor.detach())

    if any(tensor.is_cuda for tensor, _ in copies):
        for item in copies:
            copy(item)  # only enqueued on the stream
        torch.cuda.current_stream().synchronize()
    else:
        in_threads(copy, copies)


class _CopyingThread:
    """A thread that copies tensors of constant value; see [Note: copies during the next step].

    On a GPU it copies on a separate stream. Not yet run on a GPU.

    Args:
        copies: tensors and their locations.
        content: the bytes of the buffer, uint8.
        then: called in the thread after the last copy.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        content: torch.Tensor,
        then: Callable[[], None],
    ):
        self._copies = copies
        self._content = content
        self._then = then
        self._error: Exception | None = None
        # The thread sets both itself: each thread has its own current device and stream.
        self._device: torch.device | None = None
        self._stream: torch.cuda.Stream | None = None
        for tensor, _ in copies:
            if tensor.is_cuda:
                self._device = tensor.device
                self._stream = torch.cuda.Stream(self._device)
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
                break
        self._thread = Thread(target=self._run, name="copy to host memory", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._device is not None:
                # The current device of a new thread is GPU 0, and the end of a stream's context
                # would return to it: each rank would have a CUDA context of some hundred MiB there.
                torch.cuda.set_device(self._device)
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                _copy(self._copies, self._content)
            self._then()
        except Exception as error:  # finish() raises it
            self._error = error

    def finish(self) -> None:
        """Wait for the end of the thread, and raise its error if it has failed."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def _pickled(content: Any) -> tuple[_StagingPickler, int]:
    """Pickle content; return the pickler, and the bytes that all of it needs in a buffer."""
    pickler = _StagingPickler()
    pickler.dump(content)
    return pickler, pickler.end + pickler.pickled.tell()


class _StagedUnpickler(pickle.Unpickler):
    """The counterpart of the pickler, which restores tensors over their parts of the buffer."""

    def __init__(self, file: io.BytesIO, memory: mmap.mmap):
        super().__init__(file)
        self._memory = memory

    def persistent_load(self, staged: StagedTensor) -> torch.Tensor:
        return staged.read(self._memory)


class StagingBuffer:
    """Host memory that is allocated for the first save and reused by all others.

    It is an anonymous file in memory, not a segment of /dev/shm, which containers limit to 64 MB.

    Args:
        file_descriptor: descriptor of the buffer of another process; None for a new buffer.

    Attributes:
        file_descriptor: descriptor of the memory, which the writer process inherits.
    """

    def __init__(self, file_descriptor: int | None = None):
        if file_descriptor is None:
            file_descriptor = os.memfd_create("checkpoint")
        self.file_descriptor = file_descriptor
        self._memory: mmap.mmap | None = None
        self._pinned_address = 0  # 0 if nothing is pinned
        self._reserving: Thread | None = None
        self._copying: _CopyingThread | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the memory that is allocated."""
        if self._memory is None:
            return 0
        return len(self._memory)

    def reserve(self, content: Any) -> None:
        """Begin to allocate the memory that :meth:`stage` will need for such content, in a thread.

        To allocate the pages takes several times as long as to copy into them.

        Raises:
            TypeError: the content has a tensor that cannot be staged.
        """
        self._end_reserving()
        _, end = _pickled(content)

        def allocate() -> None:
            with suppress(OSError):  # the save reports it, if there still is no memory then
                memory = self._grown_to(end)
                # Reads one byte of each page, without Python's lock.
                content_of_memory = torch.frombuffer(memory, dtype=torch.uint8)
                content_of_memory[:: mmap.PAGESIZE].sum()

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
            is_changing: function that returns False for a tensor that keeps its value until
                :meth:`finish`. Large ones of these are copied in a thread.
            then: called with the result when everything is copied, in the thread if there is one.

        Returns:
            The location, with which another process can :meth:`read` the content.

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
        now: list[Copy] = []
        later: list[Copy] = []
        for tensor, staged in pickler.copies:
            if staged.num_bytes >= _LARGE and not is_changing(tensor):
                later.append((tensor, staged))
            elif staged.num_bytes:
                now.append((tensor, staged))
        _copy(now, content_bytes)
        memory[pickler.end : end] = pickler.pickled.getbuffer()
        where = StagedContent(len(memory), pickler.end, end)
        if later:
            self._copying = _CopyingThread(later, content_bytes, lambda: then(where))
        else:
            then(where)
        return where

    def finish(self) -> bool:
        """Wait until the staged content is copied; afterwards its tensors may be overwritten.

        Raises the error that the copies or ``then`` have raised.

        Returns:
            True if something was copied in a thread.
        """
        copying = self._copying
        if copying is None:
            return False
        self._copying = None
        copying.finish()
        return True

    def read(self, where: StagedContent) -> Any:
        """Return the content that another process has staged; its tensors are in the buffer."""
        if self._memory is None or len(self._memory) < where.size:
            self._memory = mmap.mmap(self.file_descriptor, where.size)
        pickled = self._memory[where.begin : where.end]
        unpickler = _StagedUnpickler(io.BytesIO(pickled), self._memory)
        return unpickler.load()

    def _grown_to(self, num_bytes: int) -> mmap.mmap:
        if self._memory is None or self.num_bytes < num_bytes:
            size = _rounded_up(num_bytes, _GROWTH)
            self._unpin()
            os.truncate(self.file_descriptor, size)
            # Otherwise a machine without memory would kill the process in the middle of a copy.
            os.posix_fallocate(self.file_descriptor, 0, size)
            self._memory = mmap.mmap(self.file_descriptor, size)
        return self._memory

    def _pin(self, memory: mmap.mmap) -> None:
        """Pin the pages, so that copies from a GPU need no other buffer."""
        if torch.cuda.is_available() and not self._pinned_address:
            content = torch.frombuffer(memory, dtype=torch.uint8)
            address = content.data_ptr()
            runtime = torch.cuda.cudart()
            error = runtime.cudaHostRegister(address, len(memory), 0)
            torch.cuda.check_error(error)
            self._pinned_address = address

    def _unpin(self) -> None:
        if self._pinned_address:
            runtime = torch.cuda.cudart()
            error = runtime.cudaHostUnregister(self._pinned_address)
            torch.cuda.check_error(error)
            self._pinned_address = 0

    def close(self) -> None:
        """Free the memory; the buffer cannot be used afterwards."""
        with suppress(Exception):
            self.finish()
        self._end_reserving()
        self._unpin()
        self._memory = None
        os.close(self.file_descriptor)
