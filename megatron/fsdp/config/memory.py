# SPDX-License-Identifier: Apache-2.0
"""The settings of the memory of buffers, and what registering it with NCCL needs."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from megatron.fsdp.config.offload import Offload
from megatron.fsdp.engine.policy import problems_of_flags, raise_problems


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of buffers.

    Args:
        device: device that the module is moved to; None: the mesh's. Ignored with meta
            initialisation.
        uses_slots: gather weights and collect gradients in a fixed set of memory slots. The first
            step finds out which buffers are in use at the same time. ``equal_sizes``,
            ``holds_addresses`` and ``registers`` imply it.
        equal_sizes: give every slot the size of the largest buffer.
        allows_own_storage: train without the memory of slots if it cannot be allocated; not with
            windows, which all ranks register together.
        holds_addresses: it is an error if a buffer must leave its slot, as CUDA graphs need, or if
            memory runs out, also with ``allows_own_storage``.
        registers: register the slots with NCCL.
        registers_locally: register them locally, not as symmetric windows.
        registers_manually: ``manual_buffer_registration()`` of the wrapper assigns and registers
            the slots, not the end of the first step.
        keeps_copies: make transposed copies of quantized weights in forward, for the backward.
        offload: "host" or a folder, in which main weights, reduced gradients and optimizer state
            lie; or :class:`Offload`, or ``CPUOffloadPolicy`` of FSDP2. None: on the device.
    """

    device: torch.device | str | None = None
    uses_slots: bool = False
    equal_sizes: bool = False
    allows_own_storage: bool = False
    holds_addresses: bool = False
    registers: bool = False
    registers_locally: bool = False
    registers_manually: bool = False
    keeps_copies: bool = False
    offload: Offload | CPUOffloadPolicy | str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        problems = problems_of_flags(self)
        device = None
        try:
            if self.device is not None:
                device = torch.device(self.device)
        except (RuntimeError, TypeError):
            problems.append(
                f"Memory.device expects a torch.device, its name or None but got {self.device!r}"
            )
        if device is not None and device.type == "meta":
            problems.append("Memory.device is meta: pass Settings.initialisation for modules there")
        if self.registers_manually and not self.registers:
            problems.append("Memory.registers_manually needs Memory.registers")
        try:
            object.__setattr__(self, "offload", Offload.parse(self.offload))
        except ValueError as error:
            problems.append(f"Memory.offload: {error}")
        if self.offload is not None and self.holds_addresses:
            problems.append("Memory.holds_addresses is for graphs, which cannot wait for offload")
        if self.registers:
            problems += problems_of_nccl(device)
        raise_problems(problems)
        object.__setattr__(self, "device", device)
        if self.equal_sizes or self.holds_addresses or self.registers:
            object.__setattr__(self, "uses_slots", True)


def problems_of_nccl(device: torch.device | None) -> list[str]:
    """Return the reasons why memory cannot be registered with NCCL."""
    # A build of torch for GPUs has an accelerator wherever it runs.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = (device or accelerator or torch.device("cpu")).type
    if kind != "cuda":
        return [
            f"Memory.registers registers memory with NCCL, which does not run on {kind}: use"
            " Memory.uses_slots alone"
        ]
    problems = []
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        settings = os.environ.get(name, "").lower().replace(" ", "")
        if "expandable_segments:true" in settings:
            problems.append(
                "Memory.registers needs memory whose segments do not grow: remove"
                f" expandable_segments from {name}"
            )
    return problems
