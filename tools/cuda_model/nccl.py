# SPDX-License-Identifier: Apache-2.0
"""Collectives on streams of their groups, and the rules of NCCL and of torch's backend for it.

Gloo carries the values. The rules are those of torch 2.10 and later, as `ProcessGroupNCCL` has
them: a collective that is not asynchronous runs on the current stream; an asynchronous one runs on
the stream of its group, after the current stream, and `wait` lets the current stream wait for it.
Its operands are kept until then. A message between two ranks is asynchronous always.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import ProcessGroup

from tools.cuda_model.detector import Detector
from tools.cuda_model.groups import Groups
from tools.cuda_model.memory import has_memory
from tools.cuda_model.methods import METHODS, Call
from tools.cuda_model.reports import NCCL_RULE, UNAWAITED, CallStack
from tools.cuda_model.streams import ModelEvent, ModelStream, StreamContext

EIGHT_BITS = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
COMPLEX = {torch.complex32, torch.complex64, torch.complex128}
REDUCED = {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
"""dtypes that NCCL adds up on every GPU; 8-bit floats need a recent one."""
MOVED = REDUCED | EIGHT_BITS | COMPLEX
"""dtypes that torch's backend hands to NCCL; int16 is not among them."""
NOT_REDUCED = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
"""Operations that gloo has and NCCL has not."""


MESSAGES = ("send", "recv")
EXCHANGES = ("alltoall_base", "all_to_all_single", "alltoall")


class Carried:
    """A collective of gloo, on copies: gloo's threads keep operands for longer than NCCL does."""

    def __init__(self, start: Callable[..., Any], args: Any, written: Sequence[torch.Tensor]):
        self._copies: dict[int, torch.Tensor] = {}
        self._written = list(written)
        self._work = start(*self._copied(args))

    def _copied(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._copied(each) for each in value]
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._copies:
            self._copies[id(value)] = value.data.clone()
        return self._copies[id(value)]

    def wait(self) -> None:
        """Wait for gloo, and bring what it has written."""
        self._work.wait()
        for tensor in self._written:
            if has_memory(tensor):  # otherwise its release was reported
                tensor.data.copy_(self._copies[id(tensor)])  # like NCCL: autograd does not know
        self._written.clear()


def _carry_again(start: Callable[..., Any], operands: Any) -> list[torch.Tensor]:
    """Run a collective for the replay of a graph; it has no results but what it writes."""
    args, written = operands
    Carried(start, args, written).wait()
    return []


class ModelWork:
    """A collective under way, on the stream of its group."""

    def __init__(
        self, nccl: Nccl, name: str, real: Any, done: ModelEvent | None, kept: Sequence[Any]
    ):
        self._nccl, self._name, self._done = nccl, name, done
        self.real = real
        self._kept = list(kept)  # torch's backend keeps operands until somebody waits
        self.is_awaited = done is None
        self._stack = CallStack(sys._getframe())

    def wait(self, timeout: object = None) -> bool:
        """Let the current stream wait; the host goes on."""
        self._nccl.finish(self)
        if self._done is not None:
            self._nccl.detector.streams.current.wait_event(self._done)
        self.is_awaited = True
        self._kept.clear()
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        """Return True, and with it what the host knows: it has asked for the values."""
        self._nccl.finish(self)
        return True

    def told(self) -> str:
        """Return the name and the place of the call."""
        return f"{self._name}, which was called at\n{self._stack.format()}"

    def __del__(self) -> None:
        self._nccl.forget(self)


class WorksOfOneLaunch:
    """Works that a coalescing manager has gathered."""

    def __init__(self, works: Sequence[ModelWork]):
        self._works = works

    def wait(self, timeout: object = None) -> bool:
        """Let the current stream wait for all of them."""
        return all(work.wait() for work in self._works)


