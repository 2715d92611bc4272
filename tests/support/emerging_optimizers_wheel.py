# SPDX-License-Identifier: Apache-2.0
"""The package emerging_optimizers for tests, unmodified: pip downloads it once.

It is for Python 3.12 and newer, of which it takes `typing.override` alone, and imports triton for
kernels that no CPU runs. torch must not see triton in other tests, so there is none afterwards.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from tools import wheels

TYPING_OVERRIDE = Path(__file__).parent / "typing_override"
"""Has the module that Python runs when it starts, which adds the name."""

UNPACKED = Path(__file__).parents[2] / "build" / "emerging_optimizers"
RELEASE = "0.3.0"
TRITON = ("triton", "triton.language")


def require() -> None:
    """Skip the test, with the reason, where pip cannot download the package."""
    reason = _obstacle()
    if reason is not None:
        pytest.skip(reason)


@functools.cache  # a failed download takes a while
def _obstacle() -> str | None:
    try:
        _unpack()
    except wheels.DownloadError as error:
        return str(error)
    return None


def _unpack() -> Path:
    return wheels.unpack("emerging-optimizers", RELEASE, UNPACKED, "--python-version 3.12")


@functools.cache
def install() -> None:
    """Let this process import the package."""
    importlib.import_module("tests.support.typing_override.sitecustomize")
    sys.path.append(str(_unpack()))
    absent = [name for name in TRITON if name not in sys.modules]
    sys.modules.update((name, MagicMock()) for name in absent)
    try:
        importlib.import_module("emerging_optimizers.triton_kernels")
    finally:
        for name in absent:
            del sys.modules[name]


def environment_with(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables of a process that may import the package too."""
    folders = [TYPING_OVERRIDE, variables["PYTHONPATH"], _unpack()]
    return {**variables, "PYTHONPATH": os.pathsep.join(map(str, folders))}
