# SPDX-License-Identifier: Apache-2.0
"""Published training runs: one JSON object a line, with hardware, model, layout and result."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

POSITIVE = ("gpus", "tp", "pp", "cp", "ep", "dp", "global_batch")
"""Fields of a run that are whole numbers of at least 1."""

POSITIVE_OF_MODEL = ("seq_length", "layers", "hidden", "heads", "kv_heads", "vocab")
"""Fields of its model that are such numbers too."""

TEXTS = ("id", "framework", "precision", "recompute")
OBJECTS = {
    "source": ("title",),
    "hardware": ("kind", "gpus_per_node"),
    "model": (*POSITIVE_OF_MODEL, "gated"),
    "measured": (),
}
"""Fields of a run that are objects, and the fields that these have at least."""


@dataclass(frozen=True)
class PublishedRun:
    """A training run as it was published.

    Attributes:
        row: the JSON object.
    """

    row: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.row[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or ``default`` where the row has none or null."""
        value = self.row.get(name)
        return default if value is None else value

    @property
    def name(self) -> str:
        """The identifier of the row."""
        return str(self.row["id"])

    @property
    def source(self) -> str:
        """The title of the source."""
        return str(self.row["source"]["title"])

    @property
    def model(self) -> Mapping[str, Any]:
        """The sizes of the model."""
        model: Mapping[str, Any] = self.row["model"]
        return model

    @property
    def hardware(self) -> Mapping[str, Any]:
        """The GPUs and the links between them."""
        hardware: Mapping[str, Any] = self.row["hardware"]
        return hardware

    @property
    def tokens_of_step(self) -> int:
        """Tokens that all GPUs read in a step."""
        return int(self.row["global_batch"]) * int(self.model["seq_length"])

    @property
    def seconds(self) -> float:
        """The measured seconds of a step."""
        if self.get("seconds_a_step"):
            return float(self.row["seconds_a_step"])
        per_second = float(self.row["tokens_per_second_per_gpu"]) * int(self.row["gpus"])
        return self.tokens_of_step / per_second

    @property
    def memory_gib(self) -> float | None:
        """The measured memory of a GPU in GiB; None: not published."""
        value = self.row["measured"].get("memory_gib")
        return None if value is None else float(value)

    @property
    def notes(self) -> str:
        """The words of the row about its software and its layout."""
        words = [self.get(name, "") for name in ("strategy", "recompute_note", "notes")]
        return "; ".join(str(word) for word in words if word)


def read_runs(path: Path) -> list[PublishedRun]:
    """Return the runs of a file.

    Args:
        path: of a file with one JSON object a line.

    Raises:
        ValueError: lists everything that is wrong with the file.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    runs: list[PublishedRun] = []
    problems: list[str] = []
    names: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            problems.append(f"line {number} is no JSON: {error}")
            continue
        found = [*_problems_of(row)]
        if not found and row["id"] in names:
            found.append(f"the id {row['id']} is there twice")
        problems += [f"line {number}: {problem}" for problem in found]
        if not found:
            names.add(row["id"])
            runs.append(PublishedRun(row))
    if not runs and not problems:
        problems.append("there is no run in it")
    if problems:
        raise ValueError("\n".join([f"{path} is no list of runs:", *_numbered(problems)]))
    return runs


def _numbered(problems: list[str]) -> Iterator[str]:
    for number, problem in enumerate(problems, 1):
        yield f"  {number}. {problem}"


def _problems_of(row: Any) -> Iterator[str]:
    """Yield everything that is wrong with one row."""
    if not isinstance(row, dict):
        yield "an object is expected"
        return
    for name in TEXTS:
        if not isinstance(row.get(name), str):
            yield f"{name} expects a text but got {row.get(name)!r}"
    for name in POSITIVE:
        if not _is_positive(row.get(name)):
            yield f"{name} expects a whole number above 0 but got {row.get(name)!r}"
    for name, needed in OBJECTS.items():
        value = row.get(name)
        if not isinstance(value, dict):
            yield f"{name} expects an object but got {value!r}"
            continue
        missing = [field for field in needed if value.get(field) is None]
        if missing:
            yield f"{name} lacks {', '.join(missing)}"
        if name == "model":
            for field in POSITIVE_OF_MODEL:
                if field not in missing and not _is_positive(value[field]):
                    yield f"model.{field} expects a whole number above 0 but got {value[field]!r}"
            if not value.get("ffn") and not value.get("moe"):
                yield "model lacks ffn"
    sizes: list[Any] = [row.get(name) for name in ("tp", "pp", "cp", "dp")]
    if all(map(_is_positive, [row.get("gpus"), *sizes])):
        num_ranks = prod(map(int, sizes))
        if num_ranks != row["gpus"]:
            yield f"gpus is {row['gpus']}, but tp, pp, cp and dp are {num_ranks}"
    speeds = [row.get(name) for name in ("seconds_a_step", "tokens_per_second_per_gpu")]
    if not any(isinstance(speed, int | float) and speed > 0 for speed in speeds):
        yield "seconds_a_step or tokens_per_second_per_gpu is needed, above 0"


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
