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
from megatron.checkpoint.torch_dist.unsharded_state import COMMON_FILE, read_common

FORMAT_ARGUMENTS = (
    "ckpt_format",
    "use_megatron_fsdp",
    "use_distributed_optimizer",
    "dist_ckpt_optim_fully_reshardable",
    "rank",
    "local_rank",
)
"""Arguments of a run that depend on the format, or on the rank that has saved them."""

_FIELDS_OF_OPTIMIZERS = ("bias_correction", "step")
"""Fields of param groups that only some optimizers have, or that are compared by parameter."""

_INTEGERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}
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
    first: StoredCheckpoint,
    second: StoredCheckpoint,
    progress: Progress = ignore_progress,
) -> Comparison:
    """Compare all entries by key: tensors bitwise, objects by value.

    Args:
        first: a checkpoint.
        second: the other one.
        progress: called with the number of bytes that were compared, of both together.
    """
    found = Comparison()
    mine = _descriptions(first)
    theirs = _descriptions(second)
    for key in _in_both(found, mine, theirs):
        if mine[key] != theirs[key]:
            found.kinds.append(f"{key}: {mine[key]}, {theirs[key]}")
        elif key in first.tensors:
            left = first.lazy(key)
            right = second.lazy(key)
            _compare_tensors(found, key, left, right, progress=progress)
        else:
            left = first.read_object(key)
            right = second.read_object(key)
            _compare_values(found, key, left, right)
    _compare_all_values(found, _common_state(first), _common_state(second))
    return _sorted(found)


def _descriptions(stored: StoredCheckpoint) -> dict[str, str]:
    """Return dtype and shape of every tensor, and ``object`` for everything else, by key."""
    descriptions = {}
    for key in stored.tensors:
        descriptions[key] = f"{stored.dtype(key)} {stored.shape(key)}"
    return descriptions | dict.fromkeys(stored.objects, "object")


def _common_state(stored: StoredCheckpoint) -> dict[str, Any]:
    """Return the common state of a torch_dist checkpoint that has it in a file of its own."""
    if not (stored.directory / COMMON_FILE).is_file():
        return {}
    common = read_common(stored)
    return {f"{COMMON_FILE}: {name}": value for name, value in common.items()}


