# SPDX-License-Identifier: Apache-2.0
"""Runs with --use-megatron-fsdp: saved and loaded as fsdp_dtensor, a plain torch.distributed.checkpoint."""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from megatron.checkpoint.core.key_rules import VOCABULARY, canonical_name, entry_names, plain_name
from megatron.checkpoint.core.listing import some
from megatron.checkpoint.core.safe_loading import SafePlanner, SafeReader
from megatron.checkpoint.fsdp_dtensor.keys import (
    CHECKPOINT_VERSION,
    META_PREFIX,
    MODEL_PREFIX,
    STATE_PREFIX,
    names_in_file,
    without_layout,
    wrapper_prefix,
)
from megatron.fsdp.dtensor.uneven import dtensor_over
from megatron.fsdp.engine.collectives import agree
from megatron.mcore_adapter import FullyShardedDataParallel

__all__ = ["CHECKPOINT_VERSION", "load", "save"]

NameInFile = Callable[[str], str]
"""Name of a parameter in the model -> in a file."""


def save(
    args: argparse.Namespace,
    state: dict[str, Any],
    model: list[FullyShardedDataParallel],
    optimizer: MegatronOptimizer | None,
    target: Path,
) -> None:
    """Write into the directory ``target``."""
    content = {**_with_rng_by_place(state), "model": model_entries(args, model)}
    if optimizer is not None:
        content["optimizer"] = optimizer_entries(args, model, optimizer, own_prefix(model))
        if optimizer.grad_scaler is not None:
            content["grad_scaler"] = optimizer.grad_scaler.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's checkpoint uses names that torch deprecates
        dcp.save(content, checkpoint_id=target)


def load(
    args: argparse.Namespace,
    state: dict[str, Any],
    model: list[FullyShardedDataParallel],
    optimizer: MegatronOptimizer | None,
    source: Path,
) -> dict[str, Any]:
    """Load ``source`` into the model, the optimizer and a copy of ``state``, which is returned.

    Raises:
        ValueError: on every rank, listing the entries that are missing on any or of another shape,
            unless partial loads are allowed; before anything is overwritten.
    """
    metadata = _read_metadata(source)
    in_file = _spelled_as(metadata)
    content: dict[str, Any] = {
        **_with_rng_of_file(state, metadata),
        "model": model_entries(args, model, in_file),
    }
    del content["checkpoint_version"]
    if "num_floating_point_operations_so_far" not in metadata.state_dict_metadata:
        del content["num_floating_point_operations_so_far"]
    if optimizer is not None:
        names = [in_file(plain_name(name)) for name in named_parameters(model)]
        prefix = wrapper_prefix(metadata.state_dict_metadata, names)
        prefix = prefix if prefix is not None else own_prefix(model)
        content["optimizer"] = optimizer_entries(args, model, optimizer, prefix, in_file)
        if optimizer.grad_scaler is not None and any(
            key.startswith("grad_scaler.") for key in metadata.state_dict_metadata
        ):
            content["grad_scaler"] = optimizer.grad_scaler.state_dict()
    _fit_padding(args, content, metadata, source)
    _check(args, content, metadata, source)
    if optimizer is not None:
        _drop_absent_groups(content["optimizer"]["param_to_group_meta"], metadata)
    _read(content, source)
    # Weights and moments were read in place. What remains is what others derive from them.
    for chunk in model:
        chunk.load_state_dict(chunk.state_dict())
    if optimizer is not None:
        _load_groups(model, optimizer, content["optimizer"]["param_to_group_meta"], in_file)
        if "grad_scaler" in content:
            optimizer.grad_scaler.load_state_dict(content["grad_scaler"])
    if "rng_state" in content:
        content["rng_state"] = content["rng_state"][_place_in_model()]
    return content


