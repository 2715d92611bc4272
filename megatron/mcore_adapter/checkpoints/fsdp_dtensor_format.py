# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of runs with --use-megatron-fsdp: fsdp_dtensor, by torch.distributed.checkpoint."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import STORAGE_TYPES
from torch.distributed.checkpoint.state_dict_loader import load as load_entries
from torch.distributed.checkpoint.state_dict_saver import save as save_entries
from torch.distributed.checkpoint.storage import StorageReader

from megatron.checkpoint.commands.formats import FSDP_DTENSOR
from megatron.checkpoint.core.listing import some
from megatron.checkpoint.core.spelling import canonical_name, plain_name
from megatron.checkpoint.core.training_state import MOMENTS
from megatron.checkpoint.dcp.safe_loading import SafePlanner, SafeReader
from megatron.checkpoint.dcp.save_planner import EvenPlanner, PlanReuse
from megatron.checkpoint.dcp.signing_writer import SigningWriter
from megatron.checkpoint.fsdp_dtensor.keys import (
    EXTRA_STATE,
    MODEL_PREFIX,
    STATE_PREFIX,
    names_in_file,
    wrapper_prefix,
)
from megatron.fsdp.dtensor.sharded_param import is_linked, sharded_param_of
from megatron.fsdp.engine.collectives import agree
from megatron.mcore_adapter import FullyShardedDataParallel
from megatron.mcore_adapter.checkpoint_entries import (
    Settings,
    drop_absent_settings,
    entries_of,
    extra_states,
    has_loss_scaler,
    load_own_state,
    named_parameters,
    scales_to_load,
    settings_of_group,
    sharded_params,
    state_entries,
)
from megatron.mcore_adapter.checkpoints.checkpoint_format import (
    attempt,
    collector_paused,
    tell_of_partial_load,
    without_warnings,
)
from megatron.mcore_adapter.checkpoints.converted_source import (
    ask_for_momentum,
    format_of,
    open_converted,
    take_momentum,
)
from megatron.mcore_adapter.checkpoints.vocabulary_padding import VocabularyArguments, fit_padding
from megatron.mcore_adapter.file_differences import FileDifferences
from megatron.mcore_adapter.run.first_rank import Say
from megatron.mcore_adapter.run.run_state import TrainedParts

Model = list[FullyShardedDataParallel]
"""The chunks of this pipeline stage."""


