# SPDX-License-Identifier: Apache-2.0
"""The torch_dist format: what Megatron-Core's ``dist_checkpointing`` writes in runs without FSDP, read and written.

A DCP directory with flat keys, one for each tensor of the model without regard to any parallelism,
with layers and experts stacked along leading axes. What is not sharded is in ``common.pt``, or from
0.19 on in an object of the directory. The optimizer's tensors have several layouts
(:mod:`megatron.checkpoint.torch_dist.optimizer_layouts`); written is ``fully_reshardable``.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron.checkpoint.core import key_rules, param_groups, safe_pickle, spelling
from megatron.checkpoint.core.dcp_target import DcpTarget, Entry, ObjectEntry, TensorEntry
from megatron.checkpoint.core.lazy_tensor import LazyTensor
from megatron.checkpoint.core.listing import listed
from megatron.checkpoint.core.spelling import Spelling
from megatron.checkpoint.core.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.core.stored_metadata import DamagedCheckpointError
from megatron.checkpoint.core.training_state import TrainingState
from megatron.checkpoint.torch_dist.optimizer_layouts import read_optimizer

COMMON_FILE, COMMON_OBJECT, MARKER = "common.pt", "common_state/shard_0_1", "metadata.json"
_OF_OPTIMIZER = re.compile(r"^(chained_\d+\.)?optimizer\.")
_RANDOM_STATE = re.compile(r"^rng_state/shard_(\d+)\.(\d+)(?:\.(\d+))?_")
_EXTRA_STATE = re.compile(r"\._extra_state(/shard_|$)")
_KNOWN_COMMON = (
    *(
        "args",
        "checkpoint_version",
        "iteration",
        "num_floating_point_operations_so_far",
        "optimizer",
        "opt_param_scheduler",
    ),
    "content_metadata",
)

# ---- reading
# ---------------------------------------------------------------------------------------------------------


def read(
    stored: StoredCheckpoint,
    group_numbers: Mapping[str, Any] | None = None,
    allow_unknown: bool = False,
) -> TrainingState:
    """What a torch_dist checkpoint says.

    Args:
        group_numbers: a map of param groups that the run has dumped
            (``--dump-param-to-param-group-map``). Needed by nobody: the rules say the same, but for
            groups that a run has made otherwise.
        allow_unknown: carry over parameters that no key rule knows under their own names, with a
            note, not an error.

    Raises:
        ValueError: for keys or shapes that the key rules do not know, all at once, and where parts
            contradict each other.
        DamagedCheckpointError: where files are missing or changed.
    """
    common = read_common(stored)
    weights, unknown = _weights(stored)
    optimizer = read_optimizer(stored, common, weights)
    state = TrainingState(
        weights={name: tensor for name, tensor in weights.items() if not key_rules.is_buffer(name)},
        buffers={name: tensor for name, tensor in weights.items() if key_rules.is_buffer(name)},
        scheduler=common.get("opt_param_scheduler"),
        random_states=_random_states(stored),
        args=common.get("args"),
        iteration=common.get("iteration"),
        operations=common.get("num_floating_point_operations_so_far"),
        version=common.get("checkpoint_version", 3.0),
        others={key: value for key, value in common.items() if key not in _KNOWN_COMMON},
    )
    state.compute_dtype = {name: tensor.dtype for name, tensor in state.weights.items()}
    if unknown and not allow_unknown:
        raise ValueError(
            listed(
                "keys that no rule knows (--allow-unknown-keys carries them over as they are)",
                unknown,
            )
        )
    state.notes += [f"{key}: no rule knows it; carried over as it is" for key in unknown]
    state.notes += [
        f"{key}: not a part of training that is known here; left out"
        for key in _left_out(stored, optimizer.used_keys)
    ]
    if optimizer.layout is not None:
        shapes = {
            name: tensor.shape
            for name, tensor in state.weights.items()
            if name in optimizer.moments
        }
        numbers = (
            param_groups.parse_group_map(group_numbers, shapes)
            if group_numbers is not None
            else None
        )
        state.groups = param_groups.assign(shapes, optimizer.param_groups, state.args, numbers)
        state.grad_scaler = optimizer.grad_scaler or _grad_scaler(common)
        _put_exact_values(state, optimizer.main, optimizer.moments)
    return state


def read_common(stored: StoredCheckpoint) -> dict[str, Any]:
    """Everything that is not sharded, from the file of its own or the object that has it from 0.19 on."""
    path = stored.directory / COMMON_FILE
    if path.is_file():
        try:
            common = safe_pickle.load_torch(path.read_bytes())
        except safe_pickle.RefusedPickleError as error:
            raise safe_pickle.RefusedPickleError(f"{path}: {error}") from None
        except ValueError as error:
            raise DamagedCheckpointError(f"{path} is damaged: {error}") from error
    elif COMMON_OBJECT in stored.objects:
        common = stored.read_object(COMMON_OBJECT)
        common = common[0] if isinstance(common, list) and len(common) == 1 else common
    else:
        raise DamagedCheckpointError(
            f"{stored.directory} has neither {COMMON_FILE} nor the object {COMMON_OBJECT}"
        )
    if not isinstance(common, dict):
        raise DamagedCheckpointError(
            f"{stored.directory}: the common state is a {type(common).__name__}, not a dict"
        )
    return common


def _weights(stored: StoredCheckpoint) -> tuple[dict[str, LazyTensor], list[str]]:
    """All tensors of the model by canonical name, and the keys that no row of the rules fits."""
    weights: dict[str, LazyTensor] = {}
    unknown: dict[str, None] = {}
    for key in stored.tensors:
        if _OF_OPTIMIZER.match(key) or _EXTRA_STATE.search(key):
            continue
        for name, index in spelling.unstacked(key, stored.shape(key)):
            if name in weights:
                raise ValueError(f"{stored.directory}: two keys hold {name}, one of them is {key}")
            weights[name] = stored.lazy(key, index)
            if key_rules.rule_of(name) is None:
                unknown[key] = None
    return weights, list(unknown)


def _random_states(stored: StoredCheckpoint) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for key in stored.objects:
        place = _RANDOM_STATE.match(key)
        if place is not None:
            value = stored.read_object(key)[0]
            found[int(place[1]), int(place[2]), int(place[3] or 0)] = (
                value if isinstance(value, list) else [value]
            )
    states: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for stage, slice_, data_rank in sorted(found):
        states.setdefault((stage, slice_), []).extend(found[stage, slice_, data_rank])
    return states


def _left_out(stored: StoredCheckpoint, used: set[str]) -> list[str]:
    """Objects that mean nothing to any conversion."""
    return [
        key
        for key in stored.objects
        if key not in used
        and key != COMMON_OBJECT
        and not _EXTRA_STATE.search(key)
        and not _RANDOM_STATE.match(key)
    ]


def _grad_scaler(common: Mapping[str, Any]) -> dict[str, Any] | None:
    optimizer = common.get("optimizer")
    if not isinstance(optimizer, dict):
        return None
    parts = [optimizer, *(part for part in optimizer.values() if isinstance(part, dict))]
    return next((part["grad_scaler"] for part in parts if part.get("grad_scaler")), None)


def _put_exact_values(
    state: TrainingState,
    main: Mapping[str, LazyTensor],
    moments: Mapping[str, Mapping[str, LazyTensor]],
) -> None:
    """Main weights for the model's, and moments beside them, wherever both say the same about the weight.

    Megatron-Core 0.16.1 to 0.19 can write a parameter's main weight and moments from the wrong
    place in the buffer. Its weight in the model is right then. Which is known when the parameter is
    read.
    """
    for name, slots in moments.items():
        if name not in state.weights:
            raise ValueError(f"the optimizer has state for {name}, which the model does not have")
        checked = _Checked(name, state.weights[name], main.get(name), state.notes)
        state.weights[name] = checked.weight()
        state.moments[name] = {slot: checked.moment(tensor) for slot, tensor in slots.items()}
        state.is_fresh[name] = checked.contradicts


class _Checked:
    """A parameter whose main weight is believed when, cast, it is the model's weight."""

    def __init__(self, name: str, model: LazyTensor, main: LazyTensor | None, notes: list[str]):
        if main is not None and main.shape != model.shape:
            raise ValueError(
                f"{name} has the shape {model.shape} in the model and {main.shape} in the optimizer"
            )
        self._name, self._model, self._main, self._notes = name, model, main, notes
        self._contradicts: bool | None = False if main is None else None

    def contradicts(self) -> bool:
        """Whether main weight and model differ; the first call reads both."""
        if self._contradicts is None:
            self._compare(self._main.read())
        return bool(self._contradicts)

    def _compare(self, main: torch.Tensor) -> None:
        cast, model = main.to(self._model.dtype), self._model.read()
        same = torch.equal(cast, model) or torch.allclose(
            cast, model, rtol=0, atol=0, equal_nan=True
        )  # NaN is NaN
        self._contradicts = not same
        if not same:
            self._notes.append(
                f"{self._name}: its main weight in the optimizer is not its weight in the model."
                " The model's is kept, and the moments are dropped: they begin at zero, at step 0"
            )

    def weight(self) -> LazyTensor:
        if self._main is None:
            return self._model

        def read_rows(start: int, stop: int) -> torch.Tensor:
            if self._contradicts is None and (start, stop) == (0, self._main.num_rows):
                main = self._main.read()
                self._compare(main)
                if not self._contradicts:
                    return main
            source = self._model if self.contradicts() else self._main
            return source.read_rows(start, stop).to(self._main.dtype)

        return LazyTensor(self._main.shape, self._main.dtype, read_rows)

    def moment(self, stored: LazyTensor) -> LazyTensor:
        def read_rows(start: int, stop: int) -> torch.Tensor:
            if self.contradicts():
                shape = (stop - start, *stored.shape[1:]) if stored.shape else ()
                return torch.zeros(shape, dtype=stored.dtype)
            return stored.read_rows(start, stop)

        return LazyTensor(stored.shape, stored.dtype, read_rows)