def _read_metadata(source: Path) -> Metadata:
    metadata, damage = None, []
    try:
        metadata = SafeReader(source).read_metadata()
    except ValueError as error:
        damage = [str(error)]
    damage = agree(damage)
    if damage:
        raise ValueError("\n".join(damage))
    return metadata


def _spelled_as(metadata: Metadata) -> NameInFile:
    """Names of parameters as the file has them: Transformer Engine's layers call some otherwise than local ones."""
    known = names_in_file(metadata.state_dict_metadata)
    return lambda name: known.get(canonical_name(name), name)


def _as_it_is(name: str) -> str:
    return name


def _place_in_model() -> str:
    """The key of a rank's random state: its pipeline stage and tensor-parallel rank."""
    stage, slice_ = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    return f"({stage}, {slice_})"


def _with_rng_by_place(state: dict[str, Any]) -> dict[str, Any]:
    return (
        {**state, "rng_state": {_place_in_model(): state["rng_state"]}}
        if "rng_state" in state
        else dict(state)
    )


def _with_rng_of_file(state: dict[str, Any], metadata: Metadata) -> dict[str, Any]:
    """``state`` with as many random states as the file has for this place; with none where its layout gave none to this rank.

    A run whose data ranks differ takes no fewer and no more than it has itself.
    """
    start = f"rng_state.{_place_in_model()}."
    numbers = {
        key.removeprefix(start).split(".")[0]
        for key in metadata.state_dict_metadata
        if key.startswith(start)
    }
    if "rng_state" not in state or not any(
        key.startswith("rng_state.") for key in metadata.state_dict_metadata
    ):
        return _with_rng_by_place(state)  # the check tells what is missing
    if not numbers or len(state["rng_state"]) not in (1, len(numbers)):
        return {key: value for key, value in state.items() if key != "rng_state"}
    return _with_rng_by_place(
        {**state, "rng_state": [copy.deepcopy(state["rng_state"][0]) for _ in numbers]}
    )


def named_parameters(model: list[FullyShardedDataParallel]) -> dict[str, torch.nn.Parameter]:
    """The optimizer's parameters on this rank by their names, which are global."""
    return {name: parameter for chunk in model for name, parameter in chunk.named_parameters()}


def model_entries(
    args: argparse.Namespace, model: list[FullyShardedDataParallel], in_file: NameInFile = _as_it_is
) -> dict[str, torch.Tensor]:
    """``module.<name>`` -> main weight or buffer of this pipeline stage, sharing storage with the model."""
    entries: dict[str, torch.Tensor] = {}
    for key, value in (
        item for chunk in model for item in chunk.module.state_dict(keep_vars=True).items()
    ):
        if key.endswith("_extra_state") or not _is_stored(args, key):
            continue
        sharded = getattr(value, "_fsdp_sharded", None)
        if sharded is None:
            entries[MODEL_PREFIX + in_file(plain_name(key))] = value
            continue
        names = entry_names(in_file(plain_name(key)), args.swiglu)
        for name, piece in zip(names, sharded.checkpoint_tensors(len(names))):
            entries[MODEL_PREFIX + name] = piece
    return entries


def optimizer_entries(
    args: argparse.Namespace,
    model: list[FullyShardedDataParallel],
    optimizer: MegatronOptimizer,
    prefix: str,
    in_file: NameInFile = _as_it_is,
) -> dict[str, dict[str, Any]]:
    """State and group fields by name, under the wrapper prefix ``prefix``; tensors share storage with the optimizer."""
    raw = optimizer.sharded_state_dict({}, metadata={"distrib_optim_sharding_type": "fsdp_dtensor"})
    parameters = named_parameters(model)
    state: dict[str, dict[str, Any]] = {}
    for wrapped, slots in raw["state"].items():
        if not _is_stored(args, wrapped):
            continue
        names = entry_names(in_file(plain_name(wrapped)), args.swiglu)
        pieces = {
            slot: _pieces(parameters[wrapped], value, len(names)) for slot, value in slots.items()
        }
        for number, name in enumerate(names):
            state[prefix + name] = {slot: values[number] for slot, values in pieces.items()}
    meta = {
        prefix + in_file(plain_name(wrapped)): dict(fields)
        for wrapped, fields in raw["param_to_group_meta"].items()
        if _is_stored(args, wrapped)
    }
    return {"state": state, "param_to_group_meta": meta}


