# SPDX-License-Identifier: Apache-2.0
"""Comparison of two checkpoints: entry by entry, or by content, across formats."""

from __future__ import annotations

import io
import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from megatron.checkpoint.core.key_rules import VOCABULARY
from megatron.checkpoint.core.lazy_tensor import LazyTensor, Tensors
from megatron.checkpoint.core.parts import Progress, ignore_progress
from megatron.checkpoint.core.training_state import TrainingState
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.torch_dist import checkpoint as torch_dist

FORMAT_ARGUMENTS = (
    *("ckpt_format", "use_megatron_fsdp", "use_distributed_optimizer"),
    *("dist_ckpt_optim_fully_reshardable", "rank", "local_rank"),
)
"""Arguments of a run that depend on the format, or on the rank that has saved them."""

_FIELDS_OF_OPTIMIZERS = ("bias_correction", "step")
"""Fields of param groups that only some optimizers have, or that are compared by parameter."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the size of an element in bytes."""


@dataclass(frozen=True)
class TensorDifference:
    """Elements of a tensor that are not bitwise the same.

    Attributes:
        name: name of the tensor.
        count: how many elements differ.
        total: how many there are.
        absolute: the largest difference; NaN if an element is NaN on one side only.
        relative: the largest difference over the larger magnitude.
    """

    name: str
    count: int
    total: int
    absolute: float
    relative: float


@dataclass
class Comparison:
    """Differences between two checkpoints.

    Attributes:
        only_first: names that only the first has.
        only_second: names that only the second has.
        kinds: names whose shapes or dtypes differ, or that are a tensor on one side and an object
            on the other; with both descriptions.
        values: tensors with other values, the largest difference first.
        objects: all other names that differ, with both values.
        equal: how many names are the same.
    """

    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    values: list[TensorDifference] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)
    equal: int = 0

    @property
    def differs(self) -> bool:
        """True if there is any difference."""
        return any((self.only_first, self.only_second, self.kinds, self.values, self.objects))


def compare_entries(
    first: StoredCheckpoint, second: StoredCheckpoint, progress: Progress = ignore_progress
) -> Comparison:
    """Compare all entries by key: tensors bitwise, objects by value."""
    found = Comparison()
    mine, theirs = _descriptions(first), _descriptions(second)
    for key in _in_both(found, mine, theirs):
        if mine[key] != theirs[key]:
            found.kinds.append(f"{key}: {mine[key]}, {theirs[key]}")
        elif key in first.tensors:
            _compare_tensors(found, key, first.lazy(key), second.lazy(key), progress)
        else:
            _compare_values(found, key, first.read_object(key), second.read_object(key))
    _compare_all_values(found, _common_state(first), _common_state(second))
    return _sorted(found)


def _descriptions(stored: StoredCheckpoint) -> dict[str, str]:
    """Return dtype and shape of every tensor, and ``object`` for everything else, by key."""
    tensors = {key: f"{stored.dtype(key)} {stored.shape(key)}" for key in stored.tensors}
    return {**tensors, **dict.fromkeys(stored.objects, "object")}


def _common_state(stored: StoredCheckpoint) -> dict[str, Any]:
    """Return the content of the file that a torch_dist checkpoint has beside those of DCP."""
    if not (stored.directory / torch_dist.COMMON_FILE).is_file():
        return {}
    common = torch_dist.read_common(stored)
    return {f"{torch_dist.COMMON_FILE}: {name}": value for name, value in common.items()}


def compare_states(
    first: TrainingState,
    second: TrainingState,
    weights_only: bool = False,
    with_padding: bool = True,
    progress: Progress = ignore_progress,
) -> Comparison:
    """Compare the content of two checkpoints: tensors by canonical name, and the rest of a run.

    Tensors of different dtypes are compared in the less precise one. Without ``with_padding`` the
    rows of the vocabulary that both have are compared, else more rows on one side are a difference.
    """
    found = Comparison()
    mine, theirs = _tensors(first, weights_only), _tensors(second, weights_only)
    for name in _in_both(found, mine, theirs):
        pair = [mine[name], theirs[name]]
        if not with_padding and name.partition(" ")[0] in VOCABULARY:
            rows = min(tensor.num_rows for tensor in pair)
            pair = [tensor.rows(0, rows) for tensor in pair]
        if pair[0].shape != pair[1].shape:
            found.kinds.append(f"{name}: {pair[0].shape}, {pair[1].shape}")
        else:
            dtype = min((tensor.dtype for tensor in pair), key=lambda dtype: dtype.itemsize)
            _compare_tensors(found, name, pair[0].to(dtype), pair[1].to(dtype), progress)
    if not weights_only:
        _compare_all_values(found, _facts(first), _facts(second))
    return _sorted(found)


def num_bytes(state: TrainingState) -> int:
    """Return the size of all tensors of a state."""
    return sum(tensor.num_bytes for _, _, tensor in state.tensors())