# ---- writing
# ---------------------------------------------------------------------------------------------------------


def target(state: TrainingState, spelling: Spelling) -> DcpTarget:
    """A torch_dist checkpoint of ``state`` in the layout fully_reshardable, as 0.15 to 0.18 write and later ones read it."""
    names = sorted([*state.weights, *state.buffers], key=key_rules.registration_order)
    places = {name: spelling.stacked_key(name) for name in names}
    axes = _leading_axes(places)
    with_optimizer = state.groups is not None
    state.notes += _other_steps(state)
    moments = {**_moments_of_frozen(state, places), **state.moments}
    entries: list[Entry] = [
        *_random_state_objects(state),
        *_extra_state_objects(names, spelling, axes),
    ]
    for name in names:
        key, index = places[name]
        tensor = state.buffers[name] if name in state.buffers else state.weights[name]
        entries.append(
            _at(key, index, axes[key], tensor.to(state.compute_dtype.get(name, tensor.dtype)))
        )
        slots = {"param": tensor.to(torch.float32), **moments[name]} if name in moments else {}
        entries += [
            _at(f"optimizer.state.{slot}.{key}", index, axes[key], value)
            for slot, value in slots.items()
        ]
    files = {
        COMMON_FILE: lambda: safe_pickle.save_torch(_common(state, with_optimizer)),
        MARKER: (
            lambda: json.dumps(_MARKER_CONTENT).encode()
        ),  # last: it says that all the rest is there
    }
    return DcpTarget(entries, extra_files=files, notes=state.notes)


