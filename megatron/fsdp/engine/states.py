# SPDX-License-Identifier: Apache-2.0
"""The states of weights, gradients and units, and the table of allowed transitions between them."""

from __future__ import annotations

from enum import Enum, auto
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
# WAITING) and are reduced (-> REDUCING) into the gradient shard (-> EMPTY). Parameters show that at
# the end of the pass (ShownState HIDDEN -> FINAL). The optimizer then updates the main weights
# (MainState INSTALLED -> DUE). At level 3 the next all-gather sends the new values. Below, weights
# stay allocated: they are STALE until the next forward, or `start_param_sync`, gathers or casts
# them. Where level 0 needs no cast, they are always UNSHARDED.


class EngineState(Enum):
    """An Enum that hashes by identity: Enum.__hash__ is Python code and showed up in profiles."""

    __hash__ = object.__hash__


class WeightState(EngineState):
    """The contents of the compute parameters of a group."""

    # Their storage is freed; this rank has its own shard only.
    SHARDED = auto()
    # They have storage, but its values, or those of other ranks, are older than main weights.
    STALE = auto()
    # They have storage, and the all-gather that fills it is under way.
    UNSHARDING = auto()
    # They have storage and the values of the main weights: a forward may read them.
    UNSHARDED = auto()


class MainState(EngineState):
    """The way of new main weights into the compute shard, which all-gathers send."""

    # The compute shard has the values of the main weights, or each all-gather casts them.
    INSTALLED = auto()
    # Main weights are newer. The next all-gather casts them, and gathers over the outer axis too.
    DUE = auto()
    # Main weights are newer, but all-gathers send older values until somebody installs them.
    HELD = auto()


class GradientState(EngineState):
    """The local gradients of a group: this rank's sum since the last reduction."""

    EMPTY = auto()
    # Layers write gradients into the flat tensor themselves; autograd has not brought any yet.
    WRITING = auto()
    # A reduction is due, in which all ranks take part, also those without gradients.
    WAITING = auto()
    # Their reduction is under way; nothing may be added to them.
    REDUCING = auto()


class ShownState(EngineState):
    """The gradients that the sharded parameters of a model show."""

    # Nothing: no backward pass has ended since all gradients were dropped.
    NONE = auto()
    # Nothing, or what was there before the backward pass under way; there are gradients.
    HIDDEN = auto()
    # Reduced gradients; others may wait for their reduction.
    SHOWN = auto()
    # All gradients: no backward pass has ended since they were reduced.
    FINAL = auto()


class BackwardState(EngineState):
    """The progress of a unit in the backward pass."""

    # No gradient of this pass has reached the unit, or its part of the pass is over.
    IDLE = auto()
    # A call is in backward, or gradients arrive; the unit is done when every parameter has one.
    RUNNING = auto()
    # Gradients came from another pass than the one in which the unit came into use: the nested
    # backward of recomputation, a backward inside a forward, or one of several over a kept graph.
    # More may follow for the same parameters, so counting does not tell the end.
    RECOMPUTED = auto()


class CallState(EngineState):
    """The progress of one call of a unit in its backward."""

    # Its forward is under way or over; its backward has not begun, or is over.
    FORWARD = auto()
    # Its backward has begun. Gradients of its inputs, or the backward of an earlier call, end it.
    AWAITING_INPUTS = auto()
    # No gradients of inputs are outstanding. Those of parameters, or the end of the pass, end it.
    AWAITING_PARAMETERS = auto()


State = TypeVar("State", bound=EngineState)

# The states that may follow each state, other than itself.
_ALLOWED: dict[EngineState, tuple[EngineState, ...]] = {
    WeightState.SHARDED: (WeightState.UNSHARDING,),
    WeightState.STALE: (WeightState.UNSHARDING, WeightState.SHARDED),
    # SHARDED if the all-gather has failed.
    WeightState.UNSHARDING: (WeightState.UNSHARDED, WeightState.SHARDED),
    WeightState.UNSHARDED: (WeightState.SHARDED, WeightState.STALE),
    MainState.INSTALLED: (MainState.DUE, MainState.HELD),
    MainState.DUE: (MainState.INSTALLED, MainState.HELD),
    MainState.HELD: (MainState.DUE, MainState.INSTALLED),
    # EMPTY without a reduction if gradients are dropped.
    GradientState.EMPTY: (GradientState.WRITING, GradientState.WAITING),
    GradientState.WRITING: (GradientState.WAITING, GradientState.EMPTY),
    GradientState.WAITING: (GradientState.REDUCING, GradientState.EMPTY),
    GradientState.REDUCING: (GradientState.EMPTY,),
    ShownState.NONE: (ShownState.HIDDEN, ShownState.FINAL),
    ShownState.HIDDEN: (ShownState.SHOWN, ShownState.FINAL, ShownState.NONE),
    ShownState.SHOWN: (ShownState.FINAL, ShownState.HIDDEN, ShownState.NONE),
    ShownState.FINAL: (ShownState.SHOWN, ShownState.HIDDEN, ShownState.NONE),
    BackwardState.IDLE: (BackwardState.RUNNING, BackwardState.RECOMPUTED),
    BackwardState.RUNNING: (BackwardState.RECOMPUTED, BackwardState.IDLE),
    BackwardState.RECOMPUTED: (BackwardState.IDLE,),
    CallState.FORWARD: (CallState.AWAITING_INPUTS, CallState.AWAITING_PARAMETERS),
    CallState.AWAITING_INPUTS: (CallState.AWAITING_PARAMETERS, CallState.FORWARD),
    CallState.AWAITING_PARAMETERS: (CallState.FORWARD,),
}


def change_state(owner: object, state: State, new_state: State) -> State:
    """Return ``new_state`` if it may follow ``state``; ``str(owner)`` is in the error's message."""
    if new_state is not state and new_state not in _ALLOWED[state]:
        raise RuntimeError(
            f"{owner} cannot change from {state.name} to {new_state.name}: it may become"
            f" {' or '.join(allowed.name for allowed in _ALLOWED[state])}"
        )
    return new_state


class StateOwner(Generic[State]):
    """A group's gradients, a unit or a call, whose state changes as the table allows."""

    state: State

    def change_state(self, state: State) -> None:
        """Go on to ``state``."""
        self.state = change_state(self, self.state, state)
