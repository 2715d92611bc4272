# SPDX-License-Identifier: Apache-2.0
"""One communication unit: parameters of a unit that share dtype, trainability and mesh.

[Note: the tensors of a group]
    compute parameter  what the module's forward uses; a view into ``compute``, whose storage comes
    and goes at level 3 compute shard      this rank's slice of the compute weights, always there;
    what gathers send
    compute piece      the part of the shard that this rank updates: all of it, unless the outer
    axis divides it further main shard         what the optimizer updates; the compute piece itself
    where the dtypes agree local gradient     what backward passes on this rank have left since the
    last reduction, whole, in ``grads``
    inner sum          in hybrid sharding: the shard's gradient, reduced over the inner axis only,
    summed over reductions gradient shard     the reduced gradient of this rank's piece, summed over
    reductions until ``zero_grad``

[Note: pieces] The layout has one piece for every rank that updates something of its own: inner x
outer of them where the outer axis divides optimizer state, and piece ``inner_rank * outer_size +
outer_rank`` belongs to this rank. Pieces of the outer ranks make up a shard, and shards the whole,
so that both gathers fill contiguous memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum, auto

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.engine.buffer import FlatBuffer, RunningSum, shard_view
from megatron.fsdp.engine.collectives import Communicator
from megatron.fsdp.engine.device import Pending
from megatron.fsdp.engine.layout import plan
from megatron.fsdp.engine.policy import Precision, ShardingStrategy


class GatherState(Enum):
    SHARDED = auto()  # the compute parameters are away (level 3) or older than the main weights
    GATHERING = auto()  # a gather is under way
    UNSHARDED = auto()  # the compute parameters may be read


class ParamGroup:
    """Weights and gradients of some parameters, sharded together.

    Args:
        names: of the parameters, for messages and checkpoints.
        parameters: compute parameters, whose values are handed over one by one by :meth:`take`. Of
            DTensors, split by tensor parallelism, the local parts.
        strategy: what the inner axis divides.
        shards_outer: whether the outer axis divides optimizer state; at level 3 only.
        precision: dtypes of main weights and gradients.
        communicator: the axes.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        strategy: ShardingStrategy,
        shards_outer: bool,
        precision: Precision,
        communicator: Communicator,
        device: torch.device,
    ):
        self.names = list(names)
        self.parameters = list(parameters)
        self.strategy = strategy
        self.precision = precision
        self.requires_grad = parameters[0].requires_grad
        self._communicator = communicator
        self._shards_outer = shards_outer
        self._num_shards = communicator.inner_size if strategy.shards_optimizer else 1
        self._num_pieces_of_shard = communicator.outer_size if shards_outer else 1
        self._inner_rank = communicator.inner_rank if strategy.shards_optimizer else 0
        self._outer_rank = communicator.outer_rank if shards_outer else 0
        self.rank = self._inner_rank * self._num_pieces_of_shard + self._outer_rank
        shapes = [tuple(local_tensor(parameter).shape) for parameter in parameters]
        self.layout = plan(shapes, self._num_shards * self._num_pieces_of_shard)
        self._comes_and_goes = strategy.shards_parameters and self._num_shards > 1

        self._make_weights(device)
        self._grads: FlatBuffer | None = None  # made at the first backward
        self._has_local_grad = False
        self._inner_sum = RunningSum(self.compute_shard.numel(), precision.main_grad, device)
        self._grad_sum = RunningSum(self.layout.shard_size, precision.main_grad, device)
        self._optimizer_grad: torch.Tensor | None = (
            None  # the gradient shard in the main dtype, where they differ
        )
        self._reduction: Iterator[Pending] = iter(())
        self._reducing: Pending | None = None

    # ---- weights
    # -------------------------------------------------------------------------------------------------

    def _make_weights(self, device: torch.device) -> None:
        self.compute = FlatBuffer(self.layout, self.precision.compute, device)
        shard = self.compute.slice(self._inner_rank, self._num_shards)
        if self._comes_and_goes:
            shard = torch.zeros_like(shard)
            self.compute.free()
        else:
            self.compute.zero_padding()
        self.compute_shard = shard
        self.compute_piece = shard.view(self._num_pieces_of_shard, -1)[self._outer_rank]
        self.main_is_compute = self.precision.main_param == self.precision.compute
        self.main_shard = self.compute_piece
        if not self.main_is_compute:
            self.main_shard = torch.zeros_like(self.compute_piece, dtype=self.precision.main_param)
        self.state = GatherState.SHARDED if self._comes_and_goes else GatherState.UNSHARDED
        self._shard_is_old = False  # older than the pieces of the outer ranks
        self._gather: Pending | None = None

    @torch.no_grad()
    def take(self, index: int) -> None:
        """Move the values of one parameter, those of the first data rank, into the group; it becomes a view of it.

        Ranks that began with different seeds would train different replicas.
        """
        parameter = self.parameters[index]
        whole = local_tensor(parameter).detach().contiguous()
        self._communicator.broadcast(whole)
        slot = self.layout.slots[index]
        if self._comes_and_goes:
            begin = self._inner_rank * self.compute_shard.numel()
            _copy_overlap(whole.view(-1), slot.start, self.compute_shard, begin)
        else:
            self.compute.view(index).copy_(whole)
        piece = self.layout.owned(index, self.rank)
        self.main_view(index).view(-1).copy_(whole.view(-1)[piece.start : piece.stop])
        # `.data` gives a version counter of its own: gathers do not look like in-place edits to
        # autograd.
        _set_local_tensor(parameter, self.compute.view(index).data)

    def main_view(self, index: int) -> torch.Tensor:
        """This rank's piece of main parameter ``index``."""
        return shard_view(self.main_shard, self.layout, index, self.rank)

    def unshard(self) -> None:
        """Begin to gather the compute parameters, unless they are there or on their way."""
        if self.state is GatherState.SHARDED:
            self.compute.allocate()
            piece = self.compute_piece if self._shard_is_old else None
            self._gather = self._communicator.all_gather(
                self.compute.flat, self.compute_shard, piece
            )
            self._shard_is_old = False
            self.state = GatherState.GATHERING

    def wait_for_unshard(self) -> None:
        """Return when the compute parameters may be read."""
        if self.state is GatherState.GATHERING:
            self._gather.wait()
            self._gather = None
            self.state = GatherState.UNSHARDED

    def reshard(self) -> None:
        """Give back the compute parameters, at level 3."""
        if self._comes_and_goes:
            self.wait_for_unshard()
            self.compute.free()
            self.state = GatherState.SHARDED

    @property
    def is_readable(self) -> bool:
        """Whether the compute parameters have values, and those of the main weights."""
        return self.state is GatherState.UNSHARDED

    @torch.no_grad()
    def install_main_weights(self) -> None:
        """Cast main weights into the compute weights; what was gathered from the old ones is out of date."""
        self.wait_for_unshard()
        if not self.main_is_compute:
            self.compute_piece.copy_(self.main_shard)
        if self.layout.world_size > 1:
            gathered = self._comes_and_goes and self.state is GatherState.UNSHARDED
            self.state = GatherState.SHARDED
            self._shard_is_old = self._num_pieces_of_shard > 1
            if gathered:  # someone holds the unit: refresh in place
                self.unshard()
                self.wait_for_unshard()

    @torch.no_grad()
    def broadcast(self) -> None:
        """Take the main weights of the first data rank.

        Where every piece has one owner there is nothing to take.
        """
        if self.layout.world_size < self._communicator.inner_size * self._communicator.outer_size:
            self._communicator.broadcast(
                self.main_shard,
                over_inner=self._num_shards == 1,
                over_outer=self._num_pieces_of_shard == 1,
            )
            self.install_main_weights()

    # ---- gradients
    # -----------------------------------------------------------------------------------------------

    @property
    def grad_shard(self) -> torch.Tensor:
        """The reduced gradient of this rank's piece, in the main gradient dtype; zeros before a reduction."""
        return self._grad_sum.total

    @property
    def has_local_grad(self) -> bool:
        """Whether this rank holds gradients that no reduction has taken yet."""
        return self._has_local_grad

    @property
    def has_inner_sum(self) -> bool:
        """Whether there are gradients that are reduced over the inner axis only."""
        return not self._inner_sum.is_empty

    @torch.no_grad()
    def accumulate(self) -> None:
        """Move the gradients that autograd left on the compute parameters into the group's buffer."""
        arrived = [
            index for index, parameter in enumerate(self.parameters) if parameter.grad is not None
        ]
        if not arrived:
            return
        views = self._open_grads(complete=len(arrived) == len(self.parameters))
        targets = [views[index] for index in arrived]
        grads = [_local_grad(self.parameters[index]) for index in arrived]
        if self._has_local_grad:
            torch._foreach_add_(targets, grads)
        else:
            torch._foreach_copy_(targets, grads)
        self._has_local_grad = True
        for index in arrived:
            self.parameters[index].grad = None

    def _open_grads(self, complete: bool) -> list[torch.Tensor]:
        """Storage for local gradients, zero where nothing is about to be written."""
        # Between reductions gradients add up in the main dtype. Where every backward is reduced,
        # the buffer holds one contribution only and is in the dtype that travels.
        dtype = (
            self.precision.grad_comm if self.strategy.shards_gradients else self.precision.main_grad
        )
        if self._grads is None or (self._grads.flat.dtype != dtype and not self._has_local_grad):
            self._grads = FlatBuffer(self.layout, dtype, self.compute.flat.device)
            self._grad_views = [self._grads.view(index) for index in range(len(self.parameters))]
        if not self._has_local_grad:
            self._grads.allocate()
            self._grads.zero_padding() if complete else self._grads.flat.zero_()
        return self._grad_views

    @torch.no_grad()
    def reduce(self, over_inner: bool, over_outer: bool) -> None:
        """Begin to reduce.

        ``over_inner``: the local gradients; without any, this rank adds zeros to what the others
            have.
        ``over_outer``: everything that was reduced over the inner axis. Without an outer axis there
            is nothing to do.
        """
        self.wait_for_reduce()
        self._reduction = self._reduce(over_inner, over_outer)
        self._reducing = next(self._reduction, None)

    @torch.no_grad()
    def advance_reduce(self) -> bool:
        """Wait for the collective under way and begin the next one; False when there is none."""
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = next(self._reduction, None)
        return self._reducing is not None

    def wait_for_reduce(self) -> None:
        """Return when the reduction that has begun is over."""
        while self.advance_reduce():
            pass

    def _reduce(self, over_inner: bool, over_outer: bool) -> Iterator[Pending]:
        is_hybrid = self._communicator.outer is not None
        if over_inner:
            yield from self._reduce_inner(self._inner_sum if is_hybrid else self._grad_sum)
        if over_outer and is_hybrid:
            yield from self._reduce_outer()

    def _reduce_inner(self, sum_: RunningSum) -> Iterator[Pending]:
        """Add the local gradients, reduced over the inner axis, to ``sum_``; their buffer is given back."""
        if not self._has_local_grad:
            self._open_grads(complete=False)
        full = self._grads.flat.to(self.precision.grad_comm)
        self._has_local_grad = False
        if self._num_shards > 1:
            result = sum_.place_for(full.dtype)
            yield self._communicator.reduce_scatter(full, result)
        else:
            result = full
            yield self._communicator.all_reduce(full)
        sum_.add(result)
        self._grads.free()

    def _reduce_outer(self) -> Iterator[Pending]:
        """Add the inner sum, reduced over the outer axis, to the gradient shard."""
        partial = self._inner_sum.total.to(self.precision.grad_comm)
        if self._shards_outer:
            result = self._grad_sum.place_for(partial.dtype)
            yield self._communicator.reduce_scatter_outer(partial, result)
        else:
            result = partial
            yield self._communicator.all_reduce_outer(partial)
        self._grad_sum.add(result)
        self._inner_sum.free()

    @torch.no_grad()
    def final_grad(self, in_main_dtype: bool = True) -> torch.Tensor:
        """The reduced gradient of this rank's piece, zero where nothing was used.

        ``in_main_dtype``: in the dtype of the main weights, what torch's optimizers want; else in
            the one it is kept in.
        """
        shard = self._grad_sum.total
        if shard.dtype == self.main_shard.dtype or not in_main_dtype:
            return shard
        if self._optimizer_grad is None:
            self._optimizer_grad = torch.empty_like(self.main_shard)
        return self._optimizer_grad.copy_(shard)

    @torch.no_grad()
    def scale_grad(self, factor: float | torch.Tensor) -> None:
        """Multiply all gradients, reduced or not yet."""
        self.wait_for_reduce()
        for sum_ in (self._grad_sum, self._inner_sum):
            if not sum_.is_empty:
                sum_.total.mul_(factor)
        if self._has_local_grad:
            self._grads.flat.mul_(factor)
        if self._optimizer_grad is not None:
            self._optimizer_grad.mul_(factor)  # not made anew: it may have been clipped

    def forget_reduced_grad(self) -> None:
        """The next reduction begins a new sum."""
        self.wait_for_reduce()
        self._grad_sum.clear()

    def zero_grad(self) -> None:
        """Forget all gradients: reduced, partly reduced, local and those still on the compute parameters."""
        self.forget_reduced_grad()
        self._inner_sum.free()
        if self._grads is not None:
            self._grads.free()
        self._has_local_grad = False
        for parameter in self.parameters:
            parameter.grad = None

    def communicate_in(self, dtype: torch.dtype | None) -> None:
        """Gradients travel in ``dtype`` from now on; None: in the main gradient dtype."""
        self.wait_for_reduce()
        self.precision = replace(self.precision, grad_comm=dtype or self.precision.main_grad)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _set_local_tensor(parameter: nn.Parameter, value: torch.Tensor) -> None:
    if isinstance(parameter, DTensor):
        parameter._local_tensor = value
    else:
        parameter.data = value


def _local_grad(parameter: nn.Parameter) -> torch.Tensor:
    """The gradient that autograd left, laid out like the parameter."""
    grad = parameter.grad
    if isinstance(grad, DTensor):
        # Of a parameter that tensor parallelism replicates, autograd may leave parts of a sum.
        if grad.placements != parameter.placements:
            grad = grad.redistribute(placements=parameter.placements)
        grad = grad.to_local()
    return grad.to_dense() if grad.is_sparse else grad


def _copy_overlap(
    source: torch.Tensor, source_start: int, target: torch.Tensor, target_start: int
) -> None:
    """Copy what two ranges of one flat space, given by tensors and their starts, have in common."""
    low = max(source_start, target_start)
    high = min(source_start + source.numel(), target_start + target.numel())
    if low < high:
        target[low - target_start : high - target_start].copy_(
            source[low - source_start : high - source_start]
        )
