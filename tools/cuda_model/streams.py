# SPDX-License-Identifier: Apache-2.0
"""Streams and events of the model, with the methods of `torch.cuda`'s."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tools.cuda_model.reports import MODEL, name_of

if TYPE_CHECKING:
    from tools.cuda_model.detector import Detector

DEFAULT = 0
POOL_SIZE = 32
"""Streams of each priority that torch has: it hands them out in turn (`CUDAStream.cpp`)."""


class Streams:
    """The streams of a device, and the current one of each thread."""

    def __init__(self, detector: Detector):
        self.detector = detector
        self.names = {DEFAULT: "the default stream"}
        self._numbers = count(1)
        self._events = count(1)
        self._current = threading.local()
        self._real: dict[int, tuple[int, int]] = {}  # priority, and number in torch's pool
        self.default = ModelStream(self, DEFAULT)

    @property
    def current(self) -> ModelStream:
        """The current stream of this thread."""
        stream: ModelStream = getattr(self._current, "stream", self.default)
        return stream

    def set_current(self, stream: ModelStream) -> None:
        """Make ``stream`` the current one of this thread."""
        self._current.stream = stream

    def make(self, name: str = "", priority: int = 0) -> ModelStream:
        """Return a new stream, named after the function that makes it by default."""
        # Two streams that are one in torch's pool are two here: what nothing orders is reported.
        number = next(self._numbers)
        if not name:
            frame: Any = sys._getframe(1)
            while frame.f_code.co_filename.startswith(MODEL):
                frame = frame.f_back
            name = name_of(frame.f_code)
        self.names[number] = f"stream {number} ({name})"
        like_it = [each for each in self._real.values() if each[0] == priority]
        self._real[number] = priority, len(like_it) % POOL_SIZE
        self.detector.syncs.create_stream(number)
        return ModelStream(self, number)

    def real(self, number: int) -> tuple[int, int]:
        """Return the priority of a stream and its number in torch's pool."""
        return self._real.get(number, (0, -1))  # the default stream is of no pool

    def make_event(self) -> int:
        """Return the number of a new event."""
        number = next(self._events)
        self.detector.syncs.create_event(number)
        return number


class ModelStream:
    """A stream: work on it runs in the order in which it was launched."""

    def __init__(self, streams: Streams, number: int):
        self._streams = streams
        self.cuda_stream = self.stream_id = number

    @property
    def priority(self) -> int:
        """0, or -1 for a stream whose kernels go before others."""
        return self._streams.real(self.cuda_stream)[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelStream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def __repr__(self) -> str:
        return f"<{self._streams.names[self.cuda_stream]}>"

    def wait_stream(self, stream: ModelStream) -> None:
        """Run later work after everything that was launched on ``stream``."""
        self.wait_event(stream.record_event())

    def wait_event(self, event: ModelEvent) -> None:
        """Run later work after ``event``; one that was never recorded has happened."""
        with self._streams.detector.lock:
            if event.number is not None:
                self._streams.detector.graphs.follow(self.cuda_stream, event.graph)
                self._streams.detector.num_beside += event.launched_since(self.cuda_stream)
                self._streams.detector.syncs.stream_wait_for_event(self.cuda_stream, event.number)

    def record_event(self, event: ModelEvent | None = None) -> ModelEvent:
        """Record ``event``, or a new one, after everything that was launched so far."""
        event = event or ModelEvent(self._streams)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for everything that was launched."""
        self._streams.detector.synchronize(self.cuda_stream)

    def is_capturing(self) -> bool:
        """Return True if a graph is captured from the stream."""
        graph = self._streams.detector.graphs.current
        return graph is not None and self.cuda_stream in graph.streams

    def query(self) -> bool:
        """Return False: work that nobody waits for may not have finished."""
        return False

    def __enter__(self) -> ModelStream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class ModelEvent:
    """An event on a stream; the settings of CUDA's are accepted and change no order."""

    def __init__(self, streams: Streams):
        self._streams = streams
        self.number: int | None = None  # of the last record
        self.graph: Any = None  # whose capture it was recorded in
        self._launched: Counter[int] = Counter()  # before the last record, by stream
        self._waiting: set[int] = set()  # streams that have waited for it, and its own

    def record(self, stream: ModelStream | None = None) -> None:
        """Happen after everything that was launched on ``stream`` so far."""
        stream = stream or self._streams.current
        with self._streams.detector.lock:
            self.number = self._streams.make_event()
            graph = self._streams.detector.graphs.current
            self.graph = graph if graph and stream.cuda_stream in graph.streams else None
            self._streams.detector.syncs.record_state(self.number, stream.cuda_stream)
            self._launched = self._streams.detector.launched.copy()
            self._waiting = {stream.cuda_stream}

    def launched_since(self, stream: int) -> int:
        """Return how many kernels ``stream``, which waits now, has launched since the record.

        0 for the stream of the event, and if it has waited before.
        """
        if stream in self._waiting:
            return 0
        self._waiting.add(stream)
        return self._streams.detector.launched[stream] - self._launched[stream]

    def wait(self, stream: ModelStream | None = None) -> None:
        """Let ``stream`` run later work after the event."""
        (stream or self._streams.current).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        self._streams.detector.graphs.waits("a wait for an event")
        with self._streams.detector.lock:
            if self.number is not None:
                self._streams.detector.syncs.all_streams_wait_for_event(self.number)

    def query(self) -> bool:
        """Return False: nobody has waited for it yet, as far as this says."""
        return False

    def elapsed_time(self, event: ModelEvent) -> float:
        """Return no time: the model has no clock."""
        return 0.0


class StreamContext:
    """Makes a stream the current one; None changes nothing."""

    def __init__(self, streams: Streams, stream: ModelStream | None):
        self._streams, self._stream = streams, stream
        self._before = streams.current

    def __enter__(self) -> None:
        self._before = self._streams.current
        if self._stream is not None:
            self._streams.set_current(self._stream)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        stack: TracebackType | None,
    ) -> None:
        if self._stream is not None:
            self._streams.set_current(self._before)
