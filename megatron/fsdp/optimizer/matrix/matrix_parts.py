# SPDX-License-Identifier: Apache-2.0
"""Matrices with their owners, and the parts of them that all ranks have."""

# [Note: from shards to owners] Ranks have flat ranges of a matrix, or of a slice of it by tensor
# parallelism. Ranks that have all of it together are a replica: there is one without an outer axis,
# one for each outer rank in hybrid sharding, and every rank is one at level 0. The owner gets the
# parts of its own replica, and sends every rank of all replicas its part of the result.
#
#     shards of a (4, 3) matrix      rank 0 [0, 7)   rank 1 [7, 12)   rank 2 [0, 7)   rank 3 [7, 12)
#     to the owner, rank 2                                            has [0, 7)   <- rank 3 sends
#     from the owner                 <- [0, 7)       <- [7, 12)       has [0, 7)      <- [7, 12)

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from megatron.fsdp.dtensor.sharded_gradient import ShardedGradient
from megatron.fsdp.dtensor.sharded_param import ShardedParam
from megatron.fsdp.dtensor.tensor_part import Shape, TensorPart, TensorSlice
from megatron.fsdp.dtensor.uneven_dtensor import UnevenDTensor, dtensor_over
from megatron.fsdp.engine.collectives import connect, local_group
from megatron.fsdp.engine.layout import FlatRange, row_size
from megatron.fsdp.engine.mesh import Axes
from megatron.fsdp.optimizer.matrix.exchange import Exchange


