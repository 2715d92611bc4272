# SPDX-License-Identifier: Apache-2.0
"""The life cycle of gradients between the end of a backward pass and the optimizer's step.

[Note: the life cycle of gradients]
    backward ends     the schedule has started to reduce some groups; if every microbatch is
                      synchronised, the rest of the cycle follows at once
    start             the reduction of all accumulated gradients starts
    wait              the results of all reductions are in the gradient shards
    attach            the shards are put on ``param.grad``, as DTensors
    clear             all gradients are dropped (``zero_grad``), and the storage of the shards is
                      freed until the first reduction of the next backward, or left to the user
                      who has kept gradients
A plain ``optimizer.zero_grad()`` of torch clears ``param.grad`` and nothing else. The next backward
pass notices that, and clears the gradient shards too.

Attaching and clearing set an attribute of every parameter. What is done for every parameter in
every step is a ``map`` over lists that are made once: it runs in C, without a call of Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice, repeat
from operator import attrgetter, is_, is_not
from sys import getrefcount

import torch
import torch.distributed as dist

from megatron.fsdp.agreement import FreezingAgreement
from megatron.fsdp.dtensor.gradient import GradientFamily, ShardedGradient
from megatron.fsdp.dtensor.sharded_param import ShardedParam
from megatron.fsdp.engine import device as memory
from megatron.fsdp.engine import observe
from megatron.fsdp.engine.buffer import shard_view
from megatron.fsdp.engine.collectives import all_reduce_over
from megatron.fsdp.engine.microbatches import Microbatches
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.schedule import Schedule
from megatron.fsdp.engine.trainability import Trainability

_requires_grad = attrgetter("requires_grad")
_local_tensor = attrgetter("_local_tensor")


class GradientError(RuntimeError):
    """A gradient that is NaN or Inf; the message names parameters and ranks."""


class GroupHandover:
    """The gradients of a group of trainable parameters, as the parameters show them.

    Args:
        sharded_params: the parameters of the group.
        attribute: the attribute of the parameters that shows the gradients.
        family: all gradients of the model.

    Attributes:
        attached: the gradients that the parameters have been given.
        kept: indices of frozen parameters whose gradients count, since they came before.
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
        self._flat: torch.Tensor | None = None
        self._gradients: list[ShardedGradient] = []
        self._references: list[int] = []  # to the gradients, by the engine itself
        self.kept: set[int] = set()
        # The number of backward passes that had ended when gradients were cleared, of all
        # parameters and of single ones, or when those were thawed.
        self._begin = 0
        self._begins: dict[int, int] = {}

    def forget(self, num_passes: int) -> None:
        """Note that all gradients were cleared, when so many backward passes had ended."""
        self._begin = num_passes
        if self._begins or self.kept:
            self._begins.clear()
            self.kept.clear()

    def forget_one(self, index: int, num_passes: int) -> None:
        """Note that the gradient of one parameter was cleared."""
        self._begins[index] = num_passes
        self.kept.discard(index)

    def note_change(self, index: int, is_trained: bool, num_passes: int) -> None:
        """Note that a parameter was frozen or thawed, when so many backward passes had ended."""
        if is_trained:
            if index not in self.kept:
                self._begins[index] = num_passes
            self.kept.discard(index)
        elif num_passes > self._begins.get(index, self._begin):
            self.kept.add(index)

    def attach(self, flat: torch.Tensor, are_used: Sequence[bool] | None = None) -> None:
        """Show the gradients in ``flat``, the gradient shard.

        Frozen parameters show none, unless they were trained earlier in the step.

        Args:
            flat: the gradient shard.
            are_used: for each parameter, False to show no gradient. None: all show theirs.
        """
        if flat is not self._flat:  # it is the same tensor in every step
            self._flat = flat
            self._gradients = [each.gradient(flat, self._family) for each in self.sharded_params]
            self._references = self._count_references()
        gradients: Sequence[ShardedGradient | None] = self._gradients
        self.attached = self._gradients
        with torch._C.DisableTorchFunctionSubclass():
            if not all(map(_requires_grad, self.parameters)):
                gradients = [
                    gradient if parameter.requires_grad or index in self.kept else None
                    for index, (gradient, parameter) in enumerate(
                        zip(self._gradients, self.parameters)
                    )
                ]
            if are_used is not None:
                gradients = [each if used else None for each, used in zip(gradients, are_used)]
            if gradients is not self._gradients:
                self.attached = [each for each in gradients if each is not None]
            _set_all(self.parameters, self._attribute, gradients)

    def detach(self) -> None:
        """Show no gradients."""
        self.attached = []
        with torch._C.DisableTorchFunctionSubclass():
            _set_all(self.parameters, self._attribute, repeat(None))

    def free(self) -> None:
        """Free the storage of the gradient shard, or leave it to the user who has kept gradients.

        The sum is empty, and no parameter shows a gradient. Addresses that are held do not change.
        """
        if self._flat is None or self.group.gradients.holds_addresses:
            return
        if self.are_kept:
            self.leave()
            return
        if self._flat.untyped_storage().nbytes():
            memory.free(self._flat)
            self._record_release(self._flat)

    def leave(self) -> None:
        """Leave the gradient shard to the user: gradients that come later are in another one."""
        if self._flat is not None:
            self._record_release(self._flat)
        self.group.gradients.forget_reduced(are_kept=True)
        self._flat, self._gradients, self._references = None, [], []

    def _record_release(self, flat: torch.Tensor) -> None:
        with observe.work(self.group.unit_name, "free gradients"):
            observe.storage("release", flat)

    @property
    def are_kept(self) -> bool:
        """True if the user has kept a gradient that no parameter shows any more.

        Never where addresses are held: the user's gradients change with the next ones then.
        """
        if self._flat is None or self.group.gradients.holds_addresses:
            return False
        if not self._flat.untyped_storage().nbytes():
            return False
        storage = self._flat.untyped_storage()
        # Tensors over the storage: the shard, the local tensor of each gradient, and aliases in
        # which local gradients accumulate. `storage` itself counts too.
        num_own = len(self._gradients) + self.group.gradients.local.num_aliases(self._flat) + 2
        is_shared = torch._C._storage_Use_Count(storage._cdata) > num_own
        # NumPy arrays make storage fixed for good.
        if is_shared or not storage.resizable():
            return True
        return self._count_references() != self._references

    def _count_references(self) -> list[int]:
        """Count the references to every gradient and its local tensor."""
        gradients = self._gradients
        return [*map(getrefcount, gradients), *map(getrefcount, map(_local_tensor, gradients))]

    @property
    def is_finite(self) -> bool:
        """True if the sum of all gradients is neither NaN nor Inf."""
        return self._flat is None or bool(torch.isfinite(self._flat.sum(dtype=torch.float32)))

    def shown(self) -> list[torch.Tensor | None]:
        """Return the gradient that each parameter shows; the user may have replaced it."""
        with torch._C.DisableTorchFunctionSubclass():
            return list(map(getattr, self.parameters, repeat(self._attribute), repeat(None)))


