# SPDX-License-Identifier: Apache-2.0
"""What two checkpoints have that is not the same: entry by entry in files of one format, or what they say in any two."""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy
import torch

from megatron.checkpoint.core.key_rules import VOCABULARY
from megatron.checkpoint.core.lazy_tensor import LazyTensor
from megatron.checkpoint.core.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.core.training_state import TrainingState
from megatron.checkpoint.torch_dist import checkpoint as torch_dist

_BLOCK_BYTES = 64 << 20

Progress = Callable[[int], None]


@dataclass(frozen=True)
class TensorDifference:
    """Elements of a tensor that are not bitwise the same.

    Attributes:
        name: of the tensor.
        count, total: how many differ, of how many.
        absolute: the largest difference; NaN where only one side is a number.
        relative: the largest difference over the larger magnitude.
    """

    name: str
    count: int
    total: int
    absolute: float
    relative: float


@dataclass
class Comparison:
    """Attributes:
    only_first, only_second: names that one side has.
    kinds: names with another shape, dtype or kind, with both.
    values: tensors of other values, the largest difference first.
    objects: everything else that differs, with both sides.
    equal: how many are the same.
    """

    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    values: list[TensorDifference] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)
    equal: int = 0

    @property
    def differs(self) -> bool:
        return any((self.only_first, self.only_second, self.kinds, self.values, self.objects))

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {"same": not self.differs, **asdict(self)}


def compare_entries(
    first: StoredCheckpoint, second: StoredCheckpoint, progress: Progress = lambda _: None
) -> Comparison:
    """All keys, tensors bitwise and objects by what they hold."""
    found = Comparison()
    mine, theirs = _described(first), _described(second)
    for key in _in_both(found, mine, theirs):
        if mine[key] != theirs[key]:
            found.kinds.append(f"{key}: {mine[key]}, {theirs[key]}")
        elif key in first.tensors:
            _compare_tensors(found, key, first.lazy(key), second.lazy(key), progress)
        else:
            _compare_values(found, key, first.read_object(key), second.read_object(key))
    commons = [_common(stored) for stored in (first, second)]
    for name in _in_both(found, *commons):
        _compare_values(found, name, commons[0][name], commons[1][name])
    return _sorted(found)


def _common(stored: StoredCheckpoint) -> dict[str, Any]:
    """What a torch_dist checkpoint keeps in a file of its own."""
    if not (stored.directory / torch_dist.COMMON_FILE).is_file():
        return {}
    return {
        f"{torch_dist.COMMON_FILE}: {name}": value
        for name, value in torch_dist.read_common(stored).items()
    }


