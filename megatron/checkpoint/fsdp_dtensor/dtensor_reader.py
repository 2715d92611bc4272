# SPDX-License-Identifier: Apache-2.0
"""Reader of the fsdp_dtensor format: files to a training state."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch

from megatron.checkpoint.core import key_rules, param_groups
from megatron.checkpoint.core.lazy_tensor import LazyTensor, Tensors, concatenate
from megatron.checkpoint.core.listing import listed, some
from megatron.checkpoint.core.spelling import HALVES, canonical_name, plain_name
from megatron.checkpoint.core.training_state import MOMENTS, MOMENTUM, RandomStates, TrainingState
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.fsdp_dtensor.keys import (
    CHECKPOINT_VERSION,
    EXTRA_STATE,
    META_PREFIX,
    MODEL_KEY_PREFIX,
    STATE_PREFIX,
    split_half,
)

_SLOTS = (*MOMENTS, MOMENTUM, "step")
_RANDOM_STATE = re.compile(r"^rng_state\.\((\d+), (\d+)\)\.(\d+)\.(.+)$")
_FIELDS_OF_ALL = (
    *("is_expert_parallel", "default_config", "wd_mult", "lr_mult", "is_decoupled_lr"),
    *("max_lr", "min_lr", "lr", "weight_decay"),
)
"""Fields that Megatron-Core gives to every param group."""


def read(stored: StoredCheckpoint, allow_unknown: bool = False) -> TrainingState:
    """Read an fsdp_dtensor checkpoint. Tensors are read later, when they are needed.

    Args:
        stored: the files.
        allow_unknown: whether to carry over parameters that no key rule knows under their own
            names, with a note. Otherwise they are an error.

    Raises:
        ValueError: for keys that the format does not have, all at once.
        DamagedCheckpointError: if files are missing or changed.
    """
    parameters, other_keys = _parameters_and_other_keys(stored)
    unknown = [name for name in parameters if key_rules.rule_of(canonical_name(name)) is None]
    if unknown and not allow_unknown:
        title = "parameters that no rule knows (--allow-unknown-keys carries them over)"
        raise ValueError(listed(title, unknown))
    names = _canonical_names(parameters)
    moments, steps = _optimizer_state(stored, parameters)
    fields = _group_fields(stored)
    _check_group_fields(fields, parameters, set(moments))
    groups = {names[name]: fields.get(name, {}) for name in sorted(moments)}
    others = _OtherEntries(stored, other_keys)
    state = TrainingState(
        weights=_renamed(parameters, names, buffers=False),
        buffers=_renamed(parameters, names, buffers=True),
        moments={names[name]: slots for name, slots in moments.items()},
        steps={names[name]: step for name, step in steps.items()},
        groups=param_groups.group_by_fields(groups) if moments else None,
        scheduler=others.read_below("opt_param_scheduler.") or None,
        random_states=_random_states(others),
        args=others.read("args"),
        iteration=others.read("iteration"),
        operations=others.read("num_floating_point_operations_so_far"),
        grad_scaler=others.read_below("grad_scaler.") or None,
        version=others.read("checkpoint_version") or CHECKPOINT_VERSION,
    )
    state.module_names = {canonical: name for name, canonical in names.items()}
    if state.args is not None:
        state.compute_dtype = dict.fromkeys(state.weights, _compute_dtype(state.args))
    for key in stored.objects:
        if key.startswith(MODEL_KEY_PREFIX) and key.endswith(EXTRA_STATE):
            name = canonical_name(key.removeprefix("model."))
            state.extra_states[name] = stored.read_object(key)
    state.unknown = [
        key for key in sorted(others.unread) if not key.startswith("rerun_state_machine")
    ]
    state.notes += _notes(state, unknown, sorted(others.unread))
    return state


def _notes(state: TrainingState, unknown: list[str], unread: list[str]) -> list[str]:
    notes = []
    if state.args is None:
        notes.append(
            "args: not in the file, so what the model computes in is not known; fp32 is taken"
        )
    notes += [f"{name}: no rule knows it; carried over as it is" for name in unknown]
    notes += [f"{key}: not a part of training that is known here; left out" for key in unread]
    return notes


def _canonical_names(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Map names in the file to canonical names, and refuse two names of one parameter."""
    names = {name: canonical_name(name) for name in parameters}
    last = {canonical: name for name, canonical in names.items()}
    twice = [
        f"{name} and {last[canonical]}"
        for name, canonical in names.items()
        if last[canonical] != name
    ]
    if twice:
        raise ValueError(f"one parameter under two names: {some(twice)}")
    return names


