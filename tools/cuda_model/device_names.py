# SPDX-License-Identifier: Apache-2.0
"""The device "cuda" and the backend "nccl" by name, for programs that were written for GPUs.

Below Python all tensors are the CPU's. A tensor that a program makes on the device "cuda", or moves
there, is marked as the device's, and so are results that are computed from it. It says that its
device is "cuda:N"; other tensors are the host's. A copy between the two is a kernel on the current
stream; unless it is asked to go on (``non_blocking``), the host waits for that stream.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.utils import _device as default_device

from tools.cuda_model.detector import Detector
from tools.cuda_model.memory import parts_of, real_device

Function = Callable[..., Any]
CPU = torch.device("cpu")
LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like")
ALIASING = ("as_tensor", "asarray")
"""Functions that return memory which they were given, if they can."""
NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def is_named_cuda(device: Any) -> bool:
    """Return True for a device of CUDA as programs name it: "cuda", "cuda:1", an index."""
    if isinstance(device, int):
        return not isinstance(device, bool)
    return str(device).partition(":")[0] == "cuda"


class DeviceNames:
    """Replacements of functions that are given a device, or return one."""

    def __init__(self, detector: Detector):
        self._detector = detector
        self.index = int(os.environ.get("LOCAL_RANK", "0"))

    # ---- memory

    def factory(self, function: Function) -> Function:
        """Return a function that makes tensors where its argument ``device`` says."""
        name = function.__name__

        @wraps(function)
        def make(*args: Any, **kwargs: Any) -> Any:
            return self.make(name, function, args, kwargs)

        return make

    def make(self, name: str, function: Function, args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a tensor on the host or on the device."""
        is_pinned = kwargs.pop("pin_memory", False)
        device = kwargs.get("device")
        if device is None and name == "new_tensor":  # which operators make of nothing
            device = args[0].device
        if device is None:
            with self._detector.making_on_host():
                result = function(*args, **kwargs)
            if is_pinned:
                self._detector.host.pin(result)
            return result
        is_cuda = is_named_cuda(device)
        if is_cuda:
            kwargs["device"] = CPU
        with self._detector.unseen():
            result = function(*args, **kwargs)
            if is_cuda and name in ALIASING:
                result = result.clone()
        if is_cuda:
            self._detector.allocated(result, name)
        elif is_pinned:
            self._detector.host.pin(result)
        return result

    def to(self, function: Function, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Do what `Tensor.to` does."""
        is_copied = kwargs.pop("copy", False)
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        settings = {"dtype": dtype or tensor.dtype, "copy": is_copied}
        if memory_format is not None:
            settings["memory_format"] = memory_format
        if device is None or device.type not in ("cpu", "cuda"):
            return function(tensor, device, **settings)
        detector = self._detector
        is_on_device = detector.blocks.is_on_device(tensor)
        is_whole = not hasattr(tensor, "__tensor_flatten__") and real_device(tensor).type == "cpu"
        if not is_whole or is_on_device == (device.type == "cuda"):
            result = function(tensor, CPU, **settings)
            if device.type == "cuda" and not is_on_device:
                for part in parts_of(result):
                    detector.allocated(part, "allocation for a copy to the device")
            return result
        name = "a copy to the host" if is_on_device else "a copy to the device"
        detector.check(name, [tensor])
        settings["copy"] = True
        with detector.unseen():
            result = function(tensor, CPU, **settings)
        if not is_on_device:
            detector.allocated(result, f"allocation for {name}")
        elif non_blocking:
            detector.host.pin(result)  # torch pins what it makes for a copy that goes on
        detector.copy(name, result, tensor, non_blocking)
        return result

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Do what `Tensor.pin_memory` does."""
        detector = self._detector
        if detector.blocks.is_on_device(tensor):
            raise RuntimeError("cannot pin memory of the device: only that of the host")
        if detector.host.is_pinned(tensor):
            return tensor
        detector.host_uses("pin_memory()", [tensor], [])
        with detector.unseen():
            result = tensor.clone()
        detector.host.pin(result)
        return result

    def of_tensors(self) -> dict[str, Any]:
        """Return what takes the place of methods of tensors."""
        to = torch.Tensor.to

        def device(tensor: torch.Tensor) -> torch.device:
            is_on_device = self._detector.blocks.is_on_device(tensor)
            return torch.device("cuda", self.index) if is_on_device else real_device(tensor)

        def move(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return self.to(to, tensor, *args, **kwargs)

        def cuda(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False) -> Any:
            return self.to(to, tensor, "cuda", non_blocking=non_blocking)

        def cpu(tensor: torch.Tensor, **settings: Any) -> Any:
            return self.to(to, tensor, "cpu", **settings)

        numpy = torch.Tensor.numpy

        def as_numpy(tensor: torch.Tensor, **settings: Any) -> Any:
            if self._detector.blocks.is_on_device(tensor):
                raise TypeError("can't convert cuda tensor to numpy: use Tensor.cpu() first")
            return numpy(tensor, **settings)

        return {
            "device": property(device),
            "to": move,
            "cuda": cuda,
            "cpu": cpu,
            "numpy": as_numpy,
            "pin_memory": lambda tensor, device=None: self.pin(tensor),
            "is_pinned": lambda tensor, device=None: self._detector.host.is_pinned(tensor),
            **{name: self.factory(getattr(torch.Tensor, name)) for name in NEW},
        }

    def of_torch(self) -> dict[str, Any]:
        """Return what takes the place of functions of torch that make tensors."""
        makers = [each.__name__ for each in default_device._device_constructors()]
        names = [name for name in (*makers, *LIKE) if hasattr(torch, name)]
        return {name: self.factory(getattr(torch, name)) for name in names}

    # ---- torch.cuda and torch.distributed

    def of_cuda(self) -> dict[str, Any]:
        """Return what takes the place of functions of `torch.cuda`."""
        count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "is_bf16_supported": lambda *args, **kwargs: True,
            "init": lambda: None,
            "_lazy_init": lambda: None,
            "device": lambda device: nullcontext(),
            "device_count": lambda: count,
            "current_device": lambda: self.index,
            "get_device_name": lambda device=None: "a model of a CUDA device",
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
            "cudart": lambda: SimpleNamespace(
                cudaHostRegister=self._detector.host.register,
                cudaHostUnregister=self._detector.host.unregister,
            ),
            "check_error": lambda status: None,
            "manual_seed": lambda seed: None,  # the CPU's generator, which has its own seed
            "manual_seed_all": lambda seed: None,
        }

    def of_accelerator(self) -> dict[str, Any]:
        """Return what takes the place of functions of `torch.accelerator`."""
        return {
            "is_available": lambda: True,
            "current_accelerator": lambda *args, **kwargs: torch.device("cuda"),
            "current_device_index": lambda: self.index,
            "set_device_index": lambda device: None,
            "device_count": lambda: torch.cuda.device_count(),
            "current_stream": lambda device=None: self._detector.streams.current,
            "set_stream": self._detector.streams.set_current,
            "synchronize": lambda device=None: torch.cuda.synchronize(),
        }

    def of_groups(self) -> dict[str, Any]:
        """Return what takes the place of functions of `torch.distributed`."""
        init, new_group = dist.init_process_group, dist.new_group

        def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("device_id", None)
            init("gloo", *args, **kwargs)

        def make_group(ranks: Any = None, timeout: Any = None, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop("device_id", None)
            kwargs.pop("backend", None)
            return new_group(ranks, timeout, "gloo", *args[1:], **kwargs)

        return {
            "init_process_group": init_process_group,
            "new_group": make_group,
            "is_nccl_available": lambda: True,
            "get_backend": lambda group=None: dist.Backend.NCCL,
        }


@contextmanager
def device_names(detector: Detector) -> Iterator[None]:
    """Let a program name "cuda" and "nccl" while the context lasts."""
    names = DeviceNames(detector)
    of_groups = names.of_groups()
    places: list[tuple[object, dict[str, Any]]] = [
        (torch, names.of_torch()),
        (torch.Tensor, names.of_tensors()),
        (torch.cuda, names.of_cuda()),
        (torch.cuda.nccl, {"version": lambda: (2, 28, 9)}),  # torch reads it for its logs
        (torch.accelerator, names.of_accelerator()),
        *((place, of_groups) for place in (dist, distributed_c10d, device_mesh)),
    ]
    with ExitStack() as patches:
        for place, replacements in places:
            for name, replacement in replacements.items():
                if hasattr(place, name):
                    patches.enter_context(patch.object(place, name, replacement))
        _patch_contexts(patches, names)
        _patch_storage(patches, detector)
        yield


def _patch_contexts(patches: ExitStack, names: DeviceNames) -> None:
    """Let contexts that have a device accept "cuda"."""
    makers = default_device._device_constructors()
    autocast = torch.autocast.__init__

    def call(self: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        settings = dict(kwargs or {})
        if function in makers and settings.get("device") is None:
            settings["device"] = self.device
            return names.make(function.__name__, function, args, settings)
        return function(*args, **settings)

    def begin(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    context = default_device.DeviceContext
    patches.enter_context(patch.object(context, "__torch_function__", call))
    patches.enter_context(patch.object(torch.autocast, "__init__", begin))


def _patch_storage(patches: ExitStack, detector: Detector) -> None:
    """Let copies of storage, and tensors around others, be where the original is."""
    clone, wrap = torch.UntypedStorage.clone, torch.Tensor._make_wrapper_subclass

    def clone_there(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        result = clone(storage)
        if detector.blocks.has(storage):
            detector.blocks.adopt(torch.empty(0, dtype=torch.uint8).set_(result))
        return result

    def wrap_on_cpu(*args: Any, **kwargs: Any) -> Any:
        if is_named_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return wrap(*args, **kwargs)

    patches.enter_context(patch.object(torch.UntypedStorage, "clone", clone_there))
    wrapper = staticmethod(wrap_on_cpu)
    patches.enter_context(patch.object(torch.Tensor, "_make_wrapper_subclass", wrapper))
