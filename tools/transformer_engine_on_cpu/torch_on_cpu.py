# SPDX-License-Identifier: Apache-2.0
"""The torch that Transformer Engine's modules see: its CUDA device is the CPU.

They name the device in many functions: `device="cuda"` as a default, `torch.cuda.current_device()`,
checks of what the device can compute. In each of them the global `torch` is replaced by this one;
nobody else sees it.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

MAKE_TENSORS = (
    *("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "eye"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
)
"""Functions of torch with a `device`."""


class DeviceProperties(NamedTuple):
    """The properties of a CUDA device that are read."""

    major: int
    minor: int
    multi_processor_count: int = 132
    name: str = "CPU"


def on_cpu(device: Any) -> Any:
    """Return the CPU for any CUDA device, which may also be given by its number."""
    kind = device.split(":")[0] if isinstance(device, str) else getattr(device, "type", device)
    is_number = isinstance(device, int) and not isinstance(device, bool)
    return torch.device("cpu") if kind == "cuda" or is_number else device


class DeviceMeta(type):
    """Class whose instances are the devices of torch."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.device)


class Device(metaclass=DeviceMeta):
    """The constructor of devices."""

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        """Return a device as torch does, and the CPU in place of a CUDA device."""
        if on_cpu(args[0] if args else settings.get("type")) == torch.device("cpu"):
            return torch.device("cpu")
        return torch.device(*args, **settings)


class Cuda(types.ModuleType):
    """The module `torch.cuda` of a device with a compute capability."""

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__("torch.cuda")
        self.capability = capability
        self.default_generators = (torch.default_generator,)
        self.get_rng_state = lambda device=None: torch.get_rng_state()
        self.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
        self.manual_seed = torch.manual_seed
        self.stream = contextlib.nullcontext

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def is_available(self) -> bool:
        """Return that there is a device."""
        return True

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """Return the compute capability that is emulated."""
        return self.capability

    def get_device_properties(self, device: Any = None) -> DeviceProperties:
        """Return the properties of the device that is emulated."""
        return DeviceProperties(*self.capability)

    def current_device(self) -> int:
        """Return the number of the only device."""
        return 0

    def is_current_stream_capturing(self) -> bool:
        """Return that no graph is captured."""
        return False

    def synchronize(self, device: Any = None) -> None:
        """Return at once."""

    def current_stream(self, device: Any = None) -> None:
        """Return no stream."""

    def empty_cache(self) -> None:
        """Return at once."""


class TorchOnCpu(types.ModuleType):
    """The module `torch` with another `device` and another `cuda`."""

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__("torch")
        self.cuda = Cuda(capability)
        self.device = Device
        # Block scaling asks for a release of CUDA
        self.version = types.SimpleNamespace(**{**vars(torch.version), "cuda": "13.0"})
        for name in MAKE_TENSORS:
            setattr(self, name, _with_device_on_cpu(getattr(torch, name), "device"))
        self.load = _with_device_on_cpu(torch.load, "map_location")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _with_device_on_cpu(function: Callable[..., Any], argument: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_other_device(*args: Any, **settings: Any) -> Any:
        if argument in settings:
            settings[argument] = on_cpu(settings[argument])
        return function(*args, **settings)

    return on_other_device
