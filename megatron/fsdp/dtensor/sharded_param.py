# SPDX-License-Identifier: Apache-2.0
"""The parameters the optimizer sees: DTensors over main weights, and their form in checkpoints.

[Note: uneven DTensors] The local part of a sharded parameter is what :mod:`megatron.fsdp.engine.layout`
says this rank owns,
not what torch would choose: some rows, or a flat run of elements. Element-wise operations do not
mind. torch's checkpoint asks a tensor for its chunks; :class:`RunTensor` answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megatron.fsdp.dtensor.gradient import NormGroup, ShardedGradient
from megatron.fsdp.dtensor.uneven import UnevenDTensor, dtensor_over
from megatron.fsdp.engine.buffer import shard_view
from megatron.fsdp.engine.layout import Box, Run
from megatron.fsdp.engine.mesh import Axes
from megatron.fsdp.engine.param_group import ParamGroup, local_tensor


class RunTensor(torch.Tensor):
    """A local piece that knows which boxes of the global tensor it holds.

    Operations on it give plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    run: Run
    slice: TensorSlice

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in self._boxes()
        ]

    def _boxes(self) -> list[Box]:
        return [(self.slice.in_whole(offsets), sizes) for offsets, sizes in self.run.boxes()]

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=properties, size=torch.Size(self.slice.shape)
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        flat = self.detach().view(-1)
        begin = 0
        for offsets, sizes in self._boxes():
            numel = torch.Size(sizes).numel()
            if index.offset is None or tuple(index.offset) == offsets:
                return flat[begin : begin + numel].view(sizes)
            begin += numel
        raise ValueError(f"{index.fqn}: this rank does not hold the chunk at {tuple(index.offset)}")

    def __deepcopy__(self, memo: dict) -> RunTensor:
        return with_run(self.detach().clone(), self.run, self.slice)

    def __reduce_ex__(self, protocol: int):
        return with_run, (self.detach().clone(), self.run, self.slice)


@dataclass(frozen=True)
class TensorSlice:
    """Which part of a whole tensor tensor parallelism has given to this rank: all of it, or a range of one dim.

    Args:
        shape: of the whole tensor.
        dim: that is divided; None where every tensor-parallel rank holds a copy.
        start: of this rank's range along ``dim``.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0

    def in_whole(self, offsets: tuple[int, ...]) -> tuple[int, ...]:
        """Offsets within the slice as offsets within the whole tensor."""
        return tuple(
            offset + self.start if dim == self.dim else offset for dim, offset in enumerate(offsets)
        )

    def of(self, whole: torch.Tensor, size: int) -> torch.Tensor:
        """This rank's part, ``size`` long along ``dim``, of the whole tensor."""
        return whole if self.dim is None else whole.narrow(self.dim, self.start, size)


def with_run(local: torch.Tensor, run: Run, slice_: TensorSlice | None = None) -> RunTensor:
    """``local``, sharing storage, as the piece ``run`` of a slice of a global tensor; by default of the whole one."""
    tensor = torch.Tensor._make_subclass(RunTensor, local)
    tensor.run = run
    tensor.slice = slice_ or TensorSlice(run.shape)
    return tensor


torch.serialization.add_safe_globals(
    [with_run, Run, TensorSlice]
)  # so that `torch.load` takes a saved state dict


@dataclass(frozen=True)
class ParameterMesh:
    """Where the parameters of a kind, dense or expert, live.

    Args:
        axes: their mesh axes.
        mesh: of their DTensors: tensor axis if there is one, inner axis, outer axis if it divides
            them.
        holders: for norms, of parameters that tensor parallelism divides, and of those that it
            copies.
    """

    axes: Axes
    mesh: DeviceMesh
    norm_group_of_slices: NormGroup
    norm_group_of_copies: NormGroup


