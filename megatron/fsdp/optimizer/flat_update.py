# SPDX-License-Identifier: Apache-2.0
"""The update of torch's optimizers on flat segments, or parameter by parameter."""

# Parameters are updated one by one, as DTensors, if the user has replaced their gradient or state,
# or if the first step must create their state. The same holds for a segment in which some
# parameters have no gradient; it is split before the next step. See [Note: flat segments].

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch.optim import Optimizer

from megatron.fsdp.dtensor.sharded_param import is_linked
from megatron.fsdp.engine.loops_in_c import WeakReferences, concatenated, present
from megatron.fsdp.optimizer.block_update import update_segments
from megatron.fsdp.optimizer.flat_segments import Segment, Segments, State
from megatron.fsdp.optimizer.optimizer_state import OptimizerClass, Params

# Segments to update, and other parameters to update one by one, of each param group.
Division = tuple[list[list[Segment]], list[list[torch.Tensor]]]
Gradients = list[torch.Tensor | None]  # of all parameters
OptimizerStep = Callable[[Optimizer], object]  # the `step` of a class, without hooks


class FlatUpdate:
    """The update of one optimizer on flat segments, with the ``step`` of a class of torch."""

    def __init__(self, kind: OptimizerClass):
        self._step = inspect.unwrap(kind.step)  # without hooks, which run around all of this
        self._segments: Segments | None = None
        self._must_divide = False  # the gradients have divided a segment in the last step
        # The gradients of the last step, if all were views of flat gradients or None. References
        # that are not weak would keep the storage of gradients in use.
        self._gradients: WeakReferences | None = None
        self._last: Division = ([], [])  # what the last step has updated
        # For each updated segment, the position of its first parameter in `Segments.parameters`.
        self._positions: list[tuple[Segment, int]] = []

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> None:
        """Update all parameters of ``optimizer`` that have a gradient."""
        segments = self.prepare(optimizer)
        gradients = segments.gradients()
        flat, others = self._divide(segments, gradients)
        if any(flat):

            def step_on(params: Params, state: State) -> None:
                run_step(self._step, optimizer, params, state)

            update_segments(
                step=step_on,
                flat=flat,
                state=segments.state,
                param_groups=optimizer.param_groups,
            )
            for counters in segments.counters:
                counters.copy_to_members()
            for segment in concatenated(flat):
                segment.weight.grad = None
        if any(others):
            step_on_parameters(self._step, optimizer, others)

    def prepare(self, optimizer: Optimizer) -> Segments:
        """Return the segments, which are built again if parameters, settings or state changed."""
        segments = self._segments
        if segments is None or self._must_divide or not segments.are_current(optimizer):
            self.forget()
            # Inference tensors have no version, which shows that somebody has written to them.
            with torch.inference_mode(False), torch.no_grad():
                self._segments = segments = Segments(optimizer)
        return segments

    def forget(self) -> None:
        """Drop the segments and all references to the state that they are views of."""
        self._segments = None
        self._must_divide = False
        self._gradients = None
        self._last = ([], [])
        self._positions = []

    def _divide(
        self,
        segments: Segments,
        gradients: Gradients,
    ) -> Division:
        """Return what to update, and give the segments their gradients."""
        if self._gradients is None or not self._gradients.are_to(gradients):
            self._gradients = None
            if self._divide_again(segments, gradients):
                self._gradients = WeakReferences(gradients)
        for segment, position in self._positions:
            gradient = gradients[position]
            assert gradient is not None
            segment.take_gradient(gradient)
        return self._last

    def _divide_again(
        self,
        segments: Segments,
        gradients: Gradients,
    ) -> bool:
        """Divide for new gradients; return True if all in segments are flat or None."""
        gradient_of = dict(zip(segments.parameters, gradients))
        position_of = {}
        for position, parameter in enumerate(segments.parameters):
            position_of[parameter] = position
        flat = []
        others = []
        self._positions = []
        are_all_flat = True
        for own_segments, alone in zip(segments.of_group, segments.others):
            own_flat = []
            own_others = []
            for parameter in alone:
                if gradient_of[parameter] is not None:
                    own_others.append(parameter)
            for segment in own_segments:
                parameters = segment.parameters
                own_gradients = present([gradient_of[parameter] for parameter in parameters])
                is_whole = len(own_gradients) == len(parameters)
                if is_whole and segment.find_gradient(own_gradients):
                    own_flat.append(segment)
                    position = position_of[parameters[0]]
                    self._positions.append((segment, position))
                elif own_gradients:
                    are_all_flat = False
                    own_others += parameters
                    self._must_divide |= not is_whole
            flat.append(own_flat)
            others.append(own_others)
        self._last = (flat, others)
        return are_all_flat


def step_on_parameters(
    step: OptimizerStep,
    optimizer: Optimizer,
    params: Params,
) -> None:
    """Run the optimizer's own step on parameters one by one, sharded ones before all others.

    Args:
        step: the ``step`` of the user's class, without hooks.
        optimizer: has the settings and the state.
        params: the parameters of each param group to update.
    """
    # torch's operations on several tensors take no mix of DTensors and plain parameters.
    sharded = []
    plain = []
    for group_params in params:
        group_sharded = []
        group_plain = []
        for parameter in group_params:
            if is_linked(parameter):
                group_sharded.append(parameter)
            else:
                group_plain.append(parameter)
        sharded.append(group_sharded)
        plain.append(group_plain)
    for selected in (sharded, plain):
        if any(selected):
            run_step(step, optimizer, selected, optimizer.state)


def run_step(
    step: OptimizerStep,
    optimizer: Optimizer,
    params: Params,
    state: State,
) -> None:
    """Run the optimizer's own step on the given ``params`` instead of its parameters.

    Args:
        step: the ``step`` of the user's class, without hooks.
        optimizer: has the settings; its groups and state are replaced while ``step`` runs.
        params: for each param group, the tensors to update, with their ``grad``; no group for an
            empty list.
        state: the state of these tensors, which ``step`` reads and changes.
    """
    groups = optimizer.param_groups
    own_state = optimizer.state
    optimizer.param_groups = []
    for group, group_params in zip(groups, params):
        if group_params:
            own_group = {**group, "params": group_params}
            optimizer.param_groups.append(own_group)
    optimizer.state = state
    try:
        step(optimizer)
    finally:
        optimizer.param_groups = groups
        optimizer.state = own_state
