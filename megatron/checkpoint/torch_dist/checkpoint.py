# SPDX-License-Identifier: Apache-2.0
"""The torch_dist format, read and written: checkpoints of Megatron-Core's ``dist_checkpointing``.

Runs without FSDP write it. It is a DCP directory with flat keys, one for each tensor of the model
without regard to any parallelism, with layers and experts stacked along leading axes. What is not
sharded is the common state (``unsharded_state``). The optimizer's tensors have several layouts
(``optimizer_layouts``), of which ``fully_reshardable`` is written.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.core import key_rules, param_groups
from megatron.checkpoint.core.lazy_tensor import Shape, Tensors, zeros
from megatron.checkpoint.core.listing import refuse
from megatron.checkpoint.core.spelling import Spelling, name_at, unstacked
from megatron.checkpoint.core.training_state import MOMENTS, TrainingState
from megatron.checkpoint.dcp import safe_pickle
from megatron.checkpoint.dcp.dcp_target import DcpTarget, Entry, ObjectEntry, TensorEntry
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.integrity.manifest import DamagedCheckpointError
from megatron.checkpoint.store import durable
from megatron.checkpoint.torch_dist.exact_weights import add_optimizer_state
from megatron.checkpoint.torch_dist.optimizer_keys import is_optimizer_key
from megatron.checkpoint.torch_dist.optimizer_layouts import OptimizerTensors, read_optimizer
from megatron.checkpoint.torch_dist.unsharded_state import (
    COMMON_FILE,
    COMMON_OBJECT,
    KNOWN_FIELDS,
    common_of,
    grad_scaler_in,
    is_distributed,
    notes_on_steps,
    read_common,
)

MARKER = "metadata.json"
"""File that marks a complete checkpoint of this format."""

_MARKER_CONTENT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_RANDOM_STATE = re.compile(r"^rng_state/shard_(\d+)\.(\d+)(?:\.(\d+))?_")
_EXTRA_STATE = re.compile(r"^(.+\._extra_state)(?:/shard_([\d.]+)_|$)")

_StackedKey = tuple[str, tuple[int, ...]]
"""Key of a tensor, and index of a parameter along its leading axes: layers and experts."""


def read(
    stored: StoredCheckpoint,
    group_numbers: Mapping[str, Any] | None = None,
    allow_unknown: bool = False,
) -> TrainingState:
    """Read a torch_dist checkpoint; tensors are read when they are needed.

    Args:
        stored: the checkpoint.
        group_numbers: a map of param groups that the run has dumped
            (``--dump-param-to-param-group-map``). It is needed only for groups that a run has made
            by other rules than Megatron-Core's.
        allow_unknown: whether to carry over parameters that no key rule knows under their own
            names, with a note, instead of an error.

    Raises:
        ValueError: for keys or shapes that the key rules do not know, all at once, and where parts
            contradict each other.
        DamagedCheckpointError: if files are missing or changed.
    """
    check_marker(stored.directory)
    common = read_common(stored)
    tensors, unknown = _model_tensors(stored)
    if not allow_unknown:
        refuse(
            "keys that no rule knows (--allow-unknown-keys carries them over as they are)", unknown
        )
    optimizer = read_optimizer(stored, common, tensors)
    state = TrainingState(
        weights={},
        scheduler=common.get("opt_param_scheduler"),
        args=common.get("args"),
        iteration=common.get("iteration"),
        operations=common.get("num_floating_point_operations_so_far"),
        version=common.get("checkpoint_version", 3.0),
        others={key: value for key, value in common.items() if key not in KNOWN_FIELDS},
    )
    for name, tensor in tensors.items():
        if key_rules.is_buffer(name):
            state.buffers[name] = tensor
        else:
            state.weights[name] = tensor
            state.compute_dtype[name] = tensor.dtype
    for key in unknown:
        state.notes.append(f"{key}: no rule knows it; carried over as it is")
    _add_objects(state, stored, optimizer.used_keys)
    if optimizer.layout is not None:
        _add_optimizer(state, optimizer, group_numbers)
        state.grad_scaler = optimizer.grad_scaler or grad_scaler_in(common)
    return state


def check_marker(directory: Path) -> None:
    """Check that the marker is one that Megatron-Core's loader accepts.

    Raises:
        DamagedCheckpointError: if it is missing, damaged or of another format.
    """
    path = directory / MARKER
    if not path.is_file():
        raise DamagedCheckpointError(
            f"{directory} has no {MARKER}, which is written last: the checkpoint was not finished"
        )
    try:
        with durable.naming(path):
            content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from error
    is_known = isinstance(content, dict) and "sharded_backend" in content
    if not is_known or not content.items() <= _MARKER_CONTENT.items():
        raise DamagedCheckpointError(
            f"{path} is damaged or of another format: it has {content}, not {_MARKER_CONTENT}"
        )


def _add_optimizer(
    state: TrainingState,
    optimizer: OptimizerTensors,
    group_numbers: Mapping[str, Any] | None,
) -> None:
    """Add the param groups and the tensors of the optimizer to the state of the model."""
    shapes = {}
    for name, tensor in state.weights.items():
        if name in optimizer.moments:
            shapes[name] = tensor.shape
    numbers = None
    if group_numbers is not None:
        numbers = param_groups.parse_group_map(group_numbers, shapes)
    state.groups = param_groups.assign(
        shapes,
        optimizer.param_groups,
        decay_query_key_norms=getattr(state.args, "apply_wd_to_qk_layernorm", False),
        numbers=numbers,
        momentum_only={name for name in shapes if MOMENTS[1] not in optimizer.moments[name]},
    )
    add_optimizer_state(state, optimizer.main, optimizer.moments)


def _model_tensors(stored: StoredCheckpoint) -> tuple[Tensors, list[str]]:
    """Return all tensors of the model by canonical name, and the keys that no rule fits."""
    tensors = {}
    unknown = []
    for key in stored.tensors:
        if is_optimizer_key(key) or _EXTRA_STATE.search(key):
            continue
        for name, index in unstacked(key, stored.shape(key)):
            if name in tensors:
                raise ValueError(f"{stored.directory}: two keys hold {name}, one of them is {key}")
            tensors[name] = stored.lazy(key, index)
            if key_rules.rule_of(name) is None and key not in unknown:
                unknown.append(key)
    return tensors, unknown


def _add_objects(
    state: TrainingState,
    stored: StoredCheckpoint,
    used: set[str],
) -> None:
    """Add random states and extra states, and notes on the objects that no conversion uses.

    ``used`` are the keys of the optimizer. The extra states of runs without FP8 are empty.
    """
    has_extra_states = state.args is None or bool(getattr(state.args, "fp8", None))
    random_states = {}
    for key in stored.objects:
        ranks = _RANDOM_STATE.match(key)
        extra_state = _EXTRA_STATE.match(key)
        if ranks is not None:
            value = stored.read_object(key)[0]
            if not isinstance(value, list):
                value = [value]
            stage, tensor_rank, data_rank = (int(rank or 0) for rank in ranks.groups())
            random_states[stage, tensor_rank, data_rank] = value
        elif extra_state is not None:
            if has_extra_states:
                content = stored.read_object(key)[0]
                _add_extra_state(state, extra_state, content)
        elif key not in used and key != COMMON_OBJECT:
            state.notes.append(f"{key}: not a part of training that is known here; left out")
    for stage, tensor_rank, data_rank in sorted(random_states):
        states = state.random_states.setdefault((stage, tensor_rank), [])
        states += random_states[stage, tensor_rank, data_rank]


def _add_extra_state(
    state: TrainingState,
    key: re.Match[str],
    value: Any,
) -> None:
    """Add the extra state of a module, unless it is empty."""
    if isinstance(value, torch.Tensor) and value.numel():
        index = tuple(int(number) for number in key[2].split("."))
        name = name_at(key[1], index)
        content = value.numpy()
        state.extra_states[name] = content.tobytes()


def target(state: TrainingState, spelling: Spelling) -> DcpTarget:
    """Plan a checkpoint of ``state``, with the optimizer in the layout ``fully_reshardable``.

    Megatron-Core 0.15 to 0.18 write it so, and later releases read it. With Muon, whose optimizers
    are not distributed, it is ``non_distributed``.

    Args:
        state: the state to write. Values that the format cannot keep are added to its ``notes``.
        spelling: spelling of the model that will load the checkpoint.

    Raises:
        ValueError: if some layers or experts have a parameter that others lack.
    """
    names = [*state.weights, *state.buffers]
    names.sort(key=key_rules.registration_order)
    keys = {name: spelling.stacked_key(name) for name in names}
    axes = _leading_axes(keys)
    state.notes += notes_on_steps(state)
    moments = {**_zero_moments(state, keys), **state.moments}
    axes_of_names = {}
    for name, (key, _) in keys.items():
        axes_of_names[name] = axes[key]
    entries: list[Entry] = [*_random_state_objects(state)]
    entries += extra_state_objects(axes_of_names, spelling, state.extra_states)
    tensors = state.weights | state.buffers
    for name, (key, index) in keys.items():
        tensor = tensors[name]
        dtype = state.compute_dtype.get(name, tensor.dtype)
        in_model = tensor.to(dtype)
        shape = axes[key] + tensor.shape
        offsets = index + (0,) * len(tensor.shape)
        entries.append(TensorEntry(key, shape, offsets, in_model))
        if name not in moments:
            continue
        slots = dict(moments[name])
        main = main_slot(is_distributed(state.groups), in_model.dtype)
        if main is not None:
            slots = {main: tensor.to(torch.float32), **slots}
        for slot, value in slots.items():
            slot_key = f"optimizer.state.{slot}.{key}"
            entries.append(TensorEntry(slot_key, shape, offsets, value))
    return DcpTarget(entries, extra_files=other_files(state), notes=state.notes)


def main_slot(has_distributed: bool, dtype: torch.dtype) -> str | None:
    """Return the slot of a main weight; None if the model's own weight is the main weight.

    ``dtype`` is that of the weight in the model.
    """
    if has_distributed:
        return "param"
    if dtype == torch.float32:
        return None
    return "fp32_param"


def other_files(state: TrainingState) -> dict[str, Callable[[], bytes]]:
    """Return the names of the format's further files, and functions that return their content."""
    return {
        COMMON_FILE: lambda: safe_pickle.save_torch(common_of(state)),
        # The marker comes last: it means that all other files are complete.
        MARKER: lambda: json.dumps(_MARKER_CONTENT).encode(),
    }


