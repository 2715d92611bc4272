# SPDX-License-Identifier: Apache-2.0
"""Sharded parameters: DTensors for the optimizer, and tensors for checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from megatron.fsdp.dtensor.process_link import ProcessLink
from megatron.fsdp.dtensor.sharded_gradient import GradientFamily, ShardedGradient
from megatron.fsdp.dtensor.tensor_part import (
    ChunkedTensor,
    TensorPart,
    TensorSlice,
    as_chunked_tensor,
    copied,
    part_of,
    wrap_local,
)
from megatron.fsdp.dtensor.uneven_dtensor import UnevenDTensor, dtensor_over
from megatron.fsdp.dtensor.uneven_shard import ScalarOfOneRank, UnevenShard
from megatron.fsdp.engine.buffer import shard_view
from megatron.fsdp.engine.layout import row_size
from megatron.fsdp.engine.mesh import Axes, NormGroup
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.policy import ParameterKind

AnyUneven = TypeVar("AnyUneven", bound=UnevenDTensor)


@dataclass(frozen=True)
class ParameterMesh:
    """The mesh of a kind of parameters."""

    kind: ParameterKind
    axes: Axes
    mesh: DeviceMesh  # tensor axis if there is one, inner axis, and outer axis if it shards them
    norm_group_of_slices: NormGroup  # for parameters that tensor parallelism divides
    norm_group_of_copies: NormGroup  # for parameters that all tensor-parallel ranks have


# [Note: sharded parameters] The local tensor of a parameter, or of its gradient, is a flat range of
# its group's main shard, or gradient shard. Both, and what element-wise operations make of them,
# know their part of the whole tensor.


class ShardedParam:
    """One parameter of a sharded model: its DTensor, its gradient, and its checkpoint entries.

    Args:
        group: the group in whose flat buffers the parameter is.
        index: its position in the group.
        mesh: the mesh of its DTensors.
    """

    def __init__(
        self,
        group: ParamGroup,
        index: int,
        mesh: ParameterMesh,
    ):
        self.group = group
        self.index = index
        self.name = group.names[index]
        axes = mesh.axes
        layout = group.layout
        # This rank has a slice of the whole tensor, and owns a flat range of that slice.
        flat_range = layout.owned(index, group.rank)
        tensor_slice = TensorSlice.of_parameter(
            group.parameters[index],
            local=flat_range.shape,
            axis=axes.tensor,
        )
        self.flat_range = flat_range
        self.slice = tensor_slice
        self.kind = mesh.kind
        self._mesh = mesh.mesh
        self.norm_group = mesh.norm_group_of_slices
        if tensor_slice.dim is None:
            self.norm_group = mesh.norm_group_of_copies
        start = layout.positions[index].start
        replicas: tuple[dist.ProcessGroup, ...] = ()
        if axes.outer is not None:
            replicas = (axes.outer.get_group(),)
        self._part = TensorPart(
            tensor_slice.shape,
            tensor_slice.chunks(flat_range),
            is_flat=not flat_range.by_rows,
            # With the mesh, these determine the part of every rank.
            key=(
                tensor_slice.shape,
                tensor_slice.dim,
                start,
                layout.shard_size,
                layout.world_size,
            ),
            replicas=replicas,
        )
        self._optimizer_part = self._part
        if not tensor_slice.shape:
            # To the optimizer, a scalar is a vector of one element, which can be sharded.
            element = TensorPart.all_or_nothing((1,), has_all=flat_range.numel > 0)
            self._optimizer_part = replace(
                self._part,
                shape=element.shape,
                chunks=element.chunks,
            )
        data: Placement = Replicate()
        if group.strategy.shards_optimizer:
            data = UnevenShard(self._optimizer_part)
        self._placements = tensor_slice.placements(axes.tensor, mesh.mesh.ndim, data)
        self.parameter = self.over(group.main_view(index))
        self.parameter.requires_grad_(group.requires_grad)
        self.parameter._is_param = True  # torch's mark, so that it is an nn.Parameter
        self.parameter.on_write = ProcessLink(group.note_edit)

    @property
    def compute(self) -> nn.Parameter:
        """The module's own parameter, which is used in forward."""
        return self.group.parameters[self.index]

    # ---- gradients and optimizer state

    def gradient(self, flat: torch.Tensor, family: GradientFamily) -> ShardedGradient:
        """Return a DTensor over this parameter's gradient in ``flat``, the shard of its group."""
        group = self.group
        shard = shard_view(flat, group.layout, self.index, group.rank)
        gradient = self._over(ShardedGradient, shard)
        gradient.norm_group = ProcessLink(self.norm_group)
        gradient.family = ProcessLink(family)
        gradient.memory = ProcessLink(group.memory)
        return gradient

    def over(self, local: torch.Tensor) -> UnevenDTensor:
        """Return a DTensor over this rank's elements of a tensor of the parameter's shape."""
        return self._over(UnevenDTensor, local)

    def sharded_like(self, value: torch.Tensor) -> UnevenDTensor:
        """Copy this rank's shard of a tensor of the parameter's shape into a new DTensor."""
        shard = self.local_shard(value).to(self.parameter.device)
        return self.over(copied(shard))

    def _over(
        self,
        dtensor_class: type[AnyUneven],
        local: torch.Tensor,
    ) -> AnyUneven:
        part = self._optimizer_part
        dtensor = wrap_local(
            dtensor_class,
            local,
            mesh=self._mesh,
            placements=self._placements,
            shape=part.shape,
        )
        dtensor.part = part
        return dtensor

    # ---- checkpoints

    def checkpoint_tensor(
        self,
        value: DTensor | None = None,
        with_chunks: bool = True,
    ) -> DTensor:
        """Return ``value``, by default the main weight, as torch's checkpoint expects it."""
        source = value
        if source is None:
            source = self.parameter
        local = source._local_tensor.detach()
        tensor = self._in_checkpoint(local, self._part, with_chunks)
        tensor.on_write = getattr(source, "on_write", None)
        return tensor

    def checkpoint_tensors(
        self,
        count: int,
        value: DTensor | None = None,
    ) -> list[DTensor]:
        """Cut a tensor along dim 0 into ``count`` equal entries of a checkpoint.

        Args:
            count: the number of entries, which divides the rows of the slice of this rank.
            value: a DTensor that is divided like the parameter; None for the main weight.
        """
        if count == 1:
            return [self.checkpoint_tensor(value)]
        if value is None:
            value = self.parameter
        # With a count of 2, a weight of shape (8, 3) becomes two of shape (4, 3). The second of two
        # tensor-parallel ranks starts at row 4 of the weight, and at row 4 / 2 = 2 of either.
        num_rows, *row_shape = self.slice.shape
        shape = (num_rows // count, *row_shape)
        start = self.slice.start
        if self.slice.dim == 0:
            start = start // count
        entry_slice = TensorSlice(shape, self.slice.dim, start)
        flat = value._local_tensor.detach().reshape(-1)
        ranges = self.flat_range.parts(count)
        flat_parts = flat.split([flat_range.numel for flat_range in ranges])
        tensors: list[DTensor] = []
        for flat_range, flat_part in zip(ranges, flat_parts):
            part = TensorPart(
                shape,
                entry_slice.chunks(flat_range),
                is_flat=not flat_range.by_rows,
            )
            local = flat_part.view(flat_range.local_shape)
            tensors.append(self._in_checkpoint(local, part))
        return tensors

    def _in_checkpoint(
        self,
        local: torch.Tensor,
        part: TensorPart,
        with_chunks: bool = True,
    ) -> UnevenDTensor:
        placements = self._placements
        if not part.shape:  # torch has no sharded scalars
            placements = [ScalarOfOneRank(part)] * self._mesh.ndim
        if with_chunks:
            local = as_chunked_tensor(local, part)
        tensor = dtensor_over(local, self._mesh, placements, part.shape)
        tensor.part = part
        return tensor

    # ---- loading

    @torch.no_grad()
    def load(self, value: torch.Tensor) -> None:
        """Copy this rank's shard of ``value`` into the main weight; see :meth:`local_shard`."""
        self.group.wait_for_readers()
        self.parameter._local_tensor.copy_(self.local_shard(value))

    def local_shard(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of a full tensor or DTensor, if possible as a view.

        Raises:
            ValueError: if the value is no tensor, has another shape, or is divided otherwise and
                cannot be gathered.
        """
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{self.name}: expects a tensor but got {type(value).__name__}")
        shape = self.slice.shape
        if tuple(value.shape) not in (shape, shape or (1,)):
            raise ValueError(
                f"{self.name}: expects shape {tuple(shape)} but got {tuple(value.shape)}"
            )
        if isinstance(value, DTensor):
            local = value._local_tensor
            if self._has_own_part(value):
                return local.reshape(self.flat_range.local_shape)
            is_of_tensor_axis = value.device_mesh.ndim < self._mesh.ndim
            if is_of_tensor_axis and local.shape == self.flat_range.shape:
                # Of the tensor-parallel model before sharding: the slice of this rank.
                return self._shard_of_slice(local)
            value = value.full_tensor()  # torch has divided it
        dim = self.slice.dim
        if dim is not None:
            size = self.flat_range.shape[dim]
            value = self.slice.of(value, size)
        return self._shard_of_slice(value)

    def _has_own_part(self, value: DTensor) -> bool:
        """Return True if a local tensor is this rank's shard; False if this is not known.

        Raises:
            ValueError: if it is a shard of another layout.
        """
        part = part_of(value)
        local = value._local_tensor
        if part is None:
            return False
        if not part.key and not isinstance(local, ChunkedTensor):
            return False
        fits = part.chunks == self._part.chunks
        if part.key:  # keys give the same answer on every rank
            fits = part.key == self._part.key
        if fits and local.numel() == self.flat_range.numel:
            return True
        raise ValueError(
            f"{self.name}: the state was sharded for another layout ({local.numel()}"
            f" elements on this rank, not the {self.flat_range.numel} of this one); load it"
            " with torch.distributed.checkpoint, which reshards"
        )

    def _shard_of_slice(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of its slice of a tensor, without a graph."""
        start = self.flat_range.start
        stop = self.flat_range.stop
        local_shape = self.flat_range.local_shape
        value = value.detach()
        if not hasattr(value, "__tensor_flatten__"):
            elements = value.reshape(-1)[start:stop]
            return elements.view(local_shape)
        if start == stop:
            return torch.empty(local_shape, device=value.device)
        row = row_size(value.shape)
        return value[start // row : stop // row]  # quantized state


def link(tensor: torch.Tensor, sharded: ShardedParam) -> None:
    """Record the sharded parameter of a DTensor for :func:`sharded_param_of`."""
    # An attribute of our own.
    tensor._fsdp_sharded = ProcessLink(sharded)  # type: ignore[attr-defined]


def sharded_param_of(tensor: torch.Tensor) -> ShardedParam:
    """Return the sharded parameter of a parameter or gradient; no other tensor has one."""
    sharded: ShardedParam = tensor._fsdp_sharded.target  # type: ignore[attr-defined]  # see `link`
    return sharded


def is_linked(tensor: object) -> bool:
    """Return True if a value belongs to a sharded parameter."""
    return getattr(tensor, "_fsdp_sharded", None) is not None
