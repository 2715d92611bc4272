# SPDX-License-Identifier: Apache-2.0
"""A dispatch mode that makes every operator an event on the current stream."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tools.cuda_model.detector import Detector
from tools.cuda_model.graphs import UNDEFINED, RunAgain
from tools.cuda_model.memory import storage_of
from tools.cuda_model.nccl import FunctionalCollectives

NO_KERNELS = {"aten::set_", "aten::record_stream", "aten::resize_", "aten::_unsafe_view"}
"""Operators that change what a tensor refers to, not the values that it has."""
SYNCHRONISES = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"}
"""Operators that let the host wait for the current stream, because they return values to it."""
NOT_OURS = {"c10d", "_c10d_functional", "profiler", "prim"}
"""Collectives are events where they are called; see `nccl.py`."""
COPIES = {"aten::copy_"}
"""Operators that copy between host and device, and by default let the host wait."""
UNDECLARED_WRITES = {"fsdp::all_gather_copy_in": {"all_gather_output"}}
"""Arguments that are written to though the schema of the operator does not say so."""


class Roles(NamedTuple):
    """The roles of an operator's arguments."""

    names: dict[str, int]
    reads: tuple[bool, ...]
    writes: tuple[bool, ...]
    synchronises: bool


@cache
def roles_of(operator: Any) -> Roles:
    """Return what ``operator`` reads and writes, by its schema."""
    schema = operator._schema
    is_factory = schema.name.endswith("_like") or "::new_" in schema.name
    reads, writes = [], []
    for argument in schema.arguments:
        alias = argument.alias_info
        is_declared = alias is not None and alias.is_write
        is_write = is_declared or argument.name in UNDECLARED_WRITES.get(schema.name, ())
        runs = schema.name not in NO_KERNELS
        writes.append(runs and is_write)
        # An alias that is not written to is a view: nothing reads the values.
        reads.append(runs and not is_factory and (alias is None or is_write))
    names = {argument.name: at for at, argument in enumerate(schema.arguments)}
    return Roles(names, tuple(reads), tuple(writes), schema.name in SYNCHRONISES)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Return the tensors of an argument or a result: itself, or those of a list."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


def id_of_storage(tensor: torch.Tensor) -> int | None:
    """Return what identifies the storage of ``tensor``, None if it has none."""
    storage = storage_of(tensor)
    return None if storage is None else storage._cdata


def run_again(func: Any) -> RunAgain:
    """Return what runs an operator for a replay, and returns its results in new memory."""

    def run(operands: Any) -> list[torch.Tensor]:
        args, kwargs = operands
        if func._schema.name.startswith(UNDEFINED):
            return []
        given = {each.untyped_storage()._cdata for each in tensors_in([*args, *kwargs.values()])}
        results = tensors_in(func(*args, **kwargs))
        return [each for each in results if each.untyped_storage()._cdata not in given]

    return run


class OperatorEvents(TorchDispatchMode):
    """Tells the detector which memory operators read, write and allocate."""

    def __init__(self, detector: Detector):
        super().__init__()
        self._detector = detector
        self._blocks = detector.blocks
        self._functional = FunctionalCollectives(detector)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._detector.is_unseen:
            return func(*args, **kwargs)
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # its own operators on plain tensors come here next
        if func.namespace in NOT_OURS:
            if func.namespace == "_c10d_functional":
                return self._functional.call(func, args, kwargs)
            return func(*args, **kwargs)
        every = [*tensors_in([*args, *kwargs.values()])]
        if self._blocks.has_host and self._is_of_host(every):
            if self._detector.host.is_used:
                self._detector.host_uses(str(func), *used_by(func, args, kwargs))
            return func(*args, **kwargs)
        reads, writes = used_by(func, args, kwargs)
        name = str(func)
        self._detector.check(name, reads + writes)
        self._detector.graphs.keep(writes)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if "out of bounds for storage of size 0" not in str(error):
                raise
            raise self._detector.use_of_released(name, args[0]) from error  # by a view of it
        new = self._new_in(result, every)
        if self._is_between_host_and_device(func, args):
            self._detector.copy(name, args[0], args[1], is_non_blocking(args, kwargs))
        elif reads or writes or new:
            self._detector.host_uses(name, reads, writes)  # values that it is launched with
            self._detector.kernel(name, reads, writes + new)
        if reads or writes or new:
            graph = self._detector.graphs.current
            if graph is not None:
                graph.record(name, run_again(func), (args, kwargs), reads, writes + new, new)
        if roles_of(func).synchronises:
            self._detector.synchronize(self._detector.streams.current.cuda_stream)
        return result

    def _is_of_host(self, tensors: list[torch.Tensor]) -> bool:
        """Return True for an operator on tensors of the host only, or one that makes them."""
        if tensors:
            return not any(map(self._blocks.is_on_device, tensors))
        return self._detector.makes_on_host()  # autograd's own zeros are the device's

    def _new_in(self, result: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results that have memory of their own, which the device gets."""
        blocks = self._blocks
        new = [tensor for tensor in tensors_in(result) if blocks.known(tensor) is None]
        if blocks.has_host:
            storages = {id_of_storage(tensor) for tensor in given}
            new = [tensor for tensor in new if id_of_storage(tensor) not in storages]
            for tensor in new:
                blocks.adopt(tensor)
        return new

    def _is_between_host_and_device(self, func: Any, args: tuple[Any, ...]) -> bool:
        if not self._blocks.has_host or func._schema.name not in COPIES:
            return False
        return len({self._blocks.is_on_device(tensor) for tensor in args[:2]}) == 2


def used_by(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operator reads, and those that it writes to."""
    roles = roles_of(func)
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    given = [*enumerate(args), *((roles.names[key], value) for key, value in kwargs.items())]
    for at, value in given:
        tensors = list(tensors_in(value))
        if roles.writes[at]:
            writes += tensors
        elif roles.reads[at]:
            reads += tensors
    return reads, writes


def is_non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True for a copy that is asked to go on."""
    return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
