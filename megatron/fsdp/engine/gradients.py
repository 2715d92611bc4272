# SPDX-License-Identifier: Apache-2.0
"""Gradients of a parameter group: accumulated locally, reduced over the axes, summed in a shard."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from megatron.fsdp.engine import observe
from megatron.fsdp.engine.buffer import (
    FlatBuffer,
    RunningSum,
    ShardMemory,
    Storage,
    ViewSpecs,
    padding_of,
    shard_view,
)
from megatron.fsdp.engine.collectives import Communicator
from megatron.fsdp.engine.layout import Layout, Partition
from megatron.fsdp.engine.loops_in_c import (
    attributes,
    indices_of_present,
    select,
    set_all,
)
from megatron.fsdp.engine.policy import Precision, ShardingStrategy
from megatron.fsdp.engine.states import GradientState, StateOwner
from megatron.fsdp.engine.tensor_parallel import local_grad

# [Note: the way of a gradient]
#     parameter.grad   the gradient that autograd leaves on a compute parameter; it is set to None
#                      when the unit's backward ends
#     local gradient   the sum of this rank's gradients since the last reduction, for whole
#                      parameters, in one flat tensor
#     inner sum        hybrid sharding only: this rank's shard of the gradient, reduced over the
#                      inner axis and not yet over the outer one, summed over microbatches
#     gradient shard   the reduced gradient of the shard that this rank owns, summed over reductions
#     final gradient   the gradient shard in the dtype that the optimizer wants. If that is another
#                      one, the values move there, and back if a further backward adds to them
#
# At levels 2 and 3 the reduction over the inner axis follows every backward, because it frees the
# large buffer of local gradients; below, it waits for the last microbatch. That over the outer
# axis, whose links are slower, always waits for it. If a rank's part of the inner axis is the whole
# gradient (level 0, or one inner rank), there is no inner sum: both then wait.

# [Note: where local gradients accumulate] In a flat buffer of their own, which is freed when it is
# reduced. But if a rank's gradient shard is the whole gradient, they accumulate in its tensor, as
# long as that has no reduced gradients.
#     level 0, 3 microbatches    copied into the shard's tensor, added, added, all-reduced there
#     another step on top        the shard has reduced gradients: local ones are all-reduced in
#                                the buffer, and then added
#     data axes of one rank      a reduction neither sends nor divides, so gradients that are
#                                reduced at once are added to the reduced ones
# Buffers in memory slots never share memory with gradient shards.

_OVER = object()  # the result of `next` for a reduction that has ended


class FlatGradient(NamedTuple):
    """The tensor of a gradient sum in which local gradients accumulate, with its views.

    Args:
        flat: the tensor ``[layout.numel]``.
        views: the gradients of whole parameters, in their shapes.
        padding: the slices of ``flat`` that belong to no parameter.
    """

    flat: torch.Tensor
    views: list[torch.Tensor]
    padding: list[torch.Tensor]


@dataclass
class GroupNames:
    """The names of a group, which its parts share: a larger model may change them.

    Attributes:
        unit: name of the unit.
        parameters: names of the parameters.
    """

    unit: str
    parameters: list[str]


class GroupGradients(StateOwner[GradientState]):
    """The gradients of a parameter group. See [Note: the way of a gradient].

    Args:
        parameters: the compute parameters of the group, whose ``grad`` autograd sets.
        layout: positions of the parameters in flat tensors, and the shards of ranks.
        partition: this rank's part of the axes.
        strategy: the ZeRO level, which decides when gradients are reduced.
        precision: dtypes of local gradients, of reductions and of the sums of shards.
        communicator: the reductions.
        names: of the group, for messages and observers.
        storage: memory of the flat buffer of local gradients.
        memory: memory of the gradient shard.
    """

    def __init__(
        self,
        *,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        partition: Partition,
        strategy: ShardingStrategy,
        precision: Precision,
        communicator: Communicator,
        names: GroupNames,
        storage: Storage,
        memory: ShardMemory,
    ):
        self._parameters = parameters
        self._layout = layout
        self._partition = partition
        self._communicator = communicator
        self._names = names
        self._storage = storage
        # This rank's part of the inner axis is the whole gradient: reducing it frees no memory.
        self._has_whole = partition.num_inner == 1
        self._frees_local = strategy.shards_gradients and not self._has_whole
        is_elsewhere = storage.is_assigned_ahead or memory.is_offloaded
        self._may_share_sum = partition.num_owned == 1 and not is_elsewhere
        self.comm_dtype = precision.grad_comm
        # Indices of the parameters that got a gradient since reduced ones were dropped.
        self.indices_with_grad: set[int] = set()
        # How often gradients written by layers were forgotten; copies of them are then worthless.
        self.num_forgotten = 0

        flat = torch.empty(layout.numel, device="meta")
        self._padding = ViewSpecs(padding_of(flat, layout))
        self.state = GradientState.EMPTY
        # The flat tensor; None also if this rank has no gradients that wait.
        self._local: FlatBuffer | FlatGradient | None = None
        self._buffer: FlatBuffer | None = None  # made when it is first needed
        self._written: set[int] = set()  # parameters whose gradient a layer has written
        self._early: dict[int, torch.Tensor] = {}  # written long before autograd reports them

        # True if gradients are never at another address, as captured graphs expect.
        self.holds_addresses = storage.holds_addresses or memory.is_offloaded
        self._inner_sum = RunningSum(
            numel=layout.numel // partition.num_inner,
            dtype=precision.main_grad,
            memory=ShardMemory(memory.device),
            holds_address=storage.holds_addresses,
        )
        shard = torch.empty(layout.shard_size, device="meta")
        indices = range(len(parameters))
        view_specs = ViewSpecs(
            [shard_view(shard, layout, index, partition.rank) for index in indices]
        )
        self._grad_sum = self._make_shard_sum(precision.main_grad, memory, view_specs)
        # Empty, unless it has the values of the sum in the other dtype of the optimizer.
        self._optimizer_grad = self._make_shard_sum(precision.main_param, memory, view_specs)
        self._reduction: Iterator[None] | None = None  # the one under way
        self.num_reductions = 0  # reductions that have started, the same number on all ranks

    def _make_shard_sum(
        self,
        dtype: torch.dtype,
        memory: ShardMemory,
        view_specs: ViewSpecs,
    ) -> RunningSum:
        return RunningSum(
            numel=self._layout.shard_size,
            dtype=dtype,
            memory=memory,
            holds_address=self.holds_addresses,
            view_specs=view_specs,
        )

    def __str__(self) -> str:
        return f"the gradients of unit {self._names.unit!r}"

    @property
    def shard(self) -> torch.Tensor:
        """The gradient shard ``[shard_size]`` in the main gradient dtype; zeros at first."""
        self._move_back()
        return self._reduced()

    @property
    def has_inner_sum(self) -> bool:
        """True if there are gradients that were reduced over the inner axis only; waits for it."""
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
        grads = attributes(self._parameters, "grad")
        arrived = indices_of_present(grads)
        self.indices_with_grad.update(arrived)
        # Where memory is assigned ahead, all ranks must allocate buffers at the same times. So a
        # rank that has not used the group (an expert without tokens) accumulates zeros.
        if arrived or self._written or self._storage.is_assigned_ahead:
            with observe.work(self._names.unit, "accumulate gradients"):
                covers_all = len(arrived) == len(grads)
                local, has_values = self._open(reduces_now, covers_all)
                if self._written:
                    arrived = self._take_written(arrived, local.views)
                grads = select(grads, arrived)
                if not are_plain(grads):
                    grads = [local_grad(self._parameters[index]) for index in arrived]
                targets = select(local.views, arrived)
                if arrived and has_values:
                    torch._foreach_add_(targets, grads)
                elif arrived:
                    torch._foreach_copy_(targets, grads)
                set_all(self._parameters, "grad", None)
        self.change_state(GradientState.WAITING)

    def _open(
        self,
        reduces_now: bool,
        covers_all: bool = False,
    ) -> tuple[FlatBuffer | FlatGradient, bool]:
        """Return the flat tensor, and True if it has values that the caller must add to.

        Args:
            reduces_now: local gradients are reduced over the inner axis next.
            covers_all: the caller writes the gradient of every parameter.
        """
        if self._local is not None:
            return self._local, True
        gradient_sum = self._sum_to_share(reduces_now)
        if gradient_sum is None:
            self._local = self._open_buffer(self._buffer_dtype)
        else:
            total = gradient_sum.tensor()
            # The rank owns whole parameters, so these are their views too.
            self._local = FlatGradient(
                total,
                gradient_sum.views(),
                self._padding.views_of(total),
            )
            if not gradient_sum.is_empty:
                return self._local, True
        # Only the padding is zeroed if the caller writes everything else.
        if not covers_all:
            self._local.flat.zero_()
        elif self._local.padding:
            torch._foreach_zero_(self._local.padding)
        return self._local, False

    def _local_flat(self, reduces_now: bool) -> torch.Tensor:
        """Return the flat tensor of the local gradients; zeros without any."""
        local, _ = self._open(reduces_now)
        return local.flat

    @property
    def _buffer_dtype(self) -> torch.dtype:
        """The dtype of the buffer: that of reductions if nothing accumulates before them."""
        if self._frees_local:
            return self.comm_dtype
        return self._grad_sum.dtype

    def _sum_to_share(self, reduces_now: bool) -> RunningSum | None:
        """Return the sum in whose tensor local gradients accumulate; None: in the buffer."""
        if not self._may_share_sum:
            return None
        changes_nothing = not self._communicator.has_collectives and self._communicator.divisor == 1
        if reduces_now and changes_nothing:
            self._move_back()
            return self._grad_sum
        if self._grad_sum.is_empty and self._optimizer_grad.is_empty:
            return self._grad_sum
        return None

    def _open_buffer(self, dtype: torch.dtype) -> FlatBuffer:
        if self._buffer is None or self._buffer.flat.dtype != dtype:
            if self._buffer is not None:
                self._buffer.discard()
            self._buffer = FlatBuffer(
                layout=self._layout,
                dtype=dtype,
                device=self._inner_sum.memory.device,
                name=f"the local gradients of unit {self._names.unit!r}",
                storage=self._storage,
            )
        self._buffer.allocate()
        return self._buffer

    # ---- gradients that layers write themselves

    @torch.no_grad()
    def view_to_write(self, index: int) -> torch.Tensor | None:
        """Return zeros in the flat tensor, into which a layer may write a parameter's gradient.

        None: there are gradients to add to, or another dtype is wanted.
        """
        # The layer leaves an alias of them on `parameter.grad`, which `accumulate` does not copy.
        parameter = self._parameters[index]
        gradient_sum = self._sum_to_share(reduces_now=False)
        dtype = self._buffer_dtype
        if gradient_sum is not None:
            dtype = gradient_sum.dtype
        if (
            self._reduction is not None  # it may reduce the same tensor
            or self._storage.is_assigned_ahead
            or parameter.grad is not None
            or parameter.dtype != dtype
            or self.state not in (GradientState.EMPTY, GradientState.WRITING)
            or index in self._written
            # A gradient written in an outer pass waits for it: a nested one must not take it.
            or index in self._early
        ):
            return None
        if self.state is GradientState.EMPTY:
            with observe.work(self._names.unit, "accumulate gradients"):
                self._open(reduces_now=False)
            self.change_state(GradientState.WRITING)
        self._written.add(index)
        return self.written(index)

    def written(self, index: int) -> torch.Tensor:
        """Return the gradient of parameter ``index`` that a layer has written, when it arrives."""
        if index in self._early:
            return self._early.pop(index)
        assert self._local is not None
        return self._local.views[index]

    def _take_written(self, arrived: list[int], views: list[torch.Tensor]) -> list[int]:
        """Finish gradients that layers have written; return the other parameters of ``arrived``."""
        for index in self._written:
            grad = self._parameters[index].grad
            view = views[index]
            if index not in arrived:
                # Autograd waits for another use of the parameter, and then accumulates the sum.
                self._early[index] = view.clone()
                view.zero_()
            # Autograd has kept the alias and added to it, or has made a tensor of the sum.
            elif grad is not None and grad.data_ptr() != view.data_ptr():
                view.copy_(grad)
        others = [index for index in arrived if index not in self._written]
        self._written.clear()
        return others

    # ---- reduction

    def reduce(self, over_inner: bool, over_outer: bool) -> None:
        """Start to reduce local gradients over the inner axis, and the inner sum over the outer.

        A rank without any contributes zeros, because the other ranks wait for it.
        """
        self.num_reductions += 1
        self.wait_for_reduce()
        self._move_back()
        with observe.work(self._names.unit, "reduce"):
            self._run(self._reduce(over_inner, over_outer))

    def advance_reduce(self) -> bool:
        """Wait for the collective under way and start the next; return False after the last."""
        if self._reduction is not None:
            with observe.work(self._names.unit, "wait for reduce"):
                self._run(self._reduction)
        return self._reduction is not None

    def _run(self, reduction: Iterator[None]) -> None:
        """Run a reduction until its next collective has started, or to its end."""
        self._reduction = None  # a reduction that fails is over, and raises its error once
        try:
            is_over = next(reduction, _OVER) is _OVER
        except BaseException:
            if self._buffer is not None:
                self._buffer.is_in_failed_collective = True
            raise
        if not is_over:
            self._reduction = reduction

    def wait_for_reduce(self) -> None:
        """Wait for all collectives of the reduction that has started."""
        if self._reduction is not None:
            with torch.no_grad():
                while self.advance_reduce():
                    pass

    def _reduce(self, over_inner: bool, over_outer: bool) -> Iterator[None]:
        """Yield whenever a collective has started, because the code after it needs its result."""
        is_hybrid = self._communicator.is_hybrid
        if self._has_whole:
            if over_inner and (over_outer or not is_hybrid):
                yield from self._reduce_whole()
            return
        if over_inner:
            target = self._grad_sum
            if is_hybrid:
                target = self._inner_sum
            yield from self._reduce_inner(target)
        if over_outer and is_hybrid:
            partial_sum = self._inner_sum.total.to(self.comm_dtype)
            result = yield from self._reduce_over_outer(partial_sum)
            self._grad_sum.add(result)
            self._inner_sum.drop()

    def _reduce_inner(self, target: RunningSum) -> Iterator[None]:
        """Add the local gradients, reduce-scattered over the inner axis, to ``target``."""
        full = self._local_flat(reduces_now=False).to(self.comm_dtype)
        self.change_state(GradientState.REDUCING)
        result = target.buffer_for(full.dtype)
        pending = self._communicator.reduce_scatter(full, result)
        yield
        pending.wait()
        target.add(result)
        self._drop_local()

    def _reduce_whole(self) -> Iterator[None]:
        """Add the local gradients, reduced over both axes, to the gradient shard."""
        communicator = self._communicator
        local = self._local_flat(reduces_now=True)
        self.change_state(GradientState.REDUCING)
        is_in_sum = self._grad_sum.is_in(local)
        if is_in_sum:
            self._grad_sum.add(local)  # in place: from here on these are the reduced gradients
        full = local
        if communicator.has_collectives:
            full = local.to(self.comm_dtype)
        result = full
        pending = communicator.all_reduce(full)
        if communicator.inner_size > 1:
            yield
        pending.wait()
        if communicator.is_hybrid:
            result = yield from self._reduce_over_outer(full)
        if not is_in_sum:
            if result is local and self._grad_sum.memory.is_offloaded:  # its copy outlives it
                result = self._grad_sum.buffer_for(local.dtype).copy_(local)
            self._grad_sum.add(result)
        elif result is not local:
            local.copy_(result)
        self._drop_local()

    def _reduce_over_outer(self, full: torch.Tensor) -> Generator[None, None, torch.Tensor]:
        """Return ``full`` reduced over the outer axis, or the owned shard of it."""
        result = full
        if self._partition.num_outer > 1:
            result = self._grad_sum.buffer_for(full.dtype)
            pending = self._communicator.reduce_scatter_outer(full, result)
        else:
            pending = self._communicator.all_reduce_outer(full)
        yield
        pending.wait()
        return result

    # ---- for the optimizer and the training loop

    def final_sum(self, in_main_dtype: bool = True) -> RunningSum:
        """Return the gradient shard; zeros without any. Call it under ``torch.no_grad()``.

        Args:
            in_main_dtype: in the dtype of the main weights, which torch's optimizers need.
                Otherwise in the dtype in which gradients are summed, which costs no copy.
        """
        if self._grad_sum.dtype == self._optimizer_grad.dtype or not in_main_dtype:
            self._reduced()
            return self._grad_sum
        if self._optimizer_grad.is_empty:
            self._optimizer_grad.add(self._reduced())
            self._grad_sum.drop()
        return self._optimizer_grad

    def _reduced(self) -> torch.Tensor:
        """Return the sum; local gradients do not appear in it before they are reduced."""
        if self._local is not None and self._grad_sum.is_in(self._local.flat):
            buffer = self._open_buffer(self._local.flat.dtype)
            buffer.flat.copy_(self._local.flat)
            self._local = buffer
        total = self._grad_sum.total
        if self._may_share_sum:
            self._grad_sum.add(total)  # in place: even zeros are reduced gradients now
        return total

    def _move_back(self) -> None:
        """Continue the sum from the final gradient, which the user may have changed."""
        if not self._optimizer_grad.is_empty:
            self._grad_sum.add(self._optimizer_grad.total)
            self._optimizer_grad.drop()

    @torch.no_grad()
    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply all gradients, reduced or not yet, by ``factor``, a number or a 0-d tensor."""
        self.wait_for_reduce()
        for running_sum in (self._grad_sum, self._inner_sum, self._optimizer_grad):
            if running_sum.is_empty:
                continue
            total = running_sum.total
            factor_there = factor
            if isinstance(factor, torch.Tensor):
                factor_there = factor.to(total.device)  # the sum may be offloaded
            total.mul_(factor_there)
        if self._local is not None:
            self._local.flat.mul_(factor)

    def drop_reduced(self) -> None:
        """Drop the reduced gradients: the next reduction begins a new sum."""
        self.wait_for_reduce()
        self.indices_with_grad.clear()
        with observe.work(self._names.unit, "free gradients"):
            self._grad_sum.drop()
            self._optimizer_grad.drop()

    def drop(self) -> None:
        """Drop all gradients: reduced, partly reduced, local, and those on compute parameters."""
        self.drop_reduced()
        self._inner_sum.drop()
        self.forget_written()
        self._drop_local()
        with torch._C.DisableTorchFunctionSubclass():  # guarded ones call Python
            set_all(self._parameters, "grad", None)

    def forget_written(self) -> None:
        """Forget gradients that layers have written and that autograd will not report."""
        # The pass has failed, or it is over and needed no gradients of these parameters.
        self.num_forgotten += 1
        self._early.clear()
        if self.state is GradientState.WRITING:
            self._drop_local()

    def _drop_local(self) -> None:
        self.change_state(GradientState.EMPTY)
        self._local = None
        self._written.clear()
        if self._buffer is not None:
            self._buffer.free()

    def set_comm_dtype(self, dtype: torch.dtype | None) -> None:
        """Reduce gradients in ``dtype`` from now on; None: in the main gradient dtype."""
        self.wait_for_reduce()
        self.comm_dtype = dtype or self._grad_sum.dtype


def are_plain(grads: Sequence[torch.Tensor]) -> bool:
    """Return True if gradients are dense tensors of torch, and no DTensors."""
    classes = set(map(type, grads))
    return classes == {torch.Tensor} and not any(attributes(grads, "is_sparse"))
