# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of runs with --use-megatron-fsdp: fsdp_dtensor, by torch.distributed.checkpoint."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
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
    report_partial_load,
    without_warnings,
)
from megatron.mcore_adapter.checkpoints.converted_source import (
    ask_for_momentum,
    format_of,
    open_converted,
    take_momentum,
)
from megatron.mcore_adapter.checkpoints.saved_state import StateDict
from megatron.mcore_adapter.checkpoints.vocabulary_padding import VocabularyArguments, fit_padding
from megatron.mcore_adapter.file_differences import FileDifferences
from megatron.mcore_adapter.run.first_rank import Log
from megatron.mcore_adapter.run.run_state import TrainedParts

Model = list[FullyShardedDataParallel]
"""The model chunks of this pipeline stage."""
SETTINGS = "param_to_group_meta"
"""Key of the optimizer's entry with the settings of each parameter."""
OPERATIONS = "num_floating_point_operations_so_far"
"""Key of the number of operations, which some files lack."""


class FsdpDtensorFormat:
    """The format fsdp_dtensor of runs with FSDP, which also load other formats as if converted.

    With --ckpt-assume-constant-structure a save uses the plan of the save before again.
    """

    def __init__(self) -> None:
        self._plans = PlanReuse()

    @collector_paused()
    def collect(
        self,
        args: argparse.Namespace,
        state: StateDict,
        parts: TrainedParts,
    ) -> StateDict:
        """Return the content of a checkpoint, nested by the keys of the file.

        Args:
            args: arguments of the run.
            state: everything but weights and optimizer; copied.
            parts: model, and the optimizer if its state is saved; the tensors share their storage.
        """
        model = parts.model
        optimizer = parts.optimizer
        names = EntryNames.of(args)
        content = _with_rng_by_stage(state)
        content["model"] = model_entries(model, names)
        content["model"].update(extra_states(model, names.name))
        if optimizer is not None:
            prefix = own_prefix(model)
            content["optimizer"] = optimizer_entries(model, optimizer, prefix, names)
            if optimizer.grad_scaler is not None:
                content["grad_scaler"] = optimizer.grad_scaler.state_dict()
        return content

    def write(
        self,
        args: argparse.Namespace,
        content: StateDict,
        target: Path,
    ) -> list[str]:
        """Write content into a directory, and sign it.

        Args:
            args: arguments of the run.
            content: result of :meth:`collect`, or a copy of it.
            target: empty directory, the same on all ranks.

        Returns:
            The problems of all ranks, the same on every rank.
        """
        return self._save(args, content, SigningWriter(target), EvenPlanner)

    @collector_paused()
    def _save(
        self,
        args: argparse.Namespace,
        content: StateDict,
        writer: SigningWriter,
        new_planner: Callable[..., EvenPlanner],
    ) -> list[str]:
        """Write content by torch.distributed.checkpoint; return the problems of all ranks.

        Args:
            args: arguments of the run. With ``ckpt_fully_parallel_save`` ranks that have the same
                entries share their writing; otherwise the first of these ranks writes them.
            content: entries of this rank; empty if the planner has them.
            writer: writer of the files.
            new_planner: constructor of the planner, with the arguments ``reuse`` and ``spreads``.
        """
        plans = None
        if args.ckpt_assume_constant_structure:
            plans = self._plans
        planner = new_planner(reuse=plans, spreads=args.ckpt_fully_parallel_save)
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
        state: StateDict,
        parts: TrainedParts,
        source: Path,
        log: Log,
    ) -> StateDict:
        """Load a checkpoint of any format into model and optimizer; return all of its content.

        Args:
            args: arguments of the run. Without ``strict_fsdp_dtensor_load`` entries may be missing,
                and the file may have more.
            state: everything but weights and optimizer, as a run without a checkpoint has it.
            parts: model, and the optimizer if its state is loaded.
            source: directory of the checkpoint.
            log: prints a line on the first rank.

        Raises:
            ValueError: on every rank, before anything is overwritten, with the entries that are
                missing on any rank or have another shape.
        """
        optimizer = parts.optimizer
        reader: StorageReader = SafeReader(source)
        if format_of(source) != FSDP_DTENSOR:
            reader = open_converted(source, args, log)
        stored = _read_metadata(reader)
        names = EntryNames.of(args, names_in_file(stored))
        content = _content_to_load(
            args=args,
            state=state,
            parts=parts,
            stored=stored,
            names=names,
        )
        changed: dict[str, StateDict] = {}
        if optimizer is not None:
            changed = ask_for_momentum(content["optimizer"], stored, names.gated)
        fit_padding(content, stored, VocabularyArguments.of(args), partial(_vocabulary_of, reader))
        _check(
            content=content,
            stored=stored,
            source=source,
            log=None if args.strict_fsdp_dtensor_load else log,
            unused=[f"{STATE_PREFIX}{name}.{MOMENTS[1]}" for name in changed],
        )
        if optimizer is not None:
            drop_absent_settings(content["optimizer"][SETTINGS], stored)
        _read(content, reader)
        # Weights and moments were read in place. Values derived from them are updated here.
        _load_own_states(parts.model, content["model"], names)
        if optimizer is not None:
            _load_settings(parts.model, optimizer, content["optimizer"][SETTINGS], names)
            take_momentum(changed, optimizer, content, log)
            if "grad_scaler" in content:
                optimizer.grad_scaler.load_state_dict(content["grad_scaler"])
        if "rng_state" in content:
            content["rng_state"] = content["rng_state"][_rng_key()]
        return content


