# SPDX-License-Identifier: Apache-2.0
"""A unit: parameters that are unsharded and resharded together, and the calls that use them."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from itertools import count

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron.fsdp.engine.buffer import FlatBuffer
from megatron.fsdp.engine.device import current_pass
from megatron.fsdp.engine.param_group import ParamGroup, unshard_groups
from megatron.fsdp.engine.states import BackwardState, CallState, StateOwner, WeightState

# The number that `current_pass` returns outside of backward passes.
NO_PASS = -1

# User of a unit's weights: the graph that autograd records of a backward (create_graph=True).
GRAPH = "graph"
# Another user: operations that were recorded in a forward, to run until the next backward ends.
TRACE = "trace"

KEPT_ASIDE = (
    "%s: gradients reach its parameters, but none a result of its forward, so its weights are not"
    " gathered. A tensor that forward keeps elsewhere (on the module, in a list, in an object that"
    " is no pytree) is in the loss: return it from the forward of the unit"
)

_clock = count()


class UnitCall(StateOwner[CallState]):
    """One call of a unit's module, from the beginning of its forward to the end of its backward.

    Args:
        unit: the unit that is called.
        module: one of its modules. None: the call is a method of no unit's module.
        borrowed: other units whose parameters the call uses; those that it reads are appended.
    """

    def __init__(
        self,
        unit: Unit,
        module: nn.Module | None,
        borrowed: list[Unit],
    ):
        self.unit = unit
        self.module = module
        self.borrowed = borrowed
        self.state = CallState.IDLE
        # Positions of the begin and the end of the forward among those of all calls.
        self.began = self.ended = next(_clock)
        # Inputs that require gradients, with their versions, by id; empty after the forward.
        self.inputs: dict[int, tuple[torch.Tensor, int]] = {}
        self._num_moves = 0  # moves of the weights that the forward used, when it ended
        self.num_input_hooks = 0  # hooks on inputs that get gradients; several may share one hook
        self.num_pending_inputs = 0  # input hooks that this pass has not called yet
        self.input_hooks: list[RemovableHandle] = []
        # Gradients of leaf inputs may arrive before those of parameters on another path.
        self.has_leaf_inputs = False

    def __str__(self) -> str:
        return f"a call of {self.unit}"

    @property
    def used_units(self) -> list[Unit]:
        """The call's own unit and the units that it borrows."""
        return [self.unit, *self.borrowed]

    def note_input(self, tensor: torch.Tensor) -> None:
        """Note an input, and the tensor that it is a view of."""
        self.inputs[id(tensor)] = (tensor, tensor._version)
        base = tensor._base
        if base is not None:
            self.inputs[id(base)] = (base, base._version)

    def is_unchanged_input(self, tensor: torch.Tensor) -> bool:
        """Return True for an input that the forward returns: it needs no weights in backward."""
        if id(tensor) not in self.inputs:
            return False
        _, version = self.inputs[id(tensor)]
        return version == tensor._version

    def end_forward(self) -> None:
        """Note the end of a forward that has a backward."""
        self.ended = next(_clock)
        self._num_moves = self._count_moves()

    def check_addresses(self) -> None:
        """Raise ``RuntimeError`` if weights have left the addresses that the graph refers to."""
        if self._num_moves != self._count_moves():
            raise RuntimeError(
                f"{self.unit}: its forward came before an all-gather that failed, or the step that"
                " assigned memory slots, its backward comes after, and the graph refers to the old"
                " addresses. Run the backward before that step, or train without slots"
            )

    def _count_moves(self) -> int:
        num_moves = 0
        for unit in self.used_units:
            for group in unit.groups:
                num_moves += group.compute.num_moves
        return num_moves


