# SPDX-License-Identifier: Apache-2.0
"""The life cycle of gradients between the end of a backward pass and the optimizer's step.

[Note: the life cycle of gradients]
    backward ends     the schedule has started to reduce some groups; if every microbatch is
                      synchronised, the rest of the cycle follows at once
    start             the reduction of all accumulated gradients starts
    wait              the results of all reductions are in the gradient shards
    attach            parameters show the shards, as DTensors on ``param.grad``
    clear             all gradients are dropped (``zero_grad``); the next ones are in other tensors
A plain ``optimizer.zero_grad()`` of torch clears ``param.grad`` and nothing else. The next backward
pass notices that, and drops the gradient shards too.

[Note: kept gradients] The DTensors that parameters show are the same in every step, since making
them costs the host 4 us for each parameter. Their local tensors are new in each step. So what code
gets from a gradient by ``to_local()``, ``detach()`` or ``clone()`` does not change after
``zero_grad``, as long as it is kept. A gradient that is kept itself has no values then (its local
tensor is on the meta device) until it shows those of the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress, count, islice, repeat
from operator import attrgetter, is_, is_not

import torch
import torch.distributed as dist

from megatron.fsdp.agreement import FreezingAgreement
from megatron.fsdp.dtensor.gradient import GradientFamily, ShardedGradient
from megatron.fsdp.dtensor.sharded_param import ShardedParam
from megatron.fsdp.engine import observe
from megatron.fsdp.engine.buffer import RunningSum, shard_view
from megatron.fsdp.engine.collectives import all_reduce_over
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.schedule import Schedule
from megatron.fsdp.engine.states import ShownState, change_state

_requires_grad = attrgetter("requires_grad")
_local_tensor = attrgetter("_local_tensor")


class GradientError(RuntimeError):
    """A gradient that is NaN or Inf; the message names parameters and ranks."""


class ShownGradients:
    """The gradients of a group of trainable parameters, as the parameters show them.

    Args:
        sharded_params: the parameters of the group.
        attribute: the attribute of the parameters that shows the gradients.
        family: all gradients of the model.

    Attributes:
        attached: the gradients that the parameters have been given.
        had_passes: indices of the parameters that were trained in a backward pass of this step, and
            show a gradient although they may be frozen now.
        used: for each parameter, whether it got a gradient on some rank; None: all count as used.
    """

    def __init__(
        self, sharded_params: Sequence[ShardedParam], attribute: str, family: GradientFamily
    ):
        self.sharded_params = sharded_params
        self.group: ParamGroup = sharded_params[0].group
        self.parameters: list[torch.Tensor] = [each.parameter for each in sharded_params]
        self._attribute = attribute
        self._family = family
        self.attached: list[ShardedGradient] = []
        self.had_passes: set[int] = set()
        self.used: list[bool] | None = None
        self._gradients: list[ShardedGradient] = []  # one for each parameter; made when first shown
        self._no_values: list[torch.Tensor] = []  # their local tensors while there are none
        self._flat: torch.Tensor | None = None  # the gradient shard that they are views of

    def attach(self, shard: RunningSum) -> None:
        """Show the gradients in the gradient shard.

        Frozen parameters show none, unless they were trained earlier in the step.
        """
        if self._flat is not shard.tensor():
            self._set_values(shard)
        shown: Sequence[ShardedGradient | None] = self._gradients
        with torch._C.DisableTorchFunctionSubclass():
            flags = list(map(_requires_grad, self.parameters))
            if not all(flags):
                for index in self.had_passes:
                    flags[index] = True
                shown = [each if flag else None for each, flag in zip(shown, flags)]
            if self.used is not None:
                shown = [each if used else None for each, used in zip(shown, self.used)]
            _set_all(self.parameters, self._attribute, shown)
        self.attached = self._gradients
        if shown is not self._gradients:
            self.attached = [each for each in shown if each is not None]

    def _set_values(self, shard: RunningSum) -> None:
        self._flat = flat = shard.tensor()
        if not self._gradients:
            self._gradients = [each.gradient(flat, self._family) for each in self.sharded_params]
            self._no_values = shard.places.within(torch.empty_like(flat, device="meta"))
        _set_all(self._gradients, "_local_tensor", shard.views())

    def drop(self) -> None:
        """Show no gradients; see [Note: kept gradients]."""
        self.attached = []
        self.had_passes.clear()
        with torch._C.DisableTorchFunctionSubclass():
            _set_all(self.parameters, self._attribute, repeat(None))
        if self._flat is not None and not self.group.gradients.holds_addresses:
            self._flat = None
            _set_all(self._gradients, "_local_tensor", self._no_values)

    def shown(self) -> list[torch.Tensor | None]:
        """Return the gradient that each parameter shows; the user may have replaced it."""
        with torch._C.DisableTorchFunctionSubclass():
            return list(map(getattr, self.parameters, repeat(self._attribute), repeat(None)))

    def note_pass(self) -> None:
        """Note the parameters that are trained in the backward pass that ends."""
        with torch._C.DisableTorchFunctionSubclass():
            self.had_passes.update(compress(count(), map(_requires_grad, self.parameters)))

    @property
    def is_finite(self) -> bool:
        """True if the sum of all gradients is neither NaN nor Inf."""
        return self._flat is None or bool(torch.isfinite(self._flat.sum(dtype=torch.float32)))


class GradientSync:
    """The gradients of all parameters of a model; see [Note: the life cycle of gradients].

    Args:
        sharded_params: all parameters of the model.
        schedule: the schedule, which starts reductions and waits for them.
        agreement: the check that all ranks freeze the same parameters.
        use_decoupled_grad: put gradients on ``param.decoupled_grad``, in the dtype in which they
            accumulate, instead of on ``param.grad``, in the dtype of the parameter.
        report_nonfinite: called on every rank with the parameters whose gradient is NaN or Inf on
            this rank, which may be none. It raises if any rank has one. None: gradients are not
            checked.
        groups_of_use: groups that reach every rank of the model if they are used one after the
            other. A parameter shows no gradient if it got none on any of these ranks. None: it
            shows zeros.
        after_pass: called when a backward pass has ended and its gradients are taken care of.
    """

    def __init__(
        self,
        sharded_params: Iterable[ShardedParam],
        schedule: Schedule,
        agreement: FreezingAgreement,
        *,
        use_decoupled_grad: bool,
        report_nonfinite: Callable[[list[ShardedParam]], None] | None,
        groups_of_use: Sequence[dist.ProcessGroup] | None,
        after_pass: Callable[[], None],
    ):
        self._schedule = schedule
        self._microbatches = schedule.microbatches
        self._agreement = agreement
        self._trainability = agreement.trainability
        self._use_decoupled_grad = use_decoupled_grad
        self._report_nonfinite = report_nonfinite
        self._groups_of_use = groups_of_use
        self._after_pass = after_pass
        self.state = ShownState.NONE
        self._num_changes = -1  # of what is frozen, at the end of the last pass
        trainable: dict[ParamGroup, list[ShardedParam]] = {}
        for sharded_param in sharded_params:
            if sharded_param.group.requires_grad:
                trainable.setdefault(sharded_param.group, []).append(sharded_param)
        attribute = "decoupled_grad" if use_decoupled_grad else "grad"
        self._family = GradientFamily()
        self._groups = [
            ShownGradients(members, attribute, self._family) for members in trainable.values()
        ]
        self._forget_use()

    def __str__(self) -> str:
        return "the gradients of the model"

    # ---- backward passes

    def begin_backward(self) -> None:
        """Drop the gradient shards of parameters whose gradient the user has cleared.

        The gradients of this pass would otherwise be added to them.
        """
        for observer in observe.observers:
            observer.begin_pass(observe.BACKWARD)
        self._agreement.check()
        if self.state not in (ShownState.SHOWN, ShownState.FINAL):
            return
        for shown in self._groups:
            gradients = shown.shown()
            if all(map(is_not, gradients, repeat(None))):
                continue
            if all(map(is_, gradients, repeat(None))):
                self._drop_reduced(shown)
                continue
            for index, gradient in enumerate(gradients):
                if gradient is None:
                    shown.had_passes.discard(index)
                    clear_gradient_shard(shown.sharded_params[index])
        self._change_state(ShownState.HIDDEN)

    def end_backward(self) -> None:
        """Make gradients final if this backward pass is to be synchronised."""
        for observer in observe.observers:
            observer.end_backward_pass()
        if self.state is ShownState.NONE:
            self._change_state(ShownState.HIDDEN)
        elif self.state is ShownState.FINAL:  # a hook of the pass has shown what there was
            self._change_state(ShownState.SHOWN)
        if self._num_changes != self._trainability.num_changes:
            self._num_changes = self._trainability.num_changes
            for shown in self._groups:
                shown.note_pass()
        self._microbatches.end_pass()
        if self._microbatches.sync_each and self._microbatches.is_last:
            self.finish()
        self._after_pass()

    # ---- reductions

    def start(self) -> None:
        """Start to reduce all gradients that have accumulated."""
        if self._groups_of_use is not None:
            self._agree_on_use(self._groups_of_use)
        self._schedule.reduce_pending()

    def wait(self) -> None:
        """Wait for the reductions that have started."""
        self._schedule.wait_for_reductions()

    def finish(self) -> None:
        """Reduce the remaining gradients, wait, and attach; do nothing if that is already done."""
        if self.state is not ShownState.FINAL:
            self.start()
            self._attach(ShownState.FINAL)

    def attach(self) -> None:
        """Wait for the reductions that have started, and put the results on the parameters.

        The local tensor is empty if this rank owns nothing of a parameter.

        Raises:
            GradientError: for a NaN or Inf gradient, if they are reported.
        """
        are_all = self.state in (ShownState.NONE, ShownState.FINAL)
        self._attach(ShownState.FINAL if are_all else ShownState.SHOWN)

    def _attach(self, state: ShownState) -> None:
        self.wait()
        self._trainability.follow()
        with torch.no_grad():
            for shown in self._groups:
                shown.attach(shown.group.gradients.final(not self._use_decoupled_grad))
        self._set_family()
        self._change_state(state)
        if self._report_nonfinite is not None:
            self._report_nonfinite(self._find_nonfinite())

    def _agree_on_use(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Find the parameters that got a gradient on any rank, and the groups to be reduced.

        This is an all-reduce over ``groups``.
        """
        flags: list[int] = []
        for shown in self._groups:
            gradients = shown.group.gradients
            flags.append(gradients.is_due)
            flags += [index in gradients.users for index in range(len(shown.parameters))]
        if not flags:
            return
        device = self._groups[0].group.main_shard.device
        table = torch.tensor(flags, dtype=torch.uint8, device=device)
        all_reduce_over(table, groups, dist.ReduceOp.MAX)
        everywhere = iter(map(bool, table.tolist()))
        for shown in self._groups:
            if next(everywhere):
                shown.group.gradients.await_reduction()
            shown.used = list(islice(everywhere, len(shown.parameters)))

    # ---- changes of gradients

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply every gradient, reduced or not yet, by a number or a 0-d tensor."""
        for shown in self._groups:
            shown.group.gradients.scale(factor)

    def clear(self) -> None:
        """Drop all gradients: accumulated, reduced, and attached."""
        self._family.assign([])
        for shown in self._groups:
            shown.group.gradients.drop()
            shown.drop()
        self._num_changes = -1
        self._forget_use()
        self._change_state(ShownState.NONE)

    def clear_hidden(self) -> None:
        """Drop the final gradients of groups whose parameters show none any more."""
        is_shown = self.state in (ShownState.SHOWN, ShownState.FINAL)
        for shown in self._groups if is_shown else ():
            if all(map(is_, shown.shown(), repeat(None))):
                self._drop_reduced(shown)
        self._set_family()

    def _drop_reduced(self, shown: ShownGradients) -> None:
        shown.group.gradients.drop_reduced()
        shown.drop()
        self._num_changes = -1
        self._family.assign([])  # it refers to gradients too

    # ---- internals

    def _set_family(self) -> None:
        self._family.assign(chain.from_iterable([shown.attached for shown in self._groups]))

    def _forget_use(self) -> None:
        if self._groups_of_use is not None:
            for shown in self._groups:
                shown.used = [False] * len(shown.parameters)

    def _find_nonfinite(self) -> list[ShardedParam]:
        """Return the parameters whose gradient is NaN or Inf on this rank."""
        found = []
        for shown in self._groups:
            # One check per group; its parameters are checked only if that finds something.
            if shown.is_finite:
                continue
            for sharded_param, gradient in zip(shown.sharded_params, shown.shown()):
                if gradient is not None and not torch.isfinite(_local_tensor(gradient)).all():
                    found.append(sharded_param)
        return found

    def _change_state(self, state: ShownState) -> None:
        self.state = change_state(self, self.state, state)


def _set_all(owners: Sequence[object], attribute: str, values: Iterable[object]) -> None:
    """Set an attribute of every owner; ``map`` runs in C, without a call of Python for each."""
    deque(map(setattr, owners, repeat(attribute), values), maxlen=0)


def clear_gradient_shard(sharded_param: ShardedParam) -> None:
    """Set this rank's shard of the reduced gradient of one parameter to zero."""
    group = sharded_param.group
    group.gradients.users.discard(sharded_param.index)
    shard_view(group.gradients.shard, group.layout, sharded_param.index, group.rank).zero_()
