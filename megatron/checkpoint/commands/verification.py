# SPDX-License-Identifier: Apache-2.0
"""Is a checkpoint whole, unchanged and consistent? Everything in it is read once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.checkpoint.commands.formats import PLAIN, Opened
from megatron.checkpoint.core import parameter_shapes
from megatron.checkpoint.core.chunk_index import chunks_overlap
from megatron.checkpoint.core.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.core.training_state import SCHEDULE, TrainingState

_BLOCK_BYTES = 64 << 20


def find_problems(
    opened: Opened, progress: Callable[[int], None] = lambda _: None, notes: list[str] | None = None
) -> list[str]:
    """Everything that is wrong with a checkpoint, in words; none for a good one.

    Files, checksums, chunks, and objects that can be read safely; for one of a training run also
    the keys, the shapes that its arguments promise, whether main weights are those of the model,
    the optimizer's state, and NaN or infinite values.

    Args:
        notes: gets what is no fault: entries that mean nothing to training.
    """
    problems: list[str] = []
    stored = opened.stored
    if stored is not None:
        problems += _holes(stored)
        problems += _unreadable(
            stored,
            progress if opened.format == PLAIN else lambda _: None,
            with_tensors=opened.format == PLAIN,
        )
    if opened.format == PLAIN or problems:
        return problems
    try:
        state = opened.state()
    except (ValueError, NotImplementedError) as error:
        return [str(error)]
    problems += _shapes(state)
    problems += _incomplete_state(state)
    problems += _incomplete_schedule(state)
    problems += _wrong_values(state, progress)
    faults = state.unknown + [
        name for name, contradicts in state.is_fresh.items() if _is_fault(contradicts)
    ]
    if notes is not None:
        notes += [note for note in state.notes if note.partition(":")[0] not in faults]
    return problems + [note for note in state.notes if note.partition(":")[0] in faults]


def _holes(stored: StoredCheckpoint) -> Iterator[str]:
    """Tensors whose chunks overlap, stick out or leave elements out."""
    for key, entry in stored.tensors.items():
        volume = 0
        boxes = []
        for chunk in entry.chunks:
            if any(
                a < 0 or a + n > size for a, n, size in zip(chunk.offsets, chunk.sizes, entry.size)
            ):
                yield (
                    f"{key}: the chunk at {tuple(chunk.offsets)} sticks out of the shape"
                    f" {tuple(entry.size)}"
                )
            if math.prod(chunk.sizes):
                boxes.append((tuple(chunk.offsets), tuple(chunk.sizes)))
            volume += math.prod(chunk.sizes)
        if volume != math.prod(entry.size):
            yield (
                f"{key}: its chunks hold {volume} elements, its shape {tuple(entry.size)} has"
                f" {math.prod(entry.size)}"
            )
        elif chunks_overlap(boxes):
            yield f"{key}: two of its chunks overlap"


def _unreadable(
    stored: StoredCheckpoint, progress: Callable[[int], None], with_tensors: bool
) -> Iterator[str]:
    for key in stored.objects:
        try:
            stored.read_object(key)
        except ValueError as error:
            yield str(error)
    for key in stored.tensors if with_tensors else ():
        try:
            progress(stored.lazy(key).read().nbytes)
        except (ValueError, NotImplementedError) as error:
            yield str(error)


def _shapes(state: TrainingState) -> Iterator[str]:
    """Tensors that do not fit the model that the arguments describe."""
    if state.args is None:
        return
    sizes = parameter_shapes.Sizes(state.args)
    for name, tensor in [*state.weights.items(), *state.buffers.items()]:
        expected = parameter_shapes.expected_shape(name, sizes)
        if expected is None:
            continue
        if len(expected) != len(tensor.shape) or any(
            n is not None and n != m for n, m in zip(expected, tensor.shape)
        ):
            yield (
                f"{name} has the shape {tensor.shape}; the arguments of the run make it {expected}"
            )


def _incomplete_state(state: TrainingState) -> Iterator[str]:
    """Parameters with some of the optimizer's state."""
    if state.groups is None:
        return
    kinds = sorted({slot for slots in state.moments.values() for slot in slots})
    for name, slots in state.moments.items():
        missing = [slot for slot in kinds if slot not in slots]
        if missing:
            yield f"{name}: the optimizer lacks {', '.join(missing)}"
        for slot, tensor in slots.items():
            if tensor.shape != state.weights[name].shape:
                yield (
                    f"{name}: {slot} has the shape {tensor.shape}, the weight"
                    f" {state.weights[name].shape}"
                )


def _is_fault(contradicts: Callable[[], bool]) -> bool:
    """Whether a main weight is not the model's; of a damaged one that has been told already."""
    try:
        return contradicts()
    except (ValueError, NotImplementedError):
        return False


def _incomplete_schedule(state: TrainingState) -> Iterator[str]:
    missing = [name for name in SCHEDULE if name not in (state.scheduler or SCHEDULE)]
    if missing:
        yield f"the schedule of rates lacks {', '.join(missing)}"


def _wrong_values(state: TrainingState, progress: Callable[[int], None]) -> Iterator[str]:
    """NaN and infinite values; negative second moments.

    Reading compares checksums, and main weights with the model's.
    """
    for kind, name, tensor in state.tensors():
        try:
            wrong = sum(_count_wrong(block, kind, progress) for block in _blocks(tensor))
        except (ValueError, NotImplementedError) as error:
            yield f"{name} ({kind}): {error}"
            continue
        if wrong:
            yield f"{name} ({kind}): {wrong} values are NaN or infinite" + (
                " or negative" if kind == "exp_avg_sq" else ""
            )


def _blocks(tensor: Any) -> Iterator[torch.Tensor]:
    step = max(_BLOCK_BYTES // max(tensor.num_bytes // max(tensor.num_rows, 1), 1), 1)
    for start in range(0, tensor.num_rows, step):
        yield tensor.read_rows(start, min(start + step, tensor.num_rows))


def _count_wrong(block: torch.Tensor, kind: str, progress: Callable[[int], None]) -> int:
    progress(block.nbytes)
    if not block.is_floating_point():
        return 0
    wrong = ~torch.isfinite(block)
    return int((wrong | (block < 0)).sum() if kind == "exp_avg_sq" else wrong.sum())


def total_bytes(opened: Opened) -> int:
    """What :func:`find_problems` reports as done in the end, about."""
    stored = opened.stored
    return sum(stored.num_bytes(key) for key in stored.tensors) if stored is not None else 0