class Unit(StateOwner[BackwardState]):
    """Parameters that are unsharded and resharded together.

    They are those of a module, or ones that several units share; these have no module.

    Args:
        name: path of the module in the model; "" for the root.
        module: the module. None: several units share the parameters.
        is_automatic: the user did not name the module as a unit.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module | None,
        is_automatic: bool = False,
    ):
        self.name = name
        self.shown_name = name or "root"  # name in traces
        self.module = module
        # The modules whose calls use the unit: its own, and small ones inside that were merged.
        self.modules = [] if module is None else [module]
        self.is_automatic = is_automatic
        self.casts_inputs = not is_automatic  # if the precision policy casts at all
        self.groups: list[ParamGroup] = []
        self.shared: list[Unit] = []  # units of parameters that this one shares with others
        self.state = BackwardState.IDLE
        # Calls that use the weights, each with the number of the backward pass in which it began to
        # use them, or NO_PASS.
        self.users: dict[Hashable, int] = {}
        # Trainable groups with parameters that are not frozen now.
        self.trained_groups: list[ParamGroup] = []
        self._num_trained = 0
        self._has_frozen = False
        self.calls_in_backward: list[UnitCall] = []  # calls whose backward is not known to be over
        self.arrived: set[int] = set()  # ids of parameters with gradients not yet accumulated

    def __str__(self) -> str:
        return f"unit {self.name!r}"

    @cached_property
    def trainable_groups(self) -> list[ParamGroup]:
        """The groups that have gradients; the groups must be complete when this is first read."""
        return [group for group in self.groups if group.requires_grad]

    def find_trained(self) -> None:
        """Find the groups and count the parameters that are not frozen now."""
        # Users freeze parameters between steps, so `requires_grad` is read again.
        self.trained_groups = []
        self._num_trained = 0
        num_parameters = 0
        for group in self.groups:
            num_parameters += len(group.parameters)
            num_trained = 0
            if group.requires_grad:
                num_trained = sum(parameter.requires_grad for parameter in group.parameters)
            if num_trained:
                self.trained_groups.append(group)
                self._num_trained += num_trained
        self._has_frozen = self._num_trained < num_parameters

    # ---- weights

    def unshard(self) -> None:
        """Start the all-gathers of all groups that are not unsharded yet."""
        unshard_groups(self.groups)

    def wait_for_unshard(self) -> None:
        """Make compute wait for the all-gathers that have started."""
        for group in self.groups:
            group.wait_for_unshard()

    def reshard(self) -> None:
        """Free the weights of the groups that are sharded at level 3."""
        for group in self.groups:
            group.reshard()

    @property
    def blockers(self) -> set[FlatBuffer]:
        """The buffers of other units that occupy the memory of this one's weights."""
        blockers = set()
        for group in self.groups:
            for buffer in group.buffers:
                blocker = buffer.blocker
                if blocker is not None:
                    blockers.add(blocker)
        return blockers

    @property
    def is_unsharded(self) -> bool:
        """True if the compute parameters have the values of the main weights."""
        return all(group.state is WeightState.UNSHARDED for group in self.groups)

    # ---- backward

    def begin_backward(self, call: UnitCall) -> None:
        """Note that the backward of ``call``, a call of this unit, has begun."""
        call.num_pending_inputs = call.num_input_hooks
        if call.num_input_hooks:
            call.change_state(CallState.AWAITING_INPUTS)
        else:
            call.change_state(CallState.AWAITING_PARAMETERS)
        self.calls_in_backward.append(call)
        if self.state is BackwardState.IDLE:
            self.change_state(BackwardState.RUNNING)

    def end_backward(self, call: UnitCall) -> None:
        """Note that the gradients of the inputs of ``call`` are complete."""
        # Those of leaf inputs may arrive before those of parameters.
        if call.has_leaf_inputs and self._num_trained:
            call.change_state(CallState.AWAITING_PARAMETERS)
        else:
            call.change_state(CallState.IDLE)
            self.calls_in_backward.remove(call)

    def add_grad(self, parameter: nn.Parameter) -> None:
        """Note that autograd has accumulated the gradient of a compute parameter."""
        self.arrived.add(id(parameter))
        # Recomputation runs a nested backward inside the pass in which the unit was unsharded, and
        # the outer pass may use the same parameter again.
        number = current_pass()
        for since in self.users.values():
            if since != number:
                self.change_state(BackwardState.RECOMPUTED)
                return
        if self.state is BackwardState.IDLE:
            if not all(group.is_readable for group in self.groups):
                raise RuntimeError(KEPT_ASIDE % self)
            self.change_state(BackwardState.RUNNING)

    @property
    def has_all_grads(self) -> bool:
        """True if every parameter that is trained has its gradient; never after recomputation."""
        # False if all parameters are frozen (only input gradients show the end), and while another
        # unit's call uses frozen parameters of this unit.
        if self._num_trained == 0 or len(self.arrived) != self._num_trained:
            return False
        is_lent = self._has_frozen and any(_borrows(user, self) for user in self.users)
        return self.state is not BackwardState.RECOMPUTED and not is_lent

    @property
    def awaits_inputs(self) -> bool:
        """True if gradients of some call's inputs are outstanding."""
        return any(call.state is CallState.AWAITING_INPUTS for call in self.calls_in_backward)

    @property
    def is_in_backward(self) -> bool:
        """True if the backward pass under way has reached the unit and has not finished it."""
        if self.state is not BackwardState.IDLE:
            return True
        return any(since != NO_PASS for since in self.users.values())

    def reset_backward(self, is_over: bool = True) -> None:
        """Return to IDLE and drop the users that began in a backward pass.

        Args:
            is_over: the pass is over. Otherwise calls of other units, whose backward may contain
                that of this one, still use it unless all of its gradients have arrived.
        """
        keeps_borrowers = not (is_over or self.has_all_grads)
        self.arrived.clear()
        for call in self.calls_in_backward:
            call.change_state(CallState.IDLE)
        self.calls_in_backward.clear()
        # A forward that contains a backward continues to use the unit.
        for user, since in list(self.users.items()):
            if since != NO_PASS and not (keeps_borrowers and _borrows(user, self)):
                del self.users[user]
        self.change_state(BackwardState.IDLE)


def _borrows(user: Hashable, unit: Unit) -> bool:
    # Other users are the graph of a backward, and calls of the unit itself.
    return isinstance(user, UnitCall) and user.unit is not unit
