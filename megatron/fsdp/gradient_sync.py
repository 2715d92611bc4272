# SPDX-License-Identifier: Apache-2.0
"""The life cycle of gradients between the end of a backward pass and the optimizer's step.

[Note: the life cycle of gradients]
    backward ends     the schedule has started to reduce some groups; if every microbatch is
                      synchronised, the rest of the cycle follows at once
    start             the reduction of all accumulated gradients starts
    wait              the results of all reductions are in the gradient shards
    attach            the shards are put on ``param.grad``, as DTensors
    clear             all gradients are dropped (``zero_grad``)
A plain ``optimizer.zero_grad()`` of torch clears ``param.grad`` and nothing else. The next backward
pass notices that, and clears the gradient shards too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch.distributed.tensor import DTensor

from megatron.fsdp.dtensor.sharded_param import ShardedParam
from megatron.fsdp.engine import recorder
from megatron.fsdp.engine.buffer import shard_view
from megatron.fsdp.engine.microbatches import Microbatches
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.schedule import Schedule


class GradientError(RuntimeError):
    """A gradient that is NaN or Inf; the message names parameters and ranks."""


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
    """

    def __init__(
        self,
        sharded_params: Iterable[ShardedParam],
        *,
        microbatches: Microbatches,
        use_decoupled_grad: bool,
        report_nonfinite: Callable[[list[ShardedParam]], None] | None,
    ):
        self._microbatches = microbatches
        self._use_decoupled_grad = use_decoupled_grad
        self._grad_attribute = "decoupled_grad" if use_decoupled_grad else "grad"
        self._report_nonfinite = report_nonfinite
        self._schedule: Schedule | None = None
        self._is_attached = False  # reduced gradients are on the parameters
        self._is_final = True  # no backward pass has ended since they were attached or cleared
        self._frozen: list[ShardedParam] = []
        self._trainable: dict[ParamGroup, list[ShardedParam]] = defaultdict(list)
        for sharded_param in sharded_params:
            if sharded_param.group.requires_grad:
                self._trainable[sharded_param.group].append(sharded_param)
            else:
                self._frozen.append(sharded_param)

    def connect(self, schedule: Schedule) -> None:
        """Set the schedule whose backward passes call this object."""
        self._schedule = schedule

    # ---- backward passes

    def begin_backward(self) -> None:
        """Clear the gradient shards of parameters whose gradient the user has cleared.

        The gradients of this pass would otherwise be added to them.
        """
        recorder.begin_backward_pass()
        if not self._is_attached:
            return
        for group, members in self._trainable.items():
            cleared = [each for each in members if self._grad_of(each) is None]
            if len(cleared) == len(members):
                group.gradients.forget_reduced()
                continue
            for sharded_param in cleared:
                clear_gradient_shard(sharded_param)
        self._is_attached = False

    def end_backward(self) -> None:
        """Make gradients final if this backward pass is to be synchronised."""
        recorder.end_backward_pass()
        self._is_final = False
        if self._microbatches.sync_each and self._microbatches.is_last:
            self.finish()

    # ---- reductions

    def start(self) -> None:
        """Start to reduce all gradients that have accumulated."""
        self._own_schedule.reduce_pending()

    def wait(self) -> None:
        """Wait for the reductions that have started."""
        self._own_schedule.wait_for_reductions()

    def finish(self) -> None:
        """Reduce the remaining gradients, wait, and attach; do nothing if that is already done."""
        if self._is_final and self._is_attached:
            return
        self.start()
        self.wait()
        self.attach()

    def attach(self) -> None:
        """Put the reduced gradients on the parameters.

        The local tensor is empty if this rank owns nothing of a parameter.

        Raises:
            GradientError: for a NaN or Inf gradient, if they are reported.
            RuntimeError: for a trainable parameter that was frozen when it was sharded.
        """
        self._refuse_thawed()
        for group, members in self._trainable.items():
            flat = group.gradients.final(in_main_dtype=not self._use_decoupled_grad)
            for sharded_param in members:
                # A parameter may have been frozen since it was sharded.
                trains = (
                    sharded_param.parameter.requires_grad and sharded_param.compute.requires_grad
                )
                self._set_grad(sharded_param, sharded_param.gradient(flat) if trains else None)
        self._is_final = self._is_attached = True
        if self._report_nonfinite is not None:
            self._report_nonfinite(self._find_nonfinite())

    # ---- changes of gradients

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply every gradient, reduced or not yet, by a number or a 0-d tensor."""
        for group in self._trainable:
            group.gradients.scale(factor)

    def clear(self) -> None:
        """Drop all gradients: accumulated, reduced, and attached."""
        for group, members in self._trainable.items():
            group.gradients.clear()
            for sharded_param in members:
                self._set_grad(sharded_param, None)
        self._is_attached = False
        self._is_final = True

    # ---- internals

    @property
    def _own_schedule(self) -> Schedule:
        assert self._schedule is not None, "connect() comes first"
        return self._schedule

    def _grad_of(self, sharded_param: ShardedParam) -> DTensor | None:
        gradient: DTensor | None = getattr(sharded_param.parameter, self._grad_attribute, None)
        return gradient

    def _set_grad(self, sharded_param: ShardedParam, gradient: DTensor | None) -> None:
        setattr(sharded_param.parameter, self._grad_attribute, gradient)

    def _refuse_thawed(self) -> None:
        thawed = [
            each.name
            for each in self._frozen
            if each.parameter.requires_grad or each.compute.requires_grad
        ]
        if thawed:
            raise RuntimeError(
                f"{', '.join(thawed[:5])}: frozen when the model was sharded, so there are no"
                " gradients; shard the model with every parameter trainable that is to be trained,"
                " and freeze afterwards"
            )

    def _find_nonfinite(self) -> list[ShardedParam]:
        """Return the parameters whose gradient is NaN or Inf on this rank."""
        found = []
        for group, members in self._trainable.items():
            # One check per group; its parameters are checked only if that finds something.
            if torch.isfinite(group.gradients.shard.sum(dtype=torch.float32)):
                continue
            for sharded_param in members:
                gradient = self._grad_of(sharded_param)
                if gradient is not None and not torch.isfinite(gradient._local_tensor).all():
                    found.append(sharded_param)
        return found


def clear_gradient_shard(sharded_param: ShardedParam) -> None:
    """Set this rank's shard of the reduced gradient of one parameter to zero."""
    group = sharded_param.group
    shard_view(group.gradients.shard, group.layout, sharded_param.index, group.rank).zero_()