def compare_states(
    first: TrainingState,
    second: TrainingState,
    weights_only: bool = False,
    with_padding: bool = True,
    progress: Progress = lambda _: None,
) -> Comparison:
    """What two checkpoints say, whichever formats they are in: tensors by canonical name, and all of the rest of a run.

    Weights that one side has in another dtype are compared in that with less precision.

    Args:
        weights_only: nothing but weights and buffers.
        with_padding: more rows of vocabulary on one side are a difference; without it those that
            both have are compared.
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
        facts, other_facts = _facts(first), _facts(second)
        for name in _in_both(found, facts, other_facts):
            _compare_values(found, name, facts[name], other_facts[name])
    return _sorted(found)


def num_bytes(tensors: Iterable[LazyTensor]) -> int:
    return sum(tensor.num_bytes for tensor in tensors)


def _described(stored: StoredCheckpoint) -> dict[str, str]:
    tensors = {key: f"{stored.dtype(key)} {stored.shape(key)}" for key in stored.tensors}
    return {**tensors, **dict.fromkeys(stored.objects, "object")}


def _tensors(state: TrainingState, weights_only: bool) -> dict[str, LazyTensor]:
    return {
        f"{name} ({kind})": tensor
        for kind, name, tensor in state.tensors()
        if not weights_only or kind in ("weight", "buffer")
    }


FORMAT_ARGUMENTS = (
    "ckpt_format",
    "use_megatron_fsdp",
    "use_distributed_optimizer",
    "dist_ckpt_optim_fully_reshardable",
    "rank",
    "local_rank",
)
"""Arguments that say how a run saves, and which rank has told them."""
_FOR_ANOTHER_OPTIMIZER = ("bias_correction", "step")


def _facts(state: TrainingState) -> dict[str, Any]:
    """Everything but tensors, one by one."""
    facts: dict[str, Any] = {
        "iteration": state.iteration,
        "operations": state.operations,
        "checkpoint version": state.version,
    }
    for name, value in vars(state.args or argparse.Namespace()).items():
        if name not in FORMAT_ARGUMENTS:
            facts[f"args.{name}"] = value
    for name, value in (state.scheduler or {}).items():
        facts[f"schedule.{name}"] = value
    for name, value in (state.grad_scaler or {}).items():
        facts[f"loss scaler.{name}"] = value
    for place, generators in state.random_states.items():
        facts[f"random state of {place}"] = generators
    for group in state.groups or []:
        for name in group.names:
            # Moments that a reader has dropped begin at step 0; their tensors have been compared by
            # now.
            facts[f"{name}: step"] = (
                0.0 if name in state.is_fresh and state.is_fresh[name]() else state.step_of(name)
            )
            for key, value in group.fields.items():
                if key not in _FOR_ANOTHER_OPTIMIZER:
                    facts[f"{name}: {key}"] = value
    return facts


def _in_both(found: Comparison, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    found.only_first += sorted(mine.keys() - theirs.keys())
    found.only_second += sorted(theirs.keys() - mine.keys())
    return [key for key in mine if key in theirs]


def _compare_tensors(
    found: Comparison, name: str, first: LazyTensor, second: LazyTensor, progress: Progress
) -> None:
    """Block by block, so that tensors of any size fit."""
    row_bytes = max(first.num_bytes // max(first.num_rows, 1), 1)
    step = max(_BLOCK_BYTES // row_bytes, 1)
    count, absolute, relative = 0, 0.0, 0.0
    for start in range(0, first.num_rows, step):
        stop = min(start + step, first.num_rows)
        mine, theirs = first.read_rows(start, stop), second.read_rows(start, stop)
        progress(mine.numel() * mine.element_size() + theirs.numel() * theirs.element_size())
        differs = _bits(mine) != _bits(theirs)
        if differs.any():
            mine, theirs = _numbers(mine)[differs], _numbers(theirs)[differs]
            distance = (mine - theirs).abs()
            count += distance.numel()
            absolute = _largest(absolute, distance)
            relative = _largest(
                relative,
                distance
                / torch.maximum(mine.abs(), theirs.abs()).clamp_min(torch.finfo(torch.double).tiny),
            )
    if count:
        found.values.append(
            TensorDifference(name, count, math.prod(first.shape), absolute, relative)
        )
    else:
        found.equal += 1


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Integers that are equal where the elements are the same in every bit; NaN is NaN."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).flatten(-2)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().reshape(-1).view(kinds[tensor.element_size()])


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1).double()


def _largest(known: float, values: torch.Tensor) -> float:
    largest = values.max().item()  # NaN if there is one
    return largest if math.isnan(largest) or math.isnan(known) else max(known, largest)


def _compare_values(found: Comparison, name: str, first: Any, second: Any) -> None:
    if same(first, second):
        found.equal += 1
    else:
        found.objects.append(f"{name}: {_short(first)}, {_short(second)}")


def same(first: Any, second: Any) -> bool:
    """Whether two nests of plain objects, tensors and arrays hold the same."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and torch.equal(_bits(first), _bits(second))
        )
    if isinstance(first, numpy.ndarray) and isinstance(second, numpy.ndarray):
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and same(first.tolist(), second.tolist())
        )
    if isinstance(first, io.BytesIO) and isinstance(second, io.BytesIO):
        return first.getvalue() == second.getvalue()
    if isinstance(first, argparse.Namespace) and isinstance(second, argparse.Namespace):
        return same(vars(first), vars(second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if (
        isinstance(first, float)
        and isinstance(second, float)
        and math.isnan(first)
        and math.isnan(second)
    ):
        return True
    return bool(first == second)


def _short(value: Any, limit: int = 80) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else f"{text[:limit]}…"


def _sorted(found: Comparison) -> Comparison:
    found.values.sort(key=lambda each: -math.inf if math.isnan(each.absolute) else -each.absolute)
    return found
