# SPDX-License-Identifier: Apache-2.0
"""The fsdp_dtensor format: what runs with FSDP write, read and written without them.

``model.module.<name>`` holds the main weight, ``optimizer.state.<P>.<name>.<slot>`` the optimizer's
state and ``optimizer.param_to_group_meta.<P>.<name>.<field>`` a field of its param group.
``<name>`` is the parameter's name in the model without any wrapper; ``<P>`` is one ``module`` per
wrapper of the run that wrote the file, which nothing states and every reader has to find out from
the keys.
"""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.checkpoint.core import key_rules, param_groups
from megatron.checkpoint.core.dcp_target import DcpTarget, Entry, ObjectEntry, whole
from megatron.checkpoint.core.lazy_tensor import LazyTensor, concatenate, in_memory
from megatron.checkpoint.core.listing import listed, some
from megatron.checkpoint.core.spelling import HALVES, Spelling, canonical_name, plain_name
from megatron.checkpoint.core.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.core.training_state import MOMENTS, TrainingState

CHECKPOINT_VERSION = 3.0
MODEL_PREFIX = "module."
STATE_PREFIX = "optimizer.state."
META_PREFIX = "optimizer.param_to_group_meta."

_SLOTS = (*MOMENTS, "momentum_buffer", "step")  # of Adam and of SGD
_RANDOM_STATE = re.compile(r"^rng_state\.\((\d+), (\d+)\)\.(\d+)\.(.+)$")


def wrapper_prefix(keys: Iterable[str], names: Iterable[str]) -> str | None:
    """``<P>.`` of the optimizer keys in a file that has parameters called ``names``; None where it has none of them."""
    known = set(names)
    for key in keys:
        stem = key.removeprefix(META_PREFIX).rpartition(".")[0]
        if key.startswith(META_PREFIX) and plain_name(stem) in known:
            return stem.removesuffix(plain_name(stem))
    return None


