# SPDX-License-Identifier: Apache-2.0
"""Frame of every command: the options that all have, ranks, output, and errors as one message."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NoReturn

import click

from megatron.checkpoint.commands import conversion
from megatron.checkpoint.commands.conversion import ConversionError
from megatron.checkpoint.core.parts import Progress, progress_of
from megatron.checkpoint.core.spelling import IMPLEMENTATIONS
from megatron.checkpoint.store import durable
from megatron.checkpoint.store.stores import local_path
from megatron.checkpoint.store.url_staging import with_urls


class Printer:
    """Output of a command. Other ranks than the first print nothing.

    Args:
        as_json: whether to print one JSON object instead of text.
        show_progress: whether to show the progress of long work. Never done with ``as_json``.
        oom_traceback: whether to print where memory ran out.
    """

    def __init__(
        self,
        as_json: bool,
        show_progress: bool,
        oom_traceback: bool = False,
    ):
        self.oom_traceback = oom_traceback
        self.as_json = as_json
        self.is_first = os.environ.get("RANK", "0") == "0"
        self.show_progress = show_progress and not as_json and self.is_first

    def text(self, text: str) -> None:
        """Print text for people."""
        if self.is_first and not self.as_json:
            with durable.standard_output():
                click.echo(with_urls(text))

    def result(self, content: Mapping[str, Any]) -> None:
        """Print the JSON object for machines. A command calls this once."""
        if self.is_first and self.as_json:
            with durable.standard_output():
                click.echo(json.dumps(_as_json(content), default=str))

    def fail(self, error: ConversionError) -> NoReturn:
        """Print the error and end with exit code 1."""
        with suppress(OSError):  # standard output may be what has failed
            self.result({"error": str(error)})
        if self.is_first:
            click.echo(with_urls(f"Error: {error}"), err=True)
        sys.exit(1)

    def progress(self, title: str, total: int) -> AbstractContextManager[Progress]:
        """Return a context that shows the progress of work on ``total`` bytes inside it."""
        return progress_of(title, total, show=self.show_progress)


def _as_json(value: Any) -> Any:
    """Return ``value`` as JSON can represent it: without NaN and infinity, with text as keys."""
    if isinstance(value, (str, Path)):
        return with_urls(str(value))
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return value


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as lines with aligned columns."""
    widths = []
    for column in zip(*rows):
        widths.append(max(len(cell) for cell in column))
    lines = []
    for row in rows:
        cells = []
        for cell, width in zip(row, widths):
            cells.append(cell.ljust(width))
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


# ---- the frame of a command


class InWords:
    """A command of click that ends with a message where standard output cannot be written."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command."""
        try:
            with durable.standard_output():
                return super().main(*args, **options)  # type: ignore[misc]
        except OSError as error:
            click.echo(f"Error: {error}", err=True)
            sys.exit(1)


class Program(InWords, click.Command):
    """A program of one command."""


class Programs(InWords, click.Group):
    """A program of several commands."""


class Location(click.Path):
    """The directory of a checkpoint or a model: a path, or a URL.

    Args:
        is_output: whether the command writes it.
    """

    def __init__(self, is_output: bool = False) -> None:
        super().__init__(exists=False, path_type=Path)
        self._is_output = is_output

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        """Return the path.

        Args:
            value: what the user has written, or a path.
            param: parameter of the command that it belongs to.
            ctx: click's context of the command.
        """
        try:
            if isinstance(value, str):
                value = local_path(value, self._is_output)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return super().convert(value, param, ctx)


CHECKPOINT = Location()
OUTPUT = Location(is_output=True)
transformer_impl = click.option(
    "--transformer-impl",
    type=click.Choice(IMPLEMENTATIONS),
    help="Layers of the model that will load it. Default: as before.",
)
allow_unknown_keys = click.option(
    "--allow-unknown-keys",
    is_flag=True,
    help="Carry over parameters that no rule knows, instead of refusing them.",
)


verify_integrity = click.option(
    "--no-verify-integrity",
    "verify_integrity",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Compare the sizes of files, but no digests and checksums.",
)


def command(function: Callable[..., None]) -> click.Command:
    """Turn a function into a command of the same name, with the options that all commands have.

    The function gets a :class:`Printer` as ``printer``. It runs on every rank of torchrun. An error
    on any rank ends all of them with one message and exit code 1.
    """

    @click.command(name=function.__name__.replace("_", "-"))
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
    @click.option("--quiet", is_flag=True, help="Show no progress.")
    @click.option(
        "--enable-msc",
        is_flag=True,
        help="The multi-storage client: not built, name URLs.",
    )
    @functools.wraps(function)
    def run(
        *args: Any,
        as_json: bool,
        quiet: bool,
        enable_msc: bool,
        oom_traceback: bool = False,
        **options: Any,
    ) -> None:
        if enable_msc:
            raise click.UsageError(
                "--enable-msc: the multi-storage client is not used; name URLs, such as"
                " s3://bucket/checkpoints, which fsspec opens"
            )
        printer = Printer(as_json, show_progress=not quiet, oom_traceback=oom_traceback)
        try:
            with conversion.ranks_of_torchrun():
                conversion.agreed(
                    lambda: function(*args, printer=printer, **options),
                    lambda error: _message(error, oom_traceback),
                )
        except ConversionError as error:
            printer.fail(error)

    return run


def _message(error: Exception, oom_traceback: bool) -> str:
    """Return the message of an error for people."""
    if conversion.is_out_of_memory(error):
        if oom_traceback:
            traceback.print_exception(error)
        return conversion.OUT_OF_MEMORY
    if isinstance(error, (ValueError, NotImplementedError)):
        return str(error)
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError):
        return f"{type(error).__name__}: {error}"
    # Files can hold anything: whatever a reader does not expect is an error of the checkpoint.
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}"
    return f"the checkpoint has something that is not understood ({where}: {error})"