class ShardedParam:
    """One parameter as the optimizer sees it.

    Args:
        group: the group it lies in, as number ``index``.
        place: the mesh that it lives on.
    """

    def __init__(self, group: ParamGroup, index: int, place: ParameterMesh):
        self.group = group
        self.index = index
        self.name = group.names[index]
        self.run = group.layout.owned(index, group.rank)
        self.slice = tensor_slice(group.parameters[index], place.axes.tensor)
        self._mesh = place.mesh
        self._placements = self._placements_on(place)
        self._holders = (
            place.norm_group_of_copies if self.slice.dim is None else place.norm_group_of_slices
        )
        self.parameter = self._dtensor(group.main_view(index)).requires_grad_(group.requires_grad)
        self.parameter._is_param = True  # what `isinstance(…, nn.Parameter)` looks at
        self._grad: ShardedGradient | None = None

    def _placements_on(self, place: ParameterMesh) -> list[Placement]:
        tensor = (
            []
            if place.axes.tensor is None
            else [Replicate() if self.slice.dim is None else Shard(self.slice.dim)]
        )
        data = place.mesh.ndim - len(tensor)
        return tensor + [Shard(0) if self.group.strategy.shards_optimizer else Replicate()] * data

    @property
    def compute(self) -> nn.Parameter:
        """The module's own parameter."""
        return self.group.parameters[self.index]

    def gradient(self, flat: torch.Tensor) -> ShardedGradient:
        """This parameter's piece of the final gradient shard ``flat``, which is the same tensor at every step."""
        if self._grad is None or self._grad.dtype != flat.dtype:
            piece = shard_view(flat, self.group.layout, self.index, self.group.rank)
            self._grad = self._dtensor(piece, ShardedGradient)
            self._grad.holders = self._holders
            self._grad._fsdp_sharded = self
        return self._grad

    def checkpoint_tensor(self, value: DTensor | None = None, with_chunks: bool = True) -> DTensor:
        """``value`` (default: the main weight), sharing storage, so that torch's checkpoint can save and load it.

        Without ``with_chunks`` nothing tells it which part of the whole this rank holds.
        """
        local = (self.parameter if value is None else value)._local_tensor.detach()
        return self._in_checkpoint(
            with_run(local, self.run, self.slice) if with_chunks else local, self.slice.shape
        )

    def checkpoint_tensors(self, parts: int, value: DTensor | None = None) -> list[DTensor]:
        """The same, cut into ``parts`` equal tensors along dim 0, each an entry of its own."""
        whole, dim, start = self.slice.shape, self.slice.dim, self.slice.start
        # Every tensor-parallel rank has its part of each of them, one after the other.
        slice_ = TensorSlice(
            (whole[0] // parts, *whole[1:]), dim, start // parts if dim == 0 else start
        )
        flat = (self.parameter if value is None else value)._local_tensor.detach().reshape(-1)
        tensors, begin = [], 0
        for run in self.run.parts(parts):
            local = flat[begin : begin + run.numel].view(run.local_shape)
            tensors.append(self._in_checkpoint(with_run(local, run, slice_), slice_.shape))
            begin += run.numel
        return tensors

    def _in_checkpoint(self, local: torch.Tensor, shape: Sequence[int]) -> DTensor:
        placements = (
            self._placements if shape else [Replicate()] * self._mesh.ndim
        )  # torch has no sharded scalars
        return dtensor_over(local, self._mesh, placements, shape)

    def local_shard(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's piece of ``value``: a full tensor, or a DTensor; one that is cut as torch does is gathered.

        Raises:
            ValueError: where the shapes do not agree.
        """
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{self.name}: expects a tensor but got {type(value).__name__}")
        if tuple(value.shape) not in (self.slice.shape, self.slice.shape or (1,)):
            raise ValueError(
                f"{self.name}: expects shape {tuple(self.slice.shape)} but got {tuple(value.shape)}"
            )
        if not isinstance(value, DTensor):
            whole = self.slice.of(value.detach(), self._size_of_slice)
        elif isinstance(value, UnevenDTensor) or isinstance(value._local_tensor, RunTensor):
            return self._piece_of(value)
        elif (
            value.device_mesh.ndim < self._mesh.ndim and value._local_tensor.shape == self.run.shape
        ):
            whole = value._local_tensor.detach()  # of the tensor-parallel model before sharding
        else:  # cut as torch does
            whole = self.slice.of(value.full_tensor().detach(), self._size_of_slice)
        return whole.reshape(-1)[self.run.start : self.run.stop].view(self.run.local_shape)

    @property
    def _size_of_slice(self) -> int:
        return self.run.shape[self.slice.dim] if self.slice.dim is not None else 0

    def _piece_of(self, value: DTensor) -> torch.Tensor:
        local = value._local_tensor
        same_run = (
            local.run == self.run
            if isinstance(local, RunTensor)
            else local.numel() == self.run.numel
        )
        if not same_run:
            raise ValueError(
                f"{self.name}: the state was sharded for another layout ({local.numel()} elements"
                f" on this rank, not the {self.run.numel} of this one); load it with"
                " torch.distributed.checkpoint, which reshards"
            )
        return local.reshape(self.run.local_shape)

    @torch.no_grad()
    def load(self, value: torch.Tensor) -> None:
        """Copy ``value`` into the main weight."""
        self.parameter._local_tensor.copy_(self.local_shard(value))

    def sharded_like(self, value: torch.Tensor) -> DTensor:
        """This rank's piece of a full tensor of the parameter's shape (optimizer state), as a DTensor of its own."""
        return self._dtensor(self.local_shard(value).to(self.parameter.device).clone())

    def _dtensor(
        self, local: torch.Tensor, kind: type[UnevenDTensor] = UnevenDTensor
    ) -> UnevenDTensor:
        # The optimizer sees a scalar as a vector of one element, which can be sharded.
        return dtensor_over(local, self._mesh, self._placements, self.slice.shape or (1,), kind)


def tensor_slice(parameter: nn.Parameter, axis: DeviceMesh | None) -> TensorSlice:
    """What ``parameter`` is of the whole tensor: torch's DTensors say so, and so do Megatron-Core's attributes."""
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
    dim = getattr(parameter, "partition_dim", -1)
    if not getattr(parameter, "tensor_model_parallel", False) or dim < 0:
        return TensorSlice(local)
    shape = tuple(size * axis.size() if each == dim else size for each, size in enumerate(local))
    return TensorSlice(shape, dim, local[dim] * axis.get_local_rank())
