# SPDX-License-Identifier: Apache-2.0
"""Gradients of a parameter group: accumulated locally, reduced over the axes, summed in a shard.

[Note: the way of a gradient]
    parameter.grad   the gradient that autograd leaves on a compute parameter; it is set to None
                     when the unit's backward ends
    local gradient   the sum of this rank's gradients since the last reduction, for whole
                     parameters, in one flat tensor: see [Note: where local gradients accumulate]
    inner sum        hybrid sharding only: this rank's shard of the gradient, reduced over the inner
                     axis and not yet over the outer one, summed over microbatches
    gradient shard   the reduced gradient of the shard that this rank owns, summed over reductions
                     until it is cleared
    final gradient   the gradient shard in the dtype that the optimizer wants. If that is another
                     one, the values move there, and back if a further backward adds to them: only
                     one of the two has storage

At levels 2 and 3 the reduction over the inner axis follows every backward, because it frees the
large buffer of local gradients; below, it waits for the last microbatch. Without an outer axis its
result is added to the gradient shard. With one it is added to the inner sum, and the reduction over
the outer axis, whose links are slower, waits for the last microbatch. If a rank's part of the inner
axis is the whole gradient (level 0, or one inner rank), there is no inner sum: local gradients wait
for the last microbatch and are then reduced over both axes. An axis of one rank has no collectives,
and without collectives gradients remain in the main gradient dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from megatron.fsdp.engine import observe
from megatron.fsdp.engine.buffer import RunningSum, Storage
from megatron.fsdp.engine.collectives import Communicator
from megatron.fsdp.engine.device import Pending
from megatron.fsdp.engine.layout import Layout, Partition
from megatron.fsdp.engine.local_gradients import LocalGradients, clear_grads
from megatron.fsdp.engine.policy import Precision, ShardingStrategy


class GroupGradients:
    """The gradients of a parameter group. See [Note: the way of a gradient].

    Args:
        parameters: the compute parameters, on which autograd leaves gradients.
        layout: the positions of the parameters in the flat buffers.
        partition: the shards of the group, and the one that this rank owns.
        strategy: the ZeRO level.
        precision: dtypes of the group.
        communicator: the axes over which gradients are reduced.
        device: where the buffers are allocated.
        unit_name: name of the unit of the group, for traces.
        storage: the memory of local gradients.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        partition: Partition,
        strategy: ShardingStrategy,
        precision: Precision,
        communicator: Communicator,
        device: torch.device,
        unit_name: str,
        storage: Storage,
    ):
        self._parameters = parameters
        self._layout = layout
        self._partition = partition
        self._communicator = communicator
        self._unit_name = unit_name
        self._has_whole = partition.num_inner == 1  # the reduction over the inner axis frees none
        self._frees_local = strategy.shards_gradients and not self._has_whole
        self._storage = storage
        self._may_share_sum = partition.num_owned == 1 and not storage.is_assigned_ahead
        self._main_param_dtype = precision.main_param
        self._main_dtype = precision.main_grad
        self.comm_dtype = precision.grad_comm
        """The dtype in which gradients are reduced; see :meth:`set_comm_dtype`."""

        self.local = LocalGradients(parameters, layout, device, unit_name, storage)
        """The gradients of this rank that are not in any reduction yet."""

        self.awaits_reduction = False
        """True from the end of a backward of the unit until the local gradients are reduced.

        Unlike those, it is the same on all ranks: experts without tokens have no gradients."""

        # True if gradients are never at another address, as captured graphs expect.
        self.holds_addresses = holds = storage.holds_addresses
        shard_numel = layout.numel // partition.num_inner
        self._inner_sum = RunningSum(shard_numel, precision.main_grad, device, holds)
        self._grad_sum = RunningSum(layout.shard_size, precision.main_grad, device, holds)
        # Where the dtype of the optimizer is not the sum's. Nothing is ever added to it.
        self._optimizer_grad = RunningSum(layout.shard_size, precision.main_param, device, holds)
        self._is_moved = False  # the values are there, and not in the sum
        self._is_shown = False  # the user may have tensors over the storage of the sum
        self._reduction: Iterator[Pending] = iter(())  # its collectives, one after the other
        self._collective: Pending | None = None  # the one under way

    @property
    def shard(self) -> torch.Tensor:
        """The gradient shard ``[shard_size]`` in the main gradient dtype; zeros at first."""
        self._move_back()
        return self._reduced()

    @property
    def has_inner_sum(self) -> bool:
        """True if there are gradients that were reduced over the inner axis only.

        The reduction over the inner axis may be under way; this waits for it.
        """
        if not self._communicator.is_hybrid or self._has_whole:
            return False
        self.wait_for_reduce()
        return not self._inner_sum.is_empty

    # ---- accumulation

    def accumulate(self, reduces_now: bool) -> None:
        """Add the gradients that autograd left on the compute parameters to the local gradients.

        Args:
            reduces_now: the caller reduces them over the inner axis next.
        """
        if self._has_whole:
            self.wait_for_reduce()  # it reduces the tensor of the local gradients
        self.awaits_reduction = True
        self.local.accumulate(*self._place(reduces_now))

    @torch.no_grad()
    def view_to_write(self, index: int) -> torch.Tensor | None:
        """Return zeros in the flat tensor, into which a layer may write a parameter's gradient.

        The layer then leaves an alias of it on ``parameter.grad``, which :meth:`accumulate` does
        not copy. None: there are gradients to add to, or another dtype is wanted.
        """
        parameter = self._parameters[index]
        dtype, gradient_sum = self._place(reduces_now=False)
        if (
            self._collective is not None  # it may reduce the same tensor
            or self._storage.is_assigned_ahead
            or parameter.grad is not None
            or parameter.dtype != (dtype if gradient_sum is None else gradient_sum.dtype)
        ):
            return None
        return self.local.view_to_write(index, dtype, gradient_sum)

    def _place(self, reduces_now: bool) -> tuple[torch.dtype, RunningSum | None]:
        """Return where local gradients accumulate if there are none yet.

        Returns:
            The dtype of their buffer, and the sum in whose tensor they accumulate instead, or None.
            Between reductions they accumulate in the main dtype. If every backward is reduced,
            nothing accumulates in the buffer, and it has the dtype of the reduction.
        """
        dtype = self.comm_dtype if self._frees_local else self._main_dtype
        if not self._may_share_sum:
            return dtype, None
        if reduces_now and self._communicator.is_identity:
            self._move_back()
            return dtype, self._grad_sum
        has_reduced = self._is_moved or not self._grad_sum.is_empty
        return dtype, None if has_reduced else self._grad_sum

    # ---- reduction

    def reduce(self, over_inner: bool, over_outer: bool) -> None:
        """Start to reduce gradients; :meth:`advance_reduce` continues the reduction.

        Args:
            over_inner: reduce the local gradients over the inner axis. A rank without any
                contributes zeros, because the other ranks wait for it.
            over_outer: reduce the inner sum over the outer axis. Without an outer axis there is
                nothing to do.
        """
        self.wait_for_reduce()
        self._move_back()
        self._reduction = self._reduce(over_inner, over_outer)
        with observe.work(self._unit_name, "reduce"):
            self._collective = next(self._reduction, None)

    def advance_reduce(self) -> bool:
        """Wait for the collective under way and start the next; return False if there is none."""
        if self._collective is not None:
            with observe.work(self._unit_name, "wait for reduce"):
                collective, self._collective = self._collective, None
                collective.wait()  # a reduction that fails is over, and raises its error once
                self._collective = next(self._reduction, None)
        return self._collective is not None

    def wait_for_reduce(self) -> None:
        """Wait for all collectives of the reduction that has started."""
        if self._collective is not None:
            with torch.no_grad():
                while self.advance_reduce():
                    pass

    def _reduce(self, over_inner: bool, over_outer: bool) -> Iterator[Pending]:
        """Yield each collective when it has started; the code after a yield needs its result."""
        is_hybrid = self._communicator.is_hybrid
        if self._has_whole:
            if over_inner and (over_outer or not is_hybrid):
                yield from self._reduce_whole()
            return
        if over_inner:
            yield from self._reduce_inner(self._inner_sum if is_hybrid else self._grad_sum)
        if over_outer and is_hybrid:
            yield from self._reduce_outer()

    def _reduce_inner(self, target: RunningSum) -> Iterator[Pending]:
        """Add the local gradients, reduce-scattered over the inner axis, to ``target``."""
        self.awaits_reduction = False
        self.local.open(*self._place(False), covers_all=False)  # zeros if there are none
        full = self.local.take()
        if full.dtype != self.comm_dtype:
            full = full.to(self.comm_dtype)
        result = target.buffer_for(full.dtype)
        yield self._communicator.reduce_scatter(full, result)
        target.add(result)
        self.local.free()

    def _reduce_whole(self) -> Iterator[Pending]:
        """Add the local gradients, reduced over both axes, to the gradient shard."""
        communicator = self._communicator
        self.awaits_reduction = False
        self.local.open(*self._place(reduces_now=True), covers_all=False)
        is_in_sum = self.local.is_in_sum
        local = self.local.take()
        if is_in_sum:
            self._grad_sum.add(local)  # in place: from here on these are the reduced gradients
        result = full = local.to(self.comm_dtype) if communicator.has_collectives else local
        inner = communicator.all_reduce(full)
        if communicator.inner_size > 1:
            yield inner
        else:
            inner.wait()
        if self._partition.num_outer > 1:
            result = self._grad_sum.buffer_for(full.dtype)
            yield communicator.reduce_scatter_outer(full, result)
        elif communicator.is_hybrid:
            yield communicator.all_reduce_outer(full)
        if not is_in_sum:
            self._grad_sum.add(result)
        elif result is not local:
            local.copy_(result)
        self.local.free()

    def _reduce_outer(self) -> Iterator[Pending]:
        """Add the inner sum, reduced over the outer axis, to the gradient shard."""
        partial = self._inner_sum.total.to(self.comm_dtype)
        if self._partition.shards_outer:
            result = self._grad_sum.buffer_for(partial.dtype)
            yield self._communicator.reduce_scatter_outer(partial, result)
        else:
            result = partial
            yield self._communicator.all_reduce_outer(partial)
        self._grad_sum.add(result)
        self._inner_sum.free()

    # ---- for the optimizer and the training loop

    def final(self, in_main_dtype: bool = True) -> torch.Tensor:
        """Return the gradient shard ``[shard_size]`` for the optimizer; zeros if there are none.

        Call it under ``torch.no_grad()``.

        Args:
            in_main_dtype: return it in the dtype of the main weights, which torch's optimizers
                need; otherwise in the main gradient dtype, without a copy.

        Returns:
            The same tensor in every step, unless the user has kept gradients of the last one.
        """
        if self._grad_sum.dtype == self._main_param_dtype or not in_main_dtype:
            self._is_shown = True
            return self._reduced()
        gradient = self._optimizer_grad.allocated()
        if not self._is_moved:
            gradient.copy_(self._reduced())
            self._grad_sum.free()
            self._is_moved = True
        return gradient

    def _reduced(self) -> torch.Tensor:
        """Return the sum; local gradients do not appear in it before they are reduced."""
        self.local.move_to_buffer()
        total = self._grad_sum.total
        if self._may_share_sum:
            self._grad_sum.add(total)  # in place: even zeros are reduced gradients now
        return total

    def _move_back(self) -> None:
        """Let the sum go on from the final gradient, which the user may have changed."""
        if self._is_moved:
            self._grad_sum.add(self._optimizer_grad.allocated())
            self._is_moved = False

    @torch.no_grad()
    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply all gradients, reduced or not yet, by ``factor``, a number or a 0-d tensor."""
        self.wait_for_reduce()
        for running_sum in (self._grad_sum, self._inner_sum):
            if not running_sum.is_empty:
                running_sum.total.mul_(factor)
        self.local.scale(factor)
        if self._is_moved:
            self._optimizer_grad.allocated().mul_(factor)

    def forget_reduced(self, are_kept: bool = False) -> None:
        """Drop the reduced gradients: the next reduction begins a new sum.

        Args:
            are_kept: the user has kept some of them, and later ones get another tensor.
        """
        self.wait_for_reduce()
        self._is_moved = False
        self.local.users.clear()
        if are_kept:
            self._grad_sum.abandon()
            self._optimizer_grad.abandon()
        elif self._is_shown:
            self._grad_sum.clear()
        else:
            self._grad_sum.free()

    def clear(self) -> None:
        """Drop all gradients: reduced, partly reduced, local, and those on compute parameters."""
        self.forget_reduced()
        self._inner_sum.free()
        self.awaits_reduction = False
        self.local.forget_written()
        self.local.free()
        clear_grads(self._parameters)

    def set_comm_dtype(self, dtype: torch.dtype | None) -> None:
        """Reduce gradients in ``dtype`` from now on; None: in the main gradient dtype."""
        self.wait_for_reduce()
        self.comm_dtype = dtype or self._main_dtype
