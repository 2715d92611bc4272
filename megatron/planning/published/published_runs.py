# SPDX-License-Identifier: Apache-2.0
"""Published training runs: one JSON object a line, with hardware, model, layout and result."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
        if value is None:
            return default
        return value

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
        if value is None:
            return None
        return float(value)

    @property
    def notes(self) -> str:
        """The words of the row about its software and its layout."""
        words: list[str] = []
        for name in ("strategy", "recompute_note", "notes"):
            if self.get(name):
                words.append(self.row[name])
        return "; ".join(words)


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
        for problem in found:
            problems.append(f"line {number}: {problem}")
        if not found:
            names.add(row["id"])
            runs.append(PublishedRun(row))
    if not runs and not problems:
        problems.append("there is no run in it")
    if problems:
        text = f"{path} is no list of runs:"
        for number, problem in enumerate(problems, 1):
            text += f"\n  {number}. {problem}"
        raise ValueError(text)
    return runs