class FsdpDtensorFormat:
    """The format fsdp_dtensor, which every run with FSDP loads, and into which it converts others.

    With --ckpt-assume-constant-structure the plan of the save before is used again.
    """

    def __init__(self) -> None:
        self._plans = PlanReuse()

    @collector_paused()
    def collect(
        self, args: argparse.Namespace, state: dict[str, Any], parts: TrainedParts
    ) -> dict[str, Any]:
        """Return the content of a checkpoint, by the keys of the file."""
        model, optimizer, names = parts.model, parts.optimizer, EntryNames.of(args)
        entries = {**model_entries(model, names), **extra_states(model, names.name)}
        content = {**_with_rng_by_stage(state), "model": entries}
        if optimizer is not None:
            prefix = own_prefix(model)
            content["optimizer"] = optimizer_entries(model, optimizer, prefix, names)
            if optimizer.grad_scaler is not None:
                content["grad_scaler"] = optimizer.grad_scaler.state_dict()
        return content

    def write(self, args: argparse.Namespace, content: dict[str, Any], target: Path) -> list[str]:
        """Write content into the directory ``target``, and sign it; return all ranks' problems."""
        return self._save(args, content, SigningWriter(target), EvenPlanner)

    @collector_paused()
    def _save(
        self,
        args: argparse.Namespace,
        content: dict[str, Any],
        writer: SigningWriter,
        new_planner: Callable[..., EvenPlanner],
    ) -> list[str]:
        """Write content by torch.distributed.checkpoint; return the problems of all ranks.

        Args:
            args: arguments of the run. Without ``ckpt_fully_parallel_save`` the first rank that has
                an entry writes it, instead of any.
            content: entries of this rank, as the planner takes them.
            writer: writer of the files.
            new_planner: maker of the planner; takes the arguments ``reuse`` and ``spreads``.
        """
        reuse = self._plans if args.ckpt_assume_constant_structure else None
        planner = new_planner(reuse=reuse, spreads=args.ckpt_fully_parallel_save)
        with without_warnings():
            problems = attempt(
                lambda: save_entries(content, storage_writer=writer, planner=planner)
            )
        if problems:
            self._plans.forget()
        return problems

    @collector_paused()
    def load(
        self,
        args: argparse.Namespace,
        state: dict[str, Any],
        parts: TrainedParts,
        source: Path,
        say: Say,
    ) -> dict[str, Any]:
        """Load a checkpoint of any format into the model, the optimizer and a copy of ``state``.

        Raises:
            ValueError: on every rank, listing the entries that are missing on any rank or of
                another shape, unless partial loads are allowed; before anything is overwritten.
        """
        model, optimizer = parts.model, parts.optimizer
        reader: StorageReader = SafeReader(source)
        if format_of(source) != FSDP_DTENSOR:
            reader = open_converted(source, args, say)
        stored = _read_metadata(reader)
        names = EntryNames.of(args, names_in_file(stored))
        content: dict[str, Any] = {
            **_with_rng_of_file(state, stored),
            "model": model_entries(model, names),
        }
        content["model"].update(scales_to_load(args, model, names.name, stored))
        del content["checkpoint_version"]
        if "num_floating_point_operations_so_far" not in stored:
            del content["num_floating_point_operations_so_far"]
        changed: dict[str, dict[str, Any]] = {}
        if optimizer is not None:
            prefix = wrapper_prefix(stored, map(names.name, named_parameters(model)))
            prefix = own_prefix(model) if prefix is None else prefix
            content["optimizer"] = optimizer_entries(model, optimizer, prefix, names)
            changed = ask_for_momentum(content["optimizer"], stored, names.gated)
            if optimizer.grad_scaler is not None and has_loss_scaler(stored):
                content["grad_scaler"] = optimizer.grad_scaler.state_dict()
        fit_padding(
            content,
            stored,
            VocabularyArguments.of(args),
            lambda: VocabularyArguments.of(_read_args(reader)),
        )
        unused = [f"{STATE_PREFIX}{name}.{MOMENTS[1]}" for name in changed]
        _check(content, stored, source, None if args.strict_fsdp_dtensor_load else say, unused)
        if optimizer is not None:
            drop_absent_settings(content["optimizer"]["param_to_group_meta"], stored)
        _read(content, reader)
        # Weights and moments were read in place. Values derived from them remain to be updated.
        for chunk in model:
            load_own_state(chunk, lambda key: content["model"].get(MODEL_PREFIX + names.name(key)))
        if optimizer is not None:
            _load_settings(model, optimizer, content["optimizer"]["param_to_group_meta"], names)
            take_momentum(changed, optimizer, content, say)
            if "grad_scaler" in content:
                optimizer.grad_scaler.load_state_dict(content["grad_scaler"])
        if "rng_state" in content:
            content["rng_state"] = content["rng_state"][_rng_key()]
        return content


# ---- entries of the model and the optimizer


@dataclass(frozen=True)
class EntryNames:
    """The names under which a file has the parameters of a model.

    Args:
        gated: the MLPs are gated, and the file stores the halves of their weights.
        is_tied: the output layer has the weight of the embedding, and none of its own in the file.
        in_file: canonical name -> name in the file. Transformer Engine's layers call some
            parameters by other names than local ones.
    """

    gated: bool
    is_tied: bool
    in_file: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, args: argparse.Namespace, in_file: Mapping[str, str] | None = None) -> EntryNames:
        """Return the names for the model of ``args``."""
        return cls(args.swiglu, not args.untie_embeddings_and_output_weights, in_file or {})

    def name(self, own: str) -> str:
        """Return the name in the file of a parameter or buffer that the model calls ``own``."""
        plain = plain_name(own)
        return self.in_file.get(canonical_name(plain), plain)

    def is_stored(self, own: str) -> bool:
        """Return True if the file has the parameter or buffer that the model calls ``own``.

        A last stage that predicts several tokens has the embedding, and Megatron-Core makes a
        weight of the output layer beside it that nothing uses. Other layouts do not have it.
        """
        return not (self.is_tied and plain_name(own) == "output_layer.weight")