def _vocabulary_of(reader: StorageReader) -> VocabularyArguments:
    return VocabularyArguments.of(_read_args(reader))


def _load_own_states(
    model: Model,
    entries: StateDict,
    names: EntryNames,
) -> None:
    """Update what modules of the model derive from their weights, after these were read."""

    def value_of(key: str) -> Any:
        return entries.get(MODEL_PREFIX + names.name(key))

    for chunk in model:
        load_own_state(chunk, value_of)


def _content_to_load(
    args: argparse.Namespace,
    state: StateDict,
    parts: TrainedParts,
    stored: Mapping[str, STORAGE_TYPES],
    names: EntryNames,
) -> StateDict:
    """Return the entries that this rank requests from a file, nested by the keys of the file.

    Args:
        args: arguments of the run.
        state: everything but weights and optimizer; copied.
        parts: model, and the optimizer if its state is loaded; the tensors share their storage.
        stored: metadata of the file's entries, by key.
        names: names of parameters in the file.
    """
    model = parts.model
    optimizer = parts.optimizer
    content = _with_rng_of_file(state, stored)
    del content["checkpoint_version"]
    if OPERATIONS not in stored:
        del content[OPERATIONS]
    content["model"] = model_entries(model, names)
    scales = scales_to_load(args, model, names.name, stored)
    content["model"].update(scales)
    if optimizer is not None:
        own_names = [names.name(name) for name in named_parameters(model)]
        prefix = wrapper_prefix(stored, own_names)
        if prefix is None:
            prefix = own_prefix(model)
        content["optimizer"] = optimizer_entries(model, optimizer, prefix, names)
        if optimizer.grad_scaler is not None and has_loss_scaler(stored):
            content["grad_scaler"] = optimizer.grad_scaler.state_dict()
    return content


# ---- entries of the model and the optimizer


@dataclass(frozen=True)
class EntryNames:
    """The names of a model's parameters in a file.

    Attributes:
        gated: True if the MLPs are gated: the file stores the halves of their weights.
        is_tied: True if the output layer uses the weight of the embedding: the file has no other.
        in_file: canonical name -> name in the file, for those that differ. Some parameters of
            Transformer Engine's layers have other names than those of local layers.
    """

    gated: bool
    is_tied: bool
    in_file: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, args: argparse.Namespace, in_file: Mapping[str, str] | None = None) -> EntryNames:
        """Return the names for the model of ``args``, in a new file if ``in_file`` is None."""
        return cls(
            gated=args.swiglu,
            is_tied=not args.untie_embeddings_and_output_weights,
            in_file=in_file or {},
        )

    def name(self, own: str) -> str:
        """Return the name in the file of a parameter or buffer that the model calls ``own``."""
        plain = plain_name(own)
        return self.in_file.get(canonical_name(plain), plain)

    def is_stored(self, own: str) -> bool:
        """Return True if the file has the parameter or buffer that the model calls ``own``.

        A last stage that predicts several tokens has the embedding, and Megatron-Core makes a
        further weight of the output layer that nothing uses. Other layouts do not have it.
        """
        return not (self.is_tied and plain_name(own) == "output_layer.weight")


