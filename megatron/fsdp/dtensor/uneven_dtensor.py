# SPDX-License-Identifier: Apache-2.0
"""Uneven DTensors: their local tensors may have any size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ClassVar, SupportsIndex, cast

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from megatron.fsdp.dtensor.operations import Function, operate
from megatron.fsdp.dtensor.process_link import ProcessLink
from megatron.fsdp.dtensor.tensor_part import (
    ChunkedTensor,
    TensorPart,
    as_chunked_tensor,
    copied,
    divided_like,
    full_tensor,
    part_of,
    wrap_local,
)
from megatron.fsdp.dtensor.uneven_shard import part_in
from megatron.fsdp.engine.weight_guard import VIEWS, FunctionsOfTorch

NO_PARTIAL_BACKWARD = (
    "torch.autograd.grad cannot return gradients of sharded parameters, which backward() reduces"
    " over all ranks: call loss.backward() and read parameter.grad. Gradients of inputs and"
    " activations can be asked for"
)

_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad
# The attribute for loops over all parameters: torch's other name of it, which runs no Python.
GRAD = "_grad"
# Attributes that are operations, and the functions that compute them.
_COMPUTED: dict[Function, Function] = {}
for _name in VIEWS:
    _getter = getattr(torch.Tensor, _name).__get__
    _COMPUTED[_getter] = _getter
_COMPUTED[_DATA.__get__] = torch.Tensor.detach  # torch's getter of `data` misses the mode


class UnevenDTensor(FunctionsOfTorch, DTensor):
    """A DTensor with local tensors of any size; operations give what whole tensors would give."""

    # The part that the local tensor contains; None if the ranks do not know, or if it follows from
    # the placements.
    part: TensorPart | None = None
    # Called after an operation has written to the tensor or an alias of it.
    on_write: ProcessLink[Callable[[], None]] | None = None
    # Called before a hook is registered on a parameter to which a model gives gradients.
    on_hook: ProcessLink[Callable[[], None]] | None = None
    # Functions in place of torch's. They return NotImplemented for calls that torch handles.
    replacements: ClassVar[Mapping[Function, Function]] = {}

    @classmethod
    def call(
        cls,
        func: Function,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a replacement of a function of torch, or operate on local or on whole tensors.

        Args:
            func: a function of torch, or the getter or setter of an attribute.
            args: its arguments, of which some are uneven DTensors.
            kwargs: its arguments by name.
        """
        if getattr(func, "__name__", "") in ("__get__", "__set__"):
            if func == _DATA.__set__:
                return _assign(*args)
            if func not in _COMPUTED:
                return func(*args)
            func = _COMPUTED[func]
        replacement = cls.replacements.get(func)
        if replacement is not None:
            result = replacement(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return operate(func, tuple(args), kwargs, UnevenDTensor)

    # Clipping reads it of every parameter. By `__torch_function__` that takes three times as long.
    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, or None."""
        with torch._C.DisableTorchFunctionSubclass():
            return cast("torch.Tensor | None", _GRAD.__get__(self))

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __repr__(self) -> str:  # type: ignore[override]  # torch's is not typed
        """Show this rank's elements: printing on one rank must not wait for others."""
        local = self._local_tensor.detach()
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, placements={self.placements},"
            f" this rank has {local.numel()} of {self.shape.numel()} elements:\n"
            f"{local.as_subclass(torch.Tensor)})"
        )

    def to_local(
        self,
        *,
        grad_placements: Sequence[Placement] | None = None,
    ) -> torch.Tensor:
        """Return this rank's elements; see :meth:`ChunkedTensor.copy_` for those of a parameter."""
        if isinstance(self, nn.Parameter) and not torch.is_grad_enabled() and part_of(self):
            chunked = self._with_chunks()
            chunked._is_param = True  # as torch marks the local tensors of parameters
            return chunked
        return super().to_local(grad_placements=grad_placements)

    # ---- torch.distributed.checkpoint

    def _with_chunks(self) -> ChunkedTensor:
        local = self._local_tensor
        part = part_of(self)
        if part is None:
            raise ValueError(
                "the ranks do not know which part of this DTensor each of them has: call"
                " update_uneven_dtensor_chunk_metadata on it first"
            )
        if isinstance(local, ChunkedTensor):
            return local
        return as_chunked_tensor(local.detach(), part)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return ChunkedTensor.__create_chunk_list__(self._with_chunks())

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return ChunkedTensor.__create_write_items__(self._with_chunks(), fqn, object)

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return ChunkedTensor.__get_tensor_shard__(self._with_chunks(), index)

    # ---- whole tensors

    def full_tensor(
        self,
        *,
        grad_placements: Sequence[Placement] | None = None,
    ) -> torch.Tensor:
        """Gather the whole tensor on every rank; a collective. Gradients do not flow through it."""
        return full_tensor(self)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """Replicate the tensor, or shard it evenly as torch does; a collective.

        Raises:
            NotImplementedError: for another mesh than the tensor's.
        """
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise NotImplementedError(
                "a sharded parameter can be redistributed on its own mesh only: take its"
                " full_tensor(), and distribute that"
            )
        everywhere = [Replicate()] * self.device_mesh.ndim
        wanted = tuple(placements or everywhere)
        # Equal placements may be of other classes: only one rank may have a scalar's element,
        # although its placement is equal to Replicate().
        are_own = all(type(new) is type(old) for new, old in zip(wanted, self.placements))
        if are_own and wanted == tuple(self.placements) and self.shape:
            return self
        whole = full_tensor(self)
        replicated = wrap_local(
            DTensor,
            whole,
            mesh=self.device_mesh,
            placements=everywhere,
            shape=self.shape,
        )
        return replicated.redistribute(placements=wanted, **options)

    # ---- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> UnevenDTensor:
        local = self._local_tensor
        # `detach` returns a plain tensor, without the chunks of a ChunkedTensor.
        if hasattr(local, "__tensor_flatten__"):
            local = copied(local)
        else:
            if local.requires_grad:
                local = local.detach()
            local = copy.deepcopy(local, memo)
        result = divided_like(self, local, UnevenDTensor)
        if isinstance(self, nn.Parameter):
            result._is_param = True
        result.requires_grad_(self.requires_grad)
        return result

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle the local tensor, mesh and placements, without what belongs to this process."""
        local = self._local_tensor
        if type(local) is torch.Tensor:  # a view; pickle would take the whole storage
            local = local.detach().clone()
        plain = dtensor_over(local, self.device_mesh, self.placements, self.shape)
        for name, value in vars(self).items():
            if not isinstance(value, ProcessLink):
                vars(plain).setdefault(name, value)
        plain.requires_grad_(self.requires_grad)
        reduce: Function = DTensor.__reduce_ex__  # torch has no types for it
        return reduce(plain, protocol)


torch.serialization.add_safe_globals([UnevenDTensor])


def _reporting(register: Function) -> Function:
    """Return a method that reports a hook to the model before it registers it."""

    def report_and_register(parameter: UnevenDTensor, hook: Function) -> Any:
        if parameter.on_hook is None:
            return NotImplemented
        parameter.on_hook.target()
        return register(parameter, hook)

    return report_and_register


def _grad(
    outputs: Any,
    inputs: Sequence[Any],
    **options: Any,
) -> Any:
    if any(getattr(tensor, "on_hook", None) is not None for tensor in inputs):
        raise NotImplementedError(NO_PARTIAL_BACKWARD)
    return NotImplemented


UnevenDTensor.replacements = {
    torch.Tensor.register_hook: _reporting(torch.Tensor.register_hook),
    torch.Tensor.register_post_accumulate_grad_hook: _reporting(
        torch.Tensor.register_post_accumulate_grad_hook
    ),
    torch.autograd.grad: _grad,
}


@torch.no_grad()
def _assign(dtensor: UnevenDTensor, value: torch.Tensor) -> None:
    # torch would exchange the wrapper and leave the local tensor as it was.
    if value.shape != dtensor.shape:
        raise RuntimeError(
            f"the data of a sharded tensor of shape {tuple(dtensor.shape)} cannot be replaced by a"
            f" tensor of shape {tuple(value.shape)}: assign one of the same shape"
        )
    # Not `dtensor.copy_(value)`, which would not reach `__torch_function__` from inside of it.
    operate(
        torch.Tensor.copy_,
        args=(dtensor, value),
        kwargs={},
        dtensor_class=UnevenDTensor,
    )


_from_local = DTensor.from_local


@wraps(_from_local)
def _from_local_part(
    local_tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    **options: Any,
) -> DTensor:
    part = part_in(placements)
    if part is None or device_mesh is None or placements is None:
        return _from_local(local_tensor, device_mesh, placements, **options)
    shape = tuple(options.get("shape") or part.shape)
    if shape != part.shape or local_tensor.numel() != part.numel:
        raise ValueError(
            f"the placements are those of a sharded tensor of shape {part.shape}, of which this"
            f" rank has {part.numel} elements, not {local_tensor.numel()} of {shape}: use"
            " Shard(0) of torch for tensors that torch divides"
        )
    if local_tensor.grad_fn is not None and torch.is_grad_enabled():
        raise NotImplementedError(
            "DTensor.from_local of a part of a sharded tensor has no backward: detach the local"
            " tensor, or compute with the sharded tensor itself"
        )
    local = local_tensor.detach()
    dtensor = dtensor_over(local, device_mesh, placements, part.shape)
    dtensor.part = part
    dtensor.requires_grad_(local_tensor.requires_grad)
    return dtensor


# Programs rebuild a DTensor of a local tensor and the placements of another one.
DTensor.from_local = staticmethod(_from_local_part)  # type: ignore[method-assign]


def dtensor_over(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
) -> UnevenDTensor:
    """Return an uneven DTensor over a local tensor of any size, whose storage it shares.

    Args:
        local: this rank's elements; its shape need not follow from the placements.
        mesh: the mesh of the ranks that have the other elements.
        placements: one for each axis of the mesh.
        shape: that of the whole tensor.
    """
    return wrap_local(UnevenDTensor, local, mesh, placements, shape)