def _is_stored(args: argparse.Namespace, name: str) -> bool:
    """Not the output layer of a tied model, which only some layouts have.

    A last stage that predicts several tokens has the embedding, and Megatron-Core makes a weight
    beside it that nothing uses.
    """
    return args.untie_embeddings_and_output_weights or plain_name(name) != "output_layer.weight"


def _pieces(parameter: torch.nn.Parameter, value: Any, parts: int) -> list[Any]:
    """A slot of the optimizer's state for each entry of its parameter; a step counter is the same for all."""
    if isinstance(value, DTensor):
        return parameter._fsdp_sharded.checkpoint_tensors(parts, value)
    return [value] * parts


def own_prefix(model: list[FullyShardedDataParallel]) -> str:
    """``module.`` once per wrapper of this run."""
    name = next(iter(named_parameters(model)))
    return name.removesuffix(plain_name(name))


def _load_groups(
    model: list[FullyShardedDataParallel],
    optimizer: MegatronOptimizer,
    meta: dict[str, dict[str, Any]],
    in_file: NameInFile,
) -> None:
    """Give every param group the fields that its parameters had."""
    fields_of = {plain_name(name): without_layout(fields) for name, fields in meta.items()}
    name_of = {
        parameter: in_file(plain_name(name)) for name, parameter in named_parameters(model).items()
    }
    divided = []
    for group in optimizer.param_groups:
        names = [name_of[parameter] for parameter in group["params"]]
        fields = [fields_of[name] for name in names if name in fields_of]
        divided += [name for name in names if name in fields_of and fields_of[name] != fields[0]]
        group.update(fields[0] if fields else {})
    divided = agree(divided)
    if divided:
        raise ValueError(
            "the checkpoint's param groups are divided otherwise than this run's (--no-load-optim"
            f" skips them): {some(divided)} had other settings than the rest of the group"
        )


def _drop_absent_groups(meta: dict[str, dict[str, Any]], metadata: Metadata) -> None:
    """In a partial load, parameters that the file does not know take the fields of those it does."""
    for name, fields in list(meta.items()):
        if not any(
            f"{META_PREFIX}{name}.{field}" in metadata.state_dict_metadata for field in fields
        ):
            del meta[name]


def _fit_padding(
    args: argparse.Namespace, content: dict[str, Any], metadata: Metadata, source: Path
) -> None:
    """Where file and model have other numbers of rows beyond the vocabulary, let the entries of ``content`` say the file's.

    What they ask for are still the rows of this rank. Those that the file does not have are not
    read, and stay as they are.
    """
    padded = [
        item for item in _vocabulary_entries(content, metadata) if item.rows != item.rows_in_file
    ]
    if not agree(item.name for item in padded):
        return
    saved_args = _saved_args(source)
    for item in padded:
        vocabulary = max(
            _least_vocabulary(args, item.rows), _least_vocabulary(saved_args, item.rows_in_file)
        )
        if vocabulary <= min(item.rows, item.rows_in_file):
            value = item.entries[item.name]
            shape = (item.rows_in_file, *value.shape[1:])
            item.entries[item.name] = dtensor_over(
                value._local_tensor, value.device_mesh, value.placements, shape
            )


class VocabularyEntry(NamedTuple):
    """An entry with one row a token: where it is, and how many rows the model and the file have."""

    entries: dict[str, DTensor]
    name: str
    rows: int
    rows_in_file: int