def model_entries(model: Model, names: EntryNames) -> StateDict:
    """Return main weights and buffers of this stage by the file's names, ``module.<name>``."""
    entries: StateDict = {}
    for chunk in model:
        for key, value in chunk.module.state_dict(keep_vars=True).items():
            if key.endswith(EXTRA_STATE) or not names.is_stored(key):
                continue
            name = MODEL_PREFIX + names.name(key)
            if is_linked(value):
                sharded = sharded_param_of(value)
                entries.update(entries_of(name, value, sharded, names.gated))
            else:
                entries[name] = value
    return entries


def optimizer_entries(
    model: Model,
    optimizer: MegatronOptimizer,
    prefix: str,
    names: EntryNames,
) -> dict[str, StateDict]:
    """Return state and settings of the optimizer's parameters by the file's names.

    Args:
        model: chunks of this stage.
        optimizer: the optimizer, whose tensors share storage with the result.
        prefix: ``module.`` once for each wrapper of the run that writes, or wrote, the file.
        names: names of parameters in the file.
    """
    raw = optimizer.sharded_state_dict({}, metadata={"distrib_optim_sharding_type": "fsdp_dtensor"})

    def name_in_file(wrapped: str) -> str:
        return prefix + names.name(wrapped)

    stored = {}
    for name, slots in raw["state"].items():
        if names.is_stored(name):
            stored[name] = slots
    settings = {}
    for wrapped, fields in raw[SETTINGS].items():
        if names.is_stored(wrapped):
            settings[name_in_file(wrapped)] = dict(fields)
    state = state_entries(stored, sharded_params(model), name_in_file, names.gated)
    return {"state": state, SETTINGS: settings}


def own_prefix(model: Model) -> str:
    """Return ``module.`` once for each wrapper of this run."""
    name = next(iter(named_parameters(model)))
    return name.removesuffix(plain_name(name))


def _load_settings(
    model: Model,
    optimizer: MegatronOptimizer,
    saved: dict[str, Settings],
    names: EntryNames,
) -> None:
    """Set every param group to the settings that its parameters have in the file.

    Args:
        model: chunks of this stage.
        optimizer: the optimizer, whose param groups are changed.
        saved: settings by the names in the file.
        names: names of parameters in the file.

    Raises:
        ValueError: on every rank, if parameters of one group have different settings.
    """
    saved = {plain_name(name): settings for name, settings in saved.items()}
    own_names: dict[nn.Parameter, str] = {}
    for name, parameter in named_parameters(model).items():
        own_names[parameter] = names.name(name)
    deviating: list[str] = []
    for group in optimizer.param_groups:
        members = [own_names[parameter] for parameter in group["params"]]
        settings, _, of_group = settings_of_group(members, saved)
        deviating += of_group
        group.update(settings)
    deviating = agree(deviating)
    if deviating:
        raise ValueError(
            "the checkpoint's param groups are divided otherwise than this run's (--no-load-optim"
            f" skips them): {some(deviating)} had other settings than the rest of the group"
        )


# ---- random state


