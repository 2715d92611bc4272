# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of runs with FSDP in the format torch_dist, which runs without FSDP load.

The optimizer's state has Megatron-Core's layout fully_reshardable, or with Muon the one of an
optimizer that is not distributed. Every rank writes the chunks of its own shards at their positions
in the stacked tensors of the format, without gathering anything.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from megatron.checkpoint.core import key_rules, param_groups
from megatron.checkpoint.core.lazy_tensor import in_memory
from megatron.checkpoint.core.spelling import (
    HALVES,
    Spelling,
    canonical_name,
    expert_number,
    layer_kinds,
    layer_number,
    plain_name,
)
from megatron.checkpoint.core.training_state import TrainingState
from megatron.checkpoint.dcp.dcp_target import Entry, EntryPlanner, ObjectEntry, TensorEntry
from megatron.checkpoint.dcp.save_planner import EvenPlanner
from megatron.checkpoint.dcp.signing_writer import SigningWriter
from megatron.checkpoint.fsdp_dtensor.keys import split_half
from megatron.checkpoint.torch_dist.checkpoint import extra_state_objects, main_slot, other_files
from megatron.fsdp.dtensor.tensor_part import as_chunked_tensor, part_of
from megatron.mcore_adapter.checkpoint_entries import extra_states, sharded_params
from megatron.mcore_adapter.checkpoints.checkpoint_format import attempt
from megatron.mcore_adapter.checkpoints.fsdp_dtensor_format import (
    OPERATIONS,
    SETTINGS,
    EntryNames,
    FsdpDtensorFormat,
    Model,
    model_entries,
    optimizer_entries,
    own_prefix,
)
from megatron.mcore_adapter.checkpoints.saved_state import StateDict
from megatron.mcore_adapter.checkpoints.torch_dist_format import sharded_random_state
from megatron.mcore_adapter.run.optimizer_names import MUON
from megatron.mcore_adapter.run.run_state import TrainedParts


class FsdpTorchDistFormat(FsdpDtensorFormat):
    """The format torch_dist of runs with FSDP; its load is that of :class:`FsdpDtensorFormat`."""

    def collect(
        self,
        args: argparse.Namespace,
        state: StateDict,
        parts: TrainedParts,
    ) -> StateDict:
        """Return the content of a checkpoint.

        Args:
            args: arguments of the run.
            state: everything but weights and optimizer.
            parts: model, and the optimizer if its state is saved; the tensors share their storage.

        Returns:
            ``args``, the ``entries`` of this rank, and on the first rank the ``files`` that have no
            tensors.

        Raises:
            ValueError: on every rank, if the layout has no place for an entry of some rank.
        """
        model = parts.model
        optimizer = parts.optimizer
        names = EntryNames.of(args)
        entries: list[ChunkEntry | ObjectEntry] = []
        slots: dict[str, StateDict] = {}
        settings: dict[str, StateDict] = {}

        def collect_own() -> None:
            weights = _canonical(model_entries(model, names))
            if optimizer is not None:
                of_optimizer = optimizer_entries(model, optimizer, own_prefix(model), names)
                slots.update(_canonical(of_optimizer["state"]))
                settings.update(_canonical(of_optimizer[SETTINGS]))
            layout = StackedLayout.of(args, [split_half(name)[0] for name in weights])
            entries.extend(_random_state(state))
            scales = _canonical(extra_states(model, names.name))
            entries.extend(extra_state_objects(layout.axes_of_names, layout.spelling, scales))
            tensors = _tensors(
                layout=layout,
                weights=weights,
                slots=slots,
                compute_dtypes=_compute_dtypes(model),
                # Not by its param groups: a stage may have only the embedding.
                has_distributed=args.optimizer not in MUON,
            )
            entries.extend(tensors)

        problems = attempt(collect_own)
        if problems:
            raise ValueError("\n".join(problems))
        common = _common_state(state, settings, slots, optimizer)
        makers = other_files(common)
        files = {}
        if dist.get_rank() == 0:
            for name, make in makers.items():
                files[name] = make()
        return {"args": state["args"], "entries": entries, "files": files}

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
        entries = [_lazy(entry) for entry in content["entries"]]
        writer = SigningWriter(target, extra_files=content["files"])
        make_planner = partial(_Planner, entries)
        return self._save(args, {}, writer, make_planner)


