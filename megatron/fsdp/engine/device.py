# SPDX-License-Identifier: Apache-2.0
"""Streams, events and storage for cuda and cpu: the only file that knows the device.

[Note: memory and streams] Storage is allocated and freed while the compute stream is current, so
the caching allocator orders its reuse by compute. A collective runs on a stream of its own. That
stream first waits for everything that compute has enqueued so far, which includes the previous user
of the memory. The collective's :class:`Pending` then makes the compute stream wait, before anyone
reads the result or frees an operand. On CPU a collective is an asynchronous work of the process
group, and waiting blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Work(Protocol):
    """A collective under way, as torch.distributed returns it."""

    def wait(self) -> object:
        """Return when the collective is over."""


Collective = Callable[[bool], "Work | None"]
"""Begins a collective. The argument says whether to return its work instead of waiting for it."""


class Pending:
    """An operation under way.

    Args:
        wait: returns when compute may use the result; None for an operation that is over.
    """

    def __init__(self, wait: Callable[[], object] | None = None):
        self._wait = wait

    def wait(self) -> None:
        """Return when compute may use the result; calling it again does nothing."""
        if self._wait is not None:
            wait, self._wait = self._wait, None
            # Copies that finish an all-gather write into a buffer with many views, which autograd
            # would refuse.
            with torch.no_grad():
                wait()


class CpuStreams:
    """Runs collectives as asynchronous works of the process group."""

    # During an in-place all-gather, gloo writes what a rank sends into what it receives, at any
    # time before the end.
    gathers_write_own_part = True

    def launch(self, stream_name: str, *collectives: Collective) -> Pending:
        """Run ``collectives`` one after another; see :meth:`CudaStreams.launch`.

        Only the first is asynchronous. The others need its result, so they run in ``wait``.
        """
        first, *others = collectives
        work = first(True)

        def wait() -> None:
            if work is not None:
                work.wait()
            for collective in others:
                collective(False)

        return Pending(wait)


class CudaStreams:
    """Runs collectives on streams of their own, ordered with compute by events.

    Args:
        device: of the operands.
    """

    gathers_write_own_part = False  # in place, NCCL leaves it alone

    def __init__(self, device: torch.device):
        self._device = device
        self._streams: dict[str, torch.cuda.Stream] = {}

    def launch(self, stream_name: str, *collectives: Collective) -> Pending:
        """Run ``collectives`` one after another on the stream of that name.

        Args:
            stream_name: "gather" or "reduce", so that neither waits for the other.
            collectives: begun in this order; each may use the results of those before it.
        """
        if stream_name not in self._streams:
            stream = torch.cuda.Stream(self._device)
            self._streams[stream_name] = stream
        stream = self._streams[stream_name]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for collective in collectives:
                collective(False)
            done = stream.record_event()
        return Pending(lambda: torch.cuda.current_stream(self._device).wait_event(done))


def streams_for(device: torch.device) -> CpuStreams | CudaStreams:
    """Return the streams for collectives of tensors on ``device``."""
    return CudaStreams(device) if device.type == "cuda" else CpuStreams()


def allocate(tensor: torch.Tensor) -> None:
    """Give a freed flat tensor storage again; the values of it and of its views are undefined."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


def free(tensor: torch.Tensor) -> None:
    """Free the storage of a flat tensor and of all views of it; they keep their shapes."""
    tensor.untyped_storage().resize_(0)


def in_backward() -> bool:
    """Return whether autograd is running a backward pass in this thread."""
    return current_pass() != -1


def current_pass() -> int:
    """Return the number of the backward pass that autograd is running in this thread, or -1.

    Activation recomputation runs passes inside of a pass, each with a number of its own.
    """
    return torch._C._current_graph_task_id()
