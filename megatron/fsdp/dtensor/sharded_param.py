# SPDX-License-Identifier: Apache-2.0
"""Sharded parameters: DTensors over main weights for the optimizer, and tensors for checkpoints.

[Note: uneven DTensors] The local tensor of a sharded parameter is the range that
:mod:`megatron.fsdp.engine.layout` assigns to this rank: some rows, or a flat range of elements,
which torch would divide otherwise. Element-wise operations do not depend on that. torch's
checkpoint does, and gets the chunks from
:class:`megatron.fsdp.dtensor.chunked_tensor.ChunkedTensor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megatron.fsdp.dtensor.chunked_tensor import ChunkedTensor, TensorSlice, as_chunked_tensor
from megatron.fsdp.dtensor.gathering import wrap_local
from megatron.fsdp.dtensor.gradient import GradientFamily, NormGroup, ShardedGradient
from megatron.fsdp.dtensor.operations import LocalPart, part_of
from megatron.fsdp.dtensor.uneven import AnyUneven, UnevenDTensor, dtensor_over
from megatron.fsdp.engine.buffer import shard_view
from megatron.fsdp.engine.mesh import Axes
from megatron.fsdp.engine.param_group import ParamGroup
from megatron.fsdp.engine.tensor_parallel import (
    get_mcore_tensor_parallel_partition_dim,
    local_tensor,
)


@dataclass(frozen=True)
class ParameterMesh:
    """The mesh of dense parameters or of expert parameters.

    Args:
        axes: their mesh axes.
        mesh: of their DTensors: the tensor axis if there is one, the inner axis, and the outer axis
            if it shards them.
        norm_group_of_slices: for parameters that tensor parallelism divides.
        norm_group_of_copies: for parameters of which every tensor-parallel rank has a copy.
    """

    axes: Axes
    mesh: DeviceMesh
    norm_group_of_slices: NormGroup
    norm_group_of_copies: NormGroup


class ShardedParam:
    """One parameter of a sharded model: its DTensor, its gradient, and its checkpoint entries.

    Args:
        group: the parameter group that it belongs to.
        index: its index in the group.
        mesh: the mesh of the group's parameters.

    Attributes:
        name: the name of the module's parameter.
        slice: the slice of the whole tensor that tensor parallelism assigns to this rank.
        flat_range: the elements of the slice that this rank owns.
        chunks: these elements, as chunks of the whole tensor.
        parameter: the DTensor over the main weight, which torch treats as an ``nn.Parameter``.
    """

    def __init__(self, group: ParamGroup, index: int, mesh: ParameterMesh):
        self.group = group
        self.index = index
        self.name = group.names[index]
        self.slice = tensor_slice(group.parameters[index], mesh.axes.tensor)
        self.flat_range = group.layout.owned(index, group.rank)
        self.chunks = self.slice.chunks(self.flat_range)
        self._mesh = mesh.mesh
        self._placements = self._placements_on(mesh)
        self._norm_group = (
            mesh.norm_group_of_copies if self.slice.dim is None else mesh.norm_group_of_slices
        )
        outer = mesh.axes.outer
        self._replicas = (outer.get_group(),) if outer is not None else ()
        self._part = self._local_part()
        self.parameter = self._dtensor(group.main_view(index), UnevenDTensor)
        self.parameter.requires_grad_(group.requires_grad)
        self.parameter._is_param = True  # what `isinstance(…, nn.Parameter)` looks at
        self.parameter.part = replace(self._part, edited=group.note_edit)

    def _local_part(self) -> LocalPart:
        """Return the part of tensors of this parameter that belongs to this rank."""
        layout = self.group.layout
        start = layout.positions[self.index].start
        # With the mesh, these determine the part of every rank.
        key = (self.slice.shape, self.slice.dim, start, layout.shard_size, layout.world_size)
        chunks = self.chunks
        if not self.slice.shape and chunks:
            chunks = (((0,), (1,)),)  # the optimizer sees a vector of one element
        return LocalPart(key, chunks, replicas=self._replicas)

    def _placements_on(self, mesh: ParameterMesh) -> list[Placement]:
        placements: list[Placement] = []
        if mesh.axes.tensor is not None:
            placements.append(Replicate() if self.slice.dim is None else Shard(self.slice.dim))
        num_data_axes = mesh.mesh.ndim - len(placements)
        data: Placement = Shard(0) if self.group.strategy.shards_optimizer else Replicate()
        return placements + [data] * num_data_axes

    @property
    def compute(self) -> nn.Parameter:
        """The module's own parameter, which is used in forward."""
        return self.group.parameters[self.index]

    # ---- gradients and optimizer state

    def gradient(self, flat: torch.Tensor, family: GradientFamily) -> ShardedGradient:
        """Return a DTensor over this parameter's gradient in ``flat``.

        Args:
            flat: the rank's shard of the group's gradients.
            family: all gradients of the model.
        """
        shard = shard_view(flat, self.group.layout, self.index, self.group.rank)
        gradient = self._dtensor(shard, ShardedGradient)
        gradient.norm_group, gradient.family = self._norm_group, family
        link(gradient, self)
        return gradient

    def over(self, local: torch.Tensor) -> UnevenDTensor:
        """Return a DTensor over ``local``, this rank's elements of a tensor like the parameter."""
        return self._dtensor(local, UnevenDTensor)

    def sharded_like(self, value: torch.Tensor) -> DTensor:
        """Copy this rank's shard of ``value``, of the parameter's shape, into a new DTensor."""
        shard = self.local_shard(value).to(self.parameter.device)
        return self._dtensor(shard.clone(), UnevenDTensor)

    def _dtensor(self, local: torch.Tensor, dtensor_class: type[AnyUneven]) -> AnyUneven:
        # To the optimizer, a scalar is a vector of one element, which can be sharded.
        shape = self.slice.shape or (1,)
        dtensor = wrap_local(dtensor_class, local, self._mesh, self._placements, shape)
        dtensor.part = self._part
        return dtensor

    # ---- checkpoints

    def checkpoint_tensor(self, value: DTensor | None = None, with_chunks: bool = True) -> DTensor:
        """Return a tensor over ``value``'s storage that torch's checkpoint can save and load.

        Args:
            value: a DTensor of the parameter's shape. None: the main weight.
            with_chunks: let torch's checkpoint know the chunks of this rank.
        """
        local = (self.parameter if value is None else value)._local_tensor.detach()
        part = self._part if value is not None else self.parameter.part
        if with_chunks:
            is_flat = not self.flat_range.by_rows
            local = as_chunked_tensor(local, self.chunks, self.slice.shape, is_flat)
        tensor = self._in_checkpoint(local, self.slice.shape)
        tensor.part = part if self.slice.shape else None
        return tensor

    def checkpoint_tensors(self, count: int, value: DTensor | None = None) -> list[DTensor]:
        """Cut a tensor into ``count`` equal ones along dim 0, each an entry of a checkpoint.

        Args:
            count: divides dim 0 of the parameter.
            value: of the parameter's shape. None: the main weight.
        """
        if count == 1:
            return [self.checkpoint_tensor(value)]
        # Example with a count of 2: a weight of shape (8, 3) becomes two tensors of shape (4, 3).
        # If tensor parallelism divides the weight along dim 0 over two ranks, each rank's slice of
        # 4 rows consists of 2 rows of the first tensor and 2 rows of the second. The second rank's
        # slice starts at row 4 of the weight, and at row 4 / 2 = 2 of each of the two tensors.
        rows, dim, start = self.slice.shape[0] // count, self.slice.dim, self.slice.start
        shape = (rows, *self.slice.shape[1:])
        slice_ = TensorSlice(shape, dim, start // count if dim == 0 else start)
        flat = (self.parameter if value is None else value)._local_tensor.detach().reshape(-1)
        tensors: list[DTensor] = []
        begin = 0
        for flat_range in self.flat_range.parts(count):
            end = begin + flat_range.numel
            local = flat[begin:end].view(flat_range.local_shape)
            chunks, is_flat = slice_.chunks(flat_range), not flat_range.by_rows
            local = as_chunked_tensor(local, chunks, slice_.shape, is_flat)
            tensors.append(self._in_checkpoint(local, shape))
            begin = end
        return tensors

    def _in_checkpoint(self, local: torch.Tensor, shape: Sequence[int]) -> UnevenDTensor:
        replicated: list[Placement] = [Replicate()] * self._mesh.ndim
        # torch has no sharded scalars.
        placements = self._placements if shape else replicated
        return dtensor_over(local, self._mesh, placements, shape)

    # ---- loading

    @torch.no_grad()
    def load(self, value: torch.Tensor) -> None:
        """Copy this rank's shard of ``value`` into the main weight; see :meth:`local_shard`."""
        self.parameter._local_tensor.copy_(self.local_shard(value))

    def local_shard(self, value: torch.Tensor) -> torch.Tensor:
        """Return the elements of ``value`` that this rank owns, in the shape of the local tensor.

        Args:
            value: a tensor of the parameter's shape: a full tensor, a DTensor of this layout, or a
                DTensor that torch has divided, which is gathered.

        Raises:
            ValueError: if the shape differs, or the value is sharded with another layout.
        """
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{self.name}: expects a tensor but got {type(value).__name__}")
        if tuple(value.shape) not in (self.slice.shape, self.slice.shape or (1,)):
            raise ValueError(
                f"{self.name}: expects shape {tuple(self.slice.shape)} but got {tuple(value.shape)}"
            )
        if isinstance(value, UnevenDTensor) or (
            isinstance(value, DTensor) and isinstance(value._local_tensor, ChunkedTensor)
        ):
            return self._shard_of(value)
        whole = self._whole_slice_of(value).reshape(-1)
        return whole[self.flat_range.start : self.flat_range.stop].view(self.flat_range.local_shape)

    def _shard_of(self, value: DTensor) -> torch.Tensor:
        local = value._local_tensor
        fits = local.numel() == self.flat_range.numel
        if isinstance(local, ChunkedTensor) and value.shape == self.slice.shape:
            fits = local.chunks == self.chunks
        part = part_of(value)
        if part is not None:  # which has the same answer on every rank
            fits = fits and part.key == self._part.key
        if not fits:
            raise ValueError(
                f"{self.name}: the state was sharded for another layout ({local.numel()} elements"
                f" on this rank, not the {self.flat_range.numel} of this one); load it with"
                " torch.distributed.checkpoint, which reshards"
            )
        return local.reshape(self.flat_range.local_shape)

    def _whole_slice_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of a full tensor, or of a DTensor that torch has divided."""
        size = self.flat_range.shape[self.slice.dim] if self.slice.dim is not None else 0
        if not isinstance(value, DTensor):
            return self.slice.of(value.detach(), size)
        is_of_tensor_axis = value.device_mesh.ndim < self._mesh.ndim
        if is_of_tensor_axis and value._local_tensor.shape == self.flat_range.shape:
            return value._local_tensor.detach()  # of the tensor-parallel model before sharding
        return self.slice.of(value.full_tensor().detach(), size)


def link(tensor: torch.Tensor, sharded: ShardedParam) -> None:
    """Record the sharded parameter that a DTensor belongs to, for :func:`sharded_param_of`."""
    tensor._fsdp_sharded = sharded  # type: ignore[attr-defined]  # an attribute of our own


def sharded_param_of(tensor: torch.Tensor) -> ShardedParam:
    """Return the sharded parameter that a parameter or gradient of a sharded model belongs to.

    Raises:
        AttributeError: for any other tensor.
    """
    sharded: ShardedParam = tensor._fsdp_sharded  # type: ignore[attr-defined]  # see `link`
    return sharded


def is_linked(tensor: object) -> bool:
    """Return True if a value belongs to a sharded parameter."""
    return hasattr(tensor, "_fsdp_sharded")


def tensor_slice(parameter: nn.Parameter, axis: DeviceMesh | None) -> TensorSlice:
    """Return the slice of the whole tensor that ``parameter`` is on this rank.

    It follows from the placements of DTensors, and from the attributes ``tensor_model_parallel``
    and ``partition_dim`` of Megatron-Core's and Transformer Engine's parameters.

    Args:
        parameter: the module's own parameter.
        axis: the tensor-parallel mesh axis; None without one.
    """
    local = tuple(local_tensor(parameter).shape)
    if axis is None:
        return TensorSlice(local)
    if isinstance(parameter, DTensor):
        (placement,) = parameter.placements
        if not isinstance(placement, Shard):
            return TensorSlice(local)
        _, start = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        return TensorSlice(tuple(parameter.shape), placement.dim, start[placement.dim])
    dim = get_mcore_tensor_parallel_partition_dim(parameter)
    if dim is None:
        return TensorSlice(local)
    shape = list(local)
    shape[dim] *= axis.size()
    return TensorSlice(tuple(shape), dim, local[dim] * axis.get_local_rank())