def compare_states(
    first: TrainingState,
    second: TrainingState,
    weights_only: bool = False,
    with_padding: bool = True,
    progress: Progress = ignore_progress,
) -> Comparison:
    """Compare the content of two checkpoints: tensors by canonical name, and the rest of a run.

    Tensors of different dtypes are compared in the less precise one.

    Args:
        first: the state of a run.
        second: that of the other one.
        weights_only: whether to compare nothing but weights and buffers.
        with_padding: whether more rows of the vocabulary on one side are a difference. Otherwise
            the rows that both have are compared.
        progress: called with the number of bytes that were compared, of both together.
    """
    found = Comparison()
    mine = _tensors(first, weights_only)
    theirs = _tensors(second, weights_only)
    for name in _in_both(found, mine, theirs):
        left = mine[name]
        right = theirs[name]
        if not with_padding and name.partition(" ")[0] in VOCABULARY:
            num_rows = min(left.num_rows, right.num_rows)
            left = left.rows(0, num_rows)
            right = right.rows(0, num_rows)
        if left.shape != right.shape:
            found.kinds.append(f"{name}: {left.shape}, {right.shape}")
        else:
            dtype = min(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
            left = left.to(dtype)
            right = right.to(dtype)
            _compare_tensors(found, name, left, right, progress=progress)
    if not weights_only:
        _compare_all_values(found, _facts(first), _facts(second))
    return _sorted(found)


def num_bytes(state: TrainingState) -> int:
    """Return the size of all tensors of a state."""
    return sum(tensor.num_bytes for _, _, tensor in state.tensors())


def _tensors(state: TrainingState, weights_only: bool) -> Tensors:
    tensors = {}
    for kind, name, tensor in state.tensors():
        if not weights_only or kind in ("weight", "buffer"):
            tensors[f"{name} ({kind})"] = tensor
    return tensors


def _facts(state: TrainingState) -> dict[str, Any]:
    """Return everything but tensors, by readable names."""
    facts: dict[str, Any] = {
        "iteration": state.iteration,
        "operations": state.operations,
        "checkpoint version": state.version,
    }
    for name, value in vars(state.args or Namespace()).items():
        if name not in FORMAT_ARGUMENTS:
            facts[f"args.{name}"] = value
    for name, value in (state.scheduler or {}).items():
        facts[f"schedule.{name}"] = value
    for name, value in (state.grad_scaler or {}).items():
        facts[f"loss scaler.{name}"] = value
    for position, generators in state.random_states.items():
        facts[f"random state of {position}"] = generators
    for group in state.groups or []:
        for name in group.names:
            facts[f"{name}: step"] = state.step_of(name)
            # All tensors have been read, so it is known which moments the reader has dropped.
            if name in state.is_fresh and state.is_fresh[name]():
                facts[f"{name}: step"] = 0.0
            for key, value in group.fields.items():
                if key not in _FIELDS_OF_OPTIMIZERS:
                    facts[f"{name}: {key}"] = value
    return facts


def _in_both(
    found: Comparison,
    mine: Mapping[str, Any],
    theirs: Mapping[str, Any],
) -> list[str]:
    """Record the names that one side has, and return those of both."""
    only_first = mine.keys() - theirs.keys()
    only_second = theirs.keys() - mine.keys()
    found.only_first += sorted(only_first)
    found.only_second += sorted(only_second)
    return [key for key in mine if key in theirs]


# ---- tensors


def _compare_tensors(
    found: Comparison,
    name: str,
    first: LazyTensor,
    second: LazyTensor,
    progress: Progress,
) -> None:
    """Compare two tensors of one shape and dtype, in blocks so that tensors of any size fit."""
    count = 0
    absolute = relative = 0.0
    for start, stop in first.row_blocks():
        mine = first.read_rows(start, stop)
        theirs = second.read_rows(start, stop)
        progress(mine.nbytes + theirs.nbytes)
        differs = _bits(mine) != _bits(theirs)
        if differs.any():
            left = _numbers(mine)[differs]
            right = _numbers(theirs)[differs]
            distance = (left - right).abs()
            magnitude = torch.maximum(left.abs(), right.abs())
            magnitude = magnitude.clamp_min(torch.finfo(torch.double).tiny)
            count += distance.numel()
            absolute = _largest(absolute, distance)
            relative = _largest(relative, distance / magnitude)
    if count:
        found.values.append(
            TensorDifference(
                name,
                count=count,
                total=math.prod(first.shape),
                absolute=absolute,
                relative=relative,
            )
        )
    else:
        found.equal += 1


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers that are equal where the elements are the same in every bit."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).flatten(-2)
    elements = tensor.contiguous().reshape(-1)
    integers = _INTEGERS[tensor.element_size()]
    return elements.view(integers)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1).double()


def _largest(known: float, values: torch.Tensor) -> float:
    """Return the maximum of ``known`` and ``values``, which is NaN if one of them is NaN."""
    known_maximum = values.new_tensor(known)
    maximum = torch.maximum(values.max(), known_maximum)
    return maximum.item()


# ---- other values


def _compare_all_values(
    found: Comparison,
    mine: Mapping[str, Any],
    theirs: Mapping[str, Any],
) -> None:
    for name in _in_both(found, mine, theirs):
        _compare_values(found, name, mine[name], theirs[name])


def _compare_values(
    found: Comparison,
    name: str,
    first: Any,
    second: Any,
) -> None:
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
        if first.keys() != second.keys():
            return False
        return all(same(first[key], second[key]) for key in first)
    if _both(pair, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if _both(pair, float) and math.isnan(first) and math.isnan(second):
        return True
    return bool(first == second)


def _both(pair: tuple[Any, Any], types: type | tuple[type, ...]) -> bool:
    first, second = pair
    return isinstance(first, types) and isinstance(second, types)


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    if len(text) > 80:
        return f"{text[:80]}…"
    return text


def _sorted(found: Comparison) -> Comparison:
    """Put the largest differences first, and NaN before all others."""
    found.values.sort(key=lambda row: (math.isnan(row.absolute), row.absolute), reverse=True)
    return found
