# SPDX-License-Identifier: Apache-2.0
"""Directory of a Hugging Face model: config.json, and tensors in one or several files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.checkpoint.core.lazy_tensor import LazyTensor
from megatron.checkpoint.dcp.stored_metadata import METADATA
from megatron.checkpoint.hugging_face.safetensors_shard import stored_tensors

CONFIG = "config.json"
OF_A_RUN = "begins_after_iteration"
"""A key that only the ``config.json`` of a run of pretrain_gpt.py has."""
INDEX = "model.safetensors.index.json"
"""Name of every tensor -> its file, in a model of several files."""
SINGLE_FILE = "model.safetensors"


def is_model_directory(path: Path) -> bool:
    """Return True for the directory of a model.

    A checkpoint may have ``config.json`` too, and so has the folder of a run: that of its settings.
    """
    if not (path / CONFIG).is_file() or (path / METADATA).is_file():
        return False
    try:
        return OF_A_RUN not in read_json(path / CONFIG)
    except ValueError:
        return True  # whoever reads the model says what is wrong with the file


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: if the file cannot be read, or has anything else.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} should hold one JSON object")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object, with keys in order."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def read_tensors(directory: Path) -> dict[str, LazyTensor]:
    """Return all tensors of a model by name. Their values are read later, when they are needed.

    Raises:
        ValueError: if files are missing, damaged, or lack tensors that the index has.
    """
    if not (directory / INDEX).is_file():
        if not (directory / SINGLE_FILE).is_file():
            raise ValueError(
                f"{directory} has neither {SINGLE_FILE} nor {INDEX}: save the model with"
                " safetensors"
            )
        return stored_tensors(directory / SINGLE_FILE)
    file_of = read_json(directory / INDEX).get("weight_map")
    if not isinstance(file_of, dict):
        raise ValueError(f"{directory / INDEX} has no weight_map")
    absent = sorted({file for file in file_of.values() if not (directory / file).is_file()})
    refuse("names files that are not there", directory / INDEX, absent)
    files = {file: stored_tensors(directory / file) for file in sorted(set(file_of.values()))}
    lost = [f"{name}: not in {file}" for name, file in file_of.items() if name not in files[file]]
    refuse("says what its files do not hold", directory / INDEX, lost)
    return {name: files[file][name] for name, file in file_of.items()}


def refuse(what: str, where: Path | str, problems: Sequence[str]) -> None:
    """Raise one error that lists all problems, if there are any.

    Raises:
        ValueError: ``<where> <what>:`` and a line for each problem.
    """
    if problems:
        raise ValueError(f"{where} {what}:\n  " + "\n  ".join(problems))
