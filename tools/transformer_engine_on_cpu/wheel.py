# SPDX-License-Identifier: Apache-2.0
"""The wheel of Transformer Engine: downloaded once, unpacked, and seen by no other process.

`transformer-engine` is Python alone: tensor classes, quantizers, recipes and modules. The compiled
kernels are in other wheels, which need CUDA to be built. pip downloads it from the index that it
is configured for, and it is unpacked into `build/transformer_engine` of this repository. Nothing
goes into the environment: Megatron-Core and transformers would find it there and use it.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path

from tools import wheels

RELEASE = "2.20.2"
"""Release whose kernels are emulated."""

UNPACKED = Path(__file__).parents[2] / "build" / "transformer_engine"
NEEDED = ("pydantic", "einops")
"""Packages that its modules import. Others that they name are replaced in `loading`."""


@functools.cache  # a failed download takes a while
def obstacle() -> str | None:
    """Return the reason for which Transformer Engine cannot run here, or None if it can."""
    installed = find_spec("transformer_engine")
    if installed and not str(installed.origin).startswith(str(UNPACKED)):  # it is after `use`
        return "Transformer Engine is installed: its kernels are only emulated where it is not"
    missing = [name for name in NEEDED if not find_spec(name)]
    if missing:
        return f"Transformer Engine imports {', '.join(missing)}: install them with pip"
    try:
        unpack()
    except wheels.DownloadError as error:
        return str(error)
    return None


def unpack() -> Path:
    """Download and unpack the wheel unless it is there already, and return its folder.

    Raises:
        wheels.DownloadError: pip cannot download it.
    """
    return wheels.unpack("transformer-engine", RELEASE, UNPACKED)
