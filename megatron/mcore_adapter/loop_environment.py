# SPDX-License-Identifier: Apache-2.0
"""Modules and programs that Megatron-LM's loop needs, checked without importing Megatron-Core."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from pathlib import Path

UNDECLARED = {
    "triton": ("core/transformer/moe/ops/paged_stash.py", "core/transformer/moe/paged_stash.py"),
    "yaml": ("training/yaml_arguments.py", "training/config/container.py"),
}
"""Module -> files of a checkout that import it in some releases, where nothing declares it."""

PACKAGES = {"yaml": "pyyaml"}
"""Module -> name for pip, where it is another one."""


def check_installed(core: Path) -> None:
    """Check that the loop can start with Megatron-Core in ``core``.

    Raises:
        RuntimeError: one line that names everything that is not installed, with the fix.
    """
    _refuse(_modules(core) + _compiler(core))


def check_importable(core: Path) -> None:
    """Check that Megatron-Core in ``core`` can be imported.

    Raises:
        RuntimeError: one line that names every module that is not installed, with the fix.
    """
    _refuse(_modules(core))


def _refuse(lacking: list[str]) -> None:
    if lacking:
        raise RuntimeError(f"Megatron-LM's training loop needs {'; and '.join(lacking)}")


def _modules(core: Path) -> list[str]:
    """Find absent modules that the loop and Megatron-Core import without declaring them."""
    lacking = []
    for name, files in UNDECLARED.items():
        importers = [core.parent / file for file in files if _imports(core.parent / file, name)]
        if importers and importlib.util.find_spec(name) is None:
            package = PACKAGES.get(name, name)
            lacking.append(
                f"the Python module {name}, which {importers[0]} imports (pip install {package})"
            )
    return lacking


def _imports(file: Path, name: str) -> bool:
    """Return True for a file that imports a module whenever it is imported itself."""
    return file.is_file() and re.search(rf"^import {name}\b", file.read_text(), re.M) is not None


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
