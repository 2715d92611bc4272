# SPDX-License-Identifier: Apache-2.0
"""States change only to those that may follow them."""

from typing import Any

import pytest
import torch
from torch import nn

from megatron.fsdp.engine.states import (
    BackwardState,
    CallState,
    EngineState,
    WeightState,
    change_state,
)
from megatron.fsdp.engine.unit import Unit, UnitCall


@pytest.mark.parametrize("states", EngineState.__subclasses__())
def test_every_state_can_be_left_and_reached(states: type[EngineState]) -> None:
    assert len(states) == len(states.__members__)  # equal values would be one state

    def may_follow(state: Any, new_state: Any) -> bool:
        try:
            return change_state("it", state, new_state) is new_state
        except RuntimeError:
            return False

    for state in states:
        assert set(state.following) <= set(states.__members__) - {state.name}
        others = [other for other in states if other is not state]
        assert any(may_follow(state, other) for other in others)
        assert any(may_follow(other, state) for other in others)
        assert may_follow(state, state)


def test_a_wrong_change_names_the_owner_and_both_states() -> None:
    with pytest.raises(RuntimeError, match=r"'layers\.3' cannot change from SHARDED to UNSHARDED"):
        change_state("unit 'layers.3'", WeightState.SHARDED, WeightState.UNSHARDED)


def test_a_unit_follows_its_calls_through_a_backward_pass() -> None:
    layer = nn.Linear(2, 2)
    unit = Unit("layer", layer)
    first, second = UnitCall(unit, layer, []), UnitCall(unit, layer, [])
    first.num_input_hooks = 1
    unit.begin_backward(first)
    unit.begin_backward(second)
    assert unit.state is BackwardState.RUNNING and unit.awaits_inputs
    unit.end_backward(first)
    assert not unit.awaits_inputs and unit.calls_in_backward
    unit.add_grad(nn.Parameter(torch.zeros(1)))
    assert unit.arrived
    unit.reset_backward()
    assert (unit.state, second.state) == (BackwardState.IDLE, CallState.IDLE)
    assert not unit.arrived and not unit.is_in_backward


def test_gradients_of_a_nested_backward_do_not_count() -> None:
    unit = Unit("layer", nn.Linear(2, 2))
    unit.users["a call of another pass"] = 7
    unit.add_grad(nn.Parameter(torch.zeros(1)))
    assert unit.state is BackwardState.RECOMPUTED and not unit.has_all_grads
