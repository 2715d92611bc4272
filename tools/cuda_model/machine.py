# SPDX-License-Identifier: Apache-2.0
"""The machine: functions and classes of `torch.cuda` and NCCL, replaced by the model's rules."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroup

from tools.cuda_model.detector import Detector
from tools.cuda_model.device_names import device_names
from tools.cuda_model.groups import Groups, NcclOptions
from tools.cuda_model.memory import real_device
from tools.cuda_model.methods import METHODS
from tools.cuda_model.nccl import Nccl
from tools.cuda_model.operators import OperatorEvents
from tools.cuda_model.pools import ModelBackend, Pools
from tools.cuda_model.reports import Finding, cheap_stacks
from tools.cuda_model.streams import ModelEvent, ModelStream, StreamContext


class CudaModel:
    """A device with streams, whose memory is the CPU's."""

    def __init__(self, has_host: bool = False, backend: str = "nccl") -> None:
        self.detector = Detector(has_host)
        self.groups = Groups(self.detector, backend)
        self.nccl = Nccl(self.detector, self.groups)
        self.pools = Pools(self.detector, self.nccl)
        self.streams = self.detector.streams

    @property
    def reports(self) -> list[Finding]:
        """Everything that was reported."""
        return self.detector.reports

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Give the memory of ``tensor`` a name in reports, which say "a tensor" otherwise."""
        self.detector.blocks.name(tensor, name)

    @contextmanager
    def during(self, work: str) -> Iterator[None]:
        """Let reports say "during ``work``" while the context lasts; contexts nest."""
        self.detector.work.append(work)
        try:
            yield
        finally:
            self.detector.work.pop()

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
            "Stream": lambda device=None, priority=0, **kwargs: streams.make(priority=priority),
            "Event": lambda *args, **kwargs: ModelEvent(streams),
            "stream": lambda stream: StreamContext(streams, stream),
            "set_stream": streams.set_current,
            "current_stream": lambda device=None: streams.current,
            "default_stream": lambda device=None: streams.default,
            "synchronize": self.synchronize,
            "current_device": lambda: torch.device("cpu"),
            "set_device": lambda device: None,
            "memory_allocated": lambda device=None: blocks.allocated,
            "max_memory_allocated": lambda device=None: blocks.peak,
            "reset_peak_memory_stats": reset_peak,
            **self.pools.replacements_of_cuda(),
        }


@contextmanager
def cuda_model(
    compares_order: bool = True, names_cuda: bool = False, backend: str = "nccl"
) -> Iterator[CudaModel]:
    """Run what follows on the model; everything is restored at the end.

    Args:
        compares_order: compare the collectives of all ranks at the end, which all must reach.
        names_cuda: the program names the device "cuda" and the backend "nccl", and has memory on
            the host too. Otherwise every tensor of the CPU counts as one of the device.
        backend: that of all ranks, "nccl" or "cpu:gloo,cuda:nccl", if the program does not name it.
    """
    model = CudaModel(has_host=names_cuda, backend=backend)
    with ExitStack() as patches:
        patches.enter_context(cheap_stacks())
        _patch_cuda(patches, model)
        _patch_tensors(patches, model.detector)
        _patch_threads(patches, model.detector)
        if names_cuda:
            patches.enter_context(device_names(model.detector))
        _patch_groups(patches, model)
        patches.callback(model.detector.blocks.close)
        patches.callback(model.detector.host.close)
        with OperatorEvents(model.detector):
            yield model
            model.nccl.close()
    if compares_order and dist.is_initialized():
        model.detector.launches.compare()


def _patch_cuda(patches: ExitStack, model: CudaModel) -> None:
    for name, replacement in model.replacements_of_cuda().items():
        patches.enter_context(patch.object(torch.cuda, name, replacement))
        if hasattr(torch.cuda.graphs, name):  # torch's own graphed callables look there
            patches.enter_context(patch.object(torch.cuda.graphs, name, replacement))


def _patch_tensors(patches: ExitStack, detector: Detector) -> None:
    """Patch what reaches memory without an operator."""
    resize, numpy = torch.UntypedStorage.resize_, torch.Tensor.numpy
    to_list, to_cpu = torch.Tensor.tolist, torch.Tensor.cpu

    def resize_(self: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
        is_ours = detector.blocks.has(self) and num_bytes != self.nbytes()
        if is_ours:
            detector.freed(self)
        elif num_bytes != self.nbytes():
            detector.host.free(self)
        result = resize(self, num_bytes)
        if is_ours:
            detector.resized(self, num_bytes)
        return result

    def read(self: torch.Tensor) -> None:
        if detector.blocks.is_on_device(self) and not hasattr(self, "__tensor_flatten__"):
            detector.check("a copy to the host", [self])
            detector.kernel("a copy to the host", [self], [])
            detector.synchronize(detector.streams.current.cuda_stream)
        else:
            detector.host_uses("a read", [self], [])

    def tolist(self: torch.Tensor) -> Any:
        read(self)
        return to_list(self)

    def cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        read(self)
        return to_cpu(self, *args, **kwargs)

    def as_numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if detector.blocks.is_on_device(self) and not detector.makes_on_host():
            detector.host_read(self, "numpy()")
        else:
            detector.host_uses("numpy()", [self], [])
        return numpy(self, *args, **kwargs)

    def record_stream(self: torch.Tensor, stream: ModelStream) -> None:
        detector.record_stream(self, stream.cuda_stream)

    patches.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_))

    def is_cuda(self: torch.Tensor) -> bool:  # torch itself would ask a driver next
        return detector.blocks.is_on_device(self) and _asking() != "torch"

    def is_cpu(self: torch.Tensor) -> bool:
        is_device = detector.blocks.is_on_device(self)
        return real_device(self).type == "cpu" and (not is_device or _asking() == "torch")

    for name, replacement in {
        "is_cuda": property(is_cuda),
        "is_cpu": property(is_cpu),
        "tolist": tolist,
        "cpu": cpu,
        "numpy": as_numpy,
        "record_stream": record_stream,
    }.items():
        patches.enter_context(patch.object(torch.Tensor, name, replacement))


def _patch_threads(patches: ExitStack, detector: Detector) -> None:
    """Let operators of threads be events, too; each has a current stream of its own."""
    run = threading.Thread.run

    def run_seen(self: threading.Thread) -> None:
        with OperatorEvents(detector):
            run(self)

    patches.enter_context(patch.object(threading.Thread, "run", run_seen))


def _asking() -> str:
    return str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0]


def _patch_groups(patches: ExitStack, model: CudaModel) -> None:
    nccl, pools, get_backend = model.nccl, model.pools, ProcessGroup._get_backend

    def backend(group: ProcessGroup, device: torch.device) -> ModelBackend:
        options = model.groups.options(group)
        return ModelBackend(pools, group.group_name, get_backend(group, device), options)

    for name, replacement in model.groups.replacements().items():
        for place in (dist, distributed_c10d, device_mesh):
            if hasattr(place, name):
                patches.enter_context(patch.object(place, name, replacement))
    options = SimpleNamespace(Options=NcclOptions)
    patches.enter_context(patch.object(dist, "ProcessGroupNCCL", options, create=True))
    patches.enter_context(patch.object(ProcessGroup, "_get_backend", backend))
    patches.enter_context(patch.object(dist, "destroy_process_group", pools.destroy_groups))
    for name, replacement in (
        ("_start_coalescing", lambda *args: nccl.start_coalescing(*args)),
        ("_end_coalescing", lambda *args: nccl.end_coalescing(*args)),
    ):
        patches.enter_context(patch.object(ProcessGroup, name, replacement))
    for name in METHODS:
        original: Callable[..., Any] | None = getattr(ProcessGroup, name, None)
        if original is not None:
            patches.enter_context(patch.object(ProcessGroup, name, nccl.method(name, original)))
