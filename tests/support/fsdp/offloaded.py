# SPDX-License-Identifier: Apache-2.0
"""Offload on a CPU with the sums that a GPU's gradients have in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch
from weakref import ref

import torch

from megatron.fsdp.backends.host_memory import HostMemory


@contextmanager
def sums_as_on_a_gpu() -> Iterator[None]:
    """Copy, add and copy back inside the context, although device and host are one.

    As on a GPU, what is in host memory already is added or cast there.
    """
    on_host: list[ref[torch.Tensor]] = []
    new, add_on_host = HostMemory.empty, HostMemory.add

    def empty(self: HostMemory, numel: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = new(self, numel, dtype)
        on_host.append(ref(tensor))
        return tensor

    def add(self: HostMemory, total: torch.Tensor, addend: torch.Tensor, is_first: bool) -> None:
        tensors = [reference() for reference in on_host]
        if any(each is not None and each.data_ptr() == addend.data_ptr() for each in tensors):
            add_on_host(self, total, addend, is_first)
            return
        on_device = None if is_first else total.clone()  # the copy to which a GPU adds
        self._add_during_compute(total, addend, is_first)
        del on_device
        self.release(total)

    with patch.object(HostMemory, "empty", empty), patch.object(HostMemory, "add", add):
        yield
