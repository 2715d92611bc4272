# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's training loop on machines without CUDA: replacements for its own CUDA call sites.

:mod:`megatron.mcore_adapter.cpu` replaces those of Megatron-Core for good. The loop asks further
questions, which other programs in the process must not hear answered: whether there is a device, of
which number and architecture. Only modules of the loop get these answers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

LOOP = "megatron.training"
"""The package that is told that there is a device."""

ARCHITECTURE = SimpleNamespace(major=9, minor=0, total_memory=0, name="CPU")
"""Properties of the device: the newest one of which the loop expects no settings of its own."""


class LoopOnCpu:
    """The replacements, from construction until :meth:`restore`."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []
        nothing: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731
        for name, answer in {"is_available": True, "device_count": 1}.items():
            self._replace(torch.cuda, name, _for_the_loop(getattr(torch.cuda, name), answer))
        self._replace(torch.cuda, "get_device_properties", lambda device=None: ARCHITECTURE)
        for name in ("set_device", "empty_cache", "reset_peak_memory_stats"):
            self._replace(torch.cuda, name, nothing)
        for name in ("memory_reserved", "max_memory_reserved", "device_memory_used"):
            self._replace(torch.cuda, name, lambda device=None: 0)
        for name in ("rand", "randn", "randint", "full", "arange"):
            self._replace(torch, name, _on_cpu(getattr(torch, name)))
        # A compiler run for each of the small fused functions takes ten seconds, and gains nothing.
        self._stance = torch.compiler.set_stance("force_eager")

    def restore(self) -> None:
        """Undo the replacements."""
        for owner, name, original in reversed(self._replaced):
            setattr(owner, name, original)
        self._replaced.clear()
        self._stance.__exit__(None, None, None)

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, replacement)


def _for_the_loop(original: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    """Return a function that answers modules of the loop, and calls the original for others."""

    @functools.wraps(original)
    def ask(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller == LOOP or caller.startswith(LOOP + "."):
            return answer
        return original(*args, **kwargs)

    return ask


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a factory that makes tensors on the CPU where CUDA is asked for."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make
