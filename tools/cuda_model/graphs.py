# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: operators and collectives are recorded during a capture, and run again by replays.

The rules are those of "Stream capture" in CUDA's programming guide and of torch's notes on graphs.
During a capture operators do run, because torch needs tensors; at its end all memory that was there
before has its old values again, as nothing runs on a GPU until a replay.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from tools.cuda_model.memory import storage_of
from tools.cuda_model.reports import CAPTURE, RELEASED, CallStack
from tools.cuda_model.streams import DEFAULT, ModelStream, StreamContext

if TYPE_CHECKING:
    from tools.cuda_model.detector import Detector

UNDEFINED = ("aten::empty", "aten::new_empty")
"""Operators whose results have no values."""
RunAgain = Callable[[Any], Sequence[torch.Tensor]]  # of resolved operands; returns new results


class CaptureError(RuntimeError):
    """A capture or a replay breaks a rule: that is reported, and ends the program as on CUDA."""


class Place:
    """A tensor as a graph knows it: memory, and where in it."""

    def __init__(self, tensor: torch.Tensor, number: int | None, keeps: bool):
        storage = tensor.untyped_storage()
        self.number = number  # of the block; None: it is empty
        self.key = storage._cdata
        self._storage = weakref.ref(storage)
        self._kept = storage if keeps else None  # memory of the graph's pool
        self._view = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._dtype = tensor.dtype

    def tensor(self) -> torch.Tensor | None:
        """Return a tensor over the memory, unless it is gone."""
        storage = self._storage()
        return (
            None
            if storage is None
            else torch.empty(0, dtype=self._dtype).set_(storage, *self._view)
        )


class GraphStep:
    """An operator or a collective that a replay runs again."""

    def __init__(
        self, name: str, run: RunAgain, operands: Any, reads: Any, writes: Any, results: Any
    ):
        self.name, self.run, self.operands = name, run, operands
        self.reads, self.writes, self.results = reads, writes, results


