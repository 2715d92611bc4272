# SPDX-License-Identifier: Apache-2.0
"""Uneven DTensors: their local tensors may have any size.

torch's DTensor expects every dim to be divided into equal parts. The local tensors of an uneven
DTensor follow one another along the mesh axes that divide dim 0, in row-major order of the ranks
(the last of these axes fastest), as whole rows or as flat ranges of elements.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from megatron.fsdp.engine.collectives import all_gather_uneven

PROCESS_ATTRIBUTES = frozenset({"_fsdp_sharded", "_fsdp_model", "norm_group", "family"})
"""Attributes of parameters and gradients that refer to the model and to process groups."""

AnyDTensor = TypeVar("AnyDTensor", bound=DTensor)


class UnevenDTensor(DTensor):
    """A DTensor whose local tensors may have any size, and which can still be gathered.

    Element-wise operations on it return another uneven DTensor.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if type(result) is DTensor and args and _is_divided_alike(result, args[0]):
            result.__class__ = UnevenDTensor
        return result

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Gather the whole tensor on every rank; a collective. Gradients do not flow through it."""
        return full_tensor(self)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """Replicate the tensor, or shard it evenly as torch does; a collective.

        With its own placements, the tensor itself is returned.

        Args:
            device_mesh: its own mesh, or None.
            placements: one for each mesh axis. None: replicated on all of them.
            options: further arguments of torch's ``redistribute``.

        Raises:
            NotImplementedError: for another mesh.
        """
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise NotImplementedError(
                "a sharded parameter can be redistributed on its own mesh only"
            )
        everywhere = [Replicate()] * self.device_mesh.ndim
        wanted = tuple(placements or everywhere)
        # The placements of a scalar are Replicate, but only one rank may have its element.
        if wanted == tuple(self.placements) and self.shape:
            return self
        whole = full_tensor(self)
        replicated = wrap_local(DTensor, whole, self.device_mesh, everywhere, self.shape)
        return replicated.redistribute(placements=wanted, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnevenDTensor:
        local = self._local_tensor
        # `detach` returns a plain tensor, without the chunks of a ChunkedTensor.
        local = copy.deepcopy(local.detach() if local.requires_grad else local, memo)
        result = dtensor_over(local, self.device_mesh, self.placements, self.shape)
        if isinstance(self, nn.Parameter):
            result._is_param = True
        result.requires_grad_(self.requires_grad)
        return result

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle as DTensors of torch do: the local tensor, the mesh and the placements.

        The rest of the flat buffer, what belongs to this process only, and the class of gradients
        are left out.
        """
        local = self._local_tensor
        if type(local) is torch.Tensor:  # a view; pickle would take the whole storage
            local = local.detach().clone()
        plain = dtensor_over(local, self.device_mesh, self.placements, self.shape)
        attributes = {k: v for k, v in vars(self).items() if k not in PROCESS_ATTRIBUTES}
        vars(plain).update({**attributes, **vars(plain)})
        plain.requires_grad_(self.requires_grad)
        reduce: Callable[..., Any] = DTensor.__reduce_ex__  # torch has no types for it
        return reduce(plain, protocol)


torch.serialization.add_safe_globals([UnevenDTensor])


def _is_divided_alike(result: DTensor, operand: object) -> bool:
    """Return True if the result of an operation is sharded like its operand."""
    return (
        isinstance(operand, UnevenDTensor)
        and result.shape == operand.shape
        and result.placements == operand.placements
        and result._local_tensor.shape == operand._local_tensor.shape
    )


def dtensor_over(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> UnevenDTensor:
    """Return an uneven DTensor of logical ``shape`` over ``local``, whose storage it shares."""
    return wrap_local(UnevenDTensor, local, mesh, placements, shape)


def wrap_local(
    dtensor_class: type[AnyDTensor],
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
) -> AnyDTensor:
    """Return a DTensor of logical ``shape`` over ``local``, whose storage it shares."""
    # `DTensor.from_local` would treat the empty shape of a scalar as no shape.
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    # The wrapper gets its storage offset from the tensor that it is created with, and torch cannot
    # copy or save a wrapper whose offset is not 0. So `local` is assigned afterwards.
    result = dtensor_class(local.new_empty(0), spec, requires_grad=False)
    result._local_tensor = local
    return result


def full_tensor(dtensor: DTensor) -> torch.Tensor:
    """Gather the whole tensor ``[*dtensor.shape]`` on every rank, detached, in new storage.

    This is an all-gather along every mesh axis that divides the tensor. If more than one dim
    besides dim 0 is divided, or a placement is neither ``Shard`` nor ``Replicate``, torch gathers,
    which expects equal parts.

    Raises:
        ValueError: if the local tensors do not make up a tensor of that shape.
    """
    shape, placements, mesh = dtensor.shape, dtensor.placements, dtensor.device_mesh
    local = dtensor._local_tensor.detach()
    sharded_dims = {placement.dim for placement in placements if isinstance(placement, Shard)}
    later_dims = sorted(sharded_dims - {0})
    if len(later_dims) > 1 or not is_sharded_or_replicated(placements):
        return wrap_local(DTensor, local, mesh, placements, shape).full_tensor()
    if shape and (shape.numel() == 0 or not sharded_dims):
        return local.clone().view(shape)
    # Offloaded state is gathered where the mesh is.
    flat = local.reshape(-1).to(mesh.device_type)
    # torch has no sharded scalars, so the placements of a scalar in a state dict are Replicate. But
    # only one rank may have its element, so it is gathered along all axes.
    for axis in reversed(axes_of(placements, 0) if shape else range(len(placements))):
        flat = torch.cat(all_gather_uneven(flat, mesh.get_group(axis)))
    for dim in later_dims:
        for axis in reversed(axes_of(placements, dim)):
            shards = all_gather_uneven(flat, mesh.get_group(axis))
            flat = torch.cat([_as_range_of_dim(each, shape, dim) for each in shards], dim)
            flat = flat.reshape(-1)
    if flat.numel() != shape.numel() and shape:
        raise ValueError(
            f"the parts of all ranks hold {flat.numel()} elements, but shape {tuple(shape)} has"
            f" {shape.numel()}"
        )
    return flat[: shape.numel()].view(shape).to(local.device)


def is_sharded_or_replicated(placements: Sequence[Placement]) -> bool:
    """Return True if all placements are ``Shard`` or ``Replicate``."""
    return all(isinstance(placement, Shard | Replicate) for placement in placements)


def axes_of(placements: Sequence[Placement], dim: int) -> list[int]:
    """List the mesh axes that divide ``dim``."""
    return [
        axis
        for axis, placement in enumerate(placements)
        if isinstance(placement, Shard) and placement.dim == dim
    ]


def _as_range_of_dim(flat: torch.Tensor, shape: torch.Size, dim: int) -> torch.Tensor:
    """View the flat elements of a range of ``dim`` of a tensor of ``shape`` with all its dims."""
    others = shape.numel() // shape[dim]
    if flat.numel() % others:
        raise ValueError(
            f"a part of {flat.numel()} elements is no range of dim {dim} of shape {tuple(shape)}"
        )
    sizes = list(shape)
    sizes[dim] = flat.numel() // others
    return flat.view(sizes)
