# SPDX-License-Identifier: Apache-2.0
"""Reader of the fsdp_dtensor format: files to a training state."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch

from megatron.checkpoint.core import key_rules, param_groups
from megatron.checkpoint.core.lazy_tensor import Tensors, concatenate
from megatron.checkpoint.core.listing import refuse, some
from megatron.checkpoint.core.param_groups import EXPERT_FIELD
from megatron.checkpoint.core.spelling import HALVES, canonical_name, plain_name
from megatron.checkpoint.core.training_state import (
    MOMENTS,
    MOMENTUM,
    Fields,
    RandomStates,
    TrainingState,
)
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
_FIELDS_OF_ALL = {
    EXPERT_FIELD,
    "default_config",
    "wd_mult",
    "lr_mult",
    "is_decoupled_lr",
    "max_lr",
    "min_lr",
    "lr",
    "weight_decay",
}
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
    names = _canonical_names(parameters)
    unknown = []
    for name in parameters:
        if key_rules.rule_of(names[name]) is None:
            unknown.append(name)
    if not allow_unknown:
        refuse("parameters that no rule knows (--allow-unknown-keys carries them over)", unknown)
    moments, steps = _optimizer_state(stored, parameters)
    fields = _group_fields(stored)
    _check_group_fields(fields, parameters, set(moments))
    groups = None
    if moments:
        fields_of = {}
        for name in sorted(moments):
            fields_of[names[name]] = fields.get(name, {})
        groups = param_groups.group_by_fields(fields_of)
    others = _OtherEntries(stored, other_keys)
    state = TrainingState(
        weights={},
        moments={names[name]: slots for name, slots in moments.items()},
        steps={names[name]: step for name, step in steps.items()},
        groups=groups,
        scheduler=others.read_below("opt_param_scheduler.") or None,
        random_states=_random_states(others),
        args=others.read("args"),
        iteration=others.read("iteration"),
        operations=others.read("num_floating_point_operations_so_far"),
        grad_scaler=others.read_below("grad_scaler.") or None,
        version=others.read("checkpoint_version") or CHECKPOINT_VERSION,
    )
    for name, tensor in parameters.items():
        canonical = names[name]
        state.module_names[canonical] = name
        tensors = state.weights
        if key_rules.is_buffer(canonical):
            tensors = state.buffers
        tensors[canonical] = tensor
    if state.args is not None:
        state.compute_dtype = dict.fromkeys(state.weights, _compute_dtype(state.args))
    for key in stored.objects:
        if key.startswith(MODEL_KEY_PREFIX) and key.endswith(EXTRA_STATE):
            name = canonical_name(key.removeprefix("model."))
            state.extra_states[name] = stored.read_object(key)
    _add_notes(state, unknown, unread=sorted(others.unread))
    return state


def _add_notes(
    state: TrainingState,
    unknown: list[str],
    unread: list[str],
) -> None:
    """Add notes on parameters without a rule, and on keys that were not read."""
    if state.args is None:
        state.notes.append(
            "args: not in the file, so the dtype of the model's computations is not known; fp32 is"
            " assumed"
        )
    for name in unknown:
        state.notes.append(f"{name}: no rule knows it; carried over as it is")
    for key in unread:
        state.notes.append(f"{key}: not a part of training that is known here; left out")
        if not key.startswith("rerun_state_machine"):
            state.unknown.append(key)


def _canonical_names(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Map names in the file to canonical names, and refuse two names of one parameter."""
    names = {}
    first: dict[str, str] = {}
    twice = []
    for name in parameters:
        canonical = canonical_name(name)
        names[name] = canonical
        other = first.setdefault(canonical, name)
        if other != name:
            twice.append(f"{other} and {name}")
    if twice:
        raise ValueError(f"one parameter under two names: {some(twice)}")
    return names


def _compute_dtype(args: Namespace) -> torch.dtype:
    """Return the dtype in which the model of a run computes, by arguments of the run."""
    dtype: torch.dtype | None = getattr(args, "params_dtype", None)
    if dtype is not None:
        return dtype
    if getattr(args, "bf16", False):
        return torch.bfloat16
    if getattr(args, "fp16", False):
        return torch.float16
    return torch.float32


# ---- model and optimizer


def _parameters_and_other_keys(stored: StoredCheckpoint) -> tuple[Tensors, set[str]]:
    """Return the parameters and buffers by name, and the keys of neither model nor optimizer.

    The two halves of a gated weight are one tensor.

    Raises:
        ValueError: for a half without the other one, and for keys that the format does not have.
    """
    tensors = {}
    other_keys = set()
    strange = []
    for key in stored.metadata.state_dict_metadata:
        if key.startswith(MODEL_KEY_PREFIX):
            if key in stored.tensors:
                tensors[plain_name(key.removeprefix("model."))] = stored.lazy(key)
        elif not key.startswith((STATE_PREFIX, META_PREFIX)):
            other_keys.add(key)
            if key.startswith(("model.", "optimizer.")):
                strange.append(key)
    refuse("keys that the format fsdp_dtensor does not have", strange)
    return _with_joined_halves(tensors, "the model"), other_keys


