# SPDX-License-Identifier: Apache-2.0
"""The states of weights, gradients, units and calls, and which ones may follow each of them."""

from __future__ import annotations

from enum import Enum, unique
from typing import Generic, TypeVar

# [Note: the life of a unit] Take a transformer layer at ZeRO level 3, trained for one step.
#
#     what happens                          its groups' WeightState          its BackwardState
#     ------------------------------------  -------------------------------  -----------------
#     the model is sharded                  SHARDED                          IDLE
#     the unit before it computes: prefetch SHARDED -> UNSHARDING            IDLE
#     its forward begins                    UNSHARDING -> UNSHARDED          IDLE
#     its forward ends                      UNSHARDED -> SHARDED             IDLE
#     the unit above is in backward         SHARDED -> UNSHARDING            IDLE
#     the gradient of its output arrives    UNSHARDING -> UNSHARDED          IDLE -> RUNNING
#     its parameters' gradients arrive      UNSHARDED                        RUNNING
#     the gradients of its inputs arrive    UNSHARDED -> SHARDED             RUNNING -> IDLE
#
# In the last line, the local gradients move into the group's flat buffer (GradientState EMPTY ->
# WAITING) and are reduced (-> REDUCING) into the gradient shard (-> EMPTY). Parameters show the
# shard at the end of the pass (ShownState HIDDEN -> FINAL). The optimizer then updates the main
# weights (MainState INSTALLED -> DUE). At level 3 the next all-gather sends the new values. Below,
# weights stay allocated: they are STALE until the next forward, or `start_param_sync`, gathers or
# casts them. Where level 0 needs no cast, they are always UNSHARDED.


class EngineState(Enum):
    """A state; its value names the states that may follow it. It may always follow itself.

    Subclasses are ``unique``: states with equal values would be one state.
    """

    __hash__ = object.__hash__  # Enum's is Python code and showed up in profiles

    def __init__(self, *following: str) -> None:
        self.following = following


@unique
class WeightState(EngineState):
    """The contents of the compute parameters of a group."""

    SHARDED = "UNSHARDING"
    """Their storage is freed; this rank has its own shard only."""
    STALE = "UNSHARDING", "SHARDED"
    """They have storage, but its values, or those of other ranks, are older than main weights."""
    UNSHARDING = "UNSHARDED", "SHARDED"
    """The all-gather that fills their storage is under way; SHARDED if it has failed."""
    UNSHARDED = "SHARDED", "STALE"
    """They have storage and the values of the main weights: a forward may read them."""


@unique
class MainState(EngineState):
    """The progress of new main weights into the compute shard, which all-gathers send."""

    INSTALLED = "DUE", "HELD"
    """The compute shard has the values of the main weights, or each all-gather casts them."""
    DUE = "INSTALLED", "HELD"
    """Main weights are newer: the next all-gather casts them, and gathers over the outer axis."""
    HELD = "DUE", "INSTALLED"
    """Main weights are newer, but all-gathers send older values until somebody installs them."""


@unique
class GradientState(EngineState):
    """The local gradients of a group: this rank's sum since the last reduction."""

    EMPTY = "WRITING", "WAITING"
    """No gradients since then."""
    WRITING = "WAITING", "EMPTY"
    """Layers write gradients into the flat tensor themselves; autograd has not reported any yet."""
    WAITING = "REDUCING", "EMPTY"
    """A reduction is due, for ranks without gradients too; EMPTY if gradients are dropped."""
    REDUCING = "EMPTY"
    """Their reduction is under way; nothing may be added to them."""


@unique
class ShownState(EngineState):
    """The gradients that the sharded parameters of a model show."""

    NONE = "HIDDEN", "FINAL"
    """Nothing: no backward pass has ended since all gradients were dropped."""
    HIDDEN = "SHOWN", "FINAL", "NONE"
    """A backward pass has begun since the last `attach`; the parameters still show what they showed
    before it, or nothing.
    """
    SHOWN = "FINAL", "HIDDEN", "NONE"
    """Reduced gradients; others may wait for their reduction."""
    FINAL = "SHOWN", "HIDDEN", "NONE"
    """All gradients: no backward pass has ended since they were reduced."""


@unique
class BackwardState(EngineState):
    """The progress of a unit in the backward pass."""

    IDLE = "RUNNING", "RECOMPUTED"
    """No gradient of this pass has reached the unit, or its part of the pass is over."""
    RUNNING = "RECOMPUTED", "IDLE"
    """A call is in backward, or gradients arrive; the unit is done when every parameter has one."""
    RECOMPUTED = "IDLE"
    """Gradients came from another pass than the one in which the unit came into use: the nested
    backward of recomputation, a backward inside a forward, or one of several over a kept graph.
    More may follow for the same parameters, so counting them does not show the end.
    """


@unique
class CallState(EngineState):
    """The progress of one call of a unit in its backward."""

    IDLE = "AWAITING_INPUTS", "AWAITING_PARAMETERS"
    """No backward of this call is under way."""
    AWAITING_INPUTS = "AWAITING_PARAMETERS", "IDLE"
    """Its backward has begun; gradients of inputs, or the backward of an earlier call, end it."""
    AWAITING_PARAMETERS = "IDLE"
    """Gradients of inputs are complete; those of parameters, or the end of the pass, end it."""


State = TypeVar("State", bound=EngineState)


def change_state(
    owner: object,
    state: State,
    new_state: State,
) -> State:
    """Return ``new_state``.

    Args:
        owner: the object whose state changes; its ``str`` is in the error's message.
        state: its state.
        new_state: the state that it changes to.

    Raises:
        RuntimeError: if ``new_state`` may not follow ``state``.
    """
    # `name` is a property of Python, and units change their states often.
    if new_state is not state and new_state._name_ not in state.following:
        raise RuntimeError(
            f"{owner} cannot change from {state.name} to {new_state.name}: it may become"
            f" {' or '.join(state.following)}"
        )
    return new_state


class StateOwner(Generic[State]):
    """A group, a unit, a call, or gradients, whose state changes as the table allows."""

    state: State

    def change_state(self, state: State) -> None:
        """Change to ``state``; raise ``RuntimeError`` if it may not follow the current one."""
        self.state = change_state(self, self.state, state)