def model_entries(model: Model, names: EntryNames) -> dict[str, Any]:
    """Return main weights and buffers of this stage by the file's names, ``module.<name>``."""
    entries: dict[str, Any] = {}
    for chunk in model:
        for key, value in chunk.module.state_dict(keep_vars=True).items():
            if key.endswith(EXTRA_STATE) or not names.is_stored(key):
                continue
            sharded = sharded_param_of(value) if is_linked(value) else None
            name = MODEL_PREFIX + names.name(key)
            if sharded is None:
                entries[name] = value
            else:
                entries.update(entries_of(name, value, sharded, names.gated))
    return entries


def optimizer_entries(
    model: Model, optimizer: MegatronOptimizer, prefix: str, names: EntryNames
) -> dict[str, dict[str, Any]]:
    """Return state and settings of the optimizer's parameters by the file's names.

    ``prefix`` is one ``module.`` for each wrapper of the run that writes, or wrote, the file.
    """
    raw = optimizer.sharded_state_dict({}, metadata={"distrib_optim_sharding_type": "fsdp_dtensor"})

    def name_in_file(wrapped: str) -> str:
        return prefix + names.name(wrapped)

    stored = {name: slots for name, slots in raw["state"].items() if names.is_stored(name)}
    settings = {}
    for wrapped, fields in raw["param_to_group_meta"].items():
        if names.is_stored(wrapped):
            settings[name_in_file(wrapped)] = dict(fields)
    state = state_entries(stored, sharded_params(model), name_in_file, names.gated)
    return {"state": state, "param_to_group_meta": settings}


def own_prefix(model: Model) -> str:
    """Return ``module.`` once for each wrapper of this run."""
    name = next(iter(named_parameters(model)))
    return name.removesuffix(plain_name(name))


def _load_settings(
    model: Model, optimizer: MegatronOptimizer, saved: dict[str, Settings], names: EntryNames
) -> None:
    """Give every param group the settings that its parameters had.

    Raises:
        ValueError: on every rank, if parameters of one group had different ones.
    """
    saved = {plain_name(name): settings for name, settings in saved.items()}
    own_names: dict[nn.Parameter, str] = {}
    for name, parameter in named_parameters(model).items():
        own_names[parameter] = names.name(name)
    divided = []
    for group in optimizer.param_groups:
        members = [own_names[parameter] for parameter in group["params"]]
        settings, _, different = settings_of_group(members, saved)
        divided += different
        group.update(settings)
    divided = agree(divided)
    if divided:
        raise ValueError(
            "the checkpoint's param groups are divided otherwise than this run's (--no-load-optim"
            f" skips them): {some(divided)} had other settings than the rest of the group"
        )


# ---- random state


def _rng_key() -> str:
    """Return the key of this rank's random state: its pipeline stage and tensor-parallel rank."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    return f"({stage}, {tensor_rank})"


def _with_rng_by_stage(state: dict[str, Any]) -> dict[str, Any]:
    """Copy ``state`` with the random states, if it has any, under the key of this rank."""
    if "rng_state" not in state:
        return dict(state)
    return {**state, "rng_state": {_rng_key(): state["rng_state"]}}


def _with_rng_of_file(state: dict[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Copy ``state`` with as many random states as the file has for this rank.

    It has none if the file has none for this rank, or if the states of data ranks differ and the
    file has another number of them than this run.
    """
    start = f"rng_state.{_rng_key()}."
    own = {key.removeprefix(start) for key in stored if key.startswith(start)}
    ranks = {key.split(".")[0] for key in own}
    file_has_any = any(key.startswith("rng_state.") for key in stored)
    if "rng_state" not in state or not file_has_any:
        return _with_rng_by_stage(state)  # the check reports missing entries
    if not ranks or len(state["rng_state"]) not in (1, len(ranks)):
        return {key: value for key, value in state.items() if key != "rng_state"}
    first = state["rng_state"][0]
    return _with_rng_by_stage({**state, "rng_state": [copy.deepcopy(first) for _ in ranks]})


