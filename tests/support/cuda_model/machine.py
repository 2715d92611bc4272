# SPDX-License-Identifier: Apache-2.0
"""The machine: what the project calls of `torch.cuda` and NCCL, replaced by the model's rules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup

from megatron.fsdp import checks
from megatron.fsdp.backends import memory_slots
from megatron.fsdp.backends.gloo_messages import GlooMessages
from megatron.fsdp.engine import device, observe
from megatron.fsdp.engine.buffer import FlatBuffer
from tests.support.cuda_model.detector import Detector
from tests.support.cuda_model.nccl import METHODS, Nccl
from tests.support.cuda_model.operators import OperatorEvents
from tests.support.cuda_model.pools import ModelBackend, Pools
from tests.support.cuda_model.reports import Finding, cheap_stacks
from tests.support.cuda_model.streams import ModelEvent, ModelStream, StreamContext


class CudaModel:
    """A device with streams, whose memory is the CPU's."""

    def __init__(self) -> None:
        self.detector = Detector()
        self.nccl = Nccl(self.detector)
        self.pools = Pools(self.detector, self.nccl)
        self.streams = self.detector.streams

    @property
    def reports(self) -> list[Finding]:
        """Everything that was reported."""
        return self.detector.reports

    def synchronize(self, device: object = None) -> None:
        """Let the host wait for everything."""
        self.detector.synchronize()
        self.nccl.finish_all()

    def replacements_of_cuda(self) -> dict[str, Any]:
        """Return what takes the place of functions and classes of `torch.cuda`."""
        streams, blocks = self.streams, self.detector.blocks

        def reset_peak(device: object = None) -> None:
            blocks.peak = blocks.allocated

        return {
            **self.detector.graphs.replacements(),
            "Stream": lambda *args, **kwargs: streams.make(),
            "Event": lambda *args, **kwargs: ModelEvent(streams),
            "stream": lambda stream: StreamContext(streams, stream),
            "set_stream": streams.set_current,
            "current_stream": lambda device=None: streams.current,
            "default_stream": lambda device=None: streams.default,
            "synchronize": self.synchronize,
            "current_device": lambda: torch.device("cpu"),
            "set_device": lambda device: None,
            "empty_cache": lambda: None,
            "memory_allocated": lambda device=None: blocks.allocated,
            "max_memory_allocated": lambda device=None: blocks.peak,
            "reset_peak_memory_stats": reset_peak,
            **self.pools.replacements_of_cuda(),
        }


class WorkWatcher(observe.Observer):
    """Tells the detector which unit the engine works on."""

    def __init__(self, detector: Detector):
        self._detector = detector

    def begin_work(self, unit: str, work: str) -> None:
        """Note work on a unit."""
        self._detector.work.append(f"{work} of unit {unit!r}")

    def end_work(self, begun: None) -> None:
        """Note that the unit's work is over."""
        self._detector.work.pop()


@contextmanager
def cuda_model(compares_order: bool = True) -> Iterator[CudaModel]:
    """Let CPU tensors count as those of a device; everything is restored at the end.

    ``compares_order``: compare the collectives of all ranks at the end, which all must reach.
    """
    model = CudaModel()
    with ExitStack() as patches:
        patches.enter_context(cheap_stacks())
        _patch_cuda(patches, model)
        _patch_tensors(patches, model.detector)
        _patch_groups(patches, model)
        _patch_engine(patches, model.detector)
        patches.callback(model.detector.blocks.close)
        with OperatorEvents(model.detector):
            yield model
            model.nccl.close()
    if compares_order and dist.is_initialized():
        model.nccl.compare_order()


def _patch_cuda(patches: ExitStack, model: CudaModel) -> None:
    for name, replacement in model.replacements_of_cuda().items():
        patches.enter_context(patch.object(torch.cuda, name, replacement))
        if hasattr(torch.cuda.graphs, name):  # torch's own graphed callables look there
            patches.enter_context(patch.object(torch.cuda.graphs, name, replacement))
    # Megatron-Core keeps streams in a class; another model's, or CUDA's, would stay there.
    for module in [value for key, value in sys.modules.items() if key.startswith("megatron.core")]:
        for owner in [each for each in vars(module).values() if isinstance(each, type)]:
            for name in [key for key in vars(owner) if key.endswith("_stream")]:
                if not callable(getattr(owner, name)):
                    patches.enter_context(patch.object(owner, name, None))


