# SPDX-License-Identifier: Apache-2.0
"""The update of torch's optimizers on flat segments, or parameter by parameter.

Parameters are updated one by one, as DTensors, if they cannot be in a segment: those whose gradient
or state the user has replaced by other tensors, and those whose state the first step must create.
So are the parameters of a segment some, but not all, of which have a gradient; before the next step
they are divided into other segments. See [Note: flat segments].
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch

from megatron.fsdp.optimizer.elementwise import OnLocalShards, OptimizerClass
from megatron.fsdp.optimizer.flat_segments import Segment, Segments, State
from megatron.fsdp.optimizer.optimizer_state import Slots

# Loops over all parameters, which many steps repeat, are left to `map`: they run in C.
_grad = attrgetter("grad")
_values = methodcaller("values")


Division = tuple[list[list[Segment]], list[list[torch.Tensor]]]
"""Segments to update, and other parameters to update one by one, of each param group."""


class FlatUpdate:
    """The update of one optimizer on flat segments.

    Args:
        kind: the class of torch whose ``step`` is used.
    """

    def __init__(self, kind: OptimizerClass):
        self._kind = kind
        self._step = inspect.unwrap(kind.step)  # without hooks, which run around all of this
        self._segments: Segments | None = None
        self._first_of: dict[Segment, int] = {}  # index of the parameter of `segment.first`
        self._must_divide = False  # the gradients have divided a segment in the last step
        # The gradients of the last step, if all were views of flat gradients or None, and what was
        # updated.
        self._gradient_ids: list[int] | None = None
        self._last: Division = ([], [])
        # What the segments were made from, to notice changes.
        self._settings: list[tuple[int, bool, bool]] = []
        self._parameters: list[torch.Tensor] = []
        self._slots: list[Slots] = []
        self._slot_values: list[Any] = []

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update all parameters of ``optimizer`` that have a gradient."""
        segments = self.prepare(optimizer)
        flat, others = self._divide(segments, _gradients_of(self._parameters))
        if any(flat):
            weights: list[list[torch.Tensor]] = []
            for own in flat:
                weights.append([segment.weight for segment in own])
            self._run(optimizer, weights, segments.state)
            for counters in segments.counters:
                counters.copy_to_members()
            for weight in chain.from_iterable(weights):
                weight.grad = None
        if any(others):
            with OnLocalShards():
                self._run(optimizer, others, optimizer.state)

    def prepare(self, optimizer: torch.optim.Optimizer) -> Segments:
        """Return the segments, made anew if parameters, settings or state have changed."""
        segments = self._segments
        if segments is None or not self._are_current(segments, optimizer):
            # Inference tensors would not tell whether somebody has written to them.
            with torch.inference_mode(False), torch.no_grad():
                segments = self._make_segments(optimizer)
        return segments

    def forget(self) -> None:
        """Let go of the state that the segments are over."""
        self._segments = None
        self._first_of, self._slots, self._slot_values = {}, [], []
        self._last = ([], [])

    def _run(
        self,
        optimizer: torch.optim.Optimizer,
        tensors: Sequence[Sequence[torch.Tensor]],
        state: State,
    ) -> None:
        """Run the optimizer's own step on the given tensors of each param group."""
        groups, own_state = optimizer.param_groups, optimizer.state
        optimizer.param_groups = [
            {**group, "params": own} for group, own in zip(groups, tensors) if own
        ]
        optimizer.state = state
        try:
            self._step(optimizer)
        finally:
            optimizer.param_groups, optimizer.state = groups, own_state

    # ---- gradients

    def _divide(self, segments: Segments, gradients: list[torch.Tensor | None]) -> Division:
        """Return what to update; the segments have their gradients.

        Args:
            segments: all segments.
            gradients: of ``self._parameters``.
        """
        ids = list(map(id, gradients))
        if self._gradient_ids is None or self._gradient_ids != ids:
            are_all_flat = self._divide_anew(segments, gradients)
            # The ids are enough: the model keeps its gradients, and shows them in every step.
            self._gradient_ids = ids if are_all_flat else None
        for segment in chain.from_iterable(self._last[0]):
            gradient = gradients[self._first_of[segment]]
            assert gradient is not None
            segment.take_gradient(gradient)
        return self._last

    def _divide_anew(self, segments: Segments, gradients: list[torch.Tensor | None]) -> bool:
        """Divide for gradients that are not those of the last step.

        Return True if all gradients in segments are views of flat gradients, or None.
        """
        gradient_of = dict(zip(self._parameters, gradients))
        flat: list[list[Segment]] = []
        others: list[list[torch.Tensor]] = []
        are_all_flat = True
        for own, alone in zip(segments.of_group, segments.others):
            flat.append([])
            others.append([each for each in alone if gradient_of[each] is not None])
            for segment in own:
                parameters = segment.parameters
                present = [each for each in map(gradient_of.get, parameters) if each is not None]
                if not present:
                    continue
                if len(present) == len(parameters) and segment.find_gradient(present):
                    flat[-1].append(segment)
                    continue
                are_all_flat = False
                others[-1] += parameters
                self._must_divide |= len(present) < len(parameters)
        self._last = (flat, others)
        return are_all_flat

    # ---- segments

    def _are_current(self, segments: Segments, optimizer: torch.optim.Optimizer) -> bool:
        if self._must_divide or any(counters.have_changed for counters in segments.counters):
            return False
        slots = optimizer.state.values()
        return (
            self._settings == _settings_of(optimizer)
            and _are_same(self._parameters, _parameters_of(optimizer))
            and _are_same(self._slots, slots)
            and _are_same(self._slot_values, chain.from_iterable(map(_values, slots)))
        )

    def _make_segments(self, optimizer: torch.optim.Optimizer) -> Segments:
        self._parameters = list(_parameters_of(optimizer))
        gradients = dict(zip(self._parameters, _gradients_of(self._parameters)))
        self._segments = Segments(
            self._kind, optimizer.param_groups, optimizer.state, gradients, self._segments
        )
        index_of = {parameter: index for index, parameter in enumerate(self._parameters)}
        self._first_of = {
            segment: index_of[segment.parameters[0]] for segment in self._segments.all()
        }
        self._must_divide = False
        self._gradient_ids = None
        self._settings = _settings_of(optimizer)
        slots = optimizer.state.values()
        self._slots = list(slots)
        self._slot_values = list(chain.from_iterable(map(_values, slots)))
        return self._segments


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return chain.from_iterable([group["params"] for group in optimizer.param_groups])


def _gradients_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_grad, parameters))


def _settings_of(optimizer: torch.optim.Optimizer) -> list[tuple[int, bool, bool]]:
    """Return the sizes and the settings of the param groups on which segments depend."""
    return [
        (len(group["params"]), bool(group.get("fused")), bool(group.get("momentum")))
        for group in optimizer.param_groups
    ]


def _are_same(known: Sequence[object], now: Iterable[object]) -> bool:
    """Return True if both have the same objects in the same order."""
    found = list(now)
    return len(known) == len(found) and all(map(is_, known, found))