def _rng_key() -> str:
    """Return the key of this rank's random state: its pipeline stage and tensor-parallel rank."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    return f"({stage}, {tensor_rank})"


def _with_rng_by_stage(state: StateDict) -> StateDict:
    """Copy ``state`` with the random states, if it has any, under the key of this rank."""
    result = dict(state)
    if "rng_state" in state:
        result["rng_state"] = {_rng_key(): state["rng_state"]}
    return result


def _with_rng_of_file(state: StateDict, stored: Mapping[str, Any]) -> StateDict:
    """Copy ``state`` with as many random states as the file has for this rank.

    The copy has none if the file has none for this rank, or if the states of data ranks differ and
    the file has another number of them than this run.
    """
    state = dict(state)
    has_stored_state = any(key.startswith("rng_state.") for key in stored)
    if "rng_state" in state and has_stored_state:
        own_states = state.pop("rng_state")
        prefix = f"rng_state.{_rng_key()}."
        data_ranks = set()
        for key in stored:
            if key.startswith(prefix):
                data_rank, _, _ = key.removeprefix(prefix).partition(".")
                data_ranks.add(data_rank)
        if data_ranks and len(own_states) in (1, len(data_ranks)):
            state["rng_state"] = [copy.deepcopy(own_states[0]) for _ in data_ranks]
    return _with_rng_by_stage(state)  # the check reports missing entries


# ---- the file


def _read_metadata(reader: StorageReader) -> dict[str, STORAGE_TYPES]:
    """Read the metadata of the file's entries, by key; a collective.

    Raises:
        ValueError: on every rank, if any rank finds it damaged.
    """
    stored: dict[str, STORAGE_TYPES] = {}
    problems = []
    try:
        stored = reader.read_metadata().state_dict_metadata
    except ValueError as error:
        problems = [str(error)]
    problems = agree(problems)
    if problems:
        raise ValueError("\n".join(problems))
    return stored


def _read(content: StateDict, reader: StorageReader) -> None:
    """Read the entries of ``content`` from the file, in place; a collective."""
    with without_warnings():
        load_entries(content, storage_reader=reader, planner=SafePlanner(allow_partial_load=True))


def _read_args(reader: StorageReader) -> argparse.Namespace | None:
    """Read the arguments of the run that wrote the file; a collective."""
    content: dict[str, argparse.Namespace | None] = {"args": None}
    _read(content, reader)
    return content["args"]


def _check(
    content: StateDict,
    stored: Mapping[str, STORAGE_TYPES],
    source: Path,
    log: Log | None,
    unused: Iterable[str],
) -> None:
    """Compare the entries that all ranks request with those of the file; a collective.

    Args:
        content: nested state that will be loaded.
        stored: metadata of the file's entries, by key.
        source: directory of the checkpoint, for messages.
        log: prints the entries that a partial load leaves out; None if all must fit.
        unused: keys of the file that this rank does not request, and that are no differences.

    Raises:
        ValueError: on every rank, if entries do not fit.
    """
    requested, _ = flatten_state_dict(content)
    own = FileDifferences.between(requested, stored, "in the model")
    differences = FileDifferences(agree(own.shapes), agree(own.missing))
    prefixes: tuple[str, ...] = ("model.",)
    if "optimizer" in content:
        prefixes += (STATE_PREFIX,)
    # Fused optimizers count steps by group, and runs of another precision do not use the scales.
    optional = (EXTRA_STATE, ".step")
    keys = []
    for key in sorted(stored):
        if key.startswith(prefixes) and not key.endswith(optional):
            keys.append(key)
    unexpected = _requested_nowhere(keys, requested.keys() | unused)
    problems = differences.problems(is_partial=log is not None)
    if log is None and unexpected:
        problems.append(f"not in the model: {some(unexpected)}")
    if problems:
        raise ValueError(
            f"{source} is a checkpoint of another model or run:\n  "
            + "\n  ".join(problems)
            + _hints(differences)
        )
    if log is not None:
        used = set(keys).difference(unexpected)
        report_partial_load(
            source=source,
            not_in_file=differences.missing,
            not_in_model=unexpected,
            fits=any(key.startswith("model.") for key in used),
            log=log,
        )


def _hints(differences: FileDifferences) -> str:
    """Return lines with the flags that leave out the entries that do not fit."""
    hints = ""
    if differences.concern_random_state:
        hints += "\nThe random state does not fit this machine or layout: --no-load-rng skips it."
    optimizer_prefixes = ("optimizer.", "opt_param_scheduler.")
    if any(key.startswith(optimizer_prefixes) for key in differences.missing):
        hints += "\nSome of the optimizer's state is not there: --no-load-optim loads weights"
        hints += " without it."
    return hints


def _requested_nowhere(keys: list[str], requested: Container[str]) -> list[str]:
    """List those of ``keys`` that no rank requests; a collective.

    Other stages and expert ranks have other entries.

    Args:
        keys: the same on every rank.
        requested: the keys of the entries that this rank requests.
    """
    # One number for each key, since the keys of all ranks would be too many to gather.
    device: torch.device | str | None = "cpu"
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    is_requested = [key in requested for key in keys]
    counts = torch.tensor(is_requested, dtype=torch.uint8, device=device)
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    unrequested = []
    for key, count in zip(keys, counts.tolist()):
        if count == 0:
            unrequested.append(key)
    return unrequested