class _Planner(EvenPlanner):
    """A planner of entries with flat keys, each of which is read when it is written.

    Args:
        entries: entries of this rank.
        **options: ``reuse`` and ``spreads`` of :class:`EvenPlanner`.
    """

    def __init__(self, entries: list[Entry], **options: Any):
        super().__init__(**options)
        self._entries = EntryPlanner(entries)

    def own_entries(self) -> tuple[list[WriteItem], None]:
        plan = self._entries.create_local_plan()
        return plan.items, None

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._entries.resolve_data(write_item)


@dataclass(frozen=True)
class ChunkEntry:
    """One chunk of a tensor in the file, whose elements are in memory.

    Attributes:
        key: key of the tensor.
        shape: shape of the whole tensor.
        offsets: start of the chunk, one offset for each dim of ``shape``.
        elements: elements of the chunk, in any dtype; leading dims of size 1 may be missing.
        dtype: dtype of the tensor in the file.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    elements: torch.Tensor
    dtype: torch.dtype


def _lazy(entry: ChunkEntry | ObjectEntry) -> Entry:
    """Return the entry in the form that the planner accepts, converted when it is read."""
    if isinstance(entry, ObjectEntry):
        return entry
    elements = in_memory(entry.elements)
    elements = elements.to(entry.dtype)
    return TensorEntry(entry.key, entry.shape, entry.offsets, elements)


def _canonical(entries: StateDict) -> StateDict:
    """Return entries by canonical names; halves of gated weights keep their suffix."""
    result = {}
    for key, value in entries.items():
        name, half = split_half(plain_name(key))
        result[canonical_name(name) + half] = value
    return result


def _compute_dtypes(model: Model) -> dict[str, torch.dtype]:
    """Return the dtype in which the model computes, by the canonical names of parameters."""
    dtypes = {}
    for name, sharded in sharded_params(model).items():
        dtypes[canonical_name(name)] = sharded.compute.dtype
    return dtypes


# ---- tensors


@dataclass(frozen=True)
class StackedLayout:
    """Keys and shapes of the format's tensors, in which layers and experts are stacked.

    Attributes:
        spelling: spelling of the model's keys.
        axes_of_names: canonical name of a parameter of this rank -> sizes of the leading dims of
            its tensor, one for layers and one for experts if it has them.
    """

    spelling: Spelling
    axes_of_names: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, args: argparse.Namespace, names: list[str]) -> StackedLayout:
        """Return the layout of the model of ``args``, for the parameters of this rank."""
        frequency = args.moe_layer_freq
        are_layers_alike = isinstance(frequency, int) and frequency <= 1
        spelling = Spelling(
            transformer_engine=args.transformer_impl == "transformer_engine",
            grouped_experts=False,  # no key depends on it
            stacked=are_layers_alike,
            layers=layer_kinds(names),
        )
        axes_of_names: dict[str, tuple[int, ...]] = {}
        for name in names:
            axes: tuple[int, ...] = ()
            if are_layers_alike and layer_number(name) is not None:
                axes += (args.num_layers,)
            if expert_number(name) is not None:
                axes += (args.num_experts,)
            axes_of_names[name] = axes
        return cls(spelling, axes_of_names)

    def chunks(
        self,
        entry: str,
        slot: str,
        value: Any,
        dtype: torch.dtype,
    ) -> Iterator[ChunkEntry]:
        """Yield the chunks of a tensor that this rank has.

        Args:
            entry: canonical name of a parameter or buffer, or of one half of it.
            slot: prefix of the key, such as ``optimizer.state.exp_avg.``; empty for the model.
            value: a DTensor over the rank's shard, or a whole tensor.
            dtype: dtype of the tensor in the file.
        """
        name, half = split_half(entry)
        key, index = self.spelling.stacked_key(name)
        shape = tuple(value.shape)
        first_row = 0
        if half:  # the second half of (8, 3) begins at row 8 of (16, 3)
            first_row = shape[0] * HALVES.index(half)
            shape = (2 * shape[0], *shape[1:])
        for offsets, elements in _local_chunks(value):
            if half:
                offsets = (first_row + offsets[0], *offsets[1:])
            yield ChunkEntry(
                key=slot + key,
                shape=(*self.axes_of_names[name], *shape),
                offsets=(*index, *offsets),
                elements=elements,
                dtype=dtype,
            )


def _local_chunks(value: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yield the offsets and the elements of every chunk of a tensor that this rank has."""
    if not isinstance(value, DTensor):
        yield (0,) * value.dim(), value.detach()
        return
    part = part_of(value)
    assert part is not None  # every DTensor of a sharded model has one
    local = as_chunked_tensor(value._local_tensor.detach(), part)
    for offsets, _ in part.chunks:
        index = MetadataIndex("", torch.Size(offsets))
        yield offsets, local.__get_tensor_shard__(index)