def _leading_axes(keys: Mapping[str, _StackedKey]) -> dict[str, tuple[int, ...]]:
    """Return the lengths of the axes of layers and experts of every key.

    Raises:
        ValueError: if a layer or an expert lacks a parameter that others have.
    """
    indices: dict[str, set[tuple[int, ...]]] = {}
    for key, index in keys.values():
        indices_of_key = indices.setdefault(key, set())
        indices_of_key.add(index)
    axes = {}
    holes = []
    for key, found in indices.items():
        axes[key] = tuple(max(axis) + 1 for axis in zip(*found))
        if len(found) != math.prod(axes[key]):
            holes.append(key)
    refuse("some layers or experts have these and others do not, so they cannot be stacked", holes)
    return axes


def _zero_moments(
    state: TrainingState,
    keys: Mapping[str, _StackedKey],
) -> dict[str, Tensors]:
    """Return zeros for frozen parameters that are stacked with others that have moments.

    A stacked tensor can have no holes.
    """
    slots_of_key = {}
    for name, slots in state.moments.items():
        key, _ = keys[name]
        slots_of_key[key] = slots
    found: dict[str, Tensors] = {}
    for name, weight in state.weights.items():
        key, _ = keys[name]
        if name not in state.moments and key in slots_of_key:
            state.notes.append(
                f"{name}: it has no optimizer state, but layers that it is stacked with have: zeros"
                " are written"
            )
            found[name] = {}
            for slot, tensor in slots_of_key[key].items():
                found[name][slot] = zeros(weight.shape, tensor.dtype)
    return found


