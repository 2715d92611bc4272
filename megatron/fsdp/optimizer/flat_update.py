# SPDX-License-Identifier: Apache-2.0
"""The update of torch's optimizers on flat segments, or parameter by parameter."""

# Parameters are updated one by one, as DTensors, if the user has replaced their gradient or state,
# or if the first step must create their state. So are those of a segment some of which have no
# gradient; before the next step they are divided into other segments. See [Note: flat segments].

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, filterfalse
from operator import is_, methodcaller
from weakref import ref

import torch

from megatron.fsdp.dtensor.sharded_param import is_linked
from megatron.fsdp.optimizer.flat_segments import Segment, Segments, State
from megatron.fsdp.optimizer.host.block_update import update_segments
from megatron.fsdp.optimizer.optimizer_state import OptimizerClass

_now = methodcaller("__call__")  # of weak references, in C

# Segments to update, and other parameters to update one by one, of each param group.
Division = tuple[list[list[Segment]], list[list[torch.Tensor]]]


class FlatUpdate:
    """The update of one optimizer on flat segments, with the ``step`` of a class of torch."""

    def __init__(self, kind: OptimizerClass):
        self._step = inspect.unwrap(kind.step)  # without hooks, which run around all of this
        self._segments: Segments | None = None
        self._must_divide = False  # the gradients have divided a segment in the last step
        # The gradients of the last step, if all were views of flat gradients or None, and what was
        # updated, with the position of the gradient that each segment takes.
        self._gradients: list[Callable[[], torch.Tensor | None]] | None = None
        self._last: Division = ([], [])
        self._positions: list[tuple[Segment, int]] = []

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update all parameters of ``optimizer`` that have a gradient."""
        segments = self.prepare(optimizer)
        flat, others = self._divide(segments, segments.gradients())
        if any(flat):
            step = partial(run_step, self._step, optimizer)
            update_segments(step, flat, segments.state, optimizer.param_groups)
            for counters in segments.counters:
                counters.copy_to_members()
            for segment in chain.from_iterable(flat):
                segment.weight.grad = None
        # torch's operations on several tensors take no mix of DTensors and plain parameters.
        for select in (filter, filterfalse) if any(others) else ():
            parameters = [list(select(is_linked, own)) for own in others]
            if any(parameters):
                run_step(self._step, optimizer, parameters, optimizer.state)

    def prepare(self, optimizer: torch.optim.Optimizer) -> Segments:
        """Return the segments, made anew if parameters, settings or state have changed."""
        segments = self._segments
        if segments is None or self._must_divide or not segments.are_current(optimizer):
            self.forget()
            # Inference tensors would not tell whether somebody has written to them.
            with torch.inference_mode(False), torch.no_grad():
                self._segments = segments = Segments(optimizer)
        return segments

    def forget(self) -> None:
        """Let go of the state that the segments are over."""
        self._segments, self._gradients, self._must_divide = None, None, False
        self._last, self._positions = ([], []), []

    def _divide(self, segments: Segments, gradients: list[torch.Tensor | None]) -> Division:
        """Return what to update; the segments have their gradients."""
        known = self._gradients
        if known is None or not all(map(is_, map(_now, known), gradients)):
            are_all_flat = self._divide_anew(segments, gradients)
            # References would keep the storage of gradients in use.
            self._gradients = list(map(_weakly, gradients)) if are_all_flat else None
        for segment, position in self._positions:
            gradient = gradients[position]
            assert gradient is not None
            segment.take_gradient(gradient)
        return self._last

    def _divide_anew(self, segments: Segments, gradients: list[torch.Tensor | None]) -> bool:
        """Divide for new gradients; return True if all in segments are flat or None."""
        gradient_of = dict(zip(segments.parameters, gradients))
        flat: list[list[Segment]] = []
        others: list[list[torch.Tensor]] = []
        are_all_flat = True
        for own, alone in zip(segments.of_group, segments.others):
            flat.append([])
            others.append([member for member in alone if gradient_of[member] is not None])
            for segment in own:
                parameters = segment.parameters
                found = map(gradient_of.get, parameters)
                present = [gradient for gradient in found if gradient is not None]
                is_whole = len(present) == len(parameters)
                if is_whole and segment.find_gradient(present):
                    flat[-1].append(segment)
                elif present:
                    are_all_flat = False
                    others[-1] += parameters
                    self._must_divide |= not is_whole
        self._last = (flat, others)
        position_of = {parameter: index for index, parameter in enumerate(segments.parameters)}
        self._positions = [
            (segment, position_of[segment.parameters[0]]) for segment in chain.from_iterable(flat)
        ]
        return are_all_flat


def run_step(
    step: Callable[[torch.optim.Optimizer], object],
    optimizer: torch.optim.Optimizer,
    params: Sequence[Sequence[torch.Tensor]],
    state: State,
) -> None:
    """Run the optimizer's own step on the given ``params`` of each param group."""
    groups, own_state = optimizer.param_groups, optimizer.state
    optimizer.param_groups = [{**group, "params": own} for group, own in zip(groups, params) if own]
    optimizer.state = state
    try:
        step(optimizer)
    finally:
        optimizer.param_groups, optimizer.state = groups, own_state


def _weakly(gradient: torch.Tensor | None) -> Callable[[], torch.Tensor | None]:
    return (lambda: None) if gradient is None else ref(gradient)
