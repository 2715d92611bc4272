# SPDX-License-Identifier: Apache-2.0
"""Writer of the fsdp_dtensor format: a training state to files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron.checkpoint.core import key_rules, param_groups
from megatron.checkpoint.core.lazy_tensor import LazyTensor, Tensors, in_memory
from megatron.checkpoint.core.listing import refuse
from megatron.checkpoint.core.spelling import HALVES, Spelling
from megatron.checkpoint.core.training_state import Freshness, OptimizerParamGroup, TrainingState
from megatron.checkpoint.dcp.dcp_target import DcpTarget, Entry, ObjectEntry, whole
from megatron.checkpoint.fsdp_dtensor.keys import META_PREFIX, STATE_PREFIX, args_of_format


def target(
    state: TrainingState,
    spelling: Spelling,
    model_prefix: str = "model.module",
    optimizer_prefix: str | None = None,
    must_be_gated: bool = False,
    gated_modules: Sequence[str] = (),
) -> DcpTarget:
    """Return the fsdp_dtensor checkpoint of ``state``.

    A strict load accepts it, with torch's AdamW and with fused ones.

    Args:
        state: the state to write.
        spelling: the parameter names of the run that will load it.
        model_prefix: prefix of the model's keys.
        optimizer_prefix: ``optimizer.state.<P>``, with one ``module`` for each wrapper of the run
            that will load it. This project's loaders derive the number from the keys; others
            require their own. Default: that of a run in the precision of ``state``.
        must_be_gated: whether to refuse a model without gated MLPs.
        gated_modules: ends of the paths of modules that must be gated.

    Raises:
        ValueError: for a prefix that no loader asks for, for a model that is not gated although it
            must be, and for modules that do not exist or are not gated.
    """
    optimizer_prefix = optimizer_prefix or _default_optimizer_prefix(state)
    _check_prefix("model", model_prefix)
    _check_prefix("optimizer.state", optimizer_prefix)
    shapes = {}
    for name, tensor in state.weights.items():
        shapes[name] = tensor.shape
    gated = set()
    for name in shapes:
        if key_rules.has_halves(name, shapes):
            gated.add(name)
    _check_gated(state, gated, must_be_gated, gated_modules)
    entries = _EntryList(
        state,
        spelling,
        gated,
        model_prefix=model_prefix,
        optimizer_prefix=optimizer_prefix,
    )
    for name in sorted([*state.weights, *state.buffers], key=key_rules.registration_order):
        entries.add_tensor(name)
        entries.add_optimizer_state(name)
    for name, value in state.extra_states.items():
        entries.add_extra_state(name, value)
    for group in state.groups or []:
        entries.add_group_fields(group)
    entries.add_everything_else()
    for key in sorted(str(key) for key in state.others):
        state.notes.append(f"{key}: this format has no place for it; left out")
    return DcpTarget(entries.entries, paths=entries.paths, notes=state.notes)


def _default_optimizer_prefix(state: TrainingState) -> str:
    """Return ``optimizer.state.module.module``, with a third wrapper in mixed precision."""
    if any(dtype != torch.float32 for dtype in state.compute_dtype.values()):
        return f"{STATE_PREFIX}module.module.module"
    return f"{STATE_PREFIX}module.module"


def _check_prefix(start: str, prefix: str) -> None:
    if not re.fullmatch(rf"{re.escape(start)}(\.module)+", prefix):
        raise ValueError(
            f"no loader asks for the prefix {prefix!r}: it is {start}.module, with one module"
            " for each wrapper"
        )


def _check_gated(
    state: TrainingState,
    gated: set[str],
    must_be_gated: bool,
    modules: Sequence[str],
) -> None:
    """Refuse a model that is not gated although it must be.

    Only gated MLPs can be named as ``modules``: loaders look for halves of no other weights.
    """
    if must_be_gated and not gated:
        raise ValueError(
            "the model's MLPs are not gated (no linear_fc1 has twice as many rows as its linear_fc2"
            " has columns)"
        )
    problems = []
    for module in modules:
        is_found = False
        for name in state.weights:
            path = name.rpartition(".")[0]
            if f".{path}".endswith(f".{module}"):
                is_found = True
                if name not in gated:
                    problems.append(f"{name}: it is not the first layer of a gated MLP")
        if not is_found:
            problems.append(f"there is no module {module}")
    refuse("modules whose weights are no two halves", problems)


class _EntryList:
    """Entries of the file, and the path of each in the nested dict that a loader fills.

    Args:
        state: the state to write.
        spelling: the parameter names of the run that will load it.
        gated: canonical names of the parameters that are written as two halves.
        model_prefix: ``model`` and one ``module`` for each wrapper, joined by dots.
        optimizer_prefix: ``optimizer.state`` and one ``module`` for each wrapper.
    """

    def __init__(
        self,
        state: TrainingState,
        spelling: Spelling,
        gated: set[str],
        model_prefix: str,
        optimizer_prefix: str,
    ):
        self.entries: list[Entry] = []
        self.paths: dict[str, tuple[Any, ...]] = {}
        self._state = state
        self._spelling = spelling
        self._gated = gated
        self._model_prefix = model_prefix
        self._wrappers = optimizer_prefix.removeprefix(STATE_PREFIX)

    def _add(self, entry: Entry, *path: Any) -> None:
        self.paths[entry.key] = path
        self.entries.append(entry)

    def add_tensor(self, name: str) -> None:
        """Add the weight, in fp32, or the buffer."""
        if name in self._state.buffers:
            tensor = self._state.buffers[name]
        else:
            tensor = self._state.weights[name].to(torch.float32)
        for module_name, half in self._halves(name, tensor):
            self._add_of_model(whole(f"{self._model_prefix}.{module_name}", half))

    def add_extra_state(self, name: str, value: bytes) -> None:
        """Add the extra state of a module of Transformer Engine, pickled."""
        key = f"{self._model_prefix}.{self._spelling.module_name(name)}"
        self._add_of_model(ObjectEntry(key, value))

    def _add_of_model(self, entry: Entry) -> None:
        self._add(entry, "model", entry.key.removeprefix("model."))

    def add_optimizer_state(self, name: str) -> None:
        """Add the moments of a parameter, and the step counter of torch's AdamW."""
        moments = self._state.moments.get(name, {})
        slots = {**moments, **_step_slot(self._state, name)}
        for slot, tensor in slots.items():
            for module_name, half in self._halves(name, tensor):
                parameter = f"{self._wrappers}.{module_name}"
                entry = whole(f"{STATE_PREFIX}{parameter}.{slot}", half)
                self._add(entry, "optimizer", "state", parameter, slot)

    def add_group_fields(self, group: OptimizerParamGroup) -> None:
        """Add every field of a param group, once for each of its parameters."""
        for name in group.names:
            parameter = f"{self._wrappers}.{self._spelling.module_name(name)}"
            fields = param_groups.for_any_optimizer(group.fields, self._state.step_of(name))
            for field, value in fields.items():
                entry = ObjectEntry(f"{META_PREFIX}{parameter}.{field}", value)
                self._add(entry, "optimizer", "param_to_group_meta", parameter, field)

    def add_everything_else(self) -> None:
        """Add arguments, counters, schedule, loss scaler and random states."""
        for path, value in _everything_else(self._state):
            key = ".".join(str(component) for component in path)
            entry: Entry = ObjectEntry(key, value)
            if isinstance(value, torch.Tensor):
                entry = whole(key, in_memory(value))
            self._add(entry, *path)

    def _halves(
        self,
        name: str,
        tensor: LazyTensor,
    ) -> Iterator[tuple[str, LazyTensor]]:
        """Yield the name in the file and the tensor, or those of each half of a gated weight."""
        module_name = self._spelling.module_name(name)
        if name not in self._gated:
            yield module_name, tensor
        elif not tensor.shape:  # a step counter, which both halves have
            for half in HALVES:
                yield module_name + half, tensor
        else:
            middle = tensor.num_rows // 2
            yield module_name + HALVES[0], tensor.rows(0, middle)
            yield module_name + HALVES[1], tensor.rows(middle, tensor.num_rows)


def _step_slot(state: TrainingState, name: str) -> Tensors:
    """Return the counter that torch's AdamW has for every parameter with moments."""
    step = state.step_of(name)
    if step is None or name not in state.moments:
        return {}
    count = float(step)
    is_fresh = state.is_fresh.get(name, Freshness())

    def read_rows(start: int, stop: int) -> torch.Tensor:
        # A reader finds out only while it reads that moments are dropped: they are at step 0 then.
        return torch.tensor(0.0 if is_fresh() else count)

    return {"step": LazyTensor((), torch.float32, read_rows)}


def _everything_else(state: TrainingState) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the path and the value of every entry of neither model nor optimizer."""
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
    for (stage, tensor_rank), ranks in state.random_states.items():
        for data_rank, generators in enumerate(ranks):
            for name, value in generators.items():
                path = ("rng_state", f"({stage}, {tensor_rank})", data_rank, name)
                if not isinstance(value, dict):
                    yield path, value
                    continue
                for tracker, tracked in value.items():
                    yield (*path, tracker), tracked
