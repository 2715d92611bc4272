# SPDX-License-Identifier: Apache-2.0
"""Output of a command, on the first rank: text for people or one JSON object for machines."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import click

from megatron.checkpoint.commands.conversion import ConversionError
from megatron.checkpoint.core.parts import Progress
from megatron.checkpoint.core.progress import progress_of
from megatron.checkpoint.store.url_staging import with_urls


class Printer:
    """Output of a command. Other ranks than the first print nothing.

    Args:
        as_json: print one JSON object instead of text.
        show_progress: show the progress of long work. Never done with ``as_json``.
        oom_traceback: print where memory ran out.
    """

    def __init__(self, as_json: bool, show_progress: bool, oom_traceback: bool = False):
        self.oom_traceback = oom_traceback
        self.as_json = as_json
        self.is_first = os.environ.get("RANK", "0") == "0"
        self.show_progress = show_progress and not as_json and self.is_first

    def say(self, text: str) -> None:
        """Print text for people."""
        if self.is_first and not self.as_json:
            click.echo(with_urls(text))

    def result(self, content: Mapping[str, Any]) -> None:
        """Print the JSON object for machines. A command calls this once."""
        if self.is_first and self.as_json:
            click.echo(json.dumps(_as_json(content), default=str))

    def fail(self, error: ConversionError) -> NoReturn:
        """Print the error and end with exit code 1."""
        self.result({"error": str(error)})
        if self.is_first:
            click.echo(with_urls(f"Error: {error}"), err=True)
        sys.exit(1)

    def progress(self, title: str, total: int) -> AbstractContextManager[Progress]:
        """Return a context that shows the progress of the work inside it.

        Args:
            title: the work, as a participle.
            total: bytes to process.
        """
        return progress_of(title, total, show=self.show_progress)


def _as_json(value: Any) -> Any:
    """Return ``value`` as JSON can represent it: without NaN and infinity, with text as keys."""
    if isinstance(value, (str, Path)):
        return with_urls(str(value))
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, float) and math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _as_json(each) for key, each in value.items()}
    return [_as_json(each) for each in value] if isinstance(value, (list, tuple)) else value


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def readable(num_bytes: float) -> str:
    """Return a number of bytes in B, KiB, MiB, GiB or TiB."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} TiB"
