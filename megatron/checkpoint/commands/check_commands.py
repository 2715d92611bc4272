# SPDX-License-Identifier: Apache-2.0
"""Commands that judge one checkpoint or compare two."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import click

from megatron.checkpoint.commands import comparison, verification
from megatron.checkpoint.commands.command import (
    CHECKPOINT,
    allow_unknown_keys,
    command,
    verify_integrity,
)
from megatron.checkpoint.commands.formats import HUGGING_FACE, open_checkpoint
from megatron.checkpoint.commands.printer import Printer, table


@command
@click.argument("checkpoint_dir", type=CHECKPOINT)
@click.option(
    "--fast", is_flag=True, help="Compare the files with their digests in manifest.json only."
)
@verify_integrity
def verify(checkpoint_dir: Path, fast: bool, verify_integrity: bool, printer: Printer) -> None:
    """Check files, digests, checksums, keys, shapes, main weights against the model's, and NaN.

    Exit code 1: not sound.
    """
    if fast and not verify_integrity:
        raise click.UsageError("--fast --no-verify-integrity: nothing would be verified")
    opened = open_checkpoint(checkpoint_dir, verify_integrity)
    notes: list[str] = []
    with printer.progress("verifying", verification.total_bytes(opened, fast)) as advance:
        if fast:
            problems = verification.find_changed_files(opened, advance)
        else:
            problems = verification.find_problems(opened, advance, notes)
    printer.result(
        {
            "directory": opened.directory,
            "format": opened.format,
            "sound": not problems,
            "problems": problems,
            "notes": notes,
        }
    )
    for note in notes:
        printer.say(f"note: {note}")
    for problem in problems:
        printer.say(f"- {problem}")
    verdict = f"{len(problems)} problems" if problems else "sound"
    printer.say(f"{opened.directory} ({opened.format}): {verdict}")
    sys.exit(1 if problems else 0)


@command
@click.argument("first", type=CHECKPOINT)
@click.argument("second", type=CHECKPOINT)
@verify_integrity
def compare_two_checkpoint(
    first: Path, second: Path, verify_integrity: bool, printer: Printer
) -> None:
    """Compare all entries of two checkpoints by their keys, bit by bit.

    Exit code 1 if they differ.
    """
    mine, theirs = (open_checkpoint(path, verify_integrity).dcp_files() for path in (first, second))
    total = 0
    for stored in (mine, theirs):
        total += sum(stored.num_bytes(key) for key in stored.tensors)
    with printer.progress("comparing", total) as advance:
        found = comparison.compare_entries(mine, theirs, advance)
    _report(found, printer, rows=20)


@command
@click.argument("first", type=CHECKPOINT)
@click.argument("second", type=CHECKPOINT)
@click.option(
    "--weights-only",
    is_flag=True,
    help="No optimizer, no arguments. So it is wherever a Hugging Face model is one of them.",
)
@click.option("--rows", default=20, show_default=True, help="Length of the lists.")
@allow_unknown_keys
@verify_integrity
def diff(
    first: Path,
    second: Path,
    weights_only: bool,
    rows: int,
    allow_unknown_keys: bool,
    verify_integrity: bool,
    printer: Printer,
) -> None:
    """Compare the content of two checkpoints in any formats.

    Weights, moments, param groups, schedule, arguments and counters are compared. With a Hugging
    Face model only weights are compared, and of the vocabulary the rows that both have: others are
    padding.

    Exit code 1 if they differ.
    """
    opened = [open_checkpoint(path, verify_integrity) for path in (first, second)]
    mine, theirs = (each.state(allow_unknown=allow_unknown_keys) for each in opened)
    # A Hugging Face model has weights only, and no padding.
    with_model = any(each.format == HUGGING_FACE for each in opened)
    total = comparison.num_bytes(mine) + comparison.num_bytes(theirs)
    with printer.progress("comparing", total) as advance:
        found = comparison.compare_states(
            mine,
            theirs,
            weights_only=weights_only or with_model,
            with_padding=not with_model,
            progress=advance,
        )
    for note in mine.notes + theirs.notes:
        printer.say(f"note: {note}")
    _report(found, printer, rows)


def _report(found: comparison.Comparison, printer: Printer, rows: int) -> NoReturn:
    """Print the differences and exit, with exit code 1 if there are any."""
    printer.result(found.as_dict())
    for title, lines in (
        ("only in the first", found.only_first),
        ("only in the second", found.only_second),
        ("of another shape or kind", found.kinds),
        ("not the same", found.objects),
    ):
        if lines:
            printer.say(f"{len(lines)} {title}:")
            for line in lines[:rows]:
                printer.say(f"  {line}")
            if len(lines) > rows:
                printer.say(f"  … and {len(lines) - rows} more")
    if found.values:
        table_rows = [("tensor", "elements that differ", "largest difference", "relative")]
        for value in found.values[:rows]:
            count = f"{value.count} of {value.total}"
            table_rows.append((value.name, count, f"{value.absolute:.3e}", f"{value.relative:.3e}"))
        printer.say(
            f"{len(found.values)} tensors have other values, the largest differences first:"
        )
        printer.say(table(table_rows))
    verdict = "the checkpoints differ" if found.differs else "there is no difference"
    printer.say(f"{found.equal} entries are the same; {verdict}")
    sys.exit(1 if found.differs else 0)
