# SPDX-License-Identifier: Apache-2.0
"""The model of a CUDA device for this library, on tensors of the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import distributed_c10d

from megatron.fsdp.backends.gloo_messages import GlooMessages
from megatron.fsdp.config import memory
from megatron.fsdp.engine import device, observe
from megatron.fsdp.engine.buffer import FlatBuffer
from megatron.fsdp.module import checks
from tools import cuda_model as tool
from tools.cuda_model.machine import CudaModel
from tools.cuda_model.reports import name_of
from tools.cuda_model.streams import ModelStream


class WorkWatcher(observe.Observer):
    """Tells the model which unit the engine works on."""

    def __init__(self, model: CudaModel):
        self._work = model.detector.work

    def begin_work(self, unit: str, work: str) -> None:
        self._work.append(f"{work} of unit {unit!r}")

    def end_work(self, begun: None) -> None:
        self._work.pop()


@contextmanager
def cuda_model(
    compares_order: bool = True, names_cuda: bool = False, backend: str = "nccl"
) -> Iterator[CudaModel]:
    """Run the engine on the model as on a GPU; everything is restored at the end.

    Args:
        compares_order: compare the collectives of all ranks at the end, which all must reach.
        names_cuda: the device is "cuda", beside the host's memory. Otherwise it has the name "cpu",
            as where Megatron-Core runs on a CPU, and there is no other memory.
        backend: of the group of all ranks.
    """
    machine = tool.cuda_model(compares_order, names_cuda, backend)
    with machine as model, ExitStack() as patches:
        _name_what_it_sees(patches, model)
        if not names_cuda:
            _patch_engine(patches)
            _patch_core(patches)
        yield model


@contextmanager
def bound_device() -> Iterator[None]:
    """Let the group of all ranks have a device, as `init_process_group` binds one to it."""
    world = distributed_c10d._get_default_group()
    world.bound_device_id = torch.device("cuda", 0)
    try:
        yield
    finally:
        world.bound_device_id = None


def _name_what_it_sees(patches: ExitStack, model: CudaModel) -> None:
    """Let reports name the engine's buffers, units and streams."""
    make, make_stream = FlatBuffer.__init__, model.streams.make

    def make_named(self: FlatBuffer, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        model.name(self.flat, self.name)

    def make_named_stream(name: str = "", priority: int = 0) -> ModelStream:
        frame = sys._getframe(2)
        makers = [each for each in (frame, frame.f_back) if each is not None]  # it fills a dict
        names = [each.f_locals.get("stream_name") for each in makers]
        return make_stream(name or next(filter(None, names), name_of(frame.f_code)), priority)

    patches.enter_context(patch.object(FlatBuffer, "__init__", make_named))
    patches.enter_context(patch.object(model.streams, "make", make_named_stream))
    watcher = WorkWatcher(model)
    observe.add(watcher)
    patches.callback(observe.remove, watcher)


def _patch_engine(patches: ExitStack) -> None:
    """Let the engine use streams, and send by NCCL, as on a device with another name."""
    on_device = partial(device.CudaStreams, torch.device("cpu"))
    patches.enter_context(patch.object(device, "CpuStreams", on_device))
    patches.enter_context(patch.object(GlooMessages, "_uses_gloo", lambda *args: False))
    for place in (memory, checks):
        patches.enter_context(patch.object(place, "problems_of_nccl", lambda device: []))


def _patch_core(patches: ExitStack) -> None:
    """Clear streams that Megatron-Core keeps in classes; answer its emulated engine as a GPU's."""
    for module in [value for key, value in sys.modules.items() if key.startswith("megatron.core")]:
        for owner in [each for each in vars(module).values() if isinstance(each, type)]:
            for name in [key for key in vars(owner) if key.endswith("_stream")]:
                if not callable(getattr(owner, name)):
                    patches.enter_context(patch.object(owner, name, None))

    def is_cpu(self: torch.Tensor) -> bool:  # the name by which an emulated engine asks for is_cuda
        asking = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
        return self.device.type == "cpu" and asking in ("torch", "transformer_engine")

    patches.enter_context(patch.object(torch.Tensor, "is_cpu", property(is_cpu)))