class Nccl:
    """The collectives of all groups, in the order of calls."""

    def __init__(self, detector: Detector, groups: Groups):
        self.detector = detector
        self.groups = groups
        self._streams: dict[str, ModelStream] = {}  # by communicator
        # Works by stream whose values may not have come; gloo's own, in order.
        self._under_way: dict[object, list[Carried]] = defaultdict(list)
        self._open: dict[int, str] = {}  # works that nobody has waited for yet
        self.calls = detector.launches.calls
        self.num_registered = 0  # collectives with an operand in registered memory
        self.is_closed = False
        self._coalesced: list[ModelWork] | None = None  # inside a coalescing manager

    def start_coalescing(self, group: ProcessGroup, device: torch.device) -> None:
        """Gather the works that follow."""
        self._coalesced = []
        self.detector.launches.begin_group()

    def end_coalescing(self, group: ProcessGroup, device: torch.device) -> WorksOfOneLaunch:
        """Return one work for those since the start."""
        works, self._coalesced = self._coalesced or [], None
        self.detector.launches.end_group()
        return WorksOfOneLaunch(works)

    def method(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what takes the place of a method of process groups."""
        parse = METHODS[name]

        def collective(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if self.groups.is_of_host(group):
                return original(group, *args, **kwargs)
            call = parse(group, *args, **_positional(kwargs))
            if self.groups.has_gloo and self._is_on_host(call):
                return original(group, *args, **kwargs)
            options = kwargs.get("opts", args[-1] if args else None)
            self._check(name, call, options, group)
            is_message = name in MESSAGES
            peer = int(args[1]) if is_message else None
            if not is_message:
                self.calls[group.group_name].append(self._signature(name, call))
            graph = self.detector.graphs.current
            if graph is not None:
                graph.keep(call.outputs)
            with self.detector.unseen():
                if name == "barrier":  # its options may name a device that gloo has not
                    args, kwargs = (), {}
                start = partial(original, group, **kwargs)
                work = Carried(start, args, call.outputs)
            if name == "barrier":
                self._wait(work)
                current = self.detector.streams.current.cuda_stream
                self._note(name, group, self._communicator(group, peer), peer, current)
                self.detector.synchronize(current)
                return ModelWork(self, name, None, None, ())
            if graph is not None:
                again = partial(_carry_again, start)
                graph.record(name, again, (args, call.outputs), call.reads, call.writes)
                graph.groups.add(group.group_name)
            is_asynchronous = is_message or bool(getattr(options, "asyncOp", False))
            return self.launch(name, call, work, group, peer, is_asynchronous)

        return collective

    def launch(
        self,
        name: str,
        call: Call,
        real: Carried,
        group: ProcessGroup,
        peer: int | None,
        is_asynchronous: bool,
    ) -> ModelWork:
        """Note a collective that gloo has started; return the work to wait for.

        Args:
            name: of the method of the group.
            call: its operands.
            real: the collective of gloo.
            group: the group.
            peer: the other rank of the group, for a message.
            is_asynchronous: somebody waits for the work.
        """
        where = f"{name} over {group.group_name}"
        communicator = self._communicator(group, peer)
        if not is_asynchronous:
            self._wait(real)
            current = self.detector.streams.current
            self._check_priority(where, group, current)
            self._note(where, group, communicator, peer, current.cuda_stream)
            self.detector.kernel(where, call.reads, call.writes)
            return ModelWork(self, where, None, None, ())
        stream = self._streams[communicator]
        stream.wait_stream(self.detector.streams.current)
        self._note(where, group, communicator, peer, stream.cuda_stream)
        self.detector.kernel(where, call.reads, call.writes, stream.cuda_stream)
        done = stream.record_event()
        self._under_way[communicator].append(real)
        work = ModelWork(self, where, (communicator, real), done, (*call.reads, *call.outputs))
        self._open[id(work)] = work.told()
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _communicator(self, group: ProcessGroup, peer: int | None) -> str:
        """Return the name of what a collective or a message uses, which is made if it is new."""
        name, ranks = str(group.group_name), dist.get_process_group_ranks(group)
        is_alone = self._coalesced is None and not self.groups.is_eager(group)
        if peer is not None and is_alone:
            ranks = sorted({ranks[group.rank()], ranks[peer]})
            name = f"{name}, ranks {ranks}"
        self.detector.launches.connect(name, ranks)
        if name not in self._streams:
            priority = -1 if self.groups.options(group).is_high_priority_stream else 0
            self._streams[name] = self.detector.streams.make(f"NCCL, {name}", priority)
        return name

    def _note(
        self, where: str, group: ProcessGroup, communicator: str, peer: int | None, stream: int
    ) -> None:
        """Add a launch before its kernel; see `launches.py`."""
        launches = self.detector.launches
        ranks = dist.get_process_group_ranks(group)
        if peer is None:
            launches.collective(communicator, ranks, where, stream)
        else:
            is_sent = where.startswith("send")
            launches.message(communicator, ranks[peer], is_sent, where, stream)

    def finish(self, work: ModelWork) -> None:
        """Wait until the values of a work are there, and those of its stream before it."""
        self._open.pop(id(work), None)
        if work.real is not None:
            key, real = work.real
            started = self._under_way[key]
            while real in started:
                self._wait(started.pop(0))

    def _wait(self, real: Carried) -> None:
        with self.detector.unseen():
            real.wait()

    def finish_all(self) -> None:
        """Wait for the values of everything under way, as the host does for the device."""
        for started in self._under_way.values():
            while started:
                self._wait(started.pop(0))

    def forget(self, work: ModelWork) -> None:
        """Report a work that is dropped before anybody has waited for it."""
        told = self._open.pop(id(work), None)
        if told is not None and not self.is_closed:
            self.detector.report(UNAWAITED, told, (told,))

    def close(self) -> None:
        """Report works that nobody has waited for, and ranks whose collectives differ."""
        self.is_closed = True
        for told in self._open.values():
            self.detector.report(UNAWAITED, told, (told,))
        self.finish_all()

    # ---- rules

    def _is_on_host(self, call: Call) -> bool:
        operands = [*call.reads, *call.outputs]
        is_on_device = self.detector.blocks.is_on_device
        return bool(operands) and not any(is_on_device(each) for each in operands)

    def _check(self, name: str, call: Call, options: Any, group: ProcessGroup) -> None:
        problems = []
        is_registered = False
        blocks = self.detector.blocks
        for tensor in [*call.reads, *call.writes]:
            if not blocks.is_on_device(tensor) and not self.groups.has_objects():
                problems.append("a tensor of the host")
            if not tensor.is_contiguous():
                problems.append(f"a tensor of shape {tuple(tensor.shape)} is not contiguous")
            known = REDUCED if call.reduces else MOVED
            if tensor.dtype not in known:
                problems.append(f"{tensor.dtype} is not {'reduced' if call.reduces else 'moved'}")
            block = blocks.known(tensor)
            pool = block and block.pool
            is_registered = is_registered or bool(pool and group.group_name in pool.groups)
            if pool and pool.groups and group.group_name not in pool.groups:
                problems.append(f"the memory is registered, but not with {group.group_name}")
        self.num_registered += is_registered
        for operation in NOT_REDUCED:
            if call.reduces and getattr(options, "reduceOp", None) == operation:
                problems.append(f"NCCL has no {operation.name}")
        for whole, part in call.slices:
            count = part.numel() * group.size()
            if whole.numel() != count or whole.dtype != part.dtype:
                problems.append(f"{whole.numel()} elements are not {group.size()} x {part.numel()}")
            offset = part.data_ptr() - whole.data_ptr()
            is_inside = part.numel() and -part.nbytes < offset < whole.nbytes
            if is_inside and offset != group.rank() * part.nbytes:
                problems.append(f"the part lies at byte {offset} of the whole, not at its rank's")
        for problem in problems:
            place = f"{problem}\n{CallStack(sys._getframe()).format()}"
            self.detector.report(NCCL_RULE, f"{name}: {place}", (name, place))

    def _check_priority(self, where: str, group: ProcessGroup, stream: ModelStream) -> None:
        """Report a group of high priority whose collective runs on a stream without it."""
        is_own = stream != self.detector.streams.default  # it has nothing to overtake there
        has_priority = self.groups.options(group).is_high_priority_stream
        if has_priority and is_own and not stream.priority:
            text = f"{where} has high priority, and runs on {stream!r}, which has not"
            place = CallStack(sys._getframe()).format()
            self.detector.report(NCCL_RULE, f"{text}\n{place}", (where, place))

    def _signature(self, name: str, call: Call) -> str:
        """Return what must be equal on all ranks, with the work that the call is for."""
        work = self.detector.work
        return _signature(name, call) + (f" during {work[-1]}" if work else "")


def _positional(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key not in ("opts", "timeout")}


def _signature(name: str, call: Call) -> str:
    """Return what must be equal on all ranks; exchanges may have other sizes on each."""
    tensors = call.writes if name == "scatter" else call.reads
    sizes = ["" if name in EXCHANGES else tensor.numel() for tensor in tensors]
    kinds = [f"{tensor.dtype}[{size}]" for tensor, size in zip(tensors, sizes, strict=True)]
    return f"{name}({', '.join(kinds)})"


class FunctionalCollectives:
    """Collectives that torch's DTensors call; their results wait in `wait_tensor`."""

    def __init__(self, detector: Detector):
        self._detector = detector
        # By the storage of a result: its event, and the operands, which torch keeps until then.
        self._done: dict[int, tuple[ModelEvent, list[torch.Tensor]]] = {}
        self._streams: dict[str, ModelStream] = {}

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a functional collective on the stream of its group."""
        name = function._schema.name.partition("::")[2]
        if name == "_wrap_tensor_autograd":  # it launches nothing
            return function(*args, **kwargs)
        if name == "wait_tensor":
            result = function(*args, **kwargs)
            storage = args[0].untyped_storage()._cdata
            if storage in self._done:
                done, _ = self._done.pop(storage)
                self._detector.streams.current.wait_event(done)
            return result
        group = args[-1]
        if group not in self._streams:
            self._streams[group] = self._detector.streams.make(f"NCCL, {group}, functional")
        stream = self._streams[group]
        stream.wait_stream(self._detector.streams.current)
        result = function(*args, **kwargs)
        launches = self._detector.launches
        ranks = dist.get_process_group_ranks(_resolve_process_group(group))
        launches.calls[group].append(name)
        launches.connect(group, ranks)
        launches.collective(group, ranks, f"{name} over {group}", stream.cuda_stream)
        operands = [args[0]] if isinstance(args[0], torch.Tensor) else list(args[0])
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        # The results are allocated on the current stream, before the group's writes to them.
        with StreamContext(self._detector.streams, stream):
            self._detector.kernel(name, operands, [])
        for tensor in results:
            self._detector.allocated(tensor, f"allocation for {name}")
        stream.wait_stream(self._detector.streams.current)
        self._detector.kernel(name, [], results, stream.cuda_stream)
        done = stream.record_event()
        for tensor in results:
            self._done[tensor.untyped_storage()._cdata] = done, operands
        return result
