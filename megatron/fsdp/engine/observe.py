# SPDX-License-Identifier: Apache-2.0
"""Observers: clients that the engine notifies of its work, its collectives and its storage."""

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

# The unsharded tensors of a collective: the results of an all-gather, the operand of a reduction.
Operands = Sequence[torch.Tensor]
Group = dist.ProcessGroup | None  # the ranks of a collective; None: all ranks

NOTHING: AbstractContextManager[None] = nullcontext()


class Observer:
    """A client that the engine notifies of what it does; every method does nothing by default."""

    def begin_pass(self, phase: str) -> None:
        """Note that a forward of a root, or a backward pass, begins."""

    def begin_work(self, unit: str, work: str) -> Any:
        """Note that work on a unit begins; return the argument of :meth:`end_work`."""

    def end_work(self, begun: Any) -> None:
        """Note that work on a unit has ended."""

    def begin_unit_backward(self, unit: str) -> None:
        """Note that the backward of a unit begins; that of the unit before it is over."""

    def end_backward_pass(self) -> None:
        """Note that the backward pass is over."""

    def begin_step(self) -> None:
        """Note a step of the optimizer, or a call of ``install_optimized_model_weights``."""

    def storage(self, action: str, tensor: torch.Tensor) -> None:
        """Note that the storage of a flat tensor is allocated ("allocate") or freed ("release")."""

    def begin_collective(
        self,
        kind: str,
        name: str,
        operands: Operands,
        group: Group,
    ) -> Any:
        """Note that a collective is launched.

        Args:
            kind: ``GATHER``, ``REDUCE`` or ``OTHER``.
            name: name of the collective as in torch.distributed, such as "all_gather".
            operands: unsharded tensors, of which only the metadata may be kept.
            group: its ranks; None: all ranks.

        Returns:
            The argument of :meth:`end_collective` or :meth:`fail_collective`.
        """

    def end_collective(self, begun: Any) -> None:
        """Note that this rank has waited for a collective, or need not wait for it."""

    def fail_collective(self, begun: Any, error: Exception) -> None:
        """Note that a collective has failed; may raise an error that explains ``error``."""


# Observers belong to the process and not to a model, because one recording covers all models and
# the collectives between them. Without an observer, each notification costs an empty loop.
observers: tuple[Observer, ...] = ()
# One more, which is notified last and of collectives only, in every run: it explains failures.
failure_observer: Observer | None = None
# The unit of the work that began last: collectives of weights and gradients are its own.
unit_of_last_work = ""
_forwards: dict[Hashable, AbstractContextManager[None]] = {}  # the observed ones under way


def add(observer: Observer) -> None:
    """Notify ``observer`` from now on."""
    global observers
    observers = (*observers, observer)


def remove(observer: Observer) -> None:
    """Stop notifying ``observer``."""
    global observers
    observers = tuple(other for other in observers if other is not observer)


def storage(action: str, tensor: torch.Tensor) -> None:
    """Report that the storage of a flat tensor is allocated or released."""
    for observer in observers:
        observer.storage(action, tensor)


# ---- work on units


def current_phase() -> str:
    """Return the phase in which the engine is, as far as forwards are observed."""
    if in_backward():
        return BACKWARD
    if _forwards:
        return FORWARD
    return STEP


def work(unit: str, work: str) -> AbstractContextManager[None]:
    """Return a context for work on a unit; collectives and storage inside it are the unit's."""
    global unit_of_last_work
    unit_of_last_work = unit
    if observers or profiler._is_profiler_enabled:
        return _observed_work(unit, work)
    return NOTHING


@contextmanager
def _observed_work(unit: str, work: str) -> Iterator[None]:
    with profiler.record_function(f"FSDP::{work} ({unit}, {current_phase()})"):
        notified = [(observer, observer.begin_work(unit, work)) for observer in observers]
        try:
            yield
        finally:
            for observer, begun in notified:
                observer.end_work(begun)


def begin_forward(
    call: Hashable,
    unit: str,
    is_root: bool,
) -> None:
    """Report that a forward begins.

    Args:
        call: the call of the unit, by which :func:`end_forward` finds it.
        unit: name of the unit.
        is_root: the unit is that of the root, whose forward begins a pass.
    """
    if not (observers or profiler._is_profiler_enabled):
        return
    if is_root and not in_backward():
        for observer in observers:
            observer.begin_pass(FORWARD)
    _forwards[call] = work(unit, FORWARD)
    _forwards[call].__enter__()


def end_forward(call: Hashable) -> None:
    """Report that the forward ``call`` has ended."""
    if _forwards and call in _forwards:
        _forwards.pop(call).__exit__(None, None, None)


# ---- collectives


class _ObservedCollective(AbstractContextManager[object]):
    """A collective that observers are notified of; an asynchronous one is the work to wait for."""

    def __init__(
        self,
        kind: str,
        name: str,
        operands: Operands,
        group: Group,
    ):
        self.work: Work | None = None
        self._notified: list[tuple[Observer, Any]] = []
        notified = observers
        if failure_observer is not None:
            notified = (*observers, failure_observer)
        for observer in notified:
            begun = observer.begin_collective(kind, name, operands, group)
            self._notified.append((observer, begun))

    def __exit__(
        self,
        kind: object,
        error: BaseException | None,
        traceback: object,
    ) -> None:
        for observer, begun in self._notified:
            if isinstance(error, Exception):
                observer.fail_collective(begun, error)
            elif self.work is None:  # otherwise it is over when a caller has waited for it
                observer.end_collective(begun)

    def wait(self) -> None:
        """Wait for the collective to finish."""
        work, self.work = self.work, None
        with self:
            if work is not None:
                work.wait()


def observed(
    kind: str,
    name: str,
    operands: Operands,
    group: Group,
    collective: Collective,
) -> Collective:
    """Return ``collective`` so that observers are notified when it starts and ends.

    Args:
        kind: ``GATHER``, ``REDUCE`` or ``OTHER``.
        name: name of the collective as in torch.distributed, such as "all_gather".
        operands: its unsharded tensors.
        group: its ranks; None: all ranks.
        collective: starts it; returned unchanged while there is no observer.
    """
    if not observers and failure_observer is None:
        return collective

    def start(asynchronous: bool) -> Work | None:
        observation = _ObservedCollective(kind, name, operands, group)
        with observation:
            observation.work = collective(asynchronous)
        if observation.work is None:
            return None
        return observation

    return start


def observing(
    name: str,
    operand: torch.Tensor | None,
    group: Group,
) -> AbstractContextManager[object]:
    """Return a context for a synchronous collective, of which observers are notified.

    Args:
        name: name of the collective as in torch.distributed, such as "broadcast".
        operand: its unsharded tensor; None: it exchanges objects.
        group: its ranks; None: all ranks.
    """
    if not observers and failure_observer is None:
        return NOTHING
    operands: Operands = ()
    if operand is not None:
        operands = (operand,)
    return _ObservedCollective(OTHER, name, operands, group)