_MARKER_CONTENT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def _leading_axes(places: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """Lengths of the axes of layers and experts of every key.

    Raises:
        ValueError: where a layer or an expert lacks what others have.
    """
    indices: dict[str, set[tuple[int, ...]]] = {}
    for key, index in places.values():
        indices.setdefault(key, set()).add(index)
    axes = {key: tuple(max(axis) + 1 for axis in zip(*found)) for key, found in indices.items()}
    holes = [key for key, found in indices.items() if len(found) != math.prod(axes[key])]
    if holes:
        raise ValueError(
            listed(
                "some layers or experts have these and others do not, so they cannot be stacked",
                holes,
            )
        )
    return axes


def _at(key: str, index: tuple[int, ...], axes: tuple[int, ...], tensor: LazyTensor) -> TensorEntry:
    return TensorEntry(key, axes + tensor.shape, index + (0,) * len(tensor.shape), tensor)


def _moments_of_frozen(
    state: TrainingState, places: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, dict[str, LazyTensor]]:
    """Zeros for parameters without state where others in the same stacked tensor have some: it can have no holes."""
    slots_of = {places[name][0]: slots for name, slots in state.moments.items()}
    frozen = [
        name for name in state.weights if name not in state.moments and places[name][0] in slots_of
    ]
    state.notes += [
        f"{name}: it has no optimizer state, but layers that it is stacked with have: zeros are"
        " written"
        for name in frozen
    ]
    return {
        name: {
            slot: _zeros(state.weights[name].shape, each.dtype)
            for slot, each in slots_of[places[name][0]].items()
        }
        for name in frozen
    }


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> LazyTensor:
    return LazyTensor(
        shape,
        dtype,
        lambda start, stop: torch.zeros((stop - start, *shape[1:]) if shape else (), dtype=dtype),
    )


def _random_state_objects(state: TrainingState) -> Iterator[ObjectEntry]:
    if not state.random_states:
        return
    stages, slices = (max(axis) + 1 for axis in zip(*state.random_states))
    # Megatron-Core has one entry for each data rank where experts are divided; else one list of
    # them all.
    are_apart = (getattr(state.args, "expert_model_parallel_size", None) or 1) > 1
    for (stage, slice_), states in state.random_states.items():
        if not are_apart:
            yield ObjectEntry(f"rng_state/shard_{stage}.{slice_}_{stages}.{slices}", [states])
            continue
        for rank, each in enumerate(states):
            yield ObjectEntry(
                f"rng_state/shard_{stage}.{slice_}.{rank}_{stages}.{slices}.{len(states)}", [[each]]
            )


def _extra_state_objects(
    names: list[str], spelling: Spelling, axes: Mapping[str, tuple[int, ...]]
) -> Iterator[ObjectEntry]:
    """What modules save beside their weights, which is nothing outside of FP8, but is asked for."""
    seen = set()
    for name in names:
        if not key_rules.has_extra_state(name, spelling.transformer_engine):
            continue
        key, index = spelling.stacked_key(name)
        module = key.rpartition(".")[0]
        shape = axes[key]
        place = f"{module}._extra_state/shard_{_dotted(index) or '0'}_{_dotted(shape) or '1'}"
        if place not in seen:
            seen.add(place)
            yield ObjectEntry(place, [None])


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _common(state: TrainingState, with_optimizer: bool) -> dict[str, Any]:
    content: dict[str, Any] = dict(state.others)
    if state.args is not None:
        content["args"] = args_of_format(state.args)
    content |= {"checkpoint_version": state.version, "iteration": state.iteration or 0}
    if state.operations is not None:
        content["num_floating_point_operations_so_far"] = state.operations
    content["content_metadata"] = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    if with_optimizer:
        content["optimizer"] = _optimizer(state)
        content["content_metadata"] |= {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
    if state.scheduler is not None:
        content["opt_param_scheduler"] = dict(state.scheduler)
    return content


def args_of_format(args: argparse.Namespace) -> argparse.Namespace:
    """``args`` as a run has them that writes this format."""
    args = copy.copy(args)
    args.ckpt_format = "torch_dist"
    args.use_megatron_fsdp = False
    args.use_distributed_optimizer = True
    args.dist_ckpt_optim_fully_reshardable = True
    return args


def _optimizer(state: TrainingState) -> dict[Any, Any]:
    """The param groups as Megatron-Core has them: in two optimizers where experts have one of their own."""
    parts: dict[bool, list[dict[str, Any]]] = {}
    last = max(_steps(state).values(), default=None)
    for group in state.groups or []:
        fields = dict(group.fields)
        if last is not None:
            fields["step"] = last
        parts.setdefault(bool(fields.get("is_expert_parallel")), []).append(fields)
    scaler = {"grad_scaler": state.grad_scaler} if state.grad_scaler else {}
    optimizers = [
        {
            "optimizer": {"param_groups": groups},
            "param_state_sharding_type": "fully_reshardable",
            **scaler,
        }
        for _, groups in sorted(parts.items())
    ]
    return optimizers[0] if len(optimizers) == 1 else dict(enumerate(optimizers))


def _steps(state: TrainingState) -> dict[str, float]:
    steps = {name: state.step_of(name) for group in state.groups or [] for name in group.names}
    return {name: step for name, step in steps.items() if step is not None}


def _other_steps(state: TrainingState) -> Iterator[str]:
    """Megatron-Core has one step for all parameters, and refuses a file with several."""
    steps = _steps(state)
    last = max(steps.values(), default=None)
    return (
        f"{name}: its moments have seen {step:g} steps; torch_dist has {last:g} for all"
        for name, step in steps.items()
        if step != last
    )