def _renamed(tensors: Tensors, names: Mapping[str, str], buffers: bool) -> Tensors:
    """Return the buffers, or all other tensors, by their canonical names."""
    return {
        names[name]: tensor
        for name, tensor in tensors.items()
        if key_rules.is_buffer(names[name]) == buffers
    }


def _compute_dtype(args: Namespace) -> torch.dtype:
    """Return the dtype in which the model of a run computes, by arguments of the run."""
    dtype: torch.dtype | None = getattr(args, "params_dtype", None)
    if dtype is not None:
        return dtype
    if getattr(args, "bf16", False):
        return torch.bfloat16
    return torch.float16 if getattr(args, "fp16", False) else torch.float32


# ---- model and optimizer


def _parameters_and_other_keys(stored: StoredCheckpoint) -> tuple[Tensors, set[str]]:
    """Return the parameters and buffers by name, and the keys of neither model nor optimizer.

    The two halves of a gated weight are one tensor.

    Raises:
        ValueError: for a half without the other one, and for keys that the format does not have.
    """
    tensors = {
        plain_name(key.removeprefix("model.")): stored.lazy(key)
        for key in stored.tensors
        if key.startswith(MODEL_KEY_PREFIX)
    }
    parameters: Tensors = {}
    for name, tensor in tensors.items():
        stem, half = split_half(name)
        if not half:
            parameters[name] = tensor
        elif half == HALVES[0]:
            parameters[stem] = _joined(tensors, stem, "the model")
        elif stem + HALVES[0] not in tensors:
            raise ValueError(f"the model has {name}, but not the other half {stem}{HALVES[0]}")
    entries = [*stored.tensors, *stored.objects]
    ours = (MODEL_KEY_PREFIX, STATE_PREFIX, META_PREFIX)
    strange = [
        key
        for key in entries
        if key.startswith(("model.", "optimizer.")) and not key.startswith(ours)
    ]
    if strange:
        raise ValueError(listed("keys that the format fsdp_dtensor does not have", strange))
    return parameters, {key for key in entries if not key.startswith(ours)}


def _joined(tensors: Tensors, name: str, where: str) -> LazyTensor:
    """Return the two halves of a gated weight as one tensor."""
    missing = [name + half for half in HALVES if name + half not in tensors]
    if missing:
        raise ValueError(f"{where} has one half of {name}, but not {', '.join(missing)}")
    return concatenate([tensors[name + half] for half in HALVES])


def _optimizer_state(
    stored: StoredCheckpoint, parameters: Tensors
) -> tuple[dict[str, Tensors], dict[str, float]]:
    """Return the moments by parameter and slot, and the number of steps by parameter.

    Raises:
        ValueError: for state of unknown parameters, in unknown slots or of another shape than the
            parameter's.
    """
    slots: dict[str, Tensors] = {}
    steps: dict[str, float] = {}
    strange = []
    for key in [*stored.tensors, *stored.objects]:
        if not key.startswith(STATE_PREFIX):
            continue
        name, _, slot = plain_name(key.removeprefix(STATE_PREFIX)).rpartition(".")
        parameter = _parameter_of(name, parameters)
        if parameter not in parameters or slot not in _SLOTS:
            strange.append(key)
        elif slot == "step":
            steps[parameter] = float(_read_entry(stored, key))
        else:
            slots.setdefault(slot, {})[name] = stored.lazy(key)
    if strange:
        title = "optimizer state of parameters or kinds that are not there"
        raise ValueError(listed(title, strange))
    moments: dict[str, Tensors] = {}
    for slot, tensors in slots.items():
        for name, weight in parameters.items():
            moment = _moment(tensors, name, slot)
            if moment is None:
                continue
            if moment.shape != weight.shape:
                raise ValueError(
                    f"{name} has the shape {weight.shape} in the model, {moment.shape} as {slot}"
                )
            moments.setdefault(name, {})[slot] = moment
    return moments, steps


