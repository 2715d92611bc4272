# SPDX-License-Identifier: Apache-2.0
"""Commands that show what a checkpoint holds, judge one, and compare two."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import click
import torch

from megatron.checkpoint.commands import comparison, verification
from megatron.checkpoint.commands.command import (
    CHECKPOINT,
    Printer,
    allow_unknown_keys,
    command,
    readable,
    table,
    verify_integrity,
)
from megatron.checkpoint.commands.formats import HUGGING_FACE, TORCH_DIST, Opened, open_checkpoint
from megatron.checkpoint.core.listing import listed
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.fsdp_dtensor.keys import META_PREFIX
from megatron.checkpoint.store import durable, stores
from megatron.checkpoint.torch_dist.unsharded_state import read_common


@dataclass(frozen=True)
class ListedEntry:
    """One row of ``inspect``, by the names that its JSON output has.

    Attributes:
        key: key of the tensor or object.
        dtype: dtype of a tensor, without ``torch.``; else ``object``.
        shape: shape of a tensor; None for an object.
        bytes: size in the files.
    """

    key: str
    dtype: str
    shape: list[int] | None
    bytes: int


@command
@click.argument("checkpoint_dir", type=CHECKPOINT)
@click.option(
    "--not-ignore-param-to-group-meta",
    is_flag=True,
    help="List the fields of param groups too, many for every parameter.",
)
@verify_integrity
def inspect(
    checkpoint_dir: Path,
    not_ignore_param_to_group_meta: bool,
    verify_integrity: bool,
    printer: Printer,
) -> None:
    """List keys, shapes, dtypes and sizes."""
    opened = open_checkpoint(checkpoint_dir, verify_integrity)
    entries = list(_listed_entries(opened, not_ignore_param_to_group_meta))
    printer.result(
        {
            "directory": opened.directory,
            "format": opened.format,
            "entries": [asdict(entry) for entry in entries],
        }
    )
    rows = [("key", "dtype", "shape", "size")]
    num_tensors = 0
    for entry in entries:
        shape = ""
        if entry.shape is not None:
            shape = str(entry.shape)
            num_tensors += 1
        size = readable(entry.bytes)
        rows.append((entry.key, entry.dtype, shape, size))
    size = readable(sum(entry.bytes for entry in entries))
    printer.text(f"{opened.directory}, format {opened.format}")
    printer.text(table(rows))
    printer.text(f"{num_tensors} tensors, {len(entries) - num_tensors} objects, {size}")
    if opened.stored is None:
        return
    left_out = len(opened.stored.metadata.state_dict_metadata) - len(entries)
    if left_out:
        printer.text(
            f"{left_out} fields of param groups are not listed (--not-ignore-param-to-group-meta"
            " lists them)"
        )


def _listed_entries(opened: Opened, with_groups: bool) -> Iterator[ListedEntry]:
    if opened.stored is None:
        for _, name, tensor in opened.state().tensors():
            yield ListedEntry(name, _dtype_name(tensor.dtype), list(tensor.shape), tensor.num_bytes)
        return
    stored = opened.stored
    for key in stored.metadata.state_dict_metadata:
        if key.startswith(META_PREFIX) and not with_groups:
            continue
        if key in stored.tensors:
            dtype = _dtype_name(stored.dtype(key))
            yield ListedEntry(key, dtype, list(stored.shape(key)), stored.num_bytes(key))
        else:
            yield ListedEntry(key, "object", None, stored.num_bytes(key))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@command
@click.argument("checkpoint_dir", type=CHECKPOINT)
@click.argument("key")
@verify_integrity
def print_tensor(
    checkpoint_dir: Path,
    key: str,
    verify_integrity: bool,
    printer: Printer,
) -> None:
    """Print the tensor, or the object, under KEY."""
    opened = open_checkpoint(checkpoint_dir, verify_integrity)
    stored = opened.dcp_files()
    common = {}
    if opened.format == TORCH_DIST:
        common = read_common(stored)
    keys = stored.metadata.state_dict_metadata
    if key in common:
        _print_object(key, common[key], printer)
    elif key in stored.tensors:
        _print_tensor(key, stored.lazy(key).read(), printer)
    elif key in keys:
        _print_object(key, stored.read_object(key), printer)
    else:
        hint = ""
        near = [other for other in keys if key in other]
        if near:
            hint = f"; did you mean one of {', '.join(near[:6])}"
        raise ValueError(f"there is no key {key!r}{hint}")


def _print_object(
    key: str,
    value: Any,
    printer: Printer,
) -> None:
    printer.result({"key": key, "value": value})
    printer.text(f"{key}: {value!r}")


def _print_tensor(
    key: str,
    tensor: torch.Tensor,
    printer: Printer,
) -> None:
    statistics = _statistics(tensor)
    if printer.as_json:  # as a list the tensor takes many times the memory
        printer.result(
            {
                "key": key,
                "dtype": str(tensor.dtype),
                "shape": list(tensor.shape),
                **statistics,
                "value": tensor.tolist(),
            }
        )
    printer.text(f"{key}: {tensor.dtype}, shape {list(tensor.shape)}")
    text = ", ".join(f"{name} {value:.6g}" for name, value in statistics.items())
    printer.text(text or "no minimum or maximum")
    printer.text(str(tensor))


def _statistics(tensor: torch.Tensor) -> dict[str, float]:
    """Return minimum, maximum, mean and norm; nothing for an empty or a complex tensor."""
    if not tensor.numel() or tensor.is_complex():
        return {}
    if tensor.dtype.itemsize < 4 or not tensor.is_floating_point():
        tensor = tensor.double()
    return {
        "min": tensor.min().item(),
        "max": tensor.max().item(),
        "mean": tensor.mean().item(),
        "norm": tensor.norm().item(),
    }


@command
@click.argument("torch_dcp_dir", type=CHECKPOINT)
@verify_integrity
def print_torch_dcp_in_json(
    torch_dcp_dir: Path,
    verify_integrity: bool,
    printer: Printer,
) -> None:
    """Write param_to_param_group_map.json next to the map of param groups that a run has dumped.

    The run dumps it with --dump-param-to-param-group-map.
    """
    stores.fetch(torch_dcp_dir)
    stored = StoredCheckpoint(torch_dcp_dir, verify_integrity)
    content = {}
    for key in stored.metadata.state_dict_metadata:
        name = key.replace("module.module", "model.module")
        content[name] = _group_number(stored, key)
    text = json.dumps(content, indent=2)
    path = torch_dcp_dir / "param_to_param_group_map.json"
    if printer.is_first:
        durable.write_text(path, text + "\n")
        store = stores.store_of(torch_dcp_dir)
        if store is not None:
            below = torch_dcp_dir.absolute().relative_to(store.staged).as_posix()
            store.upload(torch_dcp_dir, below, [path.name])
    printer.result({"file": path, "content": content})
    printer.text(text)
    printer.text(f"wrote {path}")


def _group_number(stored: StoredCheckpoint, key: str) -> int:
    value = stored.read(key)
    if isinstance(value, torch.Tensor):
        value = value.item()
    if not isinstance(value, int):
        raise ValueError(
            f"{stored.directory} is no map of param groups: {key} is {value!r}, not a number"
        )
    return value


@command
@click.argument("checkpoint_dir", type=CHECKPOINT)
@click.option(
    "--fast",
    is_flag=True,
    help="Compare the files with their digests in manifest.json only.",
)
@verify_integrity
def verify(
    checkpoint_dir: Path,
    fast: bool,
    verify_integrity: bool,
    printer: Printer,
) -> None:
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
        printer.text(f"note: {note}")
    for problem in problems:
        printer.text(f"- {problem}")
    verdict = "sound"
    if problems:
        verdict = f"{len(problems)} problems"
    printer.text(f"{opened.directory} ({opened.format}): {verdict}")
    sys.exit(int(bool(problems)))


@command
@click.argument("first", type=CHECKPOINT)
@click.argument("second", type=CHECKPOINT)
@verify_integrity
def compare_two_checkpoint(
    first: Path,
    second: Path,
    verify_integrity: bool,
    printer: Printer,
) -> None:
    """Compare all entries of two checkpoints by their keys, bit by bit.

    Exit code 1 if they differ.
    """
    mine = open_checkpoint(first, verify_integrity).dcp_files()
    theirs = open_checkpoint(second, verify_integrity).dcp_files()
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
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Length of the lists.",
)
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
    opened = open_checkpoint(first, verify_integrity)
    other = open_checkpoint(second, verify_integrity)
    mine = opened.state(allow_unknown=allow_unknown_keys)
    theirs = other.state(allow_unknown=allow_unknown_keys)
    # A Hugging Face model has weights only, and no padding.
    with_model = HUGGING_FACE in (opened.format, other.format)
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
        printer.text(f"note: {note}")
    _report(found, printer, rows)


def _report(
    found: comparison.Comparison,
    printer: Printer,
    rows: int,
) -> NoReturn:
    """Print the differences and exit, with exit code 1 if there are any."""
    printer.result({"same": not found.differs, **asdict(found)})
    for title, lines in (
        ("only in the first", found.only_first),
        ("only in the second", found.only_second),
        ("of another shape or kind", found.kinds),
        ("not the same", found.objects),
    ):
        if lines:
            printer.text(listed(f"{len(lines)} {title}", lines, rows))
    if found.values:
        table_rows = [("tensor", "elements that differ", "largest difference", "relative")]
        for value in found.values[:rows]:
            count = f"{value.count} of {value.total}"
            table_rows.append((value.name, count, f"{value.absolute:.3e}", f"{value.relative:.3e}"))
        printer.text(
            f"{len(found.values)} tensors have other values, the largest differences first:"
        )
        printer.text(table(table_rows))
    verdict = "there is no difference"
    if found.differs:
        verdict = "the checkpoints differ"
    printer.text(f"{found.equal} entries are the same; {verdict}")
    sys.exit(int(found.differs))
