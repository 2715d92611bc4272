# SPDX-License-Identifier: Apache-2.0
"""Frame of every command: the options that all have, ranks, and errors as one message."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from megatron.checkpoint.commands import conversion
from megatron.checkpoint.commands.conversion import ConversionError
from megatron.checkpoint.commands.printer import Printer
from megatron.checkpoint.fsdp_dtensor.spelling_choice import IMPLEMENTATIONS
from megatron.checkpoint.store.stores import local_path


class Location(click.Path):
    """The directory of a checkpoint or a model: a path, or a URL."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        try:
            value = local_path(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return super().convert(value, param, ctx)


CHECKPOINT = Location(exists=False, path_type=Path)
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
        "--enable-msc", is_flag=True, help="The multi-storage client: not built, name URLs."
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