def _with_joined_halves(tensors: Tensors, where: str) -> Tensors:
    """Return the tensors with the two halves of every gated weight as one tensor."""
    joined = {}
    for name, tensor in tensors.items():
        stem, half = split_half(name)
        if not half:
            joined[name] = tensor
            continue
        for other in HALVES:
            if stem + other not in tensors:
                raise ValueError(f"{where} has {name}, but not the other half {stem}{other}")
        if half == HALVES[0]:
            halves = [tensors[stem + other] for other in HALVES]
            joined[stem] = concatenate(halves)
    return joined


def _optimizer_state(
    stored: StoredCheckpoint,
    parameters: Tensors,
) -> tuple[dict[str, Tensors], dict[str, float]]:
    """Return the moments by parameter and slot, and the number of steps by parameter.

    Raises:
        ValueError: for state of unknown parameters, in unknown slots or of another shape than the
            parameter's.
    """
    slots: dict[str, Tensors] = {}
    steps = {}
    strange = []
    for key in stored.metadata.state_dict_metadata:
        if not key.startswith(STATE_PREFIX):
            continue
        path = plain_name(key.removeprefix(STATE_PREFIX))
        name, _, slot = path.rpartition(".")
        parameter, _ = split_half(name)
        if parameter not in parameters or slot not in _SLOTS:
            strange.append(key)
        elif slot == "step":
            steps[parameter] = float(stored.read(key))
        else:
            tensors_of_slot = slots.setdefault(slot, {})
            tensors_of_slot[name] = stored.lazy(key)
    refuse("optimizer state of unknown parameters, or of unknown slots", strange)
    moments: dict[str, Tensors] = {}
    for slot, tensors in slots.items():
        for name, moment in _with_joined_halves(tensors, f"the state {slot}").items():
            shape = parameters[name].shape
            if moment.shape != shape:
                raise ValueError(
                    f"{name} has the shape {shape} in the model, {moment.shape} as {slot}"
                )
            moments.setdefault(name, {})[slot] = moment
    return moments, steps


def _group_fields(stored: StoredCheckpoint) -> dict[str, Fields]:
    """Return the fields of the param group of every parameter."""
    fields: dict[str, Fields] = {}
    for key in [*stored.objects, *stored.tensors]:
        if key.startswith(META_PREFIX):
            path = plain_name(key.removeprefix(META_PREFIX))
            name, _, field = path.rpartition(".")
            value = stored.read(key)
            if isinstance(value, torch.Tensor):
                value = value.item()
            fields.setdefault(name, {})[field] = value
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
    common = set()
    problems = []
    for name, fields in fields_of.items():
        common.update(fields.keys() & _FIELDS_OF_ALL)
        if name not in parameters:
            problems.append(f"{name} is no parameter of the model")
    for name in sorted(in_optimizer):
        missing = sorted(common - fields_of.get(name, {}).keys())
        if missing:
            problems.append(f"{name} has no {', '.join(missing)}")
    refuse("fields of param groups that do not fit the model", problems)


# ---- everything else


class _OtherEntries:
    """Entries of neither model nor optimizer.

    Args:
        stored: the files.
        keys: keys of these entries.

    Attributes:
        unread: keys of the entries that were not read yet.
    """

    def __init__(self, stored: StoredCheckpoint, keys: set[str]):
        self._stored = stored
        self.unread = set(keys)

    def read(self, key: str) -> Any:
        """Read the entry under ``key``, or return None if it is missing."""
        if key not in self.unread:
            return None
        self.unread.remove(key)
        return self._stored.read(key)

    def read_below(self, prefix: str) -> Fields:
        """Read all entries whose keys begin with ``prefix``, by the rest of their keys."""
        keys = []
        for key in sorted(self.unread):
            if key.startswith(prefix):
                keys.append(key)
        values = {}
        for key in keys:
            values[key.removeprefix(prefix)] = self.read(key)
        return values


def _random_states(others: _OtherEntries) -> RandomStates:
    """Read the generators: (pipeline stage, tensor-parallel rank) -> one dict per data rank.

    ``rng_state.(0, 1).2.random_rng_state`` is a generator of data rank 2, and
    ``rng_state.(0, 1).2.rng_tracker_states.<name>`` one of its tracker's.
    """
    by_rank: dict[tuple[int, int], dict[int, Fields]] = {}
    for key in sorted(others.unread):
        match = _RANDOM_STATE.match(key)
        if match is None:
            continue
        stage = int(match[1])
        tensor_rank = int(match[2])
        ranks = by_rank.setdefault((stage, tensor_rank), {})
        generators = ranks.setdefault(int(match[3]), {"rng_tracker_states": {}})
        name = match[4].removeprefix("rng_tracker_states.")
        if name != match[4]:
            generators = generators["rng_tracker_states"]
        generators[name] = others.read(key)
    states = {}
    for position, ranks in by_rank.items():
        states[position] = [ranks[data_rank] for data_rank in sorted(ranks)]
    return states