def _vocabulary_entries(content: dict[str, Any], metadata: Metadata) -> Iterator[VocabularyEntry]:
    places = [
        ("model.", content["model"], name)
        for name in content["model"]
        if plain_name(name) in VOCABULARY
    ]
    for name, slots in content.get("optimizer", {}).get("state", {}).items():
        if plain_name(name) in VOCABULARY:
            places += [(f"{STATE_PREFIX}{name}.", slots, slot) for slot in slots]
    for start, entries, name in places:
        stored = metadata.state_dict_metadata.get(start + name)
        if isinstance(stored, TensorStorageMetadata) and isinstance(entries[name], DTensor):
            yield VocabularyEntry(entries, name, entries[name].shape[0], stored.size[0])


def _least_vocabulary(args: argparse.Namespace | None, rows: int) -> int:
    """The smallest vocabulary for which a run with ``args`` would make ``rows`` rows; all of them where nothing is known."""
    size = getattr(args, "vocab_size", None)
    if size is not None:
        return size + (
            args.tokenizer_type == "NullTokenizer"
        )  # which has an end of document beyond it
    multiple = getattr(args, "make_vocab_size_divisible_by", 1) * getattr(
        args, "tensor_model_parallel_size", 1
    )
    return rows - multiple + 1


def _saved_args(source: Path) -> argparse.Namespace | None:
    """The arguments of the run that wrote ``source``; a collective."""
    content = {"args": None}
    _read(content, source)
    return content["args"]


def _check(
    args: argparse.Namespace, content: dict[str, Any], metadata: Metadata, source: Path
) -> None:
    """Compare what will be asked for on any rank with what there is, before anything is overwritten; a collective."""
    asked, _ = flatten_state_dict(content)
    have = metadata.state_dict_metadata
    missing = agree(key for key in asked if key not in have)
    shapes = agree(
        f"{key}: {tuple(have[key].size)} in the file, {tuple(value.shape)} in the model"
        for key, value in asked.items()
        if isinstance(value, torch.Tensor)
        and isinstance(have.get(key), TensorStorageMetadata)
        and have[key].size != value.shape
    )
    ours = ("model.", STATE_PREFIX) if "optimizer" in content else ("model.",)
    unexpected = _asked_nowhere([key for key in sorted(have) if key.startswith(ours)], asked)
    problems = [f"other shapes: {some(shapes)}"] if shapes else []
    if args.strict_fsdp_dtensor_load:
        problems += [f"not in the file: {some(missing)}"] if missing else []
        problems += [f"not in the model: {some(unexpected)}"] if unexpected else []
    if problems:
        hint = ""
        if any(key.startswith("rng_state") for key in missing) or any(
            line.startswith("rng_state") for line in shapes
        ):
            hint += (
                "\nThe random state does not fit this machine or layout: --no-load-rng skips it."
            )
        if any(key.startswith(("optimizer.", "opt_param_scheduler.")) for key in missing):
            hint += (
                "\nSome of the optimizer's state is not there: --no-load-optim loads weights"
                " without it."
            )
        raise ValueError(
            f"{source} is a checkpoint of another model or run:\n  " + "\n  ".join(problems) + hint
        )


def _asked_nowhere(keys: list[str], asked: dict[str, Any]) -> list[str]:
    """Those of ``keys``, the same on every rank, that no rank asks for: other stages and expert ranks have other entries."""
    # One number a key: the keys themselves, from every rank, would be too many.
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    somewhere = torch.tensor([key in asked for key in keys], dtype=torch.uint8, device=device)
    dist.all_reduce(somewhere, op=dist.ReduceOp.MAX)
    return [key for key, found in zip(keys, somewhere.tolist()) if not found]


def _read(content: dict[str, Any], source: Path) -> None:
    """Fill ``content`` with what the file has of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's checkpoint uses names that torch deprecates
        dcp.load(
            content, storage_reader=SafeReader(source), planner=SafePlanner(allow_partial_load=True)
        )
