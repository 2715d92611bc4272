# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run, in a file beside its checkpoints that people and scripts can read."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import socket
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import megatron.core
import torch

from megatron.checkpoint.hugging_face.model_directory import CONFIG, OF_A_RUN, is_model_directory
from megatron.checkpoint.store import durable

PACKAGE = "open-megatron-fsdp"


def write_config(folder: Path, args: argparse.Namespace, iteration: int) -> None:
    """Write ``config.json``: the arguments, the command line, versions and devices of a run.

    A run that continues in the folder replaces the file of the one before; the arguments of each
    checkpoint are in the checkpoint too.

    Args:
        folder: of the checkpoints; made if missing.
        args: all completed arguments.
        iteration: after which the run begins.

    Raises:
        OSError: the file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if is_model_directory(folder):
        raise OSError(f"{folder} is the directory of a Hugging Face model, which has its own")
    durable.write_text(folder / CONFIG, json.dumps(described(args, iteration), indent=1) + "\n")


def described(args: argparse.Namespace, iteration: int) -> dict[str, Any]:
    """Return the content of ``config.json``; what JSON has no type for is text."""
    is_on_gpu = torch.cuda.is_available()
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        OF_A_RUN: iteration,
        "command_line": shlex.join(sys.argv),
        "directory": os.getcwd(),
        "ranks": args.world_size,
        "first_host": socket.gethostname(),
        "device": torch.cuda.get_device_name() if is_on_gpu else platform.processor() or "cpu",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "megatron_core": megatron.core.__version__,
            PACKAGE: _version(PACKAGE),
        },
        "arguments": {name: _plain(value) for name, value in sorted(vars(args).items())},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return None


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: dtypes and members of enums by their names."""
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(getattr(value, "name", value))
