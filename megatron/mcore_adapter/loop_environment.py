# SPDX-License-Identifier: Apache-2.0
"""Modules and programs that Megatron-LM's loop needs, checked without importing Megatron-Core."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path


def check_installed(core: Path) -> None:
    """Check that the loop can start with Megatron-Core in ``core``.

    Raises:
        RuntimeError: one line that names everything that is not installed, with the fix.
    """
    lacking = _modules(core) + _compiler(core)
    if lacking:
        raise RuntimeError(f"Megatron-LM's training loop needs {'; and '.join(lacking)}")


def _modules(core: Path) -> list[str]:
    """Find absent modules that packages of Megatron-Core import without declaring them."""
    importers = {"triton": core / "transformer" / "moe" / "paged_stash.py"}
    return [
        f"the Python module {name}, which {file} imports (pip install {name})"
        for name, file in importers.items()
        if file.exists() and importlib.util.find_spec(name) is None
    ]


def _compiler(core: Path) -> list[str]:
    """Find what is absent to compile functions on data sets, which the loop does as it starts.

    A folder where that has been done needs nothing more.
    """
    folder = core / "datasets"
    if any(folder.glob("helpers_cpp*")) or not (folder / "Makefile").exists():
        return []
    lacking = []
    if importlib.util.find_spec("pybind11") is None:
        lacking.append("the Python module pybind11 (pip install pybind11)")
    programs = ("make", os.environ.get("CXX", "g++"), "python3", "python3-config")
    absent = [name for name in programs if shutil.which(name) is None]
    if absent:
        lacking.append(f"the programs {', '.join(absent)} on PATH")
    return [f"{each}, to compile {folder}/helpers.cpp" for each in lacking]
