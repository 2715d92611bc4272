# SPDX-License-Identifier: Apache-2.0
"""The parameters the optimizer sees: DTensors over main weights, and their form in checkpoints.

[Note: uneven DTensors] The local part of a sharded parameter is what :mod:`megatron.fsdp.layout` says this rank owns,
not what torch would choose: some rows, or a flat run of elements. Element-wise operations do not mind. torch's
checkpoint asks a tensor for its chunks; :class:`RunTensor` answers.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from megatron.fsdp.buffer import shard_view
from megatron.fsdp.collectives import all_gather_uneven
from megatron.fsdp.layout import Run
from megatron.fsdp.param_group import ParamGroup


class RunTensor(torch.Tensor):
    """A local piece that knows which boxes of the global tensor it holds. Operations on it give plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    run: Run

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in self.run.boxes()]

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(self.run.shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        flat = self.detach().view(-1)
        begin = 0
        for offsets, sizes in self.run.boxes():
            numel = torch.Size(sizes).numel()
            if index.offset is None or tuple(index.offset) == offsets:
                return flat[begin : begin + numel].view(sizes)
            begin += numel
        raise ValueError(f"{index.fqn}: this rank does not hold the chunk at {tuple(index.offset)}")

    def __deepcopy__(self, memo: dict) -> RunTensor:
        return with_run(self.detach().clone(), self.run)

    def __reduce_ex__(self, protocol: int):
        return with_run, (self.detach().clone(), self.run)


def with_run(local: torch.Tensor, run: Run) -> RunTensor:
    """``local``, sharing storage, as the piece ``run`` of a global tensor."""
    tensor = torch.Tensor._make_subclass(RunTensor, local)
    tensor.run = run
    return tensor


torch.serialization.add_safe_globals([with_run, Run])  # so that `torch.load` takes a saved state dict


def dtensor_over(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """A DTensor of logical ``shape`` over ``local``, which it shares."""
    # The wrapper takes its storage offset from the tensor it is made with, and torch cannot copy or save one that
    # does not begin at 0; so it is made with another and given the view afterwards.
    stride = torch.empty(shape, device="meta").stride()
    # `DTensor.from_local` would take the empty shape of a scalar for no shape.
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), stride, local.dtype))
    result = DTensor(local.new_empty(0), spec, requires_grad=False)
    result._local_tensor = local
    return result


class ShardedParam:
    """One parameter as the optimizer sees it.

    Args:
        group: the group it lies in, as number ``index``.
        mesh: the one-axis mesh it is sharded over.
    """

    def __init__(self, group: ParamGroup, index: int, mesh: DeviceMesh):
        self.group = group
        self.index = index
        self.name = group.names[index]
        self.run = group.layout.owned(index, group.rank)
        self._mesh = mesh
        self._placements = [Shard(0) if group.strategy.shards_optimizer else Replicate()]
        local = group.main_view(index)
        wrapped = self._dtensor(local)
        self.parameter = nn.Parameter(wrapped, requires_grad=group.requires_grad)
        self.parameter._local_tensor = local
        self._grad: DTensor | None = None

    @property
    def compute(self) -> nn.Parameter:
        """The module's own parameter."""
        return self.group.parameters[self.index]

    def attach_grad(self, flat: torch.Tensor) -> None:
        """Put this parameter's piece of the final gradient shard ``flat`` on ``parameter.grad``."""
        if self._grad is None:  # `flat` is the same tensor at every step
            self._grad = self._dtensor(shard_view(flat, self.group.layout, self.index, self.group.rank))
        self.parameter.grad = self._grad

    def checkpoint_tensor(self, value: DTensor | None = None, with_chunks: bool = True) -> DTensor:
        """``value`` (default: the main weight), sharing storage, so that torch's checkpoint can save and load it.

        Without ``with_chunks`` nothing tells it which part of the whole this rank holds.
        """
        local = (self.parameter if value is None else value)._local_tensor.detach()
        return self._in_checkpoint(with_run(local, self.run) if with_chunks else local, self.run)

    def checkpoint_tensors(self, parts: int, value: DTensor | None = None) -> list[DTensor]:
        """The same, cut into ``parts`` equal tensors along dim 0, each an entry of its own."""
        flat = (self.parameter if value is None else value)._local_tensor.detach().reshape(-1)
        tensors, begin = [], 0
        for run in self.run.parts(parts):
            local = flat[begin : begin + run.numel].view(run.local_shape)
            tensors.append(self._in_checkpoint(with_run(local, run), run))
            begin += run.numel
        return tensors

    def _in_checkpoint(self, local: torch.Tensor, run: Run) -> DTensor:
        placements = self._placements if run.shape else [Replicate()]  # torch has no sharded scalars
        return dtensor_over(local, self._mesh, placements, run.shape)

    def local_part(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's piece of ``value``: a full tensor, or a DTensor laid out like the parameter.

        Raises:
            ValueError: where the shapes do not agree.
        """
        if tuple(value.shape) not in (self.run.shape, self.run.shape or (1,)):
            raise ValueError(f"{self.name}: expects shape {tuple(self.run.shape)} but got {tuple(value.shape)}")
        if isinstance(value, DTensor):
            local = value._local_tensor
            same_run = local.run == self.run if isinstance(local, RunTensor) else local.numel() == self.run.numel
            if not same_run:
                raise ValueError(
                    f"{self.name}: the state was sharded for another layout ({local.numel()} elements on this rank, not the"
                    f" {self.run.numel} of this one); load it with torch.distributed.checkpoint, which reshards"
                )
            return local.reshape(self.run.local_shape)
        return value.detach().reshape(-1)[self.run.start : self.run.stop].view(self.run.local_shape)

    @torch.no_grad()
    def load(self, value: torch.Tensor) -> None:
        """Copy ``value`` into the main weight."""
        self.parameter._local_tensor.copy_(self.local_part(value))

    def sharded_like(self, value: torch.Tensor) -> DTensor:
        """This rank's piece of a full tensor of the parameter's shape (optimizer state), as a DTensor of its own."""
        return self._dtensor(self.local_part(value).to(self.parameter.device).clone())

    def _dtensor(self, local: torch.Tensor) -> DTensor:
        # The optimizer sees a scalar as a vector of one element, which can be sharded.
        return dtensor_over(local, self._mesh, self._placements, self.run.shape or (1,))


def full_tensor(dtensor: DTensor) -> torch.Tensor:
    """The whole tensor of an uneven DTensor, on every rank; a collective over its mesh.

    The pieces of the ranks follow one another, so they need only be put together.
    """
    local = dtensor.to_local().detach()
    # A scalar in a state dict says that it is replicated, because torch has no sharded ones; one rank may hold it.
    if dtensor.shape and all(isinstance(placement, Replicate) for placement in dtensor.placements):
        return local.clone().view(dtensor.shape)
    pieces = all_gather_uneven(local.reshape(-1), dtensor.device_mesh.get_group())
    return pieces[: dtensor.shape.numel()].view(dtensor.shape)