def _tensors(
    layout: StackedLayout,
    weights: StateDict,
    slots: dict[str, StateDict],
    compute_dtypes: dict[str, torch.dtype],
    has_distributed: bool,
) -> Iterator[ChunkEntry]:
    """Yield weights in the dtype of the model, main weights and moments.

    Args:
        layout: keys and shapes in the file.
        weights: weights and buffers by canonical names.
        slots: state of the optimizer by canonical names of parameters; empty without an optimizer.
        compute_dtypes: dtypes of parameters in the model, by canonical names.
        has_distributed: True for the state of a distributed optimizer.
    """
    for entry, value in weights.items():
        name, _ = split_half(entry)
        dtype = compute_dtypes.get(name, value.dtype)
        yield from layout.chunks(entry, "", value, dtype)
        if entry in slots:
            main = main_slot(has_distributed, dtype)
            if main:
                prefix = f"optimizer.state.{main}."
                yield from layout.chunks(entry, prefix, value, torch.float32)
    for entry, values in slots.items():
        for slot, value in values.items():
            if slot != "step":
                prefix = f"optimizer.state.{slot}."
                yield from layout.chunks(entry, prefix, value, torch.float32)


# ---- random state and common state


def _random_state(state: StateDict) -> Iterator[ObjectEntry]:
    if "rng_state" in state:
        sharded = sharded_random_state(state["rng_state"])
        if not sharded.replica_id:
            yield ObjectEntry(sharded.unique_key, [sharded.data])


def _common_state(
    state: StateDict,
    settings: dict[str, StateDict],
    slots: dict[str, StateDict],
    optimizer: MegatronOptimizer | None,
) -> TrainingState:
    """Return the state that is not sharded, with the param groups of all ranks; a collective.

    The format does not name the parameters of a group, so each group has one invented name.

    Args:
        state: everything but weights and optimizer.
        settings: settings of this rank's parameters, by canonical names.
        slots: state of this rank's parameters, by canonical names.
        optimizer: the optimizer; None to leave it out.
    """
    common = TrainingState(
        {},
        args=state["args"],
        iteration=state["iteration"],
        operations=state[OPERATIONS],
        scheduler=state.get("opt_param_scheduler"),
        version=state["checkpoint_version"],
    )
    if optimizer is None:
        return common
    if optimizer.grad_scaler is not None:
        common.grad_scaler = optimizer.grad_scaler.state_dict()
    own_groups = []
    for group in param_groups.group_by_fields(settings):
        steps = _steps(group.names, slots)
        step = max(steps, default=None)
        own_groups.append((group.fields, step))
    groups_of_ranks: list[list[Any]] = [[]] * dist.get_world_size()
    dist.all_gather_object(groups_of_ranks, own_groups)
    fields_of: dict[str, StateDict] = {}
    for rank, groups in enumerate(groups_of_ranks):
        for number, (fields, step) in enumerate(groups):
            name = f"group {number} of rank {rank}"
            fields_of[name] = fields
            if step is not None:
                common.steps[name] = step
    common.groups = param_groups.group_by_fields(fields_of)
    return common


def _steps(names: list[str], slots: dict[str, StateDict]) -> Iterator[float]:
    """Yield the steps of parameters, whose state may be that of their halves."""
    for name in names:
        for entry in key_rules.entry_names(name, name not in slots):
            if "step" in slots.get(entry, {}):
                yield float(slots[entry]["step"])