class GradientSync:
    """The gradients of all parameters of a model; see [Note: the life cycle of gradients].

    Args:
        sharded_params: all parameters of the model.
        microbatches: tells which backward passes end with final gradients.
        use_decoupled_grad: put gradients on ``param.decoupled_grad``, in the dtype in which they
            accumulate, instead of on ``param.grad``, in the dtype of the parameter.
        report_nonfinite: called on every rank with the parameters whose gradient is NaN or Inf on
            this rank, which may be none. It raises if any rank has one. None: gradients are not
            checked.
        groups_of_use: groups that reach every rank of the model if they are used one after the
            other. A parameter shows no gradient if it got none on any of these ranks. None: it
            shows zeros.
    """

    def __init__(
        self,
        sharded_params: Iterable[ShardedParam],
        *,
        microbatches: Microbatches,
        use_decoupled_grad: bool,
        report_nonfinite: Callable[[list[ShardedParam]], None] | None,
        groups_of_use: Sequence[dist.ProcessGroup] | None = None,
    ):
        self._microbatches = microbatches
        self._use_decoupled_grad = use_decoupled_grad
        self._report_nonfinite = report_nonfinite
        self._groups_of_use = groups_of_use
        self._schedule: Schedule | None = None
        self._is_attached = False  # reduced gradients are on the parameters
        self._is_final = True  # no backward pass has ended since they were attached or cleared
        self._num_passes = 0  # that have ended since they were all cleared
        self._trainability: Trainability | None = None
        self._agreement: FreezingAgreement | None = None
        trainable: dict[ParamGroup, list[ShardedParam]] = {}
        for sharded_param in sharded_params:
            if sharded_param.group.requires_grad:
                trainable.setdefault(sharded_param.group, []).append(sharded_param)
        attribute = "decoupled_grad" if use_decoupled_grad else "grad"
        self._family = GradientFamily()
        self._handovers = [
            GroupHandover(members, attribute, self._family) for members in trainable.values()
        ]
        # By group, for each parameter: it has got a gradient on some rank since they were cleared.
        self._used: dict[GroupHandover, list[bool]] = {}
        self._forget_use()
        if groups_of_use is not None:
            for group in trainable:
                group.gradients.local.notes_users = True

    def connect(self, schedule: Schedule) -> None:
        """Set the schedule whose backward passes call this object."""
        self._schedule = schedule
        schedule.reduces_late = self._groups_of_use is not None

    def follow(self, trainability: Trainability, agreement: FreezingAgreement) -> None:
        """Let the gradients that a parameter has got before it is frozen count.

        Args:
            trainability: the parameters that are frozen.
            agreement: compares them with those of other ranks before a backward.
        """
        self._trainability = trainability
        self._agreement = agreement
        trainability.on_change = self._note_changes

    def _note_changes(self, parameters: dict[torch.Tensor, bool]) -> None:
        for handover in self._handovers:
            gradients = handover.shown()
            for index, parameter in enumerate(handover.parameters):
                if self._is_attached and gradients[index] is None:
                    handover.forget_one(index, self._num_passes)
                if parameter in parameters:
                    handover.note_change(index, parameters[parameter], self._num_passes)

    # ---- backward passes

    def begin_backward(self) -> None:
        """Clear the gradient shards of parameters whose gradient the user has cleared.

        The gradients of this pass would otherwise be added to them.
        """
        observe.begin_backward_pass()
        if self._agreement is not None:
            self._agreement.check()
        if not self._is_attached:
            return
        for handover in self._handovers:
            shown = handover.shown()
            if all(map(is_not, shown, repeat(None))):
                continue
            cleared = [index for index, gradient in enumerate(shown) if gradient is None]
            if len(cleared) == len(shown):
                handover.forget(self._num_passes)
                self._family.assign([])  # it refers to gradients too
                if handover.are_kept:
                    handover.leave()
                else:
                    handover.group.gradients.forget_reduced()
                continue
            for index in cleared:
                handover.forget_one(index, self._num_passes)
                clear_gradient_shard(handover.sharded_params[index])
        self._is_attached = False

    def end_backward(self) -> None:
        """Make gradients final if this backward pass is to be synchronised."""
        observe.end_backward_pass()
        self._is_final = False
        self._num_passes += 1
        self._microbatches.end_pass()
        if self._microbatches.sync_each and self._microbatches.is_last:
            self.finish()

    # ---- reductions

    def start(self) -> None:
        """Start to reduce all gradients that have accumulated."""
        if self._groups_of_use is not None:
            self._agree_on_use()
        self._own_schedule.reduce_pending()

    def wait(self) -> None:
        """Wait for the reductions that have started."""
        self._own_schedule.wait_for_reductions()

    def finish(self) -> None:
        """Reduce the remaining gradients, wait, and attach; do nothing if that is already done."""
        if self._is_final and self._is_attached:
            return
        self.start()
        self._is_final = True
        self.attach()

    def attach(self) -> None:
        """Wait for the reductions that have started, and put the results on the parameters.

        The local tensor is empty if this rank owns nothing of a parameter.

        Raises:
            GradientError: for a NaN or Inf gradient, if they are reported.
        """
        self.wait()
        if self._trainability is not None:
            self._trainability.follow()
        with torch.no_grad():
            shards = [
                handover.group.gradients.final(in_main_dtype=not self._use_decoupled_grad)
                for handover in self._handovers
            ]
        for handover, shard in zip(self._handovers, shards):
            handover.attach(shard, self._used.get(handover))
        self._family.assign(chain.from_iterable([each.attached for each in self._handovers]))
        self._is_attached = True
        if self._report_nonfinite is not None:
            self._report_nonfinite(self._find_nonfinite())

    def _agree_on_use(self) -> None:
        """Find the parameters that got a gradient on any rank, and the groups to be reduced.

        This is an all-reduce over the groups of use.
        """
        assert self._groups_of_use is not None
        flags: list[int] = []
        for handover in self._handovers:
            gradients = handover.group.gradients
            users = gradients.local.users
            flags.append(gradients.awaits_reduction)
            flags += [index in users for index in range(len(handover.parameters))]
        if not flags:
            return
        device = self._handovers[0].group.main_shard.device
        table = torch.tensor(flags, dtype=torch.uint8, device=device)
        all_reduce_over(table, self._groups_of_use, dist.ReduceOp.MAX)
        everywhere = iter(map(bool, table.tolist()))
        for handover in self._handovers:
            handover.group.gradients.awaits_reduction = next(everywhere)
            self._used[handover] = list(islice(everywhere, len(handover.parameters)))

    # ---- changes of gradients

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply every gradient, reduced or not yet, by a number or a 0-d tensor."""
        for handover in self._handovers:
            handover.group.gradients.scale(factor)

    def clear(self) -> None:
        """Drop all gradients: accumulated, reduced, and attached."""
        self._family.assign([])
        for handover in self._handovers:
            handover.group.gradients.clear()
            handover.detach()
            handover.free()
            handover.forget(0)
        self._num_passes = 0
        self._forget_use()
        self._is_attached = False
        self._is_final = True

    def clear_hidden(self) -> None:
        """Drop the final gradients of groups whose parameters show none any more."""
        for handover in self._handovers if self._is_attached else ():
            if all(map(is_, handover.shown(), repeat(None))):
                handover.group.gradients.forget_reduced()
                handover.detach()
                handover.forget(self._num_passes)
        self._family.assign(chain.from_iterable([each.attached for each in self._handovers]))
        for handover in self._handovers:
            if not handover.attached:
                handover.free()

    # ---- internals

    def _forget_use(self) -> None:
        if self._groups_of_use is not None:
            self._used = {each: [False] * len(each.parameters) for each in self._handovers}

    @property
    def _own_schedule(self) -> Schedule:
        assert self._schedule is not None, "connect() comes first"
        return self._schedule

    def _find_nonfinite(self) -> list[ShardedParam]:
        """Return the parameters whose gradient is NaN or Inf on this rank."""
        found = []
        for handover in self._handovers:
            # One check per group; its parameters are checked only if that finds something.
            if handover.is_finite:
                continue
            for sharded_param, gradient in zip(handover.sharded_params, handover.shown()):
                if gradient is not None and not torch.isfinite(_local_tensor(gradient)).all():
                    found.append(sharded_param)
        return found


def _set_all(
    parameters: Sequence[torch.Tensor], attribute: str, values: Iterable[torch.Tensor | None]
) -> None:
    """Set an attribute of every parameter."""
    deque(map(setattr, parameters, repeat(attribute), values), maxlen=0)


def clear_gradient_shard(sharded_param: ShardedParam) -> None:
    """Set this rank's shard of the reduced gradient of one parameter to zero."""
    group = sharded_param.group
    group.gradients.local.users.discard(sharded_param.index)
    shard_view(group.gradients.shard, group.layout, sharded_param.index, group.rank).zero_()