@dataclass(frozen=True)
class MatrixPart:
    """The part of a matrix that one rank has."""

    rank: int  # rank in the group of the owners
    replica: tuple[int, ...]  # equal for ranks that have the whole matrix together
    slice: TensorSlice
    range: FlatRange  # part of the slice

    @property
    def is_contiguous(self) -> bool:
        """True if the elements are neighbours in the whole matrix."""
        return self.slice.dim != 1

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the elements in ``whole``, flat: a view, or a copy if they are not contiguous."""
        shape = self.slice.shape
        if not self.is_contiguous:
            chunks = self.slice.chunks(self.range)
            return TensorPart(shape, chunks).of(whole)
        first = self.slice.start * row_size(shape)
        start = first + self.range.start
        stop = first + self.range.stop
        return whole.view(-1)[start:stop]

    def put(self, whole: torch.Tensor, flat: torch.Tensor) -> None:
        """Set the elements in ``whole`` to those of ``flat``."""
        flat = flat.view(-1)
        if self.is_contiguous:
            self.of(whole).copy_(flat)
            return
        start = 0
        chunks = self.slice.chunks(self.range)
        for (row, column), (height, width) in chunks:
            stop = start + height * width
            values = flat[start:stop].view(height, width)
            rows = whole[row : row + height]
            rows[:, column : column + width] = values
            start = stop


class OwnerRanks:
    """The ranks among which the matrices of one mesh have owners."""

    def __init__(self, axes: Axes):
        self.mesh = axes.dtensor_mesh(outer_is_sharded=True)
        ranks = self.mesh.mesh
        num_slices = 1
        if axes.tensor is not None:
            num_slices = axes.tensor.size()
        known = None
        if num_slices == 1:
            known = axes.data_group
        # Not the group of all ranks: other pipeline stages may have other parameters.
        self.group = known or local_group(ranks.flatten().tolist())
        # In a round of messages some ranks have nothing to send, and would not connect.
        device = torch.device(self.mesh.device_type)
        connect([self.group], device)
        ranks_in_group = dist.get_process_group_ranks(self.group)
        # Coordinates (tensor, inner, outer) of each rank, by its number in the group.
        self.members: dict[int, tuple[int, int, int]] = {}
        grid = ranks.reshape(num_slices, axes.inner.size(), -1)
        for tensor, of_slice in enumerate(grid.tolist()):
            for inner, of_inner in enumerate(of_slice):
                for outer, rank in enumerate(of_inner):
                    number = ranks_in_group.index(rank)
                    self.members[number] = tensor, inner, outer
        self.rank = dist.get_rank(self.group)

    def parts(self, sharded_param: ShardedParam) -> Iterator[MatrixPart]:
        """Yield the part of a matrix that each rank has."""
        group = sharded_param.group
        num_inner = group.partition.num_inner
        num_outer = group.partition.num_outer
        for rank, (tensor, inner, outer) in self.members.items():
            inner_shard = inner % num_inner
            outer_shard = outer % num_outer
            shard = inner_shard * num_outer + outer_shard
            owned = group.layout.owned(sharded_param.index, shard)
            slice_ = sharded_param.slice
            # Ranks along an axis that divides the matrix are in the same replica.
            if slice_.dim is not None:
                start = tensor * owned.shape[slice_.dim]
                slice_ = slice_._replace(start=start)
                tensor = 0
            if num_inner > 1:
                inner = 0
            if num_outer > 1:
                outer = 0
            yield MatrixPart(
                rank=rank,
                replica=(tensor, inner, outer),
                slice=slice_,
                range=owned,
            )

    def with_all(self, sharded_param: ShardedParam) -> list[int]:
        """List the ranks that have all of a matrix."""
        numel = prod(sharded_param.slice.shape)
        ranks = []
        for part in self.parts(sharded_param):
            if part.range.numel == numel:
                ranks.append(part.rank)
        return ranks


class Matrix:
    """A parameter that is a matrix, and the rank that updates all of it.

    Args:
        sharded_param: the parameter.
        ranks: the ranks of its mesh.
        owner: the rank that updates it, numbered in their group.
    """

    def __init__(
        self,
        sharded_param: ShardedParam,
        ranks: OwnerRanks,
        owner: int,
    ):
        self.sharded_param = sharded_param
        self.ranks = ranks
        self.owner = owner
        self.shape = sharded_param.slice.shape
        self.is_own = ranks.rank == owner
        parts = {part.rank: part for part in ranks.parts(sharded_param)}
        self._part = parts[ranks.rank]
        self._sources: list[MatrixPart] = []  # parts of which the owner makes the matrix
        self._others: list[MatrixPart] = []  # parts that the owner sends
        replica = parts[owner].replica
        for part in parts.values():
            if not part.range.numel:
                continue
            if part.replica == replica:
                self._sources.append(part)
            if part.rank != owner:
                self._others.append(part)

    @property
    def parameter(self) -> UnevenDTensor:
        """The parameter that the optimizer has."""
        return self.sharded_param.parameter

    @property
    def weight(self) -> torch.Tensor:
        """The part of the main weight that this rank has."""
        return self.parameter._local_tensor

    @property
    def gradient(self) -> torch.Tensor:
        """The part of the gradient that this rank has."""
        gradient = self.parameter.grad
        if isinstance(gradient, ShardedGradient):
            return gradient._local_tensor
        assert gradient is not None  # checked by the caller
        return self.sharded_param.local_shard(gradient)  # the user has replaced it

    def collect(
        self,
        local: torch.Tensor,
        exchange: Exchange,
    ) -> torch.Tensor | None:
        """Send the owner a tensor of which this rank has ``local``; return all of it there.

        The result is complete when the messages have arrived. It may be a view of ``local``.
        """
        local = local.contiguous()
        if not self.is_own:
            if self._part in self._sources:
                exchange.send(local, self.owner)
            return None
        if self._sources == [self._part]:
            return local.view(self.shape)
        whole = local.new_empty(self.shape)
        for part in self._sources:
            if part.rank == self.owner:
                part.put(whole, local)
            else:
                self._receive(part, whole, exchange)
        return whole

    def _receive(
        self,
        part: MatrixPart,
        whole: torch.Tensor,
        exchange: Exchange,
    ) -> None:
        flat = part.of(whole)
        if part.is_contiguous:
            exchange.receive(flat, part.rank)
            return

        def put() -> None:
            part.put(whole, flat)

        exchange.receive(flat, part.rank, after=put)  # `flat` is a copy

    def distribute(
        self,
        whole: torch.Tensor | None,
        local: torch.Tensor,
        exchange: Exchange,
    ) -> None:
        """Set ``local`` on every rank to its part of ``whole``, when the messages have arrived.

        Args:
            whole: on the owner the whole matrix, which must not change before; None elsewhere.
            local: this rank's part, contiguous; its values are replaced.
            exchange: collects the messages; the caller starts it.
        """
        if whole is None:
            if local.numel():
                exchange.receive(local, self.owner)
            return
        if local.numel() and local.data_ptr() != whole.data_ptr():
            own = self._part.of(whole)
            local.view(-1).copy_(own)
        for part in self._others:
            exchange.send(part.of(whole), part.rank)

    # ---- state

    @property
    def _key(self) -> tuple[object, ...]:
        """The key of the parts of tensors that the owner has."""
        return "owner", self.owner, tuple(self.ranks.members)

    def is_with_owner(self, value: torch.Tensor) -> bool:
        """Return True for a tensor that :meth:`with_owner` has returned."""
        if not isinstance(value, UnevenDTensor) or value.part is None:
            return False
        key = value.part.key
        return isinstance(key, tuple) and key[:-1] == self._key

    def with_owner(self, local: torch.Tensor, shape: Shape) -> UnevenDTensor:
        """Return a DTensor over ``local``, which is all of it on the owner, elsewhere empty."""
        mesh = self.ranks.mesh
        placements = [Shard(0)] * mesh.ndim
        dtensor = dtensor_over(local, mesh, placements, shape)
        key = (*self._key, shape)
        dtensor.part = TensorPart.all_or_nothing(shape, self.is_own, key)
        return dtensor

    def take(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor of another shape than the matrix as one of which the owner has all."""
        if not value.ndim or self.is_with_owner(value):
            return value
        shape = tuple(value.shape)
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if not self.is_own:
            value = value.new_empty(0)
        return self.with_owner(value, shape)
