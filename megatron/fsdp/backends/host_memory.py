# SPDX-License-Identifier: Apache-2.0
"""Host memory and mapped files, in which shards lie that are not on the device."""

# [Note: mapped files] Pages of a file that a process has mapped are read when they are first used,
# and count as its memory until it gives them back, which `release` does; what was written reaches
# the disk later. The disk's space is taken when a file is made, so training never runs out of it.
# The files are deleted while they are mapped: their space is free when the process has ended.

# [Note: copies of shards] Copies to the device and those to the host have a stream each, since the
# bus carries both at once. Compute waits for neither: an all-gather waits for its own weights.
#     to the device  |   copy unit 2, cast   |   copy unit 3, cast   |
#     all-gather     | unit 1                | unit 2                | unit 3
#     compute        |        unit 1         |        unit 2         |
# A sum that has gradients is copied to the device, added to and copied back, all on the stream to
# the host, so that the host waits once a step. What is added lives until compute has waited for its
# copy, which it does when the next gradient comes.

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.config.offload import Offload
from megatron.fsdp.engine.buffer import ShardMemory
from megatron.fsdp.engine.device import Pending, pinned, streams_for
from megatron.fsdp.engine.mesh import Mesh
from megatron.fsdp.engine.policy import ParameterKind, Precision

# Streams of copies, those of updates in blocks too.
TO_DEVICE = "copies to the device"
TO_HOST = "copies to the host"

_madvise = ctypes.CDLL(None, use_errno=True).madvise if os.name == "posix" else None


class HostMemory(ShardMemory):
    """Host memory, pinned where the device is a GPU."""

    is_offloaded = True

    def __init__(self, device: torch.device, offload: Offload):
        super().__init__(device)
        self.on_device = offload.on_device
        self.streams = streams_for(device)  # see [Note: copies of shards]
        # The last copy of gradients to the host, and its source.
        self._last_added: tuple[Pending, torch.Tensor] | None = None
        self._is_pinned = offload.pins and is_accelerator(device)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new flat tensor of zeros on the host."""
        if self._is_pinned and numel:
            return pinned(numel, dtype, self.device)
        host = "cpu"
        if self.device.type == "meta":  # in a simulated run
            host = "meta"
        return torch.zeros(numel, dtype=dtype, device=host)

    def use(self, tensor: torch.Tensor, function: Callable[[torch.Tensor], None]) -> Pending:
        """Begin to call ``function`` with a copy of ``tensor`` on the device, during compute."""

        def copy_and_call(_: bool) -> None:
            on_device = tensor.to(self.device, non_blocking=True)
            function(on_device)

        pending = self.streams.launch(TO_DEVICE, copy_and_call)
        self.release(tensor)
        return pending

    def add(
        self,
        total: torch.Tensor,
        addend: torch.Tensor,
        is_first: bool,
    ) -> None:
        """Begin to add a gradient to a sum of gradients in this memory.

        Args:
            total: the sum, flat, in this memory; changed in place.
            addend: what is added, of the same shape, on the device or the host.
            is_first: replace ``total``, whose values are from the last step.
        """
        if addend.device == total.device:
            super().add(total, addend, is_first)
        else:
            self._add_during_compute(total, addend, is_first)
        self.release(total)

    def _add_during_compute(
        self,
        total: torch.Tensor,
        addend: torch.Tensor,
        is_first: bool,
    ) -> None:
        def add(_: bool) -> None:
            result = addend
            if not is_first:
                result = total.to(addend.device, non_blocking=True)
                result.add_(addend)
            total.copy_(result, non_blocking=True)

        if self._last_added is not None:
            pending, _ = self._last_added
            pending.wait()
        pending = self.streams.launch(TO_HOST, add)
        self._last_added = (pending, addend)

    def wait(self) -> None:
        """Let the host wait for all copies from and to the device."""
        self.streams.wait_on_host()
        self._last_added = None

    def has(self, tensor: torch.Tensor) -> bool:
        """Return True if ``tensor`` is pinned like this memory, or not, and on the host."""
        return tensor.is_cpu and tensor.is_pinned() == self._is_pinned

    def prefetch(self, tensor: torch.Tensor) -> None:
        """Begin to read ``tensor``, which is used next."""


class FileMemory(HostMemory):
    """Mapped files, one for each tensor; see [Note: mapped files].

    Args:
        device: computes with the tensors.
        offload: the settings.
        folder: where the files lie.
    """

    def __init__(
        self,
        device: torch.device,
        offload: Offload,
        folder: Path,
    ):
        super().__init__(device, offload)
        self._folder = folder

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new flat tensor of zeros in a file.

        Raises:
            OSError: if the disk is full.
        """
        if not numel or self.device.type == "meta":
            return super().empty(numel, dtype)
        return mapped(self._folder, numel, dtype)

    def has(self, tensor: torch.Tensor) -> bool:
        """Return True if ``tensor`` is a mapped file."""
        return tensor.untyped_storage().filename is not None

    def prefetch(self, tensor: torch.Tensor) -> None:
        """Begin to read the pages of ``tensor``."""
        if self.has(tensor):
            _advise(tensor, mmap.MADV_WILLNEED)

    def release(self, tensor: torch.Tensor) -> None:
        """Give the pages of ``tensor`` back to the system; its values stay in the file."""
        # Copies of pages that are not pinned are over when CUDA's call returns.
        if self.has(tensor):  # other memory would lose its values
            _advise(tensor, mmap.MADV_DONTNEED)


