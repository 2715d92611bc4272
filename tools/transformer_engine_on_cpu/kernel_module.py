# SPDX-License-Identifier: Apache-2.0
"""The module `transformer_engine_torch`, which is compiled where there is CUDA.

Its functions are those of the files here, by their names. Others raise NotImplementedError when
they are called, and classes that only label things are made up where they are named.
"""

from __future__ import annotations

import enum
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from tools.transformer_engine_on_cpu import (
    activations,
    attention,
    matrix_products,
    multi_tensor,
    normalization,
    nvfp4,
    partial_casts,
    quantization,
)

NAME = "transformer_engine_torch"
PARTS = (
    attention,
    matrix_products,
    multi_tensor,
    normalization,
    nvfp4,
    partial_casts,
    quantization,
)


DType = enum.IntEnum(
    "DType",
    {
        "kByte": 0,
        "kInt32": 2,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
)
"""Types of data, with the numbers that the kernels know them by."""


class FP8FwdTensors(enum.IntEnum):
    """Places of forward tensors in the state of delayed scaling."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensors(enum.IntEnum):
    """Places of backward tensors in the state of delayed scaling."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


class NVTE_Fused_Attn_Backend(enum.IntEnum):  # noqa: N801 (the name in Transformer Engine)
    """Kinds of fused attention, none of which is here."""

    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


class Labels(type):
    """Class of enumerations that are only compared: a member is there once it is named."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        number = sum(isinstance(value, int) for value in vars(cls).values())
        setattr(cls, name, number)
        return number


class KernelModule(types.ModuleType):
    """The module; it has every name that is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return self.__dict__.setdefault(name, Labels(name, (), {}))

        def missing(*args: object, **settings: object) -> None:
            raise NotImplementedError(f"the kernel {name} is not emulated")

        return missing


def build() -> KernelModule:
    """Return the module with everything that is emulated."""
    module = KernelModule(NAME)
    for cls in (DType, FP8FwdTensors, FP8BwdTensors, NVTE_Fused_Attn_Backend):
        setattr(module, cls.__name__, cls)
    for part in PARTS:
        for name, value in vars(part).items():
            # Functions that a file imports from another one are that one's.
            if inspect.isfunction(value) and value.__module__ in [p.__name__ for p in PARTS]:
                setattr(module, name, compiled(value))
    for name, kernel in activations.kernels().items():
        setattr(module, name, compiled(kernel))
    return module


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that autograd does not look into, as it does not into compiled ones."""
    return torch.no_grad()(function)
