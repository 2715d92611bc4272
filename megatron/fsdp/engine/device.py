# SPDX-License-Identifier: Apache-2.0
"""Streams and events on CUDA and on CPU."""

from __future__ import annotations

import mmap
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

# [Note: memory and streams] Storage is allocated and freed while the compute stream is current, so
# the caching allocator orders its reuse by compute. A collective runs on a separate stream, which
# first waits for everything that compute has enqueued so far, including the previous user of the
# memory. `Pending.wait` then makes compute wait for it, before the result is read or an operand is
# freed. On CPU a collective is asynchronous work of the process group, and waiting blocks.


class Work(Protocol):
    """A collective under way, as torch.distributed returns it."""

    def wait(self) -> object:
        """Wait for the collective to finish."""


# Starts a collective. If the argument is True, it returns the work instead of waiting for it.
Collective = Callable[[bool], "Work | None"]


class Pending:
    """An operation under way; on CUDA, all who wait for it do so on one stream.

    Args:
        wait: makes compute wait for the result. None: the operation is over.
    """

    def __init__(self, wait: Callable[[], object] | None = None):
        self._wait = wait
        self.has_failed = False  # a caller has waited for it, and has got its error

    def wait(self) -> None:
        """Make compute wait for the result; further calls do nothing, unless it has failed."""
        if self._wait is None:
            return
        if torch.is_grad_enabled():
            # An all-gather may copy into a buffer that has many views, which autograd would reject.
            with torch.no_grad():
                self.wait()
            return
        try:
            self._wait()
        except Exception:  # after a KeyboardInterrupt it is still under way
            self.has_failed = True
            raise
        self._wait = None


def all_of(operations: Iterable[Pending]) -> Pending:
    """Return one pending operation that stands for all of ``operations``."""

    def wait() -> None:
        for pending in operations:
            pending.wait()

    return Pending(wait)


class CpuStreams:
    """Runs collectives as asynchronous work of the process group."""

    def serve(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Do nothing: there are no streams."""

    def launch(
        self,
        stream_name: str,
        *collectives: Collective,
        after: Pending | None = None,
    ) -> Pending:
        """Run ``collectives`` one after another; see :meth:`CudaStreams.launch`."""
        if after is not None:
            after.wait()
        # Only the first is asynchronous. The others need its result, so they run in `wait`.
        work = collectives[0](True)

        def wait() -> None:
            if work is not None:
                work.wait()
            for collective in collectives[1:]:
                collective(False)

        return Pending(wait)

    def wait_on_host(self) -> None:
        """Do nothing: the host has waited for everything that it has launched."""


class CudaStreams:
    """Runs collectives on streams of their own, ordered by events.

    Args:
        device: the device of the tensors.
        has_one_stream: run all collectives on the same stream.
    """

    def __init__(self, device: torch.device, has_one_stream: bool = False):
        self._device = device
        self._has_one_stream = has_one_stream
        self._priority = 0
        self._streams = defaultdict[str, torch.cuda.Stream](
            lambda: torch.cuda.Stream(device, self._priority)
        )

    def serve(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Give collectives priority over compute if one of ``groups`` was created with it."""
        # A group's own stream has its priority, but NCCL runs on it what is asynchronous. What is
        # launched here is not, so it runs on these streams.
        for group in groups:
            backend = group._get_backend(self._device)
            backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG
            try:
                options = backend.options
            except RuntimeError:  # a backend that has none
                continue
            if getattr(options, "is_high_priority_stream", False):
                # All groups of a model share its streams, which are created at the first launch,
                # after this.
                self._priority = -1

    def launch(
        self,
        stream_name: str,
        *collectives: Collective,
        after: Pending | None = None,
    ) -> Pending:
        """Run ``collectives`` on a stream; each may use the results of those before it.

        Args:
            stream_name: "gather" or "reduce": neither stream waits for the other.
            collectives: run one after another, in this order.
            after: an operation for which the stream waits first; compute does not.
        """
        if self._has_one_stream:
            stream_name = "all collectives"
        stream = self._streams[stream_name]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            if after is not None:
                after.wait()
            for collective in collectives:
                collective(False)
            done = stream.record_event()
        return Pending(lambda: torch.cuda.current_stream(self._device).wait_event(done))

    def wait_on_host(self) -> None:
        """Make the host wait for all collectives that were launched on these streams."""
        for stream in self._streams.values():
            stream.synchronize()


def record_on_current_stream(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, whose memory is reused only after the current stream has used it."""
    if tensor.is_cuda:  # another stream may have allocated it
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


class LockedPages(mmap.mmap):
    """Host memory whose pages stay where they are, so that a GPU copies them by itself."""

    def lock(self, address: int, device: torch.device) -> None:
        """Lock the pages, which begin at ``address``, for copies from and to ``device``."""
        cuda = torch.cuda.cudart()
        with torch.cuda.device(device):  # otherwise this opens a context on GPU 0
            torch.cuda.check_error(cuda.cudaHostRegister(address, len(self), 0))
        self._unlock = partial(cuda.cudaHostUnregister, address)
        self._device = device
        self._process = os.getpid()

    def __del__(self) -> None:
        # Before the memory is unmapped, and not in a fork. When a process ends, CUDA may be gone.
        is_locked = getattr(self, "_process", None) == os.getpid()
        if is_locked and not sys.is_finalizing():
            torch.cuda.synchronize(self._device)  # nobody else waits for copies under way
            self._unlock()


def pinned(
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return a flat tensor of zeros in pinned memory, which takes whole pages of its own.

    Args:
        numel: number of elements, at least 1.
        dtype: dtype of the elements; the memory is ``numel * dtype.itemsize`` bytes.
        device: the GPU that copies from and to it.
    """
    # Torch's allocator of pinned memory (CachingHostAllocator.h) would round the bytes up to a
    # power of two, and keep them when the tensor is gone. The pages are shared with forks: private
    # ones would be copied at the next write, away from where the GPU copies them.
    pages = LockedPages(-1, numel * dtype.itemsize)
    tensor = torch.frombuffer(pages, dtype=dtype)
    pages.lock(tensor.data_ptr(), device)
    return tensor


Streams = CpuStreams | CudaStreams


def streams_for(device: torch.device, has_one_stream: bool = False) -> Streams:
    """Return the streams for collectives of tensors on ``device``; on CPU these do nothing."""
    if device.type == "cuda":
        return CudaStreams(device, has_one_stream)
    return CpuStreams()


# Returns the number of the backward pass that autograd is running in this thread, or -1. Activation
# recomputation runs nested passes, each with a number of its own.
current_pass: Callable[[], int] = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Return True if autograd is running a backward pass in this thread."""
    return current_pass() != -1
