# SPDX-License-Identifier: Apache-2.0
"""The settings of offload: which main weights, gradients and optimizer state lie elsewhere."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from megatron.fsdp.engine.policy import problems_of_flags, raise_problems

HOST = "host"


@dataclass(frozen=True, kw_only=True)
class Offload:
    """The settings for main weights, reduced gradients and optimizer state off the device.

    The update runs in blocks, whose copies or reads from disk overlap with the update of others.

    Args:
        to: "host": in host memory. A folder: in files that are mapped into memory, on a disk of
            this machine, of which only what is in use takes memory. The files have no names, and
            are gone when the process ends.
        fraction: the share of the parameters' elements that is offloaded, from 0 to 1: whole flat
            buffers, those of the first units first.
        on_device: update on the device: each block is copied there and back. False: on the host,
            where torch's fused optimizers (``AdamW(..., fused=True)``) update a block in one pass.
        pins: pin host memory, which copies to and from a GPU need to overlap with compute.
    """

    to: str | os.PathLike[str] = HOST
    fraction: float = 1.0
    on_device: bool = False
    pins: bool = True

    def __post_init__(self) -> None:
        problems = problems_of_flags(self)
        if not isinstance(self.to, str | os.PathLike) or not os.fspath(self.to):
            problems.append(f"Offload.to expects 'host' or a folder but got {self.to!r}")
        is_number = isinstance(self.fraction, float | int) and not isinstance(self.fraction, bool)
        if not is_number or not 0 <= self.fraction <= 1:
            problems.append(
                f"Offload.fraction expects a number from 0 to 1 but got {self.fraction!r}"
            )
        raise_problems(problems)

    @property
    def folder(self) -> Path | None:
        """The folder of the files; None for host memory."""
        if self.to == HOST:
            return None
        return Path(self.to)

    @classmethod
    def parse(cls, value: Any) -> Offload | None:
        """Return the settings for "host", a folder, a policy of FSDP2, or None."""
        if value is None or isinstance(value, Offload):
            return value
        if isinstance(value, CPUOffloadPolicy):
            return cls(pins=value.pin_memory)
        if isinstance(value, OffloadPolicy):  # FSDP2's name for no offload
            return None
        return cls(to=value)
