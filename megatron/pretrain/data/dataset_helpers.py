# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's compiled functions for datasets.

Its wheel has them. In a checkout they are compiled on first use, into the folder of their source.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path

import megatron.core.datasets
import torch.distributed as dist

from megatron.fsdp.engine.collectives import agree
from megatron.pretrain.errors import RunError

MODULE = "helpers_cpp"
FIX = (
    "install pybind11 (pip install pybind11), g++ and make, and start once where the folder can be"
    " written; or use a release from a wheel"
)


def compile_if_missing() -> None:
    """Compile the functions on the first rank of each node, if they are not there; a collective.

    Raises:
        RunError: on every rank, if they cannot be compiled on a node.
    """
    problems: list[str] = []
    if os.environ.get("LOCAL_RANK", "0") == "0" and not is_compiled():
        problems = compile_helpers(Path(megatron.core.datasets.__path__[0]))
    if dist.is_initialized():
        problems = agree(problems)
    importlib.invalidate_caches()
    if problems:
        raise RunError("; ".join(problems))


def is_compiled() -> bool:
    """Return True if Python finds the compiled functions."""
    return importlib.util.find_spec(f"megatron.core.datasets.{MODULE}") is not None


def compile_helpers(folder: Path) -> list[str]:
    """Compile the functions by the Makefile of their folder; return what went wrong."""
    try:
        import pybind11
    except ImportError:
        return [f"{folder / MODULE}.* is not compiled, and pybind11 is not installed: {FIX}"]
    headers = [sysconfig.get_paths()["include"], pybind11.get_include()]
    # Nodes may share the folder: each compiles a file of its own, and the last one stays.
    temporary = folder / f"{MODULE}.{os.uname().nodename}.{os.getpid()}.tmp"
    command = ["make", "-C", str(folder), f"OUT={temporary.name}"]
    command.append("CPPFLAGS=" + " ".join(f"-I{header}" for header in headers))
    try:
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode == 0:
            temporary.replace(folder / f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}")
            return []
        reason = (run.stderr.strip().splitlines() or ["make failed"])[-1]
    except OSError as error:
        reason = str(error)
    temporary.unlink(missing_ok=True)
    return [f"{folder / MODULE}.* cannot be compiled ({reason}): {FIX}"]
