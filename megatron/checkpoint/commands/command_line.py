# SPDX-License-Identifier: Apache-2.0
"""The command line of the checkpoint tools: what ``tools/checkpoint/checkpoint_inspector.py`` runs.

Started by ``python`` it is one process without a process group; started by ``torchrun`` its ranks
share conversions. No GPU, no Megatron-Core. Exit code 0: done, and nothing is wrong; 1: something
differs, is broken or failed; 2: wrong usage.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
from tqdm import tqdm

from megatron.checkpoint.commands import comparison, conversion, editing, verification
from megatron.checkpoint.commands.conversion import ConversionError, fingerprint
from megatron.checkpoint.commands.formats import (
    FSDP_DTENSOR,
    HUGGING_FACE,
    TORCH_DIST,
    Opened,
    open_checkpoint,
)
from megatron.checkpoint.core import directory
from megatron.checkpoint.core.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.core.training_state import TrainingState
from megatron.checkpoint.fsdp_dtensor import checkpoint as fsdp_dtensor
from megatron.checkpoint.fsdp_dtensor.spelling_choice import IMPLEMENTATIONS, choose_spelling
from megatron.checkpoint.hugging_face import checkpoint as hugging_face
from megatron.checkpoint.torch_dist import checkpoint as torch_dist

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
def main() -> None:
    """Inspect, verify, compare and convert checkpoints: torch_dist, fsdp_dtensor and Hugging Face, in every direction.

    A CHECKPOINT is the directory of an iteration, or the one above it with the tracker file that
    names the iteration. Formats, models and layouts are found out from the files. Start it with
    python, or with torchrun to share the work.
    """


# ---- what commands have in common
# -------------------------------------------------------------------------------------


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """A subcommand: its options are those of all, and its errors are one message."""

    @main.command(name=function.__name__.replace("_", "-"))
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for machines.")
    @click.option("--quiet", is_flag=True, help="No progress bar.")
    @click.option(
        "--enable-msc", is_flag=True, help="Object stores by the multi-storage client: not built."
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
                "--enable-msc: object stores are not built in; mount the store, or copy the"
                " checkpoint"
            )
        printer = Printer(as_json, show_progress=not quiet, oom_traceback=oom_traceback)
        try:
            with conversion.ranks_of_torchrun():
                conversion.agreed(
                    lambda: function(*args, printer=printer, **options),
                    lambda error: _told(error, oom_traceback),
                )
        except ConversionError as error:
            printer.fail(error)

    return run


def _told(error: Exception, oom_traceback: bool) -> str:
    """An error for people."""
    if conversion.is_out_of_memory(error):
        if oom_traceback:
            traceback.print_exception(error)
        return conversion.OUT_OF_MEMORY
    if isinstance(error, (ValueError, NotImplementedError)):
        return str(error)
    if isinstance(error, OSError):
        return f"{type(error).__name__}: {error}"
    place = traceback.extract_tb(error.__traceback__)[-1]  # files can hold anything at all
    where = f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno}"
    return f"the checkpoint has something that is not understood ({where}: {error})"


class Printer:
    """Prints on the first rank: text for people, or one JSON object."""

    def __init__(self, as_json: bool, show_progress: bool, oom_traceback: bool = False):
        self.oom_traceback = oom_traceback
        self.as_json = as_json
        self.is_first = os.environ.get("RANK", "0") == "0"
        self.show_progress = show_progress and not as_json and self.is_first

    def say(self, text: str) -> None:
        if self.is_first and not self.as_json:
            click.echo(text)

    def result(self, content: Mapping[str, Any]) -> None:
        if self.is_first and self.as_json:
            click.echo(json.dumps(_as_json(content), default=str))

    def fail(self, error: ConversionError) -> None:
        """The error, and exit code 1."""
        self.result({"error": str(error)})
        if self.is_first:
            click.echo(f"Error: {error}", err=True)
        sys.exit(1)

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        with tqdm(
            total=total, unit="B", unit_scale=True, desc=title, disable=not self.show_progress
        ) as progress:
            yield progress.update


def _as_json(value: Any) -> Any:
    """What JSON can hold: it has no NaN and no infinity, and its keys are text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _as_json(each) for key, each in value.items()}
    return [_as_json(each) for each in value] if isinstance(value, (list, tuple)) else value


