# SPDX-License-Identifier: Apache-2.0
"""Preparation of a process for Megatron-LM's training loop, and its way back."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import typing
from pathlib import Path

import megatron.core
import torch
import typing_extensions

from megatron.mcore_adapter import cpu
from megatron.mcore_adapter.loop_flags import LoopCommandLine
from megatron.mcore_adapter.loop_on_cpu import LoopOnCpu

NAME = "megatron.mcore_adapter"


class LoopProgram:
    """The process that runs the program in ``sys.argv``.

    The constructor checks, and changes nothing. :meth:`prepare` completes the command line,
    installs what a machine without CUDA needs, and provides ``typing.override``: the loop of
    Megatron-LM 0.19 imports it, and Python has it since 3.12.

    Raises:
        LoopFlagError: if the command line contradicts itself or the machine.
        RuntimeError: names everything that is not installed and that the loop needs.
    """

    def __init__(self) -> None:
        self._has_cuda = torch.cuda.is_available()
        self._command_line = LoopCommandLine(sys.argv[1:], os.environ, self._has_cuda).complete()
        self._given = list(sys.argv)
        self._completed = [*sys.argv, *self._command_line.added]
        self._environment: dict[str, str] = {}
        self._on_cpu: LoopOnCpu | None = None
        self._provides_override = False
        lacking = not_installed() if self._command_line.is_of_the_loop else []
        if lacking:
            raise RuntimeError(f"Megatron-LM's training loop needs {', and '.join(lacking)}")

    def prepare(self) -> None:
        """Change ``sys.argv``, the environment, and on a machine without CUDA torch."""
        sys.argv[:] = self._completed
        for name in self._command_line.unset:
            self._environment[name] = os.environ.pop(name)
        if not self._has_cuda:
            cpu.install()
            self._on_cpu = LoopOnCpu()
        if not hasattr(typing, "override"):
            typing.override = typing_extensions.override
            self._provides_override = True

    def restore(self) -> None:
        """Undo what :meth:`prepare` did, where nobody else has changed it since."""
        if sys.argv == self._completed:
            sys.argv[:] = self._given
        for name, value in self._environment.items():
            os.environ.setdefault(name, value)
        if self._on_cpu is not None:
            self._on_cpu.restore()
        if self._provides_override:
            del typing.override

    def say(self, message: str) -> None:
        """Print one line on the first rank, with what was changed."""
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"{NAME}: {'; '.join([message, *self._command_line.notes()])}", flush=True)


def not_installed() -> list[str]:
    """Return what the loop needs and this machine lacks, with the fix.

    The loop compiles functions on data sets with make when it starts. A folder where that has been
    done needs nothing more.
    """
    folder = Path(megatron.core.__path__[0]) / "datasets"
    is_compiled = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    if is_compiled or not (folder / "Makefile").exists():
        return []
    lacking = []
    if importlib.util.find_spec("pybind11") is None:
        lacking.append("the Python module pybind11 (pip install pybind11)")
    programs = ("make", os.environ.get("CXX", "g++"), "python3", "python3-config")
    absent = [name for name in programs if shutil.which(name) is None]
    if absent:
        lacking.append(f"the programs {', '.join(absent)} on PATH")
    return [f"{each}, to compile {folder}/helpers.cpp" for each in lacking]