# ---- the file


def _read_metadata(reader: StorageReader) -> dict[str, STORAGE_TYPES]:
    """Read the metadata of the file's entries, by key; a collective.

    Raises:
        ValueError: on every rank, if it is damaged for any.
    """
    stored: dict[str, STORAGE_TYPES] = {}
    damage = []
    try:
        stored = reader.read_metadata().state_dict_metadata
    except ValueError as error:
        damage = [str(error)]
    damage = agree(damage)
    if damage:
        raise ValueError("\n".join(damage))
    return stored


def _read(content: dict[str, Any], reader: StorageReader) -> None:
    """Read the entries of ``content`` from the file, in place; a collective."""
    with without_warnings():
        load_entries(content, storage_reader=reader, planner=SafePlanner(allow_partial_load=True))


def _read_args(reader: StorageReader) -> argparse.Namespace | None:
    """Read the arguments of the run that wrote the file; a collective."""
    content: dict[str, argparse.Namespace | None] = {"args": None}
    _read(content, reader)
    return content["args"]


def _check(
    content: dict[str, Any],
    stored: Mapping[str, STORAGE_TYPES],
    source: Path,
    say: Say | None,
    unused: Iterable[str],
) -> None:
    """Compare the entries that all ranks ask for with those of the file; a collective.

    ``say`` allows a partial load, and tells what it leaves out. The file may have ``unused`` too.
    """
    asked, _ = flatten_state_dict(content)
    own = FileDifferences.between(asked, stored, "in the model")
    differences = FileDifferences(agree(own.shapes), agree(own.missing))
    starts = ("model.", STATE_PREFIX) if "optimizer" in content else ("model.",)
    # Fused optimizers count steps by group, and runs of another precision have no use for scales.
    needless = (EXTRA_STATE, ".step")
    keys = [key for key in sorted(stored) if key.startswith(starts) and not key.endswith(needless)]
    unexpected = _asked_nowhere(keys, asked.keys() | unused)
    if say is not None:
        problems = differences.problems(is_partial=True)
    else:
        problems = differences.problems()
        problems += [f"not in the model: {some(unexpected)}"] if unexpected else []
    if problems:
        raise ValueError(
            f"{source} is a checkpoint of another model or run:\n  "
            + "\n  ".join(problems)
            + _hints(differences)
        )
    if say is not None:
        used = set(keys).difference(unexpected)
        fits = any(key.startswith("model.") for key in used)
        tell_of_partial_load(source, differences.missing, unexpected, fits, say)


def _hints(differences: FileDifferences) -> str:
    """Name the flags that leave out the entries that do not fit."""
    hints = ""
    if differences.concern_random_state:
        hints += "\nThe random state does not fit this machine or layout: --no-load-rng skips it."
    of_optimizer = ("optimizer.", "opt_param_scheduler.")
    if any(key.startswith(of_optimizer) for key in differences.missing):
        hints += "\nSome of the optimizer's state is not there: --no-load-optim loads weights"
        hints += " without it."
    return hints


def _asked_nowhere(keys: list[str], asked: Container[str]) -> list[str]:
    """List those of ``keys`` that no rank asks for; a collective.

    Other stages and expert ranks have other entries.

    Args:
        keys: the same on every rank.
        asked: the keys of the entries that this rank asks for.
    """
    # One number a key: the keys themselves, from every rank, would be too many.
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    somewhere = torch.tensor([key in asked for key in keys], dtype=torch.uint8, device=device)
    dist.all_reduce(somewhere, op=dist.ReduceOp.MAX)
    return [key for key, found in zip(keys, somewhere.tolist()) if not found]