def is_accelerator(device: torch.device) -> bool:
    """Return True for a device with memory of its own."""
    return device.type not in ("cpu", "meta")


def mapped(
    folder: Path,
    numel: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a flat tensor of zeros in a new file without a name.

    Args:
        folder: where the file lies; its space is free when the tensor's memory is.
        numel: the number of elements, at least 1.
        dtype: that of the tensor.

    Raises:
        OSError: if the disk is full, or the folder cannot be written to.
    """
    size = numel * dtype.itemsize
    with NamedTemporaryFile(dir=folder, prefix="megatron_fsdp_") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        return torch.from_file(file.name, shared=True, size=numel, dtype=dtype)


def _advise(tensor: torch.Tensor, advice: int) -> None:
    """Advise the kernel on the pages of a contiguous tensor."""
    if _madvise is None or not tensor.nbytes:
        return
    address = tensor.data_ptr()
    first = address // mmap.PAGESIZE * mmap.PAGESIZE  # advice is for whole pages
    stop = address + tensor.nbytes
    _madvise(ctypes.c_void_p(first), ctypes.c_size_t(stop - first), advice)


class ShardMemoryChoice:
    """The choice of memory for the shards of each group.

    Args:
        device: computes with the weights.
        offload: the settings; None keeps all shards on the device.
        numel: the number of elements of all groups on all ranks.
    """

    def __init__(
        self,
        device: torch.device,
        offload: Offload | None,
        numel: int,
    ):
        self._on_device = ShardMemory(device)
        self._offloaded = self._on_device
        self._left = 0.0  # elements that are still to be offloaded
        if offload is not None:
            self._left = offload.fraction * numel
            if offload.folder is None:
                self._offloaded = HostMemory(device, offload)
            else:
                self._offloaded = FileMemory(device, offload, offload.folder)

    def of_group(self, numel: int) -> ShardMemory:
        """Return the memory of the next group, of ``numel`` elements on all ranks."""
        if self._left <= 0:
            return self._on_device
        self._left -= numel
        return self._offloaded


def problems_of_offload(
    offload: Offload,
    device: torch.device,
    mesh: Mesh,
    named: Mapping[str, nn.Parameter],
    precision_of: Callable[[torch.dtype, bool], Precision],
    kinds: Mapping[str, ParameterKind],
    is_sharded: Mapping[ParameterKind, bool],
) -> Iterator[str]:
    """Yield the reasons why this rank cannot offload.

    Args:
        offload: the settings.
        device: computes with the weights.
        mesh: the mesh of the model, whose process groups must work on host memory.
        named: the parameters of the module, by name, before sharding.
        precision_of: returns the dtypes of a parameter, given its own and if it is trained.
        kinds: the kinds of the parameters, by name.
        is_sharded: for each kind, True if optimizer state is sharded.
    """
    if is_accelerator(device):
        for group in mesh.all_groups():
            try:
                group._get_backend(torch.device("cpu"))
            except RuntimeError:
                yield (
                    "Memory.offload needs process groups for host memory too: call"
                    ' init_process_group("cpu:gloo,cuda:nccl") or init_process_group()'
                )
                break
    folder = offload.folder
    if folder is None:
        return
    try:
        mapped(folder, 1, torch.uint8)
    except (OSError, RuntimeError) as error:
        yield (
            f"Memory.offload={str(folder)!r}: rank {dist.get_rank()} cannot map a file there"
            f" ({error}): name a folder on a local disk that exists and can be written to"
        )
        return
    needed = 0
    for name, parameter in named.items():
        num_shards = 1
        if is_sharded[kinds[name]]:
            num_shards = mesh.axes(kinds[name]).inner.size()
        precision = precision_of(parameter.dtype, parameter.requires_grad)
        itemsize = _bytes_of_element(precision, parameter.requires_grad)
        needed += parameter.numel() * itemsize // num_shards
    needed *= int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # ranks of one machine share the disk
    free = shutil.disk_usage(folder).free
    if free < needed:
        yield (
            f"Memory.offload={str(folder)!r} has {free / 1e9:.1f} GB free, but the ranks of this"
            f" machine need {needed / 1e9:.1f} GB for main weights, gradients and two moments:"
            " free some, name another disk, or shard over more machines"
        )


def _bytes_of_element(precision: Precision, is_trained: bool) -> int:
    """Return the bytes of main weight, and if it is trained of gradient and two moments."""
    main = precision.main_param.itemsize
    if not is_trained:
        return main
    needed = 3 * main + precision.main_grad.itemsize
    if precision.main_grad != precision.main_param:  # the optimizer's gradient has its own memory
        needed += main
    return needed
