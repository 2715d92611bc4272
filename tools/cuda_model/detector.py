# SPDX-License-Identifier: Apache-2.0
"""The race detector: torch's sanitizer keeps what happens before what, this file the rest."""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.cuda._sanitizer import Access, AccessType, EventHandler, UnsynchronizedAccessError

from tools.cuda_model.graphs import Graphs
from tools.cuda_model.host import HostBlocks, is_direct
from tools.cuda_model.launches import Launches
from tools.cuda_model.memory import Blocks, MemoryBlock, has_memory
from tools.cuda_model.ranges import Accesses, Extent, extent_of
from tools.cuda_model.reports import (
    EARLY_RELEASE,
    HOST_READ,
    HOST_WRITE,
    RACE,
    RELEASED,
    CallStack,
    Finding,
    told_together,
)
from tools.cuda_model.streams import Streams


class ReleasedMemoryError(RuntimeError):
    """A kernel would use memory that was released: it is reported, and not run."""


class FreedBlock(NamedTuple):
    """A block that is freed while other streams than its own may still use it."""

    block: MemoryBlock
    uses: list[Access]
    during: str


class Detector:
    """Takes every access to memory as an event on a stream, and reports those out of order.

    Attributes:
        reports: what was reported so far, each pair of places once.
        work: what the program does at the moment, the innermost last, for reports.
        num_beside: how many kernels streams have launched between an event of another stream and
            their first wait for it; they may run at the same time.
    """

    def __init__(self, has_host: bool = False) -> None:
        self.lock = threading.RLock()
        self._handler = EventHandler()
        self.syncs = self._handler.syncs
        self.reports: list[Finding] = []
        self.work: list[str] = []
        self._accesses = Accesses(self._handler.tensors_accessed.accesses)
        self.blocks = Blocks(self._released, self._reused, self._accesses.numbers, has_host)
        self.host = HostBlocks(self.blocks.make, self._released_on_host)
        self._freed: dict[int, list[FreedBlock]] = defaultdict(list)  # by the stream that owns them
        self.streams = Streams(self)
        self.graphs = Graphs(self)
        self.launches = Launches(self)
        self.num_events = 0
        self.launched: Counter[int] = Counter()  # kernels, by stream
        self.num_beside = 0
        self._calls = threading.local()
        self._told: set[tuple[object, ...]] = set()

    @property
    def is_unseen(self) -> bool:
        """True if operators of this thread are none of the program's, as gloo's own."""
        return getattr(self._calls, "is_unseen", False)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Take no notice of operators of this thread while the context lasts."""
        before, self._calls.is_unseen = self.is_unseen, True
        try:
            yield
        finally:
            self._calls.is_unseen = before

    @contextmanager
    def making_on_host(self) -> Iterator[None]:
        """Let tensors that are made of nothing be the host's while the context lasts."""
        before, self._calls.makes_on_host = self.makes_on_host(), True
        try:
            yield
        finally:
            self._calls.makes_on_host = before

    def makes_on_host(self) -> bool:
        """Return True if this thread makes tensors on the host."""
        return getattr(self._calls, "makes_on_host", False)

    # ---- events

    def kernel(
        self,
        name: str,
        reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
        stream: int | None = None,
    ) -> None:
        """Note a kernel on ``stream``, by default the current one."""
        with self.lock:
            current = self.streams.current.cuda_stream
            read, written = self._extents_of(reads, current), self._extents_of(writes, current)
            self._launch(name, read, written, current if stream is None else stream)

    def copy(
        self, name: str, target: torch.Tensor, source: torch.Tensor, non_blocking: bool
    ) -> None:
        """Note a copy between host and device on the current stream; see [Note: the host's memory].

        Args:
            name: that of the operator.
            target: tensor that is written to.
            source: tensor that is read.
            non_blocking: the host goes on before the end of the copy.
        """
        is_to_host = self.blocks.is_on_device(source)
        host, device = (target, source) if is_to_host else (source, target)
        is_pinned, goes_through = self.host.is_pinned(host), not is_direct(target, source, host)
        if self.graphs.current is not None and not is_pinned:
            raise self.graphs.refuse(f"{name} of memory that is not pinned is captured")
        with self.lock:
            current = self.streams.current.cuda_stream
            on_host, on_device = self.host.of_copy([host]), self._extents_of([device], current)
            if is_to_host:
                self._launch(name, on_device, on_host, current)
            else:
                self._launch(name, on_host, on_device, current)
                if goes_through or not is_pinned:  # it was read during the call
                    for number in self._ranges_of(on_host):
                        self._handler.tensors_accessed.get_reads(number).pop()
        if not non_blocking:
            self.synchronize(current)
        elif goes_through and is_to_host:
            self.host_uses(f"{name}, which copies from memory of its own,", [host], [])

    def check(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Raise an error if one of the tensors that a kernel is to use has no memory."""
        for tensor in tensors:
            if not has_memory(tensor):
                raise self.use_of_released(name, tensor)

    def use_of_released(self, name: str, tensor: torch.Tensor) -> ReleasedMemoryError:
        """Report a use of memory that was released; return the error to raise."""
        text = f"{name} uses {self.blocks.name_of(tensor)}, which was released{self._during()}"
        stack = CallStack(sys._getframe()).format()
        self.report(RELEASED, f"{text}\n{stack}", (name, stack))
        return ReleasedMemoryError(text)

    def allocated(self, tensor: torch.Tensor, name: str) -> None:
        """Note that ``tensor`` has new memory, which the current stream owns."""
        with self.lock:
            current = self.streams.current.cuda_stream
            self.blocks.adopt(tensor)
            block = self.blocks.of(tensor, current)
            if block is not None:
                self._launch(name, [], [Extent(block, 0, block.num_bytes)], current)

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Note that ``storage`` now has so many bytes, in new memory."""
        with self.lock:
            current = self.streams.current.cuda_stream
            if num_bytes:
                block = self.blocks.allocate(storage, current)
                whole = Extent(block, 0, num_bytes)
                self._launch("allocation by resize_", [], [whole], current)

    def freed(self, storage: torch.UntypedStorage) -> None:
        """Note that ``storage`` gives its memory back, before it is resized."""
        with self.lock:
            self.blocks.free(storage)

    def record_stream(self, tensor: torch.Tensor, stream: int) -> None:
        """Note that the memory of ``tensor`` may be reused only after ``stream``, too."""
        with self.lock:
            block = self.blocks.of(tensor, self.streams.current.cuda_stream)
            if block is not None:
                block.recorded.add(stream)

    def synchronize(self, stream: int | None = None) -> None:
        """Let the host, and so all later work, wait for ``stream``, or for all streams."""
        self.graphs.waits("a synchronisation")
        with self.lock:
            if stream is None:
                for number in list(self.syncs.current_sync_states):
                    self.syncs.all_streams_wait_for_stream(number)
            else:
                self.syncs.all_streams_wait_for_stream(stream)

    def host_read(self, tensor: torch.Tensor, how: str) -> None:
        """Note that the host reads ``tensor`` of the device without waiting for anything."""
        self.graphs.waits(how)
        with self.lock:
            block = self.blocks.known(tensor)
            if block is not None:
                self._host_access(how, extent_of(tensor, block), is_write=False)

    def host_uses(
        self, how: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]
    ) -> None:
        """Note that the host reads and writes its own memory, which copies may still use."""
        if not self.host.is_used:
            return
        with self.lock:
            for extent in self.host.used(writes):
                self._host_access(how, extent, is_write=True)
            for extent in self.host.used(reads):
                self._host_access(how, extent, is_write=False)

    def _host_access(self, how: str, extent: Extent, is_write: bool) -> None:
        for number, block in self._ranges_of([extent]).items():
            for use in self._accesses.of(number):
                if is_write or use.type is AccessType.WRITE:
                    what = f"{how} of {block}{self._during()}"
                    self._report_late(HOST_WRITE if is_write else HOST_READ, what, use)

    def _report_late(self, kind: str, what: str, use: Access) -> None:
        """Report a use of memory that the host has not waited for."""
        if use.seq_num > self.syncs.host_sync_state.get(use.stream, 0):
            self._report_accesses(kind, what, [use])

    # ---- rules

    @property
    def seq_num(self) -> int:
        """The number of the last kernel."""
        return self._handler.seq_num

    def _launch(self, name: str, reads: list[Extent], writes: list[Extent], stream: int) -> None:
        self.graphs.launches(name, stream)
        self.num_events += 1
        self.launched[stream] += 1
        self._split(reads + writes)
        read, written = self._ranges_of(reads), self._ranges_of(writes)
        blocks = {**read, **written}
        errors = self._handler._handle_kernel_launch(
            stream,
            read.keys() - written.keys(),
            set(written),
            set(),
            f"{name}{self._during()}",
            {number: [] for number in blocks},
        )
        for number in read.keys() - written.keys():
            accesses = self._handler.tensors_accessed.get_reads(number)
            if len(accesses) > 1 and accesses[-2].stream == accesses[-1].stream:
                del accesses[-2]  # what waits for the later one waits for it
        for error in errors:
            assert isinstance(error, UnsynchronizedAccessError)
            what = f"{blocks[error.data_ptr]} is used on two streams that nothing orders"
            both = [error.current_access, error.previous_access]
            self._report_accesses(RACE, what, both)
        for block, start, stop in writes:
            block.ranges.join(start, stop, self._accesses)

    def _split(self, extents: Iterable[Extent]) -> None:
        """Let the ranges of blocks begin and end where kernels' accesses do."""
        for block, start, stop in extents:
            block.ranges.split(start, self._accesses)
            block.ranges.split(stop, self._accesses)

    @staticmethod
    def _ranges_of(extents: Iterable[Extent]) -> dict[int, MemoryBlock]:
        """Return the numbers of ranges, each with its block."""
        blocks = {}
        for block, start, stop in extents:
            for number in block.ranges.within(start, stop):
                blocks[number] = block
        return blocks

    def _released(self, block: MemoryBlock) -> None:
        """Note uses of a freed block that later work of its own stream may overtake."""
        with self.lock:
            uses = self._forget(block)
            if uses:
                self._freed[block.stream].append(FreedBlock(block, uses, self._during()))

    def _released_on_host(self, block: MemoryBlock, is_pinned: bool) -> None:
        """Report copies that still use memory of the host which is freed."""
        with self.lock:
            for number in block.ranges:
                for use in self._accesses.pop(number):
                    if not is_pinned:  # torch's allocator of pinned memory waits for copies
                        what = f"{block} of the host is freed{self._during()}"
                        self._report_late(EARLY_RELEASE, what, use)

    def _forget(self, block: MemoryBlock) -> list[Access]:
        """Forget the accesses to all ranges of a block; return those that it must wait for."""
        uses = {}
        for number in block.ranges:
            for use in self._accesses.pop(number):
                if not self._is_ordered(block, use):
                    uses[use.seq_num] = use  # one kernel may have used several ranges
        return list(uses.values())

    def _reused(self, stream: int) -> None:
        """Report uses of freed blocks whose memory ``stream`` may get by an allocation now."""
        for block, uses, during in self._freed.pop(stream, ()):
            owner = self.streams.names[block.stream]
            what = f"{block}, which {owner} has allocated, is freed{during}"
            for use in uses:
                if not self._is_ordered(block, use):
                    self._report_accesses(EARLY_RELEASE, what, [use])

    def _is_ordered(self, block: MemoryBlock, use: Access) -> bool:
        """Return True if the next work of the stream that owns a block comes after a use of it."""
        if use.stream == block.stream or use.stream in block.recorded:
            return True
        return self.syncs.is_ordered_after(block.stream, use.seq_num, use.stream)

    # ---- reports

    def _extents_of(self, tensors: Iterable[torch.Tensor], stream: int) -> list[Extent]:
        extents = []
        for tensor in tensors:
            block = self.blocks.of(tensor, stream)
            if block is not None and tensor.numel():
                extents.append(extent_of(tensor, block))
        return extents

    def _during(self) -> str:
        return f" during {self.work[-1]}" if self.work else ""

    def _report_accesses(self, kind: str, what: str, accesses: list[Access]) -> None:
        places = [
            (access.operator, access.stream, access.stack_trace.format()) for access in accesses
        ]
        text = told_together(what, accesses, self.streams.names)
        self.report(kind, text, tuple(places))

    def report(self, kind: str, text: str, place: tuple[object, ...]) -> None:
        """Add a report, unless the same place was reported before."""
        if (kind, place) not in self._told:
            self._told.add((kind, place))
            self.reports.append(Finding(kind, text))
