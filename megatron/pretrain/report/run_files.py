# SPDX-License-Identifier: Apache-2.0
"""Files in the directory of checkpoints, and a guard for outputs that only decorate a run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import megatron.core
import torch

from megatron.checkpoint.hugging_face.model_directory import CONFIG, OF_A_RUN, is_model_directory
from megatron.checkpoint.store import durable

PACKAGE = "open-megatron-fsdp"


class Decorations:
    """A guard around files and services that only decorate a run.

    Args:
        log: prints a line for the user.
    """

    def __init__(self, log: Callable[[str], None]):
        self._log = log
        self._failed: set[str] = set()

    @contextmanager
    def guard(self, name: str, errors: type[Exception] = OSError) -> Iterator[None]:
        """Continue with training where a file or service cannot be written, and report it once.

        No collective may be inside: its error would be ignored.
        """
        try:
            yield
        except errors as error:
            if name not in self._failed:
                self._failed.add(name)
                self._log(f"{name} cannot be written, training continues without: {error}")


def write_config(
    folder: Path,
    args: argparse.Namespace,
    iteration: int,
) -> None:
    """Write ``config.json``: the arguments, the command line, versions and devices of a run.

    A run that continues in the folder replaces the file of the one before; the arguments of each
    checkpoint are in the checkpoint too. What JSON has no type for is text.

    Args:
        folder: folder of the checkpoints; made if missing.
        args: all completed arguments.
        iteration: iteration after which the run begins.

    Raises:
        OSError: the file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if is_model_directory(folder):
        raise OSError(f"{folder} is the directory of a Hugging Face model, which has its own")
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        version = None
    is_on_gpu = torch.cuda.is_available()
    content = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        OF_A_RUN: iteration,
        "command_line": shlex.join(sys.argv),
        "directory": os.getcwd(),
        "ranks": args.world_size,
        "first_host": socket.gethostname(),
        "device": torch.cuda.get_device_name() if is_on_gpu else platform.machine() or "cpu",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "megatron_core": megatron.core.__version__,
            PACKAGE: version,
        },
        "arguments": dict(sorted(vars(args).items())),
    }
    durable.write_text(folder / CONFIG, json.dumps(content, indent=1, default=_text) + "\n")


def _text(value: Any) -> str:
    """Return the name of a dtype or of a member of an enum, and other values as text."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(getattr(value, "name", value))