class Graphs:
    """The capture under way, if there is one."""

    def __init__(self, detector: Detector):
        self.detector = detector
        self.current: ModelGraph | None = None
        self.pools = count(1)
        self.num_replays = 0
        self.alive: weakref.WeakSet[ModelGraph] = weakref.WeakSet()

    def refuse(self, what: str, kind: str = CAPTURE) -> CaptureError:
        """Report what breaks a rule; return the error to raise."""
        stack = CallStack(sys._getframe()).format()
        self.detector.report(kind, f"{what}\n{stack}", (what, stack))
        return CaptureError(what)

    def waits(self, what: str) -> None:
        """Refuse a wait of the host during a capture."""
        if self.current is not None:
            raise self.refuse(f"{what} lets the host wait during the capture of a graph")

    def launches(self, name: str, stream: int) -> None:
        """Note a kernel; refuse one on a stream that has not joined the capture under way."""
        if self.current is not None:
            if stream not in self.current.streams:
                where = self.detector.streams.names[stream]
                raise self.refuse(f"{name} on {where}, which has not joined the capture of a graph")
            self.current.streams[stream] = self.detector.seq_num + 1

    def follow(self, stream: int, graph: ModelGraph | None) -> None:
        """Note that a stream waits for an event, which was recorded in the capture of ``graph``."""
        current = self.current
        if current is None:
            return
        if graph is current:
            current.streams.setdefault(stream, 0)
        elif stream in current.streams:
            where = self.detector.streams.names[stream]
            raise self.refuse(f"{where} waits during the capture of a graph for work outside of it")

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the values of memory that is written to."""
        if self.current is not None:
            self.current.keep(tensors)

    def destroy_groups(self, group: str | None) -> None:
        """Check that no graph has collectives of a group that is destroyed; None: of all groups."""
        for graph in self.alive:
            if graph.groups and (group is None or group in graph.groups):
                what = f"{sorted(graph.groups)} are destroyed with a graph of their collectives"
                stack = CallStack(sys._getframe(1)).format()
                self.detector.report(CAPTURE, f"{what}\n{stack}", (what, stack))

    def replacements(self) -> dict[str, Any]:
        """Return what takes the place of functions and classes of `torch.cuda`."""
        streams = self.detector.streams
        return {
            "CUDAGraph": lambda keep_graph=False: ModelGraph(self),
            "graph": GraphContext,
            "graph_pool_handle": lambda: (0, next(self.pools)),
            "is_current_stream_capturing": lambda: streams.current.is_capturing(),
        }


class ModelGraph:
    """A graph, with the methods of `torch.cuda.CUDAGraph`."""

    def __init__(self, graphs: Graphs):
        self._graphs = graphs
        self._pool: Any = None
        self._steps: list[GraphStep] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._own: dict[int, torch.UntypedStorage] = {}  # allocated in the capture, kept for good
        self._random = torch.get_rng_state()
        self._origin = DEFAULT
        self.streams: dict[int, int] = {}  # in the capture, each with its last kernel
        self.groups: set[str] = set()  # whose collectives it has: NCCL waits for its end
        graphs.alive.add(self)

    # ---- capture

    def capture_begin(self, pool: Any = None, **settings: Any) -> None:
        """Begin to record what is launched on the current stream and those that join it."""
        origin = self._graphs.detector.streams.current.cuda_stream
        if origin == DEFAULT:
            raise self._graphs.refuse("a graph cannot be captured on the default stream")
        if self._graphs.current is not None:
            raise self._graphs.refuse("a graph is captured during the capture of another one")
        self._pool = pool or (0, next(self._graphs.pools))
        self._origin, self.streams = origin, {origin: 0}
        self._random = torch.get_rng_state()
        self._graphs.current = self

    def capture_end(self) -> None:
        """End the capture: bring back all values, and refuse streams that have not joined."""
        graphs, detector = self._graphs, self._graphs.detector
        graphs.current = None
        for storage, values in self._before.values():
            if storage.nbytes() == values.nbytes():
                storage.copy_(values)
        self._before.clear()
        torch.set_rng_state(self._random)
        for stream, last in self.streams.items():
            if not detector.syncs.is_ordered_after(self._origin, last, stream):
                where = detector.streams.names[stream]
                raise graphs.refuse(f"{where} has not joined at the end of the capture of a graph")
        # Nothing has run: no later work needs to wait. Memory of the pool belongs to no stream.
        for stream in self.streams:
            detector.syncs.all_streams_wait_for_stream(stream)
        for block in detector.blocks:
            if block.stream in self.streams:
                block.recorded.update(detector.syncs.current_sync_states)

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the values of memory that was there before the capture."""
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is not None and storage._cdata not in self._own:
                self._before.setdefault(storage._cdata, (storage, storage.clone()))

    def record(
        self, name: str, run: RunAgain, operands: Any, reads: Any, writes: Any, results: Any = ()
    ) -> None:
        """Record a step; ``results`` are tensors in new memory, which belongs to the graph."""
        for tensor in results:
            storage = tensor.untyped_storage()
            self._own[storage._cdata] = storage
        known: dict[int, Place] = {}
        step = [self._places(each, known) for each in (operands, reads, writes, list(results))]
        self._steps.append(GraphStep(name, run, *step))

    def _places(self, value: Any, known: dict[int, Place]) -> Any:
        """Return ``value`` with places for its tensors."""
        if isinstance(value, torch.Tensor):
            if storage_of(value) is None:
                return value
            block = self._graphs.detector.blocks.known(value)
            keeps = value.untyped_storage()._cdata in self._own
            place = Place(value, block.number if block is not None else None, keeps)
            return known.setdefault(id(value), place)
        if isinstance(value, dict):
            return {key: self._places(each, known) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._places(each, known) for each in value]
        return value

    # ---- replay

    def replay(self) -> None:
        """Run the steps again, on the memory of the capture, all on the current stream."""
        self._graphs.waits("a replay")
        self._graphs.num_replays += 1
        detector = self._graphs.detector
        for step in self._steps:
            known: dict[int, torch.Tensor] = {}
            parts = (step.operands, step.reads, step.writes, step.results)
            operands, reads, writes, results = (self._tensors(each, known, step) for each in parts)
            detector.kernel(f"{step.name} of a graph", reads, writes)
            with detector.unseen(), torch.no_grad():
                for target, value in zip(results, step.run(operands)):
                    target.copy_(value)

    def _tensors(self, value: Any, known: dict[int, torch.Tensor], step: GraphStep) -> Any:
        if isinstance(value, Place):
            if id(value) not in known:
                known[id(value)] = self._tensor(value, step)
            return known[id(value)]
        if isinstance(value, dict):
            return {key: self._tensors(each, known, step) for key, each in value.items()}
        if isinstance(value, list):
            return [self._tensors(each, known, step) for each in value]
        return value

    def _tensor(self, place: Place, step: GraphStep) -> torch.Tensor:
        with self._graphs.detector.unseen():
            tensor = place.tensor()
        block = None if tensor is None else self._graphs.detector.blocks.known(tensor)
        number = None if block is None else block.number
        if tensor is None or number != place.number:
            what = f"{step.name} of a graph uses memory that was released since the capture"
            raise self._graphs.refuse(what, RELEASED)
        return tensor

    def pool(self) -> Any:
        """Return the handle of the graph's memory pool."""
        return self._pool

    def register_generator_state(self, generator: Any) -> None:
        """Accept a generator: replays draw from those of the CPU, which go on."""

    def instantiate(self) -> None:
        """Do nothing: the steps are there."""

    def reset(self) -> None:
        """Forget the steps, and free their memory."""
        self._steps.clear()
        self._own.clear()
        self.groups.clear()


class GraphContext:
    """The context `torch.cuda.graph`."""

    def __init__(
        self,
        cuda_graph: ModelGraph,
        pool: Any = None,
        stream: ModelStream | None = None,
        **settings: Any,
    ):
        self._graph, self._pool = cuda_graph, pool
        streams = cuda_graph._graphs.detector.streams
        self._stream = stream or streams.make("capture")
        self._context = StreamContext(streams, self._stream)

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        self._context.__enter__()
        self._graph.capture_begin(self._pool)

    def __exit__(self, *error: Any) -> None:
        try:
            self._graph.capture_end()
        except CaptureError:
            if error[0] is None:  # otherwise the first error tells more
                raise
        finally:
            self._context.__exit__(*error)