CHECKPOINT = click.Path(exists=False, path_type=Path)
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


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns as wide as they need to be."""
    widths = (
        [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    )
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )


def readable(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


# ---- looking
# ------------------------------------------------------------------------------------------------------------


@command
@click.argument("checkpoint_dir", type=CHECKPOINT)
@click.option(
    "--not-ignore-param-to-group-meta",
    is_flag=True,
    help="List the fields of param groups too, many for every parameter.",
)
def inspect(checkpoint_dir: Path, not_ignore_param_to_group_meta: bool, printer: Printer) -> None:
    """List keys, shapes, dtypes and sizes."""
    opened = open_checkpoint(checkpoint_dir)
    rows = list(_rows(opened, not_ignore_param_to_group_meta))
    printer.result(
        {
            "directory": opened.directory,
            "format": opened.format,
            "entries": [dict(zip(_COLUMNS, row)) for row in rows],
        }
    )
    cells = [
        (key, kind, str(list(shape)) if shape is not None else "", readable(size))
        for key, kind, shape, size in rows
    ]
    printer.say(f"{opened.directory}, format {opened.format}")
    printer.say(table([("key", "dtype", "shape", "size"), *cells]))
    tensors = [row for row in rows if row[2] is not None]
    left = (
        len(opened.stored.metadata.state_dict_metadata) - len(rows)
        if opened.stored is not None
        else 0
    )
    printer.say(
        f"{len(tensors)} tensors, {len(rows) - len(tensors)} objects,"
        f" {readable(sum(row[3] for row in rows))}"
    )
    if left:
        printer.say(
            f"{left} fields of param groups are not listed (--not-ignore-param-to-group-meta lists"
            " them)"
        )


_COLUMNS = ("key", "dtype", "shape", "bytes")


def _rows(opened: Opened, with_groups: bool) -> Iterator[tuple[str, str, list[int] | None, int]]:
    if opened.stored is None:
        for kind, name, tensor in opened.state().tensors():
            yield (
                name,
                str(tensor.dtype).removeprefix("torch."),
                list(tensor.shape),
                tensor.num_bytes,
            )
        return
    stored = opened.stored
    for key in stored.metadata.state_dict_metadata:
        if key.startswith(fsdp_dtensor.META_PREFIX) and not with_groups:
            continue
        is_tensor = key in stored.tensors
        kind = str(stored.dtype(key)).removeprefix("torch.") if is_tensor else "object"
        yield key, kind, list(stored.shape(key)) if is_tensor else None, stored.num_bytes(key)


@command
@click.argument("checkpoint_dir", type=CHECKPOINT)
@click.argument("key")
def print_tensor(checkpoint_dir: Path, key: str, printer: Printer) -> None:
    """Print the tensor, or the object, under KEY."""
    opened = open_checkpoint(checkpoint_dir)
    stored = _stored(opened)
    common = torch_dist.read_common(stored) if opened.format == TORCH_DIST else {}
    if key in common:
        printer.result({"key": key, "value": common[key]})
        printer.say(f"{key}: {common[key]!r}")
        return
    if key not in stored.metadata.state_dict_metadata:
        near = [each for each in stored.metadata.state_dict_metadata if key in each][:6]
        raise ValueError(
            f"there is no key {key!r}"
            + (f"; did you mean one of {', '.join(near)}" if near else "")
        )
    if key not in stored.tensors:
        value = stored.read_object(key)
        printer.result({"key": key, "value": value})
        printer.say(f"{key}: {value!r}")
        return
    tensor = stored.lazy(key).read()
    facts = {}
    if tensor.numel() and not tensor.is_complex():
        numbers = (
            tensor.double()
            if tensor.dtype.itemsize < 4 or not tensor.is_floating_point()
            else tensor
        )
        facts = {
            "min": numbers.min().item(),
            "max": numbers.max().item(),
            "mean": numbers.mean().item(),
            "norm": numbers.norm().item(),
        }
    if printer.as_json:  # as a list it takes many times the memory
        printer.result(
            {
                "key": key,
                "dtype": str(tensor.dtype),
                "shape": list(tensor.shape),
                **facts,
                "value": tensor.tolist(),
            }
        )
    printer.say(f"{key}: {tensor.dtype}, shape {list(tensor.shape)}")
    printer.say(
        ", ".join(f"{name} {value:.6g}" for name, value in facts.items()) or "no minimum or maximum"
    )
    printer.say(str(tensor))


def _stored(opened: Opened) -> StoredCheckpoint:
    if opened.stored is None:
        raise ValueError(
            f"{opened.directory} is a Hugging Face model; its tensors are printed by other tools"
        )
    return opened.stored


@command
@click.argument("torch_dcp_dir", type=CHECKPOINT)
def print_torch_dcp_in_json(torch_dcp_dir: Path, printer: Printer) -> None:
    """Write param_to_param_group_map.json beside a map that a run has dumped (--dump-param-to-param-group-map)."""
    stored = StoredCheckpoint(torch_dcp_dir)
    content = {
        key.replace("module.module", "model.module"): _number(stored, key)
        for key in stored.metadata.state_dict_metadata
    }
    path = Path(torch_dcp_dir) / "param_to_param_group_map.json"
    if printer.is_first:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(content, indent=2) + "\n")
        new.replace(path)
    printer.result({"file": path, "content": content})
    printer.say(json.dumps(content, indent=2))
    printer.say(f"wrote {path}")


def _number(stored: StoredCheckpoint, key: str) -> int:
    value = stored.lazy(key).read().item() if key in stored.tensors else stored.read_object(key)
    if not isinstance(value, int):
        raise ValueError(
            f"{stored.directory} is no map of param groups: {key} is {value!r}, not a number"
        )
    return value


# ---- judging
# ------------------------------------------------------------------------------------------------------------


@command
@click.argument("checkpoint_dir", type=CHECKPOINT)
def verify(checkpoint_dir: Path, printer: Printer) -> None:
    """Read everything once: files, checksums, keys, shapes, main weights against the model's, NaN.

    Exit code 1: not sound.
    """
    opened = open_checkpoint(checkpoint_dir)
    with printer.bar("verifying", verification.total_bytes(opened)) as progress:
        problems = verification.find_problems(opened, progress, notes := [])
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
    printer.say(
        f"{opened.directory} ({opened.format}): "
        + (f"{len(problems)} problems" if problems else "sound")
    )
    sys.exit(1 if problems else 0)


@command
@click.argument("first", type=CHECKPOINT)
@click.argument("second", type=CHECKPOINT)
def compare_two_checkpoint(first: Path, second: Path, printer: Printer) -> None:
    """Compare all entries of two checkpoints by their keys, bit by bit.

    Exit code 1 if they differ.
    """
    mine, theirs = _stored(open_checkpoint(first)), _stored(open_checkpoint(second))
    total = sum(stored.num_bytes(key) for stored in (mine, theirs) for key in stored.tensors)
    with printer.bar("comparing", total) as progress:
        found = comparison.compare_entries(mine, theirs, progress)
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
def diff(
    first: Path,
    second: Path,
    weights_only: bool,
    rows: int,
    allow_unknown_keys: bool,
    printer: Printer,
) -> None:
    """Compare what two checkpoints say, in whichever formats: weights, moments, param groups, schedule, arguments, counters.

    Beside a Hugging Face model only weights are compared, and of the vocabulary the rows that both
    have: others are padding.

    Exit code 1 if they differ.
    """
    opened = [open_checkpoint(path) for path in (first, second)]
    states = [each.state(allow_unknown=allow_unknown_keys) for each in opened]
    with_model = HUGGING_FACE in (
        each.format for each in opened
    )  # which has weights only, and no padding
    total = comparison.num_bytes(tensor for state in states for _, _, tensor in state.tensors())
    with printer.bar("comparing", total) as progress:
        found = comparison.compare_states(
            *states, weights_only or with_model, with_padding=not with_model, progress=progress
        )
    for note in states[0].notes + states[1].notes:
        printer.say(f"note: {note}")
    _report(found, printer, rows)


def _report(found: comparison.Comparison, printer: Printer, rows: int) -> None:
    printer.result(found.as_dict())
    for title, lines in (
        ("only in the first", found.only_first),
        ("only in the second", found.only_second),
        ("of another shape or kind", found.kinds),
        ("not the same", found.objects),
    ):
        if lines:
            more = [f"  … and {len(lines) - rows} more"] if len(lines) > rows else []
            printer.say(
                "\n".join(
                    [f"{len(lines)} {title}:", *(f"  {line}" for line in lines[:rows]), *more]
                )
            )
    if found.values:
        head = ("tensor", "elements that differ", "largest difference", "relative")
        cells = [
            (
                each.name,
                f"{each.count} of {each.total}",
                f"{each.absolute:.3e}",
                f"{each.relative:.3e}",
            )
            for each in found.values
        ]
        printer.say(
            f"{len(found.values)} tensors have other values, the largest differences first:"
        )
        printer.say(table([head, *cells[:rows]]))
    printer.say(
        f"{found.equal} entries are the same; "
        + ("the checkpoints differ" if found.differs else "there is no difference")
    )
    sys.exit(1 if found.differs else 0)


# ---- converting
# ---------------------------------------------------------------------------------------------------------


def _convert(
    opened: Opened,
    target: Any,
    output: directory.OutputDirectory,
    printer: Printer,
    said: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """Carry out a conversion and say what became of it."""
    if output.final.resolve().is_relative_to(opened.directory.resolve()):
        raise ValueError(
            f"{output.final} is inside of the checkpoint that is converted: name another directory"
        )
    stats = {
        str(path): path.stat() for path in sorted(opened.directory.rglob("*")) if path.is_file()
    }
    files = {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}
    identity = fingerprint(str(opened.directory.resolve()), files, options)
    notes = sorted(
        {
            *said.get("notes", []),
            *conversion.convert(
                target, output, identity, printer.show_progress, printer.oom_traceback
            ),
        }
    )
    printer.result({"output": output.final, "input": opened.directory, **said, "notes": notes})
    for note in notes:
        printer.say(f"note: {note}")
    for line in said.get("lines", []):
        printer.say(line)
    printer.say(f"{opened.directory} ({opened.format}) -> {output.final}")


def _expect(opened: Opened, expected: str, instead: Mapping[str, str]) -> None:
    if opened.format != expected:
        hint = f"; use {instead[opened.format]}" if opened.format in instead else ""
        raise ValueError(
            f"{opened.directory} is in the format {opened.format}, not {expected}{hint}"
        )


def _summary(state: TrainingState) -> str:
    elements = sum(torch.Size(tensor.shape).numel() for tensor in state.weights.values())
    moments = (
        f", optimizer state of {len(state.moments)}" if state.moments else ", no optimizer state"
    )
    at = f", iteration {state.iteration}" if state.iteration is not None else ""
    return f"{len(state.weights)} parameters with {elements:,} elements{moments}{at}"


def _said(state: TrainingState) -> dict[str, Any]:
    """What every conversion of a run reports."""
    return {
        "lines": [_summary(state)],
        "parameters": len(state.weights),
        "notes": list(state.notes),
    }


def _place(opened: Opened, state: TrainingState) -> int | str:
    is_release = state.iteration is None or opened.directory.name == directory.RELEASE
    return directory.RELEASE if is_release else state.iteration


_COMMAND_FOR = {
    TORCH_DIST: "convert-torch-dist-to-fsdp-dtensor",
    FSDP_DTENSOR: "convert-fsdp-dtensor-to-torch-dist, or convert-to-hf",
    HUGGING_FACE: "convert-from-hf",
}


@command
@click.argument("input_dir", type=CHECKPOINT)
@click.argument("output_dir", type=CHECKPOINT)
@click.option(
    "--swiglu",
    is_flag=True,
    help=(
        "The MLPs are gated. That is found out from shapes; with this flag anything else is"
        " refused."
    ),
)
@click.option(
    "--swiglu-modules",
    metavar="A,B",
    help="Modules whose weights must be two halves, by the ends of their paths; refused if not.",
)
@click.option(
    "--param-to-param-group-map-json",
    type=click.Path(path_type=Path),
    help="From print-torch-dcp-in-json. Default: Megatron-Core's rules.",
)
@click.option(
    "--output-optimizer-state-prefix",
    help="Default: optimizer.state. and one module for each wrapper of the run.",
)
@click.option("--output-model-weight-prefix", default="model.module", show_default=True)
@click.option(
    "--rename-mtp-keys/--no-rename-mtp-keys",
    default=True,
    help="Call the layer inside MTP transformer_layer, as loaders want it.",
)
@click.option("--oom-traceback", is_flag=True, help="Where it was, if memory runs out.")
@transformer_impl
@allow_unknown_keys
def convert_torch_dist_to_fsdp_dtensor(
    input_dir: Path,
    output_dir: Path,
    printer: Printer,
    allow_unknown_keys: bool,
    transformer_impl: str | None,
    **options: Any,
) -> None:
    """torch_dist, of a run without FSDP, to fsdp_dtensor, for runs with --use-megatron-fsdp: weights, optimizer and all."""
    opened = open_checkpoint(input_dir)
    _expect(
        opened, TORCH_DIST, {key: value for key, value in _COMMAND_FOR.items() if key != TORCH_DIST}
    )
    group_numbers = _json_file(options["param_to_param_group_map_json"])
    state = opened.state(group_numbers, allow_unknown_keys)
    spelling = choose_spelling(state, transformer_impl, options["rename_mtp_keys"])
    more = [
        module.strip() for module in (options["swiglu_modules"] or "").split(",") if module.strip()
    ]
    target = fsdp_dtensor.target(
        state,
        spelling,
        options["output_model_weight_prefix"],
        options["output_optimizer_state_prefix"],
        must_be_gated=options["swiglu"],
        gated_modules=more,
    )
    asked = {
        **options,
        "map": group_numbers,
        "layers": spelling.transformer_engine,
        "unknown": allow_unknown_keys,
        "to": FSDP_DTENSOR,
    }
    _convert(
        opened,
        target,
        directory.new_checkpoint(output_dir, _place(opened, state)),
        printer,
        _said(state),
        asked,
    )


def _json_file(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} should hold an object of parameter names and group numbers")
    return content


@command
@click.argument("input_dir", type=CHECKPOINT)
@click.argument("output_dir", type=CHECKPOINT)
@click.option(
    "--rename-mtp-keys/--no-rename-mtp-keys",
    default=True,
    help="Call the layer inside MTP transformer_layer, as up to 0.16.",
)
@transformer_impl
@allow_unknown_keys
def convert_fsdp_dtensor_to_torch_dist(
    input_dir: Path,
    output_dir: Path,
    printer: Printer,
    transformer_impl: str | None,
    allow_unknown_keys: bool,
    rename_mtp_keys: bool,
) -> None:
    """fsdp_dtensor back to torch_dist (optimizer layout fully_reshardable), which any TP x PP layout loads."""
    opened = open_checkpoint(input_dir)
    _expect(
        opened,
        FSDP_DTENSOR,
        {key: value for key, value in _COMMAND_FOR.items() if key != FSDP_DTENSOR},
    )
    state = opened.state(allow_unknown=allow_unknown_keys)
    spelling = choose_spelling(state, transformer_impl, rename_mtp_keys)
    target = torch_dist.target(state, spelling)
    asked = {
        "layers": spelling.transformer_engine,
        "mtp": rename_mtp_keys,
        "unknown": allow_unknown_keys,
        "to": TORCH_DIST,
    }
    _convert(
        opened,
        target,
        directory.new_checkpoint(output_dir, _place(opened, state)),
        printer,
        _said(state),
        asked,
    )


@command
@click.argument("input_dir", type=CHECKPOINT)
@click.argument("output_dir", type=CHECKPOINT)
@click.option(
    "--template",
    type=click.Path(path_type=Path),
    help="Hugging Face model whose tokenizer and settings are carried over.",
)
@click.option("--family", help="Model type of config.json. Default: found out from the model.")
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    help="Of the weights. Default: what the run computed in.",
)
@click.option(
    "--vocab-size",
    type=int,
    help="Rows of the vocabulary that are real. Default: from the run's arguments.",
)
@click.option(
    "--max-shard-size",
    default=4.0,
    show_default=True,
    metavar="GIB",
    help="Of one safetensors file.",
)
@allow_unknown_keys
def convert_to_hf(
    input_dir: Path,
    output_dir: Path,
    printer: Printer,
    template: Path | None,
    family: str | None,
    dtype: str | None,
    vocab_size: int | None,
    max_shard_size: float,
    allow_unknown_keys: bool,
) -> None:
    """torch_dist or fsdp_dtensor to a Hugging Face model: config.json, safetensors, tokenizer of the template."""
    opened = open_checkpoint(input_dir)
    if opened.format not in (TORCH_DIST, FSDP_DTENSOR):
        raise ValueError(
            f"{opened.directory} is in the format {opened.format}; torch_dist or fsdp_dtensor is"
            " expected"
        )
    state = opened.state(allow_unknown=allow_unknown_keys)
    target = hugging_face.HuggingFaceTarget(
        state,
        family,
        DTYPES[dtype] if dtype else None,
        template,
        int(max_shard_size * 2**30),
        vocab_size,
    )
    asked = {
        "family": family,
        "dtype": dtype,
        "template": template,
        "vocab": vocab_size,
        "shard": max_shard_size,
        "to": HUGGING_FACE,
    }
    _convert(opened, target, directory.new_directory(output_dir), printer, _said(state), asked)


@command
@click.argument("input_dir", type=CHECKPOINT)
@click.argument("output_dir", type=CHECKPOINT)
@click.option(
    "--format",
    "to",
    type=click.Choice([FSDP_DTENSOR, TORCH_DIST]),
    default=FSDP_DTENSOR,
    show_default=True,
)
@click.option(
    "--params-dtype",
    type=click.Choice(list(DTYPES)),
    help="What the model computes in. Default: as in config.json.",
)
@click.option(
    "--vocab-multiple",
    type=int,
    help="Pad the vocabulary to a multiple of this, as tensor parallelism needs it.",
)
@transformer_impl
def convert_from_hf(
    input_dir: Path,
    output_dir: Path,
    printer: Printer,
    to: str,
    params_dtype: str | None,
    vocab_multiple: int | None,
    transformer_impl: str | None,
) -> None:
    """A Hugging Face model to fsdp_dtensor or torch_dist: a release, for --finetune.

    Prints the model's flags.
    """
    opened = open_checkpoint(input_dir)
    _expect(
        opened,
        HUGGING_FACE,
        {key: value for key, value in _COMMAND_FOR.items() if key != HUGGING_FACE},
    )
    state = hugging_face.read(opened.directory, vocabulary_multiple=vocab_multiple)
    if params_dtype is not None:
        state.args.params_dtype = DTYPES[params_dtype]
        state.args.bf16, state.args.fp16 = params_dtype == "bf16", params_dtype == "fp16"
    state.compute_dtype = dict.fromkeys(state.weights, state.args.params_dtype)
    state.args.transformer_impl = (
        transformer_impl or "transformer_engine"
    )  # Megatron-LM's own default
    spelling = choose_spelling(state, transformer_impl)
    target = (fsdp_dtensor if to == FSDP_DTENSOR else torch_dist).target(state, spelling)
    flags = hugging_face.model_flags(state.args)
    lines = [_summary(state), "Flags of this model:", "  " + " ".join(flags)]
    said = {"lines": lines, "model_flags": flags, "notes": list(state.notes)}
    asked = {
        "to": to,
        "dtype": params_dtype,
        "multiple": vocab_multiple,
        "layers": spelling.transformer_engine,
    }
    _convert(
        opened,
        target,
        directory.new_checkpoint(output_dir, directory.RELEASE),
        printer,
        said,
        asked,
    )


@command
@click.argument("input_dir", type=CHECKPOINT)
@click.argument("output_dir", type=CHECKPOINT)
@click.option(
    "--op",
    "operations",
    multiple=True,
    metavar="'remove PATTERN' | 'rename PATTERN REPLACEMENT'",
    help="Repeatable, in this order.",
)
def modify_state_dict(
    input_dir: Path, output_dir: Path, operations: tuple[str, ...], printer: Printer
) -> None:
    """Remove or rename entries whose keys a regular expression is found in.

    What no operation names is copied as it is.
    """
    opened = open_checkpoint(input_dir)
    stored = _stored(opened)
    renamed = editing.new_keys(
        list(stored.metadata.state_dict_metadata), [editing.Rule.parse(text) for text in operations]
    )
    total = len(stored.metadata.state_dict_metadata)
    changed = sum(old != new for old, new in renamed.items())
    said = {
        "lines": [f"{total - len(renamed)} of {total} keys removed, {changed} renamed"],
        "removed": total - len(renamed),
        "renamed": changed,
    }
    output = directory.same_iteration(opened.directory, output_dir)
    _convert(
        opened, editing.target(stored, renamed), output, printer, said, {"operations": operations}
    )


if __name__ == "__main__":
    main()
