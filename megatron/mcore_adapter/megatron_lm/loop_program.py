# SPDX-License-Identifier: Apache-2.0
"""Preparation of a process for Megatron-LM's training loop, and its way back."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import typing
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import typing_extensions
from megatron.core.datasets import utils as dataset_utils
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fp8_utils import HAVE_TE

from megatron.mcore_adapter import cpu
from megatron.mcore_adapter.megatron_lm import loop_optimizers
from megatron.mcore_adapter.megatron_lm.loaded_names import exchange, with_original
from megatron.mcore_adapter.megatron_lm.loop_checkpoints import LoopCheckpoints
from megatron.mcore_adapter.megatron_lm.loop_flags import LoopCommandLine
from megatron.mcore_adapter.megatron_lm.loop_on_cpu import LoopOnCpu, with_own_random_state
from megatron.mcore_adapter.megatron_lm.loop_watch import LoopWatch
from megatron.mcore_adapter.releases import tested

SETTINGS = {field.name for field in fields(DistributedDataParallelConfig)}
"""Settings of data parallelism, of which the loop makes flags."""


class LoopProgram:
    """The process that runs the program in ``sys.argv``.

    Programs without a command line of the loop are left as they are. The constructor checks, and
    changes nothing. :meth:`prepare` completes the command line, installs what a machine without
    CUDA needs, and lets the loop save and load by :class:`LoopCheckpoints` and be watched by
    :class:`LoopWatch`. It provides ``typing.override``: the loop of Megatron-LM 0.18 and newer
    imports it, and Python has it since 3.12. In a wheel the loop does not compile functions for
    data sets: they are compiled there, and the Makefile that it calls is missing.

    Raises:
        LoopFlagError: if the command line contradicts itself or the machine.
    """

    def __init__(self) -> None:
        self._has_cuda = torch.cuda.is_available()
        self._command_line = LoopCommandLine(
            words=sys.argv[1:],
            environment=os.environ,
            has_cuda=self._has_cuda,
            has_loop=tested.has_loop(),
            has_engine=HAVE_TE,
            has_version="megatron_fsdp_version" in SETTINGS,
            has_muon=importlib.util.find_spec("emerging_optimizers") is not None,
        ).complete()
        self._given = list(sys.argv)
        self._completed = [sys.argv[0], *self._command_line.completed]
        self._undo = ExitStack()

    def settings(self) -> dict[str, Any]:
        """Return the attributes of ``ddp_config`` that the engine reads, and releases may lack."""
        if not self._command_line.is_of_the_loop:
            return {}
        settings = {"megatron_fsdp_version": self._command_line.version}
        try:
            args = importlib.import_module("megatron.training").get_args()
        except (ImportError, AssertionError):  # there are no arguments yet
            return settings
        return settings | loop_optimizers.settings_of(args)

    def prepare(self) -> None:
        """Change ``sys.argv``, the environment, and on a machine without CUDA torch."""
        if not self._command_line.is_of_the_loop:
            return
        sys.argv[:] = self._completed
        for name in self._command_line.unset:
            self._undo.callback(os.environ.setdefault, name, os.environ.pop(name))
        if not self._has_cuda:
            cpu.install()
            self._undo.callback(LoopOnCpu().restore)
        if not hasattr(typing, "override"):
            vars(typing)["override"] = typing_extensions.override
            self._undo.callback(delattr, typing, "override")
        if not Path(dataset_utils.__file__).with_name("Makefile").exists():
            compile_helpers = dataset_utils.compile_helpers
            self._undo.callback(setattr, dataset_utils, "compile_helpers", compile_helpers)
            dataset_utils.compile_helpers = lambda: None
        self._replace_functions()

    def _replace_functions(self) -> None:
        """Let the loop save, load and be watched by the code that both loops share."""
        tested.find_loop_of(Path(sys.argv[0]))
        try:
            checkpointing = importlib.import_module("megatron.training.checkpointing")
            training = importlib.import_module("megatron.training.training")
            initialize = importlib.import_module("megatron.training.initialize")
        except ImportError:  # the program will fail at the same, and report it
            return
        checkpoints = LoopCheckpoints(
            (checkpointing, training, initialize), self._command_line.own_arguments()
        )
        watch = LoopWatch(initialize)
        arguments = importlib.import_module("megatron.training.arguments")
        self._undo.callback(watch.close)
        self._undo.callback(checkpoints.close)
        pairs = [
            *checkpoints.replacements(),
            *watch.replacements(),
            *loop_optimizers.replacements(arguments, training),
        ]
        if not self._has_cuda:
            iterators = training.build_train_valid_test_data_iterators
            pairs.append((iterators, with_original(iterators, with_own_random_state)))
        exchange(pairs)
        self._undo.callback(exchange, [(ours, theirs) for theirs, ours in pairs])

    def restore(self) -> None:
        """Undo what :meth:`prepare` did, where nobody else has changed it since."""
        if sys.argv == self._completed:
            sys.argv[:] = self._given
        self._undo.close()

    def log(self, message: str) -> None:
        """Print one line on the first rank, with what was changed."""
        if os.environ.get("RANK", "0") == "0":
            line = "; ".join([message, *self._command_line.notes()])
            print(f"megatron.mcore_adapter: {line}", flush=True)