def _patch_tensors(patches: ExitStack, detector: Detector) -> None:
    """Patch what reaches memory without an operator."""
    resize, numpy = torch.UntypedStorage.resize_, torch.Tensor.numpy
    to_list, to_cpu = torch.Tensor.tolist, torch.Tensor.cpu

    def resize_(self: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
        is_ours = self.device.type == "cpu" and num_bytes != self.nbytes()
        if is_ours:
            detector.freed(self)
        result = resize(self, num_bytes)
        if is_ours:
            detector.resized(self, num_bytes)
        return result

    def read(self: torch.Tensor) -> None:
        if self.device.type == "cpu" and not hasattr(self, "__tensor_flatten__"):
            detector.check("a copy to the host", [self])
            detector.kernel("a copy to the host", [self], [])
            detector.synchronize(detector.streams.current.cuda_stream)

    def tolist(self: torch.Tensor) -> Any:
        read(self)
        return to_list(self)

    def cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        read(self)
        return to_cpu(self, *args, **kwargs)

    def as_numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        detector.host_read(self, "numpy()")
        return numpy(self, *args, **kwargs)

    def record_stream(self: torch.Tensor, stream: ModelStream) -> None:
        detector.record_stream(self, stream.cuda_stream)

    patches.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_))

    def is_cuda(self: torch.Tensor) -> bool:  # torch itself would ask a driver next
        return self.device.type == "cpu" and _asking() != "torch"

    def is_cpu(self: torch.Tensor) -> bool:  # the name by which an emulated engine asks for is_cuda
        return self.device.type == "cpu" and _asking() in ("torch", "transformer_engine")

    for name, replacement in {
        "is_cuda": property(is_cuda),
        "is_cpu": property(is_cpu),
        "tolist": tolist,
        "cpu": cpu,
        "numpy": as_numpy,
        "record_stream": record_stream,
    }.items():
        patches.enter_context(patch.object(torch.Tensor, name, replacement))


def _asking() -> str:
    return str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0]


def _patch_groups(patches: ExitStack, model: CudaModel) -> None:
    nccl, pools, get_backend = model.nccl, model.pools, ProcessGroup._get_backend

    def backend(group: ProcessGroup, device: torch.device) -> ModelBackend:
        return ModelBackend(pools, group.group_name, get_backend(group, device))

    patches.enter_context(patch.object(ProcessGroup, "_get_backend", backend))
    patches.enter_context(patch.object(dist, "destroy_process_group", pools.destroy_groups))
    for name, replacement in (
        ("_start_coalescing", lambda *args: nccl.start_coalescing(*args)),
        ("_end_coalescing", lambda *args: nccl.end_coalescing(*args)),
    ):
        patches.enter_context(patch.object(ProcessGroup, name, replacement))
    for place in (memory_slots, checks):
        patches.enter_context(patch.object(place, "problems_of_nccl", lambda device: []))
    for name in METHODS:
        original: Callable[..., Any] | None = getattr(ProcessGroup, name, None)
        if original is not None:
            patches.enter_context(patch.object(ProcessGroup, name, nccl.method(name, original)))


def _patch_engine(patches: ExitStack, detector: Detector) -> None:
    """Let the engine use streams, send by NCCL, and tell the names of buffers and units."""
    make = FlatBuffer.__init__

    def make_named(self: FlatBuffer, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        detector.blocks.name(self.flat, self.name)

    patches.enter_context(patch.object(FlatBuffer, "__init__", make_named))
    on_device = partial(device.CudaStreams, torch.device("cpu"))
    patches.enter_context(patch.object(device, "CpuStreams", on_device))
    patches.enter_context(patch.object(GlooMessages, "_uses_gloo", lambda *args: False))
    watcher = WorkWatcher(detector)
    observe.add(watcher)
    patches.callback(observe.remove, watcher)