def _random_state_objects(state: TrainingState) -> Iterator[ObjectEntry]:
    if not state.random_states:
        return
    num_stages, num_tensor_ranks = (max(axis) + 1 for axis in zip(*state.random_states))
    # Megatron-Core has an object for each data-parallel rank where experts are divided, else one
    # list of them all.
    num_expert_ranks = getattr(state.args, "expert_model_parallel_size", None) or 1
    are_apart = num_expert_ranks > 1
    for (stage, tensor_rank), states in state.random_states.items():
        ranks = (stage, tensor_rank)
        sizes = (num_stages, num_tensor_ranks)
        if not are_apart:
            yield ObjectEntry(_object_key("rng_state", ranks, sizes), [states])
            continue
        for data_rank, generators in enumerate(states):
            key = _object_key(
                "rng_state",
                index=(*ranks, data_rank),
                shape=(*sizes, len(states)),
            )
            yield ObjectEntry(key, [[generators]])


def extra_state_objects(
    axes: Mapping[str, tuple[int, ...]],
    spelling: Spelling,
    extra_states: Mapping[str, bytes],
) -> Iterator[ObjectEntry]:
    """Yield the extra states of modules; those without one have None, since loaders ask for them.

    Args:
        axes: canonical name of a parameter -> lengths of the axes of layers and experts of its
            tensor in the file.
        spelling: spelling of the model that will load the checkpoint.
        extra_states: canonical name that ends in ``._extra_state`` -> the pickled state.
    """
    # By their keys: that of a norm inside a linear layer is the linear layer's.
    values = {}
    for name, value in extra_states.items():
        values[spelling.stacked_key(name)] = value
    seen = set()
    for name in axes:
        if not key_rules.has_extra_state(name, spelling.transformer_engine):
            continue
        key, index = spelling.stacked_key(name)
        extra_key = f"{key.rpartition('.')[0]}._extra_state"
        object_key = _object_key(
            extra_key,
            index=index or (0,),
            shape=axes[name] or (1,),
        )
        if object_key in seen:
            continue
        seen.add(object_key)
        content = None
        if values.get((extra_key, index)):
            content = extra_state_tensor(values[extra_key, index])
        yield ObjectEntry(object_key, [content])


def extra_state_tensor(value: bytes) -> torch.Tensor:
    """Return an extra state as Transformer Engine's modules give and take it."""
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def _object_key(
    name: str,
    index: tuple[int, ...],
    shape: Shape,
) -> str:
    """Return the key of an object at an index of a grid: ``name/shard_1.0_2.4`` for (1, 0)."""
    position = ".".join(str(number) for number in index)
    sizes = ".".join(str(length) for length in shape)
    return f"{name}/shard_{position}_{sizes}"
