# SPDX-License-Identifier: Apache-2.0
"""DTensors whose local parts are not what torch would choose.

torch puts a DTensor together from parts of equal size. Here every part may have any size; the parts
along an axis that divides dim 0 follow one another in row-major order, as rows or as flat runs of
elements, and those of the last mesh axis lie closest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from megatron.fsdp.engine.collectives import all_gather_uneven


class UnevenDTensor(DTensor):
    """A DTensor that knows how to become whole. Element-wise operations on one give another."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if (
            type(result) is DTensor
            and args
            and isinstance(args[0], UnevenDTensor)
            and _is_cut_like(result, args[0])
        ):
            result.__class__ = UnevenDTensor
        return result

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, on every rank; a collective. Gradients do not flow through it."""
        return full_tensor(self)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """The same tensor, whole on every rank, cut as it is, or cut anew as torch does; a collective.

        Raises:
            NotImplementedError: onto another mesh.
        """
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise NotImplementedError(
                "a sharded parameter can be redistributed on its own mesh only"
            )
        wanted = tuple(placements or [Replicate()] * self.device_mesh.ndim)
        # A scalar says that it is replicated, but one rank may hold it.
        if wanted == tuple(self.placements) and self.shape:
            return self
        replicated = dtensor_over(
            full_tensor(self),
            self.device_mesh,
            [Replicate()] * self.device_mesh.ndim,
            self.shape,
            DTensor,
        )
        return replicated.redistribute(placements=wanted, **options)

    def __deepcopy__(self, memo: dict) -> UnevenDTensor:
        local = self._local_tensor
        # `detach` would forget what a piece knows about its place.
        local = copy.deepcopy(local.detach() if local.requires_grad else local, memo)
        result = dtensor_over(local, self.device_mesh, self.placements, self.shape)
        if isinstance(self, nn.Parameter):
            result._is_param = True
        return result.requires_grad_(self.requires_grad)


torch.serialization.add_safe_globals([UnevenDTensor])


def _is_cut_like(result: DTensor, operand: DTensor) -> bool:
    """Whether the local part of an operation's result is where its operand's is."""
    return (result.shape, result.placements, result._local_tensor.shape) == (
        operand.shape,
        operand.placements,
        operand._local_tensor.shape,
    )


def dtensor_over(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    kind: type[DTensor] = UnevenDTensor,
) -> DTensor:
    """A DTensor of logical ``shape`` over ``local``, which it shares."""
    # The wrapper takes its storage offset from the tensor it is made with, and torch cannot copy or
    # save one that does not begin at 0; so it is made with another and given the view afterwards.
    stride = torch.empty(shape, device="meta").stride()
    # `DTensor.from_local` would take the empty shape of a scalar for no shape.
    spec = DTensorSpec(
        mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), stride, local.dtype)
    )
    result = kind(local.new_empty(0), spec, requires_grad=False)
    result._local_tensor = local
    return result


def full_tensor(dtensor: DTensor) -> torch.Tensor:
    """The whole tensor ``[*dtensor.shape]``, on every rank, detached and with storage of its own.

    A gather along every mesh axis that divides the tensor. Where more than one dim besides dim 0 is
    divided, or a placement is neither ``Shard`` nor ``Replicate``, torch gathers, which expects
    even parts.

    Raises:
        ValueError: where the parts do not make up a tensor of that shape.
    """
    shape, placements = dtensor.shape, dtensor.placements
    local = dtensor._local_tensor.detach()
    sliced = {placement.dim for placement in placements if isinstance(placement, Shard)} - {0}
    if len(sliced) > 1 or not all(
        isinstance(placement, Shard | Replicate) for placement in placements
    ):
        return dtensor_over(local, dtensor.device_mesh, placements, shape, DTensor).full_tensor()
    if shape and (
        shape.numel() == 0 or all(isinstance(placement, Replicate) for placement in placements)
    ):
        return local.clone().view(shape)
    # A scalar in a state dict says that it is replicated, because torch has no sharded ones; one
    # rank may hold it.
    flat = local.reshape(-1).to(
        dtensor.device_mesh.device_type
    )  # offloaded state is gathered where the mesh is
    for axis in reversed(axes_of(placements, 0) if shape else range(len(placements))):
        flat = torch.cat(all_gather_uneven(flat, dtensor.device_mesh.get_group(axis)))
    for dim in sliced:
        for axis in reversed(axes_of(placements, dim)):
            pieces = all_gather_uneven(flat, dtensor.device_mesh.get_group(axis))
            flat = torch.cat([_unflatten(piece, shape, dim) for piece in pieces], dim).reshape(-1)
    if flat.numel() != shape.numel() and shape:
        raise ValueError(
            f"the parts of all ranks hold {flat.numel()} elements, but shape {tuple(shape)} has"
            f" {shape.numel()}"
        )
    return flat[: shape.numel()].view(shape).to(local.device)


def axes_of(placements: Sequence[Placement], dim: int) -> list[int]:
    """Mesh axes that divide ``dim``."""
    return [
        axis
        for axis, placement in enumerate(placements)
        if isinstance(placement, Shard) and placement.dim == dim
    ]


def _unflatten(piece: torch.Tensor, shape: torch.Size, dim: int) -> torch.Tensor:
    """A flat range of ``dim`` of a tensor of ``shape`` in its own shape."""
    others = shape.numel() // shape[dim]
    if piece.numel() % others:
        raise ValueError(
            f"a part of {piece.numel()} elements is no range of dim {dim} of shape {tuple(shape)}"
        )
    return piece.view(
        [piece.numel() // others if each == dim else size for each, size in enumerate(shape)]
    )
