# SPDX-License-Identifier: Apache-2.0
"""Observers: what the engine tells of its work on units, its collectives and its flat storage."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler

from megatron.fsdp.engine.device import Collective, Work, in_backward

# Phases: a forward of any unit, a backward pass, and everything around the optimizer's step.
FORWARD, BACKWARD, STEP = "forward", "backward", "step"
# Kinds of collectives: of weights, of gradients, and everything else.
GATHER, REDUCE, OTHER = "gather", "reduce", "other"

Operands = Sequence[torch.Tensor]  # whole: the results of a gather, the operand of a reduction
Group = dist.ProcessGroup | None  # the ranks of a collective; None: all ranks

NOTHING: AbstractContextManager[None] = nullcontext()


class Observer:
    """A client of the engine that is told what it does; every method does nothing by default."""

    def begin_pass(self, phase: str) -> None:
        """Note that a forward of a root, or a backward pass, begins."""

    def begin_work(self, unit: str, work: str) -> Any:
        """Note that work on a unit begins; return what :meth:`end_work` is called with."""

    def end_work(self, begun: Any) -> None:
        """Note that work on a unit has ended."""

    def begin_backward(self, unit: str) -> None:
        """Note that the backward of a unit begins; that of the unit before it is over."""

    def end_backward_pass(self) -> None:
        """Note that the backward pass is over."""

    def begin_step(self) -> None:
        """Note that the optimizer has made a step."""

    def storage(self, action: str, tensor: torch.Tensor) -> None:
        """Note that the storage of a flat tensor is allocated ("allocate") or freed ("release")."""

    def begin_collective(self, kind: str, name: str, operands: Operands, group: Group) -> Any:
        """Note that a collective is launched; return what the next two methods are called with."""

    def end_collective(self, begun: Any) -> None:
        """Note that this rank has waited for a collective, or need not wait for it."""

    def fail_collective(self, begun: Any, error: Exception) -> None:
        """Note that a collective has failed; may raise an error that explains ``error``."""


# Observers belong to the process and not to a model, because one recording covers all models and
# the collectives between them. Without an observer, each place that tells costs an empty loop.
observers: tuple[Observer, ...] = ()
# One more, which is told last, and of collectives only, in every run: it explains those that fail.
memory: Observer | None = None
last_unit = ""  # of the work that began last, which collectives of weights and gradients are for
_forwards: dict[Hashable, AbstractContextManager[None]] = {}  # the observed ones under way


def add(observer: Observer) -> None:
    """Tell ``observer`` everything from now on."""
    global observers
    observers = (*observers, observer)


def remove(observer: Observer) -> None:
    """Tell ``observer`` nothing any more."""
    global observers
    observers = tuple(other for other in observers if other is not observer)


def storage(action: str, tensor: torch.Tensor) -> None:
    """Tell that the storage of a flat tensor is allocated or released."""
    for observer in observers:
        observer.storage(action, tensor)


# ---- work on units


def current_phase() -> str:
    """Return the phase in which the engine is, as far as forwards are observed."""
    if in_backward():
        return BACKWARD
    return FORWARD if _forwards else STEP


def work(unit: str, work: str) -> AbstractContextManager[None]:
    """Return a context for work on a unit; collectives and storage inside it are the unit's."""
    global last_unit
    last_unit = unit
    return _told_work(unit, work) if observers or profiler._is_profiler_enabled else NOTHING


@contextmanager
def _told_work(unit: str, work: str) -> Iterator[None]:
    with profiler.record_function(f"FSDP::{work} ({unit}, {current_phase()})"):
        told = [(observer, observer.begin_work(unit, work)) for observer in observers]
        try:
            yield
        finally:
            for observer, begun in told:
                observer.end_work(begun)


def begin_forward(call: Hashable, unit: str, is_root: bool) -> None:
    """Tell that ``call``, a forward of ``unit``, begins."""
    if not (observers or profiler._is_profiler_enabled):
        return
    if is_root and not in_backward():
        for observer in observers:
            observer.begin_pass(FORWARD)
    _forwards[call] = work(unit, FORWARD)
    _forwards[call].__enter__()


def end_forward(call: Hashable) -> None:
    """Tell that ``call`` has ended."""
    if _forwards and call in _forwards:
        _forwards.pop(call).__exit__(None, None, None)


# ---- collectives


class _ObservedCollective(AbstractContextManager[object]):
    """A collective that observers are told of; if it is asynchronous, also the work to wait for."""

    def __init__(self, kind: str, name: str, operands: Operands, group: Group):
        self._told = [
            (observer, observer.begin_collective(kind, name, operands, group))
            for observer in (observers if memory is None else (*observers, memory))
        ]
        self.work: Work | None = None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for observer, begun in self._told:
            if isinstance(error, Exception):
                observer.fail_collective(begun, error)
            elif self.work is None:  # otherwise it is over when somebody has waited for it
                observer.end_collective(begun)

    def wait(self) -> None:
        """Wait for the collective to finish."""
        work, self.work = self.work, None
        with self:
            if work is not None:
                work.wait()


def observed(
    kind: str, name: str, operands: Operands, group: Group, collective: Collective
) -> Collective:
    """Return ``collective``, of which observers are told when it starts and ends.

    ``kind`` is ``GATHER``, ``REDUCE`` or ``OTHER``, ``name`` that of the operation.
    """
    if not observers and memory is None:
        return collective

    def start(asynchronous: bool) -> Work | None:
        told = _ObservedCollective(kind, name, operands, group)
        with told:
            told.work = collective(asynchronous)
        return told if told.work is not None else None

    return start


def observing(
    name: str, operand: torch.Tensor | None, group: Group
) -> AbstractContextManager[object]:
    """Return a context for a synchronous collective, of which observers are told."""
    if not observers and memory is None:
        return NOTHING
    return _ObservedCollective(OTHER, name, () if operand is None else (operand,), group)
