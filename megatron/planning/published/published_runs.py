# SPDX-License-Identifier: Apache-2.0
"""Published training runs: one JSON object a line, with hardware, model, layout and result."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.planning.published.row_problems import problems_of


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
        found = [*problems_of(row)]
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
