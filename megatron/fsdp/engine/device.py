# SPDX-License-Identifier: Apache-2.0
"""Streams, events and storage for cuda and cpu: the only file that knows the device.

[Note: memory and streams] Storage is always taken and given back while the compute stream is
current, so the caching allocator orders its reuse by compute. A collective runs on a stream of its
own, which first waits for everything that compute has enqueued so far (the previous owner of the
memory included); its :class:`Pending` makes the compute stream wait before anyone reads the result
or frees an operand. On CPU a collective is an asynchronous work and waiting blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Work(Protocol):
    def wait(self) -> object: ...


Collective = Callable[[bool], "Work | None"]  # whether to be asynchronous -> its work, if it is


class Pending:
    """An operation under way.

    ``wait`` returns when compute may use its result; calling it again does nothing.
    """

    def __init__(self, wait: Callable[[], object] | None = None):
        self._wait = wait

    def wait(self) -> None:
        if self._wait is not None:
            wait, self._wait = self._wait, None
            # Copies that finish a gather write into a buffer with many views, which grad mode
            # forbids.
            with torch.no_grad():
                wait()


class CpuStreams:
    """Collectives as asynchronous works of the process group."""

    gathers_write_own_part = (
        True  # gloo writes what a rank sends into what it receives, at any time before the end
    )

    def launch(self, stream_name: str, *collectives: Collective) -> Pending:
        """Run ``collectives`` one after another.

        Later ones need what earlier ones leave: they begin in ``wait``.
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
    """One stream for gathers, one for reductions, ordered with compute by events."""

    gathers_write_own_part = False  # in place, NCCL leaves it alone

    def __init__(self, device: torch.device):
        self._device = device
        self._streams: dict[str, torch.cuda.Stream] = {}

    def launch(self, stream_name: str, *collectives: Collective) -> Pending:
        """Run ``collectives`` one after another on the stream of ``stream_name``."""
        if stream_name not in self._streams:
            self._streams[stream_name] = torch.cuda.Stream(self._device)
        stream = self._streams[stream_name]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for collective in collectives:
                collective(False)
            done = stream.record_event()
        return Pending(lambda: torch.cuda.current_stream(self._device).wait_event(done))


def streams_for(device: torch.device) -> CpuStreams | CudaStreams:
    """Where the collectives of parameters on ``device`` run."""
    return CudaStreams(device) if device.type == "cuda" else CpuStreams()


def allocate(tensor: torch.Tensor) -> None:
    """Give a freed flat tensor storage again; its contents and those of its views are undefined."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


def free(tensor: torch.Tensor) -> None:
    """Take the storage away from a flat tensor and all views of it; they keep their shapes."""
    tensor.untyped_storage().resize_(0)


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return current_pass() != -1


def current_pass() -> int:
    """The number of the backward pass that autograd is running in this thread, -1 outside of one.

    Reentrant checkpoints run passes inside of a pass, each with a number of its own.
    """
    return torch._C._current_graph_task_id()