def without_layout(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a param group without what each run says for itself: with one expert rank experts have no own groups."""
    return {field: value for field, value in fields.items() if field != "is_expert_parallel"}


def names_in_file(keys: Iterable[str]) -> dict[str, str]:
    """Canonical name -> name in a file with these keys, of every parameter and buffer of the model."""
    start = "model." + MODEL_PREFIX
    names = {}
    for key in keys:
        if key.startswith(start):
            name = plain_name(key.removeprefix(start))
            half = next(
                (
                    half
                    for half in HALVES
                    if name.endswith(half) and key_rules.is_gated(name.removesuffix(half))
                ),
                "",
            )
            names[canonical_name(name.removesuffix(half))] = name.removesuffix(half)
    return names


# ---- reading
# ---------------------------------------------------------------------------------------------------------


def read(stored: StoredCheckpoint, allow_unknown: bool = False) -> TrainingState:
    """What an fsdp_dtensor checkpoint says.

    Args:
        allow_unknown: carry over parameters that no key rule knows under their own names, with a
            note, not an error.

    Raises:
        ValueError: for keys that the format does not have, all at once.
        DamagedCheckpointError: where files are missing or changed.
    """
    parameters, others = _tensors_and_others(stored)
    names = {name: canonical_name(name) for name in parameters}
    unknown = [name for name in names if key_rules.rule_of(names[name]) is None]
    if unknown and not allow_unknown:
        raise ValueError(
            listed(
                "parameters that no rule knows (--allow-unknown-keys carries them over)", unknown
            )
        )
    known = {canonical: name for name, canonical in names.items()}
    twice = [
        f"{name} and {known[canonical]}"
        for name, canonical in names.items()
        if known[canonical] != name
    ]
    if twice:
        raise ValueError(f"one parameter under two names: {some(twice)}")
    state_of, step_of = _optimizer_state(stored, parameters)
    meta = _group_fields(stored)
    has_optimizer = bool(state_of)
    of_optimizer = (
        set(state_of)
        if has_optimizer
        else {name for name in names if not key_rules.is_buffer(names[name])}
    )
    _check_group_fields(meta, parameters, of_optimizer if has_optimizer else set())
    state = TrainingState(
        weights={
            names[name]: parameters[name] for name in names if not key_rules.is_buffer(names[name])
        },
        buffers={
            names[name]: parameters[name] for name in names if key_rules.is_buffer(names[name])
        },
        moments={names[name]: slots for name, slots in state_of.items()},
        steps={names[name]: step for name, step in step_of.items()},
        groups=(
            param_groups.group_by_fields(
                {names[name]: meta.get(name, {}) for name in sorted(of_optimizer)}
            )
            if has_optimizer
            else None
        ),
        scheduler=_under(stored, others, "opt_param_scheduler.") or None,
        random_states=_random_states(stored, others),
        args=_object(stored, others, "args"),
        iteration=_object(stored, others, "iteration"),
        operations=_object(stored, others, "num_floating_point_operations_so_far"),
        grad_scaler=_under(stored, others, "grad_scaler.") or None,
        version=_object(stored, others, "checkpoint_version") or CHECKPOINT_VERSION,
    )
    state.module_names = {names[name]: name for name in names}
    dtype = _compute_dtype(state.args)
    if dtype is not None:
        state.compute_dtype = dict.fromkeys(state.weights, dtype)
    else:
        state.notes.append(
            "args: not in the file, so what the model computes in is not known; fp32 is taken"
        )
    state.notes += [f"{name}: no rule knows it; carried over as it is" for name in unknown]
    state.unknown = [key for key in sorted(others) if not key.startswith("rerun_state_machine")]
    state.notes += [
        f"{key}: not a part of training that is known here; left out" for key in sorted(others)
    ]
    state.notes += _incomplete_random_states(state.random_states)
    return state


def _compute_dtype(args: argparse.Namespace | None) -> torch.dtype | None:
    """What the model of a run computes in."""
    if args is None:
        return None
    by_flag = (
        torch.bfloat16
        if getattr(args, "bf16", False)
        else torch.float16
        if getattr(args, "fp16", False)
        else torch.float32
    )
    return getattr(args, "params_dtype", None) or by_flag


def _tensors_and_others(stored: StoredCheckpoint) -> tuple[dict[str, LazyTensor], set[str]]:
    """The parameters and buffers by name, halves put together; and the keys that are neither model nor optimizer."""
    start = "model." + MODEL_PREFIX
    tensors = {
        plain_name(key.removeprefix("model.")): stored.lazy(key)
        for key in stored.tensors
        if key.startswith(start)
    }
    parameters: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        half = next(
            (
                half
                for half in HALVES
                if name.endswith(half) and key_rules.is_gated(name.removesuffix(half))
            ),
            None,
        )
        if half is None:
            parameters[name] = tensor
        elif half == HALVES[0]:
            parameters[name.removesuffix(half)] = _joined(
                tensors, name.removesuffix(half), "the model"
            )
        elif name.removesuffix(half) + HALVES[0] not in tensors:
            raise ValueError(
                f"the model has {name}, but not the other half {name.removesuffix(half)}{HALVES[0]}"
            )
    entries = [*stored.tensors, *stored.objects]
    ours = (start, STATE_PREFIX, META_PREFIX)
    strange = [
        key
        for key in entries
        if key.startswith(("model.", "optimizer.")) and not key.startswith(ours)
    ]
    if strange:
        raise ValueError(listed("keys that the format fsdp_dtensor does not have", strange))
    return parameters, {key for key in entries if not key.startswith(ours)}


def _joined(tensors: dict[str, LazyTensor], name: str, where: str) -> LazyTensor:
    missing = [name + half for half in HALVES if name + half not in tensors]
    if missing:
        raise ValueError(f"{where} has one half of {name}, but not {', '.join(missing)}")
    return concatenate([tensors[name + half] for half in HALVES])


def _optimizer_state(
    stored: StoredCheckpoint, parameters: dict[str, LazyTensor]
) -> tuple[dict[str, dict[str, LazyTensor]], dict[str, float]]:
    """Moments and steps by name, halves put together.

    Raises:
        ValueError: for state of parameters or in slots that there are not.
    """
    slots: dict[str, dict[str, LazyTensor]] = {}
    steps: dict[str, float] = {}
    strange = []
    for key in [*stored.tensors, *stored.objects]:
        if not key.startswith(STATE_PREFIX):
            continue
        name, _, slot = plain_name(key.removeprefix(STATE_PREFIX)).rpartition(".")
        whole_name = next(
            (name.removesuffix(half) for half in HALVES if name.removesuffix(half) in parameters),
            name,
        )
        if whole_name not in parameters or slot not in _SLOTS:
            strange.append(key)
        elif slot == "step":
            steps[whole_name] = (
                float(stored.lazy(key).read())
                if key in stored.tensors
                else float(stored.read_object(key))
            )
        else:
            slots.setdefault(slot, {})[name] = stored.lazy(key)
    if strange:
        raise ValueError(
            listed("optimizer state of parameters or kinds that are not there", strange)
        )
    moments: dict[str, dict[str, LazyTensor]] = {}
    for slot, tensors in slots.items():
        for name, whole_tensor in parameters.items():
            if name in tensors:
                moments.setdefault(name, {})[slot] = tensors[name]
            elif name + HALVES[0] in tensors or name + HALVES[1] in tensors:
                moments.setdefault(name, {})[slot] = _joined(tensors, name, f"the state {slot}")
            if (
                name in moments
                and slot in moments[name]
                and moments[name][slot].shape != whole_tensor.shape
            ):
                raise ValueError(
                    f"{name} has the shape {whole_tensor.shape} in the model,"
                    f" {moments[name][slot].shape} as {slot}"
                )
    return moments, steps


def _group_fields(stored: StoredCheckpoint) -> dict[str, dict[str, Any]]:
    fields: dict[str, dict[str, Any]] = {}
    for key in stored.objects:
        if key.startswith(META_PREFIX):
            name, _, field = plain_name(key.removeprefix(META_PREFIX)).rpartition(".")
            fields.setdefault(name, {})[field] = stored.read_object(key)
    for key in stored.tensors:
        if key.startswith(META_PREFIX):
            name, _, field = plain_name(key.removeprefix(META_PREFIX)).rpartition(".")
            fields.setdefault(name, {})[field] = stored.lazy(key).read().item()
    return fields


_FIELDS_OF_ALL = (
    *(
        "is_expert_parallel",
        "default_config",
        "wd_mult",
        "lr_mult",
        "is_decoupled_lr",
        "max_lr",
        "min_lr",
    ),
    *("lr", "betas", "eps", "weight_decay"),
)


def _check_group_fields(
    meta: Mapping[str, Mapping[str, Any]], parameters: Mapping[str, Any], of_optimizer: set[str]
) -> None:
    """What Megatron-Core's groups all have, a parameter cannot lack while others have it.

    Raises:
        ValueError: listing those that do, and fields of parameters that are not there.
    """
    common = {field for fields in meta.values() for field in fields if field in _FIELDS_OF_ALL}
    problems = [f"{name} is no parameter of the model" for name in meta if name not in parameters]
    for name in sorted(of_optimizer):
        missing = sorted(common - meta.get(name, {}).keys())
        problems += [f"{name} has no {', '.join(missing)}"] if missing else []
    if problems:
        raise ValueError(listed("fields of param groups that do not fit the model", problems))


def _object(stored: StoredCheckpoint, others: set[str], key: str) -> Any:
    if key not in others:
        return None
    others.remove(key)
    return stored.read_object(key) if key not in stored.tensors else stored.lazy(key).read()


def _under(stored: StoredCheckpoint, others: set[str], start: str) -> dict[str, Any]:
    """Everything whose key begins with ``start``, by the rest of its key."""
    return {
        key.removeprefix(start): _object(stored, others, key)
        for key in sorted(others)
        if key.startswith(start)
    }


def _random_states(
    stored: StoredCheckpoint, others: set[str]
) -> dict[tuple[int, int], list[dict[str, Any]]]:
    states: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
    for key in sorted(others):
        place = _RANDOM_STATE.match(key)
        if place is None:
            continue
        state = states.setdefault((int(place[1]), int(place[2])), {}).setdefault(
            int(place[3]), {"rng_tracker_states": {}}
        )
        tracker = place[4].removeprefix("rng_tracker_states.")
        (state if tracker == place[4] else state["rng_tracker_states"])[tracker] = _object(
            stored, others, key
        )
    return {place: [each for _, each in sorted(found.items())] for place, found in states.items()}


def _incomplete_random_states(states: Mapping[tuple[int, int], list[dict[str, Any]]]) -> list[str]:
    """Ranks that lack generators which others have."""
    ranks = {
        f"rng_state.{place}.{number}": each
        for place, found in states.items()
        for number, each in enumerate(found)
    }
    kinds = {kind for each in ranks.values() for kind in each}
    lacking = {rank: sorted(kinds - each.keys()) for rank, each in ranks.items()}
    return [
        f"{rank}: it has no {', '.join(missing)}, which other ranks have"
        for rank, missing in lacking.items()
        if missing
    ]


# ---- writing
# ---------------------------------------------------------------------------------------------------------


def target(
    state: TrainingState,
    spelling: Spelling,
    model_prefix: str = "model.module",
    optimizer_prefix: str | None = None,
    must_be_gated: bool = False,
    gated_modules: Sequence[str] = (),
) -> DcpTarget:
    """An fsdp_dtensor checkpoint of ``state`` that a strict load accepts, with torch's AdamW and with fused ones.

    Args:
        spelling: of the run that will load it.
        model_prefix: of the model's keys.
        optimizer_prefix: ``optimizer.state.<P>``, with one ``module`` for each wrapper of the run.
            Ours finds it out; others want their own number. Default: that of a run in the precision
            of ``state``.
        must_be_gated: refuse a model without gated MLPs.
        gated_modules: ends of the paths of modules that must be gated.

    Raises:
        ValueError: for a model that is not gated although it must be, or modules that are not there
            or not gated.
    """
    prefix = optimizer_prefix or STATE_PREFIX + ".".join(
        ["module"] * (3 if _is_mixed(state) else 2)
    )
    _check_prefix("model", model_prefix)
    _check_prefix("optimizer.state", prefix)
    meta_prefix = META_PREFIX + prefix.removeprefix(STATE_PREFIX)
    gated = _gated_names(state)
    if must_be_gated and not gated:
        raise ValueError(
            "the model's MLPs are not gated (no linear_fc1 has twice as many rows as its linear_fc2"
            " has columns)"
        )
    problems = _not_gated(state, gated_modules, gated)
    if problems:
        raise ValueError(listed("modules whose weights are no two halves", problems))
    paths: dict[str, tuple[Any, ...]] = {}
    entries: list[Entry] = []

    def add(entry: Entry, *path: Any) -> None:
        paths[entry.key] = path
        entries.append(entry)

    for name in sorted([*state.weights, *state.buffers], key=key_rules.registration_order):
        module_name = spelling.module_name(name)
        tensor = (
            state.buffers[name] if name in state.buffers else state.weights[name].to(torch.float32)
        )
        for end, piece in _pieces(module_name, tensor, name in gated):
            key = f"{model_prefix}.{end}"
            add(whole(key, piece), "model", key.removeprefix("model."))
        step = state.step_of(name)
        slots = {**state.moments.get(name, {}), **_step_slot(state, name, step)}
        for slot, value in slots.items():
            for end, piece in _pieces(module_name, value, name in gated):
                wrapped = f"{prefix}.{end}"
                add(
                    whole(f"{wrapped}.{slot}", piece),
                    "optimizer",
                    "state",
                    wrapped.removeprefix(STATE_PREFIX),
                    slot,
                )
    for group in state.groups or []:
        for name in group.names:
            wrapped = f"{meta_prefix}.{spelling.module_name(name)}"
            for field, value in param_groups.for_any_optimizer(
                group.fields, state.step_of(name)
            ).items():
                path = (
                    "optimizer",
                    "param_to_group_meta",
                    wrapped.removeprefix(META_PREFIX),
                    field,
                )
                add(ObjectEntry(f"{wrapped}.{field}", value), *path)
    state.notes += [
        f"{key}: this format has no place for it; left out"
        for key in sorted(map(str, state.others))
    ]
    for path, value in _everything_else(state):
        key = ".".join(map(str, path))
        add(
            (
                whole(key, in_memory(value))
                if isinstance(value, torch.Tensor)
                else ObjectEntry(key, value)
            ),
            *path,
        )
    return DcpTarget(entries, paths=paths, notes=state.notes)


def _check_prefix(start: str, prefix: str) -> None:
    if not re.fullmatch(rf"{re.escape(start)}(\.module)+", prefix):
        raise ValueError(
            f"the prefix {prefix!r} is none that a loader asks for: {start}.module, with one module"
            " for each wrapper"
        )


def _is_mixed(state: TrainingState) -> bool:
    """Whether the model computes in another dtype than fp32, and so has one wrapper more."""
    return any(dtype != torch.float32 for dtype in state.compute_dtype.values())


def _gated_names(state: TrainingState) -> set[str]:
    """The parameters of which the file has halves."""
    shapes = {name: tensor.shape for name, tensor in state.weights.items()}
    return {name for name in shapes if key_rules.has_halves(name, shapes)}


def _not_gated(state: TrainingState, modules: Sequence[str], gated: set[str]) -> list[str]:
    """What is wrong with modules whose weights should be two halves.

    Loaders look for halves of gated MLPs only.
    """
    problems = []
    for module in modules:
        names = [
            name for name in state.weights if f".{name.rpartition('.')[0]}".endswith(f".{module}")
        ]
        problems += [] if names else [f"there is no module {module}"]
        problems += [
            f"{name}: it is not the first layer of a gated MLP"
            for name in names
            if name not in gated
        ]
    return problems


def _pieces(name: str, tensor: LazyTensor, is_gated: bool) -> Iterator[tuple[str, LazyTensor]]:
    if not is_gated:
        yield name, tensor
    elif not tensor.shape:  # a step counter, the same for both
        yield from ((name + half, tensor) for half in HALVES)
    else:
        middle = tensor.num_rows // 2
        yield name + HALVES[0], tensor.rows(0, middle)
        yield name + HALVES[1], tensor.rows(middle, tensor.num_rows)


def _step_slot(state: TrainingState, name: str, step: float | None) -> dict[str, LazyTensor]:
    """The counter that torch's AdamW has for every parameter."""
    if step is None or name not in state.moments:
        return {}
    is_fresh: Callable[[], bool] = state.is_fresh.get(name, lambda: False)
    return {
        "step": LazyTensor(
            (), torch.float32, lambda start, stop: torch.tensor(0.0 if is_fresh() else float(step))
        )
    }


def _everything_else(state: TrainingState) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if state.args is not None:
        yield ("args",), args_of_format(state.args)
    yield ("checkpoint_version",), state.version
    yield ("iteration",), state.iteration or 0
    if state.operations is not None:
        yield ("num_floating_point_operations_so_far",), state.operations
    for field, value in (state.scheduler or {}).items():
        yield ("opt_param_scheduler", field), value
    for field, value in (state.grad_scaler or {}).items():
        yield ("grad_scaler", field), value
    for (stage, slice_), states in state.random_states.items():
        for rank, generators in enumerate(states):
            for kind, value in generators.items():
                path = ("rng_state", f"({stage}, {slice_})", rank, kind)
                if isinstance(value, dict):
                    yield from (((*path, tracker), each) for tracker, each in value.items())
                else:
                    yield path, value


def args_of_format(args: argparse.Namespace) -> argparse.Namespace:
    """``args`` as a run has them that writes this format."""
    args = copy.copy(args)
    args.ckpt_format = "fsdp_dtensor"
    args.use_megatron_fsdp = True
    args.use_distributed_optimizer = True
    return args
