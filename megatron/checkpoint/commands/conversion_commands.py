# SPDX-License-Identifier: Apache-2.0
"""Commands that write a checkpoint from another one."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import torch

from megatron.checkpoint.commands import conversion, editing
from megatron.checkpoint.commands.command import (
    CHECKPOINT,
    OUTPUT,
    Printer,
    allow_unknown_keys,
    command,
    transformer_impl,
    verify_integrity,
)
from megatron.checkpoint.commands.formats import (
    FSDP_DTENSOR,
    HUGGING_FACE,
    TORCH_DIST,
    Opened,
    open_checkpoint,
)
from megatron.checkpoint.core.listing import refuse
from megatron.checkpoint.core.parts import Target
from megatron.checkpoint.core.spelling import choose_spelling
from megatron.checkpoint.core.training_state import TrainingState
from megatron.checkpoint.fsdp_dtensor import dtensor_writer as fsdp_dtensor
from megatron.checkpoint.hugging_face import model_reader as hugging_face
from megatron.checkpoint.hugging_face.model_arguments import model_flags
from megatron.checkpoint.hugging_face.model_directory import read_json
from megatron.checkpoint.hugging_face.model_writer import HuggingFaceTarget
from megatron.checkpoint.integrity.manifest import digest_of
from megatron.checkpoint.store import directory
from megatron.checkpoint.store.stores import is_staged
from megatron.checkpoint.store.url_staging import with_urls
from megatron.checkpoint.torch_dist import checkpoint as torch_dist

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_NOT_OF_THE_OUTPUT = ("input_dir", "output_dir", "as_json", "quiet", "enable_msc", "oom_traceback")
"""Arguments that do not change the content of the output, or whose files are compared instead."""

_COMMAND_FOR = {
    TORCH_DIST: "convert-torch-dist-to-fsdp-dtensor",
    FSDP_DTENSOR: "convert-fsdp-dtensor-to-torch-dist, or convert-to-hf",
    HUGGING_FACE: "convert-from-hf",
}


def _positive(
    context: click.Context,
    parameter: click.Parameter,
    value: float,
) -> float:
    if not (math.isfinite(value) and value > 0):
        raise click.BadParameter(f"expects a positive number but got {value}")
    return value


def _open(
    path: Path,
    verify_integrity: bool,
    expected: str = "",
) -> Opened:
    """Open a checkpoint to convert; the ranks share the comparison with its manifest.

    Raises:
        ValueError: if it is missing, or one in another format than ``expected``, or if files of
            this rank's share are damaged.
    """
    opened = open_checkpoint(path, verify_integrity)
    if expected and opened.format != expected:
        hint = ""
        if opened.format in _COMMAND_FOR:
            hint = f"; use {_COMMAND_FOR[opened.format]}"
        raise ValueError(
            f"{opened.directory} is in the format {opened.format}, not {expected}{hint}"
        )
    if opened.stored is not None and opened.stored.has_manifest:
        rank, world_size = conversion.rank_and_world_size()
        damaged = opened.stored.damaged_files(rank, world_size)
        refuse(f"{opened.directory} is damaged", damaged)
    return opened


def _convert(
    opened: Opened,
    target: Target,
    output: directory.OutputDirectory,
    printer: Printer,
    report: Mapping[str, Any],
) -> None:
    """Carry out a conversion, and print its ``report``.

    The report has ``notes``, ``lines`` of text for people, and further fields of the JSON object.
    """
    source = Path(os.path.realpath(opened.directory))
    final = Path(os.path.realpath(output.final))
    if source in final.parents:
        raise ValueError(
            f"{output.final} is inside of the checkpoint that is converted: name another directory"
        )

    def upload_and_print(new_notes: list[str]) -> None:
        conversion.upload(output)
        notes = sorted({*report.get("notes", []), *new_notes})
        found = {"output": output.final, "input": opened.directory, **report, "notes": notes}
        printer.result(found)
        for note in notes:
            printer.text(f"note: {note}")
        for line in report.get("lines", []):
            printer.text(line)
        printer.text(f"{opened.directory} ({opened.format}) -> {output.final}")

    conversion.convert(
        target,
        output,
        identity=_identity(opened, output),
        show_progress=printer.show_progress,
        oom_traceback=printer.oom_traceback,
        report=upload_and_print,
    )


def _identity(opened: Opened, output: directory.OutputDirectory) -> str:
    """Return a digest of the command, its arguments, and all files that it reads.

    Local copies of what is at a URL are new in every run: their content counts, not their times.
    """
    context = click.get_current_context()
    sources = [opened.directory]
    given = {}
    for name, value in context.params.items():
        if name not in _NOT_OF_THE_OUTPUT:
            given[name] = value
            if isinstance(value, Path):  # a template, or a map of param groups
                sources.append(value)
    files = {}
    for source in sources:
        for path in (source, *source.rglob("*")):
            is_output = {output.final, output.staging}.intersection((path, *path.parents))
            if is_output or not path.is_file():
                continue
            status = path.stat()
            version: Any = status.st_mtime_ns
            if is_staged(path):
                version = digest_of(path)
            files[with_urls(str(path.absolute()))] = (status.st_size, version)
    return conversion.fingerprint(context.command.name, given, files)


def _report(state: TrainingState) -> dict[str, Any]:
    """Return the report of a conversion of a training state."""
    return {
        "lines": [_summary(state)],
        "parameters": len(state.weights),
        "notes": list(state.notes),
    }


def _summary(state: TrainingState) -> str:
    elements = sum(math.prod(tensor.shape) for tensor in state.weights.values())
    summary = f"{len(state.weights)} parameters with {elements:,} elements"
    if state.moments:
        summary += f", optimizer state of {len(state.moments)}"
    else:
        summary += ", no optimizer state"
    if state.iteration is not None:
        summary += f", iteration {state.iteration}"
    return summary


def _iteration(opened: Opened, state: TrainingState) -> int | str:
    """Return the iteration of the new checkpoint, that of the old one."""
    if state.iteration is None or opened.directory.name == directory.RELEASE:
        return directory.RELEASE
    return state.iteration


def _from_one_to_another(function: Callable[..., None]) -> click.Command:
    """Turn a function into a command that reads a checkpoint and writes another one."""
    output = click.argument("output_dir", type=OUTPUT)
    return command(click.argument("input_dir", type=CHECKPOINT)(output(function)))


@_from_one_to_another
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
@verify_integrity
def convert_torch_dist_to_fsdp_dtensor(
    input_dir: Path,
    output_dir: Path,
    printer: Printer,
    verify_integrity: bool,
    allow_unknown_keys: bool,
    transformer_impl: str | None,
    **options: Any,
) -> None:
    """Convert torch_dist to fsdp_dtensor, for runs with --use-megatron-fsdp.

    Weights, optimizer, schedule, counters and random states of a run without FSDP are converted.
    """
    opened = _open(input_dir, verify_integrity, TORCH_DIST)
    path = options["param_to_param_group_map_json"]
    group_numbers = None
    if path is not None:
        group_numbers = read_json(path)
    state = opened.state(group_numbers, allow_unknown_keys)
    spelling = choose_spelling(state, transformer_impl, options["rename_mtp_keys"])
    gated_modules = []
    for module in (options["swiglu_modules"] or "").split(","):
        if module.strip():
            gated_modules.append(module.strip())
    target = fsdp_dtensor.target(
        state,
        spelling,
        model_prefix=options["output_model_weight_prefix"],
        optimizer_prefix=options["output_optimizer_state_prefix"],
        must_be_gated=options["swiglu"],
        gated_modules=gated_modules,
    )
    output = directory.new_checkpoint(output_dir, _iteration(opened, state))
    _convert(opened, target, output, printer, report=_report(state))


@_from_one_to_another
@click.option(
    "--rename-mtp-keys/--no-rename-mtp-keys",
    default=True,
    help="Call the layer inside MTP transformer_layer, as up to 0.16.",
)
@transformer_impl
@allow_unknown_keys
@verify_integrity
def convert_fsdp_dtensor_to_torch_dist(
    input_dir: Path,
    output_dir: Path,
    printer: Printer,
    verify_integrity: bool,
    transformer_impl: str | None,
    allow_unknown_keys: bool,
    rename_mtp_keys: bool,
) -> None:
    """Convert fsdp_dtensor back to torch_dist, which any TP x PP layout loads.

    The optimizer's layout is fully_reshardable, or non_distributed with Muon, as in Megatron-Core.
    """
    opened = _open(input_dir, verify_integrity, FSDP_DTENSOR)
    state = opened.state(allow_unknown=allow_unknown_keys)
    spelling = choose_spelling(state, transformer_impl, rename_mtp_keys)
    target = torch_dist.target(state, spelling)
    output = directory.new_checkpoint(output_dir, _iteration(opened, state))
    _convert(opened, target, output, printer, report=_report(state))


@_from_one_to_another
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
    type=click.IntRange(min=1),
    help="Rows of the vocabulary that are real. Default: from the run's arguments.",
)
@click.option(
    "--max-shard-size",
    default=4.0,
    show_default=True,
    metavar="GIB",
    callback=_positive,
    help="Of one safetensors file.",
)
@click.option("--fp8", is_flag=True, help="Linear layers in FP8, a scale a block: DeepSeek-V3's.")
@allow_unknown_keys
@verify_integrity
def convert_to_hf(
    input_dir: Path,
    output_dir: Path,
    printer: Printer,
    verify_integrity: bool,
    template: Path | None,
    family: str | None,
    dtype: str | None,
    vocab_size: int | None,
    max_shard_size: float,
    fp8: bool,
    allow_unknown_keys: bool,
) -> None:
    """Convert torch_dist or fsdp_dtensor to a Hugging Face model.

    It has config.json, safetensors files and the tokenizer of the template.
    """
    opened = _open(input_dir, verify_integrity)
    if opened.format not in (TORCH_DIST, FSDP_DTENSOR):
        raise ValueError(
            f"{opened.directory} is in the format {opened.format}; torch_dist or fsdp_dtensor is"
            " expected"
        )
    state = opened.state(allow_unknown=allow_unknown_keys)
    target = HuggingFaceTarget(
        state,
        family=family,
        dtype=None if dtype is None else DTYPES[dtype],
        template=template,
        shard_bytes=int(max_shard_size * 2**30),
        vocab_size=vocab_size,
        fp8=fp8,
    )
    output = directory.new_directory(output_dir)
    _convert(opened, target, output, printer, report=_report(state))


@_from_one_to_another
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
    type=click.IntRange(min=1),
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
    """Convert a Hugging Face model to fsdp_dtensor or torch_dist: a release, for --finetune.

    Prints the model's flags.
    """
    opened = _open(input_dir, True, HUGGING_FACE)
    state = hugging_face.read(opened.directory, vocabulary_multiple=vocab_multiple)
    args = state.args
    assert args is not None  # config.json has them
    if params_dtype is not None:
        args.params_dtype = DTYPES[params_dtype]
        args.bf16 = params_dtype == "bf16"
        args.fp16 = params_dtype == "fp16"
    state.compute_dtype = dict.fromkeys(state.weights, args.params_dtype)
    args.transformer_impl = transformer_impl or "transformer_engine"  # Megatron-LM's own default
    spelling = choose_spelling(state, transformer_impl)
    target_of = torch_dist.target
    if to == FSDP_DTENSOR:
        target_of = fsdp_dtensor.target
    target = target_of(state, spelling)
    flags = model_flags(args)
    lines = [_summary(state), "Flags of this model:", "  " + " ".join(flags)]
    report = {"lines": lines, "model_flags": flags, "notes": list(state.notes)}
    output = directory.new_checkpoint(output_dir, directory.RELEASE)
    _convert(opened, target, output, printer, report=report)


@_from_one_to_another
@click.option(
    "--op",
    "operations",
    multiple=True,
    metavar="'remove PATTERN' | 'rename PATTERN REPLACEMENT'",
    help="Repeatable, in this order.",
)
@verify_integrity
def modify_state_dict(
    input_dir: Path,
    output_dir: Path,
    operations: tuple[str, ...],
    verify_integrity: bool,
    printer: Printer,
) -> None:
    """Remove or rename entries whose keys a regular expression is found in.

    What no operation names is copied as it is.
    """
    opened = _open(input_dir, verify_integrity)
    stored = opened.dcp_files()
    keys = list(stored.metadata.state_dict_metadata)
    renamed = editing.new_keys(keys, [editing.EditRule.parse(text) for text in operations])
    num_removed = len(keys) - len(renamed)
    num_renamed = sum(old != new for old, new in renamed.items())
    report = {
        "lines": [f"{num_removed} of {len(keys)} keys removed, {num_renamed} renamed"],
        "removed": num_removed,
        "renamed": num_renamed,
    }
    target = editing.target(stored, renamed)
    output = directory.same_iteration(opened.directory, output_dir)
    _convert(opened, target, output, printer, report=report)
