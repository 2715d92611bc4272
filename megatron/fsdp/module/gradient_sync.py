# SPDX-License-Identifier: Apache-2.0
"""The life cycle of gradients between the end of a backward pass and the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress
from operator import and_
from typing import Any

import torch
import torch.distributed as dist

from megatron.fsdp.dtensor.process_link import ProcessLink
from megatron.fsdp.dtensor.sharded_gradient import GradientFamily, ShardedGradient
from megatron.fsdp.dtensor.sharded_param import ShardedParam
from megatron.fsdp.dtensor.uneven_dtensor import GRAD
from megatron.fsdp.engine import observe
from megatron.fsdp.engine.buffer import RunningSum, shard_view
from megatron.fsdp.engine.collectives import all_reduce_over
from megatron.fsdp.engine.loops_in_c import (
    indices_of_present,
    optional_attributes,
    set_all,
    set_each,
)
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.schedule import Schedule
from megatron.fsdp.engine.states import GradientState, ShownState, StateOwner
from megatron.fsdp.engine.tensor_parallel import local_tensor
from megatron.fsdp.module.agreement import FreezingAgreement
from megatron.fsdp.module.trainability import read_flags

# [Note: the life cycle of gradients]
#     backward ends   the schedule has started to reduce some groups; if every microbatch is
#                     synchronised, the rest of the cycle follows at once
#     start           the reduction of all accumulated gradients starts
#     wait            the results of all reductions are in the gradient shards
#     attach          parameters show the shards, as DTensors on `param.grad`
#     clear           all gradients are dropped (`zero_grad`); the next ones are in other tensors
# A plain `optimizer.zero_grad()` of torch clears `param.grad` and nothing else. The next backward
# pass notices that, and drops the gradient shards too.

# [Note: kept gradients] The DTensors that parameters show are the same in every step, since making
# them costs the host 4 us for each parameter. Their local tensors are new in each step, so the
# result of `to_local()`, `detach()` or `clone()` of a gradient does not change after `zero_grad`.
# A gradient that is kept itself has no values then (its local tensor is on the meta device) until
# it shows those of the next step.

# [Note: hooks of parameters] Like torch's, a hook gets the gradient of this pass, not its sum with
# those of earlier passes. Theirs is set aside for the pass and added again after the hooks.


class GradientError(RuntimeError):
    """A gradient that is NaN or Inf; the message names parameters and ranks."""


class ShownGradients:
    """The gradients of a group of trainable parameters, as the parameters show them.

    Args:
        sharded_params: the parameters, in the order of the group.
        attribute: attribute on which they show gradients: ``GRAD`` or "decoupled_grad".
        family: the gradients of the model, of which norms are computed together.
    """

    def __init__(
        self,
        sharded_params: Sequence[ShardedParam],
        attribute: str,
        family: GradientFamily,
    ):
        self.sharded_params = sharded_params
        self.group: ParamGroup = sharded_params[0].group
        self.parameters: list[torch.Tensor] = [sharded.parameter for sharded in sharded_params]
        self._attribute = attribute
        self._family = family
        self.attached: list[ShardedGradient] = []  # gradients that parameters show
        # Indices of the parameters that were trained in a backward pass of this step, and show a
        # gradient although they may be frozen now.
        self.had_passes: set[int] = set()
        # For each parameter, True if some rank has a gradient of it. None: all count as used.
        self.used: list[bool] | None = None
        self._gradients: list[ShardedGradient] = []  # one for each parameter; made when first shown
        self._no_values: list[torch.Tensor] = []  # local tensors of gradients without values
        self._flat: torch.Tensor | None = None  # the gradient shard that they are views of

    def attach(self, shard: RunningSum) -> None:
        """Show the gradients in the gradient shard."""
        flat = shard.tensor()
        if not self._gradients:
            for sharded_param in self.sharded_params:
                self._gradients.append(sharded_param.gradient(flat, self._family))
            no_values = torch.empty_like(flat, device="meta")
            self._no_values = shard.view_specs.views_of(no_values)
        if self._flat is not flat:
            self._flat = flat
            set_each(self._gradients, "_local_tensor", shard.views())
        flags = read_flags(self.parameters)
        if not all(flags):
            for index in self.had_passes:
                flags[index] = True
        if self.used is not None:
            flags = list(map(and_, flags, self.used))
        self.attached = list(compress(self._gradients, flags))  # in C, as other loops of a step
        shown: list[ShardedGradient | None] = [*self._gradients]
        if len(self.attached) < len(shown):
            for index, flag in enumerate(flags):
                if not flag:
                    shown[index] = None
        with torch._C.DisableTorchFunctionSubclass():
            set_each(self.parameters, self._attribute, shown)

    def drop(self) -> None:
        """Show no gradients; see [Note: kept gradients]."""
        self.attached = []
        self.had_passes.clear()
        with torch._C.DisableTorchFunctionSubclass():
            set_all(self.parameters, self._attribute, None)
        if self._flat is not None and not self.group.gradients.holds_addresses:
            self._flat = None
            set_each(self._gradients, "_local_tensor", self._no_values)

    def shown(self) -> list[torch.Tensor | None]:
        """Return the gradient that each parameter shows; the user may have replaced it."""
        with torch._C.DisableTorchFunctionSubclass():
            return optional_attributes(self.parameters, self._attribute)

    def sum(self) -> torch.Tensor:
        """Return the sum of the gradients, on the device of compute."""
        assert self._flat is not None
        total = self._flat.sum(dtype=torch.float32)
        return total.to(self.group.memory.device)

    def nonfinite(self) -> list[ShardedParam]:
        """Return the parameters whose gradient is NaN or Inf on this rank."""
        found = []
        for sharded_param, gradient in zip(self.sharded_params, self.shown()):
            if gradient is None:
                continue
            is_finite = torch.isfinite(local_tensor(gradient)).all()
            if not is_finite:
                found.append(sharded_param)
        return found


class GradientSync(StateOwner[ShownState]):
    """The gradients of all parameters of a model; see [Note: the life cycle of gradients].

    Args:
        sharded_params: all sharded parameters, those of a group in its order.
        schedule: the schedule that reduces gradients.
        agreement: checks that ranks freeze the same parameters.
        use_decoupled_grad: show gradients on ``param.decoupled_grad``, in the dtype in which they
            accumulate.
        report_nonfinite: called on every rank with the parameters whose gradient is NaN or Inf on
            this rank, which may be none. None: gradients are not checked.
        groups_of_use: groups that together reach every rank. A parameter shows no gradient if it
            got none on any of them. None: it shows zeros.
        after_pass: called when the gradients of a backward pass are complete.
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
        self._num_changes = -1  # changes of what is frozen, up to the end of the last pass
        trainable: dict[ParamGroup, list[ShardedParam]] = {}
        for sharded_param in sharded_params:
            group = sharded_param.group
            if group.requires_grad:
                trainable.setdefault(group, []).append(sharded_param)
                note_hook: Callable[[], None] = partial(self._note_hook, sharded_param)
                sharded_param.parameter.on_hook = ProcessLink(note_hook)
        self._attribute = GRAD
        if use_decoupled_grad:
            self._attribute = "decoupled_grad"
        # Parameters with hooks, each with the number of reductions when they were last called.
        self._hooked: dict[ShardedParam, int] = {}
        # Gradients that are set aside for a pass: see [Note: hooks of parameters].
        self._grads_before_pass: dict[ShardedParam, torch.Tensor] = {}
        self._family = GradientFamily()
        self._groups: list[ShownGradients] = []
        for members in trainable.values():
            shown = ShownGradients(members, self._attribute, self._family)
            self._groups.append(shown)
        self._forget_use()

    def __str__(self) -> str:
        return "the gradients of the model"

    @property
    def _hands_over(self) -> bool:
        """True if a backward pass ends with final gradients on the parameters."""
        return self._microbatches.sync_each and self._microbatches.is_last

    # ---- backward passes

    def begin_backward_pass(self) -> None:
        """Drop the gradient shards of parameters whose gradient the user has cleared."""
        # The gradients of this pass would otherwise be added to them.
        for observer in observe.observers:
            observer.begin_pass(observe.BACKWARD)
        self._trainability.sync_requires_grad()
        self._trainability.refuse_unfrozen()
        self._agreement.check()
        self._grads_before_pass.clear()  # those of a pass that has failed
        if self.state not in (ShownState.SHOWN, ShownState.FINAL):
            return
        for shown in self._groups:
            present = indices_of_present(shown.shown())
            num_parameters = len(shown.parameters)
            if len(present) == num_parameters:
                continue
            if not present:
                self._drop_reduced(shown)
                continue
            missing = set(range(num_parameters)).difference(present)
            for index in missing:
                shown.had_passes.discard(index)
                clear_gradient_shard(shown.sharded_params[index])
        if self._hooked and self.state is ShownState.FINAL:
            self._set_gradients_aside()
        self.change_state(ShownState.HIDDEN)

    def end_backward_pass(self) -> None:
        """Make gradients final if this backward pass is to be synchronised."""
        for observer in observe.observers:
            observer.end_backward_pass()
        if self.state is ShownState.NONE:
            self.change_state(ShownState.HIDDEN)
        elif self.state is ShownState.FINAL:  # a hook of the pass has shown what there was
            self.change_state(ShownState.SHOWN)
        if self._num_changes != self._trainability.num_changes:
            self._num_changes = self._trainability.num_changes
            for shown in self._groups:
                flags = read_flags(shown.parameters)
                trained = compress(range(len(flags)), flags)
                shown.had_passes.update(trained)
        self._microbatches.end_pass()
        if self._hands_over:
            self.finish()
        self._after_pass()

    # ---- reductions

    def start(self) -> None:
        """Start to reduce all gradients that have accumulated."""
        if self._groups_of_use is not None:
            self._agree_on_use(self._groups_of_use)
        self._schedule.reduce_pending()

    def finish(self) -> None:
        """Reduce the remaining gradients, wait, and attach; do nothing if that is already done."""
        if self.state is not ShownState.FINAL:
            self.start()
            self._attach(ShownState.FINAL)
            if self._hooked:
                self._call_hooks()

    def attach(self) -> None:
        """Wait for the reductions that have started, and put the results on the parameters."""
        state = ShownState.SHOWN
        if self.state in (ShownState.NONE, ShownState.FINAL):
            state = ShownState.FINAL
        self._attach(state)

    def _attach(self, state: ShownState) -> None:
        self._schedule.wait_for_reductions()
        self._trainability.sync_requires_grad()
        with torch.no_grad():
            for shown in self._groups:
                gradients = shown.group.gradients
                shard = gradients.final_sum(not self._use_decoupled_grad)
                shown.attach(shard)
        self._set_family()
        self.change_state(state)
        if self._report_nonfinite is not None:
            self._report_nonfinite(self._find_nonfinite())

    def _find_nonfinite(self) -> list[ShardedParam]:
        # Parameters are checked only where the sum of a group is not finite. The sums are read
        # together, since the host waits for the device each time that it reads.
        found: list[ShardedParam] = []
        if not self._groups:
            return found
        sums = torch.stack([shown.sum() for shown in self._groups])
        are_finite = sums.isfinite().tolist()
        for shown, is_finite in zip(self._groups, are_finite):
            if not is_finite:
                found += shown.nonfinite()
        return found

    def _agree_on_use(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Find the parameters that got a gradient on any rank, and the groups to be reduced."""
        flags: list[int] = []
        for shown in self._groups:
            gradients = shown.group.gradients
            flags.append(gradients.state is GradientState.WAITING)
            used = gradients.indices_with_grad
            flags += [index in used for index in range(len(shown.parameters))]
        if not flags:
            return
        device = self._groups[0].group.main_shard.device
        table = torch.tensor(flags, dtype=torch.uint8, device=device)
        all_reduce_over(table, groups, dist.ReduceOp.MAX)
        everywhere = table.bool().tolist()
        start = 0  # start of the flags of a group: that of its state, then those of parameters
        for shown in self._groups:
            stop = start + 1 + len(shown.parameters)
            if everywhere[start]:
                shown.group.gradients.change_state(GradientState.WAITING)
            shown.used = everywhere[start + 1 : stop]
            start = stop

    # ---- hooks of parameters

    def _note_hook(self, sharded_param: ShardedParam) -> None:
        if not self._microbatches.sync_each:
            raise NotImplementedError(
                f"{sharded_param.name}: hooks are called at the end of a backward that hands its"
                " gradients over. Without synchronisation of each microbatch none does"
                " (sync_model_each_microbatch=False): change parameter.grad before the step, or"
                " accumulate inside no_sync()"
            )
        gradients = sharded_param.group.gradients
        self._hooked.setdefault(sharded_param, gradients.num_reductions)

    def _set_gradients_aside(self) -> None:
        for sharded_param in self._hooked:
            parameter = sharded_param.parameter
            if not parameter._backward_hooks:
                continue
            if getattr(parameter, self._attribute, None) is None:
                continue
            if not self._hands_over:
                raise RuntimeError(
                    f"{sharded_param.name} has a hook and a gradient that was handed over, to which"
                    " a microbatch that does not synchronise would add: call zero_grad() first"
                )
            shard = gradient_shard(sharded_param)
            self._grads_before_pass[sharded_param] = shard.clone()
            shard.zero_()

    @torch.no_grad()
    def _call_hooks(self) -> None:
        """Call the hooks of the parameters that have got new gradients, and may be trained."""
        called: list[torch.Tensor] = []
        for sharded_param, number in list(self._hooked.items()):
            parameter = sharded_param.parameter
            gradient: Any = getattr(parameter, self._attribute, None)
            num_reductions = sharded_param.group.gradients.num_reductions
            self._hooked[sharded_param] = num_reductions
            if gradient is None:  # no rank has used the parameter
                continue
            if number != num_reductions and parameter.requires_grad:
                called.append(parameter)
                hooks = parameter._backward_hooks or {}
                for hook in list(hooks.values()):
                    result = hook(gradient)
                    if result is not None:
                        gradient.copy_(result)
            if sharded_param in self._grads_before_pass:
                gradient._local_tensor.add_(self._grads_before_pass.pop(sharded_param))
        for owner in called:
            hooks = owner._post_accumulate_grad_hooks or {}
            for hook in list(hooks.values()):
                hook(owner)

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
        self.change_state(ShownState.NONE)

    def clear_hidden(self) -> None:
        """Drop the final gradients of groups whose parameters show none any more."""
        if self.state in (ShownState.SHOWN, ShownState.FINAL):
            for shown in self._groups:
                if not indices_of_present(shown.shown()):
                    self._drop_reduced(shown)
        self._set_family()

    def _drop_reduced(self, shown: ShownGradients) -> None:
        shown.group.gradients.drop_reduced()
        shown.drop()
        self._num_changes = -1
        self._family.assign([])  # it refers to gradients too

    def _set_family(self) -> None:
        attached: list[ShardedGradient] = []
        for shown in self._groups:
            attached += shown.attached
        self._family.assign(attached)

    def _forget_use(self) -> None:
        if self._groups_of_use is None:
            return
        for shown in self._groups:
            shown.used = [False] * len(shown.parameters)


def gradient_shard(sharded_param: ShardedParam) -> torch.Tensor:
    """Return this rank's shard of the reduced gradient of one parameter."""
    group = sharded_param.group
    return shard_view(
        group.gradients.shard,
        group.layout,
        sharded_param.index,
        group.rank,
    )


def clear_gradient_shard(sharded_param: ShardedParam) -> None:
    """Set this rank's shard of the reduced gradient of one parameter to zero."""
    gradients = sharded_param.group.gradients
    gradients.indices_with_grad.discard(sharded_param.index)
    gradient_shard(sharded_param).zero_()