def _parameter_of(name: str, parameters: Mapping[str, Any]) -> str:
    """Return the parameter that ``name`` belongs to, which may be the name of one half."""
    for half in HALVES:
        if name.removesuffix(half) in parameters:
            return name.removesuffix(half)
    return name


def _moment(tensors: Tensors, name: str, slot: str) -> LazyTensor | None:
    """Return the moment of a parameter in one slot, whole or joined from halves."""
    if name in tensors:
        return tensors[name]
    if any(name + half in tensors for half in HALVES):
        return _joined(tensors, name, f"the state {slot}")
    return None


def _read_entry(stored: StoredCheckpoint, key: str) -> Any:
    """Read a tensor or an object."""
    return stored.lazy(key).read() if key in stored.tensors else stored.read_object(key)


def _group_fields(stored: StoredCheckpoint) -> dict[str, dict[str, Any]]:
    """Return the fields of the param group of every parameter."""
    fields: dict[str, dict[str, Any]] = {}
    for key in [*stored.objects, *stored.tensors]:
        if key.startswith(META_PREFIX):
            name, _, field = plain_name(key.removeprefix(META_PREFIX)).rpartition(".")
            value = _read_entry(stored, key)
            fields.setdefault(name, {})[field] = value.item() if key in stored.tensors else value
    return fields


def _check_group_fields(
    fields_of: Mapping[str, Mapping[str, Any]],
    parameters: Mapping[str, Any],
    in_optimizer: set[str],
) -> None:
    """Reject fields that no run writes.

    If one parameter has a field that Megatron-Core gives to all groups, all parameters have it.

    Raises:
        ValueError: lists the parameters that lack one, and fields of unknown parameters.
    """
    common: set[str] = set()
    for fields in fields_of.values():
        common.update(field for field in fields if field in _FIELDS_OF_ALL)
    problems = [
        f"{name} is no parameter of the model" for name in fields_of if name not in parameters
    ]
    for name in sorted(in_optimizer):
        missing = sorted(common - fields_of.get(name, {}).keys())
        if missing:
            problems.append(f"{name} has no {', '.join(missing)}")
    if problems:
        raise ValueError(listed("fields of param groups that do not fit the model", problems))


# ---- everything else


class _OtherEntries:
    """Entries of neither model nor optimizer; ``unread`` are the keys of those not yet read."""

    def __init__(self, stored: StoredCheckpoint, keys: set[str]):
        self._stored = stored
        self.unread = set(keys)

    def read(self, key: str) -> Any:
        """Read the entry under ``key``, or return None if there is none."""
        if key not in self.unread:
            return None
        self.unread.remove(key)
        return _read_entry(self._stored, key)

    def read_below(self, prefix: str) -> dict[str, Any]:
        """Read all entries whose keys begin with ``prefix``, by the rest of their keys."""
        keys = [key for key in sorted(self.unread) if key.startswith(prefix)]
        return {key.removeprefix(prefix): self.read(key) for key in keys}


def _random_states(others: _OtherEntries) -> RandomStates:
    """Read the generators: (pipeline stage, tensor-parallel rank) -> one dict per data rank.

    ``rng_state.(0, 1).2.random_rng_state`` is a generator of data rank 2, and
    ``rng_state.(0, 1).2.rng_tracker_states.<name>`` one of its tracker's.
    """
    by_rank: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
    for key in sorted(others.unread):
        match = _RANDOM_STATE.match(key)
        if match is None:
            continue
        ranks = by_rank.setdefault((int(match[1]), int(match[2])), {})
        generators = ranks.setdefault(int(match[3]), {"rng_tracker_states": {}})
        name = match[4].removeprefix("rng_tracker_states.")
        if name != match[4]:
            generators = generators["rng_tracker_states"]
        generators[name] = others.read(key)
    return {
        position: [generators for _, generators in sorted(ranks.items())]
        for position, ranks in by_rank.items()
    }
