# SPDX-License-Identifier: Apache-2.0
"""Import of Transformer Engine into this process, with its kernels emulated.

The import cannot be taken back, and Megatron-Core and transformers look for the package: call
`use` before they are imported, and in a process of its own where others are to do without it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from tools.transformer_engine_on_cpu import kernel_module
from tools.transformer_engine_on_cpu.torch_on_cpu import TorchOnCpu
from tools.transformer_engine_on_cpu.wheel import unpack

HOPPER = (9, 0)
"""Compute capability of an H100: FP8 with delayed, current and blockwise scaling."""

BLACKWELL = (10, 0)
"""Compute capability of a B200: MXFP8 and NVFP4 besides."""

ENVIRONMENT = {
    "NVTE_PROJECT_BUILDING": "1",  # loads no CUDA libraries
    "NVTE_TORCH_COMPILE": "0",  # functions that it compiles on import
}
NOT_NEEDED = (
    *("triton", "triton.language", "triton.language.core", "triton.language.standard"),
    *("onnx", "onnxscript"),
)
"""Modules that files import and that only kernels in triton or an export to ONNX use."""


_loaded: list[tuple[int, int]] = []
"""The capability, once the package is there."""


def use(capability: tuple[int, int] | None = None) -> types.ModuleType:
    """Import `transformer_engine.pytorch` for an emulated device, and return it.

    Further calls return the same module. They cost nothing, and restore the environment variables
    and the entry of `sys.path` where something has taken them away.

    Args:
        capability: compute capability of the device, which decides what tensors there are: with
            `HOPPER`, FP8 weights have a transposed copy, and MXFP8 and NVFP4 are refused. None
            stands for that of an earlier call, or `BLACKWELL`.

    Raises:
        RuntimeError: it is there already, for another capability.
        tools.wheels.DownloadError: pip cannot download the wheel.
    """
    # Last, as what the folder has besides is nobody's first choice.
    os.environ.update(ENVIRONMENT)
    folder = str(unpack())
    if folder not in sys.path:
        sys.path.append(folder)
    if not _loaded:
        _load(capability or BLACKWELL)
        _loaded.append(capability or BLACKWELL)
    if capability not in (None, *_loaded):
        raise RuntimeError(f"Transformer Engine is loaded for {_loaded[0]} already")
    return sys.modules["transformer_engine.pytorch"]


def _load(capability: tuple[int, int]) -> None:
    """Import the package and replace what CUDA is needed for."""
    # Before the placeholders: it looks for triton when it is imported, and remembers what it found.
    importlib.import_module("torch._dynamo")
    sys.modules[kernel_module.NAME] = kernel_module.build()
    with _placeholders(), _without_compiled_libraries():
        importlib.import_module("transformer_engine.pytorch")
    seen = TorchOnCpu(capability)
    for module in _modules():
        for name, value in list(vars(module).items()):
            if value is torch:
                setattr(module, name, seen)
            elif name in REPLACED:
                setattr(module, name, REPLACED[name])
    for function in _constructors_on_cuda():
        defaults = function.__defaults__ or ()
        function.__defaults__ = tuple("cpu" if value == "cuda" else value for value in defaults)
    for function in _ask_for_the_device():
        code = function.__code__
        function.__code__ = code.replace(
            # The other one is true of all tensors, also where the CPU counts as a CUDA device.
            co_names=tuple("size" if name == "is_cuda" else name for name in code.co_names),
            co_consts=tuple("cpu" if const == "cuda" else const for const in code.co_consts),
        )


@functools.cache
def _no_values() -> torch.Tensor:
    return torch.empty(0)


REPLACED = {
    "_empty_tensor": _no_values,  # it moves a tensor to the device
    "_lazy_init": lambda: None,  # of CUDA
    "_lazy_call": lambda action: action(),
}


def _constructors_on_cuda() -> list[types.FunctionType]:
    """Return the constructors of modules whose arguments have "cuda" among their defaults."""
    found = {}
    for module in _modules():
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, torch.nn.Module):
                function = inspect.unwrap(cls.__init__)
                if "cuda" in (getattr(function, "__defaults__", None) or ()):
                    found[id(function)] = function
    return [*found.values()]


def _ask_for_the_device() -> list[types.FunctionType]:
    """Return the functions that refuse a tensor, or move it, unless it is on a CUDA device."""
    te = sys.modules["transformer_engine.pytorch"]
    base = sys.modules["transformer_engine.pytorch.module.base"]
    storage = te.tensor.storage
    functions = (
        base.TransformerEngineBaseModule.prepare_forward,
        te.DotProductAttention.forward,
        storage.mxfp8_tensor_storage._FromMXFP8Func.forward,
        storage.nvfp4_tensor_storage._FromNVFP4Func.forward,
    )
    return [inspect.unwrap(function) for function in functions]


def _modules() -> list[types.ModuleType]:
    return [
        module
        for name, module in sys.modules.items()
        if name.split(".")[0] == "transformer_engine" and module is not None
    ]


class Placeholder(types.ModuleType):
    """A module that has every name; each is a placeholder, which may be indexed.

    While the package is imported it may be called too: decorators make kernels of functions.
    """

    __version__ = "0"
    may_be_called = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(name)

    def __call__(self, *args: object, **settings: object) -> Any:
        """Return another placeholder during the import; raise NotImplementedError after it."""
        if not Placeholder.may_be_called:
            raise NotImplementedError("kernels in triton and the export to ONNX are not emulated")
        return Placeholder("result")

    def __getitem__(self, key: object) -> Any:
        return Placeholder("item")


@contextlib.contextmanager
def _placeholders() -> Iterator[None]:
    """Let the import find modules that are not needed; take them away after it.

    torch compiles functions where it finds triton, so it must not find it later.
    """
    kept = {name: sys.modules.get(name) for name in NOT_NEEDED}
    for name in NOT_NEEDED:
        sys.modules[name] = Placeholder(name)
    Placeholder.may_be_called = True
    try:
        yield
    finally:
        Placeholder.may_be_called = False
        for name, module in kept.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


@contextlib.contextmanager
def _without_compiled_libraries() -> Iterator[None]:
    """Let the import go on where it would look for the file of compiled kernels.

    The package imports its parts when it is imported itself, so the function is replaced as soon as
    the part that defines it is there.
    """

    class Finder:
        """Finder that comes first and replaces the function after the import of its module."""

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if name == "transformer_engine.pytorch":
                common: Any = sys.modules["transformer_engine.common"]
                common.load_framework_extension = lambda framework: None

    finder: Any = Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
