# SPDX-License-Identifier: Apache-2.0
"""Parameters that are tensor subclasses: with FSDP2's all-gather extension, and quantized ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

CODES = 127


class Wrapper(torch.Tensor):
    """A subclass around the tensors in `NAMES`, of which operations make plain ones."""

    NAMES: tuple[str, ...] = ()

    @staticmethod
    def __new__(cls, *inner: Tensor) -> Wrapper:
        whole = inner[0]
        return torch.Tensor._make_wrapper_subclass(
            cls,
            whole.shape,
            dtype=cls.dtype_of(*inner),
            device=whole.device,
            requires_grad=whole.requires_grad,
        )

    def __init__(self, *inner: Tensor) -> None:
        for name, tensor in zip(self.NAMES, inner, strict=True):
            setattr(self, name, tensor)

    @classmethod
    def dtype_of(cls, *inner: Tensor) -> torch.dtype:
        return inner[0].dtype

    def plain(self) -> Tensor:
        """Return the values."""
        raise NotImplementedError

    def inner(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.NAMES]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return list(self.NAMES), None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any
    ) -> Wrapper:
        return cls(*(inner[name] for name in cls.NAMES))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(*args[0].inner())
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.empty_like.default):
            return cls(*(function(one, *args[1:], **(kwargs or {})) for one in args[0].inner()))
        args, kwargs = tree_map_only(Wrapper, lambda one: one.plain(), (args, kwargs or {}))
        return function(*args, **kwargs)


class Rounding(torch.autograd.Function):
    """Multiply by a rounded weight; the gradient of the weight is that of its values."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(x, weight)
        return x @ values_of(weight).T

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = context.saved_tensors
        return gradient @ values_of(weight), gradient.T @ x


def values_of(weight: Tensor) -> Tensor:
    return weight.plain() if isinstance(weight, Wrapper) else weight


def code(values: Tensor, scale: Tensor) -> Tensor:
    return torch.round(values / scale).to(torch.int8)


def scale_of(values: Tensor) -> Tensor:
    """Return the scale of all rows, 0-d."""
    return values.abs().max().clamp(min=1e-9) / CODES


class Coded(Wrapper):
    """A weight that forwards read: codes of 8 bits, and one scale."""

    NAMES = ("codes",)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        super().__init__(codes)
        self.scale = scale

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Coded:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        if function is torch.ops.aten.as_strided.default:
            return cls(function(args[0].codes, *args[1:]), args[0].scale)
        return super().__torch_dispatch__(function, types, args, kwargs)

    def plain(self) -> Tensor:
        return self.codes.to(self.scale.dtype) * self.scale


class Master(Wrapper):
    """A weight whose codes are gathered, with one scale of all ranks: the forward reads these."""

    NAMES = ("values",)
    seen: tuple[Any, ...] = ()  # the arguments of the last call

    def plain(self) -> Tensor:
        return self.values

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        Master.seen = mesh, outer_size, outer_stride, module, mp_policy
        scale = scale_of(self.values)
        dist.all_reduce(scale, dist.ReduceOp.MAX, mesh.get_group())
        return (code(self.values, scale),), scale.to(mp_policy.param_dtype)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], scale: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if out is None:
            return Coded(*outputs, scale), outputs
        assert outputs[0].data_ptr() == out.codes.data_ptr()
        out.scale = scale
        return None


class RowScaled(Master):
    """A weight of which codes and the scale of each row are gathered: the forward reads a copy."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        scales = self.values.abs().amax(1, keepdim=True).clamp(min=1e-9) / CODES
        # A tensor of one byte a row comes before one whose elements have several.
        marks = torch.ones(len(scales), 1, dtype=torch.int8)
        return (marks, code(self.values, scales), scales), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        marks, codes, scales = outputs
        assert bool((marks == 1).all()) or out is None  # nothing is gathered at first
        made = (codes.to(scales.dtype) * scales).to(dtype)
        if out is None:
            return made, (made,)
        out.copy_(made[: len(out)])
        return None


class Frozen4Bit(Wrapper):
    """A quantized weight of two tensors, which knows nothing of sharding."""

    NAMES = ("codes", "scales")

    @classmethod
    def of(cls, values: Tensor) -> Frozen4Bit:
        scales = values.abs().amax(1, keepdim=True) / CODES
        return cls(code(values, scales), scales)

    @classmethod
    def dtype_of(cls, *inner: Tensor) -> torch.dtype:
        return inner[1].dtype

    def plain(self) -> Tensor:
        return self.codes.to(self.scales.dtype) * self.scales


class RoundedLayer(nn.Module):
    """A linear layer whose weight is of a class, and a plain bias."""

    def __init__(self, inputs: int, outputs: int, kind: type[Wrapper] | None = None) -> None:
        super().__init__()
        values = torch.randn(outputs, inputs) / inputs**0.5
        self.weight = nn.Parameter(values if kind is None else kind(values))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Rounding.apply(x, self.weight) + self.bias)


class StraightLayer(RoundedLayer):
    """The same layer, which rounds its plain weight in every forward as `Master`, or by rows."""

    def __init__(self, inputs: int, outputs: int, kind: type[Master]) -> None:
        super().__init__(inputs, outputs)
        self.by_rows = kind is RowScaled

    def forward(self, x: Tensor) -> Tensor:
        values = self.weight.detach()
        scale = scale_of(values)
        if self.by_rows:
            scale = values.abs().amax(1, keepdim=True).clamp(min=1e-9) / CODES
        rounded = code(values, scale).to(values.dtype) * scale
        straight = self.weight + (rounded - self.weight).detach()
        return torch.tanh(F.linear(x, straight, self.bias))