def _tensors(state: TrainingState, weights_only: bool) -> Tensors:
    return {
        f"{name} ({kind})": tensor
        for kind, name, tensor in state.tensors()
        if not weights_only or kind in ("weight", "buffer")
    }


def _facts(state: TrainingState) -> dict[str, Any]:
    """Return everything but tensors, by readable names."""
    facts: dict[str, Any] = {
        "iteration": state.iteration,
        "operations": state.operations,
        "checkpoint version": state.version,
    }
    args = vars(state.args or Namespace())
    of_args = {name: value for name, value in args.items() if name not in FORMAT_ARGUMENTS}
    tables = {"args.": of_args, "schedule.": state.scheduler, "loss scaler.": state.grad_scaler}
    for prefix, table in {**tables, "random state of ": state.random_states}.items():
        facts |= {f"{prefix}{name}": value for name, value in (table or {}).items()}
    for group in state.groups or []:
        for name in group.names:
            # Moments that a reader had to drop begin at step 0. They are known by now, because all
            # tensors have been read.
            is_fresh = name in state.is_fresh and state.is_fresh[name]()
            facts[f"{name}: step"] = 0.0 if is_fresh else state.step_of(name)
            for key, value in group.fields.items():
                if key not in _FIELDS_OF_OPTIMIZERS:
                    facts[f"{name}: {key}"] = value
    return facts


def _in_both(found: Comparison, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Record the names that one side has, and return those of both."""
    found.only_first += sorted(mine.keys() - theirs.keys())
    found.only_second += sorted(theirs.keys() - mine.keys())
    return [key for key in mine if key in theirs]


# ---- tensors


def _compare_tensors(
    found: Comparison, name: str, first: LazyTensor, second: LazyTensor, progress: Progress
) -> None:
    """Compare two tensors of one shape and dtype, in blocks so that tensors of any size fit."""
    count, absolute, relative = 0, 0.0, 0.0
    for start, stop in first.row_blocks():
        mine, theirs = first.read_rows(start, stop), second.read_rows(start, stop)
        progress(mine.nbytes + theirs.nbytes)
        differs = _bits(mine) != _bits(theirs)
        if differs.any():
            mine, theirs = _numbers(mine)[differs], _numbers(theirs)[differs]
            distance = (mine - theirs).abs()
            magnitude = torch.maximum(mine.abs(), theirs.abs())
            magnitude = magnitude.clamp_min(torch.finfo(torch.double).tiny)
            count += distance.numel()
            absolute = _largest(absolute, distance)
            relative = _largest(relative, distance / magnitude)
    if count:
        total = math.prod(first.shape)
        found.values.append(TensorDifference(name, count, total, absolute, relative))
    else:
        found.equal += 1


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers that are equal where the elements are the same in every bit."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).flatten(-2)
    return tensor.contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1).double()


def _largest(known: float, values: torch.Tensor) -> float:
    """Return the maximum of ``known`` and ``values``, which is NaN if one of them is NaN."""
    largest = values.max().item()
    return largest if math.isnan(largest) or math.isnan(known) else max(known, largest)


# ---- other values


def _compare_all_values(
    found: Comparison, mine: Mapping[str, Any], theirs: Mapping[str, Any]
) -> None:
    for name in _in_both(found, mine, theirs):
        _compare_values(found, name, mine[name], theirs[name])


def _compare_values(found: Comparison, name: str, first: Any, second: Any) -> None:
    if same(first, second):
        found.equal += 1
    else:
        found.objects.append(f"{name}: {_short(first)}, {_short(second)}")


def same(first: Any, second: Any) -> bool:
    """Return True if two nests of plain objects, tensors and arrays have the same values.

    NaN is the same as NaN.
    """
    pair = (first, second)
    is_tensor = _both(pair, torch.Tensor)
    if is_tensor or _both(pair, numpy.ndarray):
        if first.dtype != second.dtype or first.shape != second.shape:
            return False
        if is_tensor:
            return torch.equal(_bits(first), _bits(second))
        return same(first.tolist(), second.tolist())
    if _both(pair, io.BytesIO):
        return bool(first.getvalue() == second.getvalue())
    if _both(pair, Namespace):
        return same(vars(first), vars(second))
    if _both(pair, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if _both(pair, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if _both(pair, float) and math.isnan(first) and math.isnan(second):
        return True
    return bool(first == second)


def _both(pair: tuple[Any, Any], types: type | tuple[type, ...]) -> bool:
    return isinstance(pair[0], types) and isinstance(pair[1], types)


def _short(value: Any, limit: int = 80) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else f"{text[:limit]}…"


def _sorted(found: Comparison) -> Comparison:
    """Put the largest differences first, and NaN before all others."""
    found.values.sort(key=lambda row: -math.inf if math.isnan(row.absolute) else -row.absolute)
    return found
