# SPDX-License-Identifier: Apache-2.0
"""Function transforms of ``torch.func`` (jvp, vjp, vmap, ...) around a forward."""

# [Note: function transforms] Inside of a transform, tensors are wrapped, one wrapper for each
# transform, and operations dispatch to the innermost. Weights are constants to all of them: the
# engine gathers and frees them outside of the transforms, where they are plain tensors. Hooks on
# outputs would miss the passes of other levels (a tangent has a backward too, also that of a dual
# number without a transform), so outputs pass through an autograd function, as transforms expect.

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

P = ParamSpec("P")
R = TypeVar("R")

is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active

# torch's `get_proxy_mode` looks for a tracer before dispatch too, which traces no hooks, and takes
# ten times as long: a unit asks ten times in each microbatch.
_mode_of: Callable[[Any], Any] = torch._C._get_dispatch_mode
_TRACER = torch._C._TorchDispatchModeKey.PROXY


def has_other_backward() -> bool:
    """Return True if an output may have a backward that its hooks miss, as its tangent has."""
    return is_transformed() or forward_ad._current_level >= 0


def is_traced() -> bool:
    """Return True while operations are recorded to run later, as by ``torch.func.linearize``."""
    return _mode_of(_TRACER) is not None


def outside_transforms(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function on plain tensors run outside of the transforms under way."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not (is_transformed() or is_traced()):
            return function(*args, **kwargs)
        with (
            torch._C._DisableFuncTorch(),
            disable_proxy_modes_tracing(),
        ):
            return function(*args, **kwargs)

    return run


class BeforeBackward(torch.autograd.Function):
    """The identity, whose backward calls a function with the gradient before it continues."""

    generate_vmap_rule = True

    @staticmethod
    def forward(callback: Callable[[Any], None], tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``."""
        return tensor

    @staticmethod
    def setup_context(
        ctx: Any,
        inputs: tuple[Any, ...],
        output: Any,
    ) -> None:
        """Save the function for the backward.

        Args:
            ctx: context of the autograd function.
            inputs: the arguments of :meth:`forward`: the function and the tensor.
            output: the result of :meth:`forward`, which the backward does not need.
        """
        ctx.callback, _ = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[None, Any]:
        """Call the function, and pass the gradient on."""
        ctx.callback(gradient)
        return None, gradient

    @staticmethod
    def jvp(
        ctx: Any,
        _: None,
        tangent: Any,
    ) -> Any:
        """Make the backward of the tangent call the function too.

        Args:
            ctx: context of the autograd function.
            _: tangent of the function, which has none.
            tangent: tangent of the tensor; None if it has none.
        """
        if tangent is None:
            return None
        return before_backward(ctx.callback, tangent)


def before_backward(callback: Callable[[Any], None], tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``; its backward calls ``callback`` with the gradient first."""
    result: torch.Tensor = BeforeBackward.apply(callback, tensor)  # type: ignore[no-untyped-call]
    return result
