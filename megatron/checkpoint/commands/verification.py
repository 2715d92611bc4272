# SPDX-License-Identifier: Apache-2.0
"""Verification that a checkpoint is complete, unchanged and consistent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from megatron.checkpoint.commands.formats import PLAIN, Opened
from megatron.checkpoint.core.key_rules import expected_shape
from megatron.checkpoint.core.lazy_tensor import Shape
from megatron.checkpoint.core.parts import Progress, ignore_progress
from megatron.checkpoint.core.training_state import SCHEDULE, TrainingState
from megatron.checkpoint.dcp.chunk import Chunk, chunks_overlap
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.integrity.manifest import MANIFEST
from megatron.checkpoint.store import directory


def find_problems(
    opened: Opened, progress: Progress = ignore_progress, notes: list[str] | None = None
) -> list[str]:
    """Find all problems of a checkpoint.

    The checks cover files, digests, the checksums of all entries, chunks, and safe reading of
    objects. In a checkpoint of a training run they also cover the keys, the shapes that its
    arguments imply, main weights against those of the model, the optimizer's state, and values that
    are NaN or infinite.

    Harmless entries without meaning to training are added to ``notes``. The progress counts bytes
    once for files and once for values.
    """
    problems: list[str] = []
    stored = opened.stored
    if stored is not None:
        problems += _wrong_chunks(stored)
        problems += stored.damaged_files(progress=progress) or _unreadable_entries(stored)
    if opened.format == PLAIN or problems:
        return problems
    try:
        state = opened.state()
    except (ValueError, NotImplementedError) as error:
        return [str(error)]
    problems += _wrong_shapes(state)
    problems += _incomplete_state(state)
    problems += _incomplete_schedule(state)
    problems += _wrong_values(state, progress)
    contradicting = [name for name, is_fresh in state.is_fresh.items() if _is_fault(is_fresh)]
    faults = {*state.unknown, *contradicting}
    if notes is not None:
        notes += _other_iteration(opened, state)
    for note in state.notes:
        if note.partition(":")[0] in faults:
            problems.append(note)
        elif notes is not None:
            notes.append(note)
    return problems


def _other_iteration(opened: Opened, state: TrainingState) -> Iterator[str]:
    """Yield a note if a directory has the name of another iteration than that of its content."""
    named = directory.iteration_of(opened.directory.name)
    if named is not None and state.iteration not in (None, named):
        yield (
            f"{opened.directory.name} holds iteration {state.iteration}: it was renamed, or files"
            " of another checkpoint are in it"
        )


def find_changed_files(opened: Opened, progress: Progress = ignore_progress) -> list[str]:
    """Compare the files of a checkpoint with its manifest, and find those that are not listed.

    Raises:
        ValueError: if it has no manifest.
    """
    if opened.stored is None or not opened.stored.has_manifest:
        raise ValueError(
            f"{opened.directory} has no {MANIFEST}, which --fast compares: verify without --fast"
        )
    return opened.stored.damaged_files(progress=progress)


def total_bytes(opened: Opened, fast: bool = False) -> int:
    """Return about how many bytes are reported in all, by the fast verification or the full one."""
    if opened.stored is None:
        return 0
    num_bytes = sum(map(opened.stored.num_bytes, opened.stored.tensors))
    return num_bytes if fast or opened.format == PLAIN else 2 * num_bytes


# ---- files


def _wrong_chunks(stored: StoredCheckpoint) -> Iterator[str]:
    """Report tensors whose chunks overlap, reach beyond the shape or leave elements out."""
    for key, entry in stored.tensors.items():
        chunks = list(map(Chunk.of, entry.chunks))
        for chunk in chunks:
            if any(chunk.span(dim)[1] > size for dim, size in enumerate(entry.size)):
                shape = tuple(entry.size)
                yield f"{key}: the chunk at {chunk.offsets} sticks out of the shape {shape}"
        volume = sum(chunk.numel for chunk in chunks)
        if volume != math.prod(entry.size):
            yield (
                f"{key}: its chunks hold {volume} elements, its shape {tuple(entry.size)} has"
                f" {math.prod(entry.size)}"
            )
        elif chunks_overlap(chunks):
            yield f"{key}: two of its chunks overlap"


def _unreadable_entries(stored: StoredCheckpoint) -> Iterator[str]:
    """Report entries whose checksums differ or that are not what the metadata says."""
    for key in [*stored.tensors, *stored.objects]:
        try:
            stored.check_entry(key)
        except (ValueError, NotImplementedError) as error:
            yield str(error)


# ---- training state


def _wrong_shapes(state: TrainingState) -> Iterator[str]:
    """Report tensors that do not fit the model which the arguments describe."""
    if state.args is None:
        return
    for name, tensor in [*state.weights.items(), *state.buffers.items()]:
        expected = expected_shape(name, state.args)
        if expected is not None and not _fits(tensor.shape, expected):
            yield (
                f"{name} has the shape {tensor.shape}; the arguments of the run make it {expected}"
            )


def _fits(shape: Shape, expected: tuple[int | None, ...]) -> bool:
    """Compare shapes; None in ``expected`` allows any size."""
    return len(expected) == len(shape) and all(
        wanted is None or wanted == size for wanted, size in zip(expected, shape)
    )


def _incomplete_state(state: TrainingState) -> Iterator[str]:
    """Report parameters that lack a part of the optimizer's state which others have."""
    if state.groups is None:
        return
    all_slots: set[str] = set()
    for slots in state.moments.values():
        all_slots.update(slots)
    for name, slots in state.moments.items():
        missing = sorted(all_slots - slots.keys())
        if missing:
            yield f"{name}: the optimizer lacks {', '.join(missing)}"
        for slot, tensor in slots.items():
            if tensor.shape != state.weights[name].shape:
                yield (
                    f"{name}: {slot} has the shape {tensor.shape}, the weight"
                    f" {state.weights[name].shape}"
                )


def _is_fault(is_fresh: Callable[[], bool]) -> bool:
    """Return True if the main weight of a parameter contradicts the model's.

    A damaged one has been reported when it was read.
    """
    try:
        return is_fresh()
    except (ValueError, NotImplementedError):
        return False


def _incomplete_schedule(state: TrainingState) -> Iterator[str]:
    missing = [name for name in SCHEDULE if name not in (state.scheduler or SCHEDULE)]
    if missing:
        yield f"the schedule of rates lacks {', '.join(missing)}"


def _wrong_values(state: TrainingState, progress: Progress) -> Iterator[str]:
    """Report tensors with NaN, infinite values or negative second moments.

    Reading them also compares checksums, and main weights with the model's.
    """
    for kind, name, tensor in state.tensors():
        try:
            blocks = (tensor.read_rows(*rows) for rows in tensor.row_blocks())
            wrong = sum(_count_wrong(block, kind, progress) for block in blocks)
        except (ValueError, NotImplementedError) as error:
            yield f"{name} ({kind}): {error}"
            continue
        if wrong:
            negative = " or negative" if kind == "exp_avg_sq" else ""
            yield f"{name} ({kind}): {wrong} values are NaN or infinite{negative}"


def _count_wrong(block: torch.Tensor, kind: str, progress: Progress) -> int:
    progress(block.nbytes)
    if not block.is_floating_point():
        return 0
    wrong = ~torch.isfinite(block)
    if kind == "exp_avg_sq":
        wrong |= block < 0
    return int(wrong.sum())
