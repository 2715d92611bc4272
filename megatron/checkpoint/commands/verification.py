# SPDX-License-Identifier: Apache-2.0
"""Verification that a checkpoint is complete, unchanged and consistent."""

from __future__ import annotations

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
    opened: Opened,
    progress: Progress = ignore_progress,
    notes: list[str] | None = None,
) -> list[str]:
    """Find all problems of a checkpoint.

    The checks cover files, digests, the checksums of all entries, chunks, and safe reading of
    objects. In a checkpoint of a training run they also cover the keys, the shapes that its
    arguments imply, main weights against those of the model, the optimizer's state, and values that
    are NaN or infinite.

    Args:
        opened: the checkpoint.
        progress: called with numbers of bytes; they count once for files and once for values.
        notes: a list that gets the harmless entries without meaning to training.

    Returns:
        A message for each problem.
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
    faults = set(state.unknown)
    for name, is_fresh in state.is_fresh.items():
        if _is_fault(is_fresh):
            faults.add(name)
    harmless = [*_other_iteration(opened, state)]
    for note in state.notes:
        if note.partition(":")[0] in faults:
            problems.append(note)
        else:
            harmless.append(note)
    if notes is not None:
        notes += harmless
    return problems


def _other_iteration(opened: Opened, state: TrainingState) -> Iterator[str]:
    """Yield a note if a directory has the name of another iteration than that of its content."""
    named = directory.iteration_of(opened.directory.name)
    if named is not None and state.iteration not in (None, named):
        yield (
            f"{opened.directory.name} holds iteration {state.iteration}: it was renamed, or files"
            " of another checkpoint are in it"
        )


def find_changed_files(
    opened: Opened,
    progress: Progress = ignore_progress,
) -> list[str]:
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
    num_bytes = sum(opened.stored.num_bytes(key) for key in opened.stored.tensors)
    if fast or opened.format == PLAIN:
        return num_bytes
    return 2 * num_bytes


# ---- files


def _wrong_chunks(stored: StoredCheckpoint) -> Iterator[str]:
    """Report tensors whose chunks overlap, reach beyond the shape or leave elements out."""
    for key, chunks in stored.chunks.items():
        shape = stored.shape(key)
        whole = Chunk((0,) * len(shape), shape)
        for chunk in chunks:
            if chunk.numel and chunk.overlap(whole) != chunk:
                yield f"{key}: the chunk at {chunk.offsets} sticks out of the shape {whole.sizes}"
        volume = sum(chunk.numel for chunk in chunks)
        if volume != whole.numel:
            yield (
                f"{key}: its chunks hold {volume} elements, its shape {whole.sizes} has"
                f" {whole.numel}"
            )
        elif chunks_overlap(chunks):
            yield f"{key}: two of its chunks overlap"


def _unreadable_entries(stored: StoredCheckpoint) -> Iterator[str]:
    """Report entries whose checksums differ or that do not match the metadata."""
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
    tensors = state.weights | state.buffers
    for name, tensor in tensors.items():
        expected = expected_shape(name, state.args)
        if expected is not None and not _fits(tensor.shape, expected):
            yield (
                f"{name} has the shape {tensor.shape}; the arguments of the run make it {expected}"
            )


def _fits(shape: Shape, expected: tuple[int | None, ...]) -> bool:
    """Compare shapes; None in ``expected`` allows any size."""
    if len(expected) != len(shape):
        return False
    return all(wanted in (None, size) for wanted, size in zip(expected, shape))


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


def _is_fault(is_fresh: Callable[[], bool]) -> bool:
    """Return True if the main weight of a parameter contradicts the model's.

    A damaged one has been reported when it was read.
    """
    try:
        return is_fresh()
    except (ValueError, NotImplementedError):
        return False


def _incomplete_schedule(state: TrainingState) -> Iterator[str]:
    missing = []
    for name in SCHEDULE:
        if name not in (state.scheduler or SCHEDULE):
            missing.append(name)
    if missing:
        yield f"the schedule of rates lacks {', '.join(missing)}"


def _wrong_values(state: TrainingState, progress: Progress) -> Iterator[str]:
    """Report tensors with NaN, infinite values or negative second moments.

    Reading them also compares checksums, and main weights with the model's.
    """
    for kind, name, tensor in state.tensors():
        wrong = 0
        try:
            for start, stop in tensor.row_blocks():
                block = tensor.read_rows(start, stop)
                progress(block.nbytes)
                wrong += _count_wrong(block, kind)
        except (ValueError, NotImplementedError) as error:
            yield f"{name} ({kind}): {error}"
            continue
        if wrong:
            fault = "NaN or infinite"
            if kind == "exp_avg_sq":
                fault += " or negative"
            yield f"{name} ({kind}): {wrong} values are {fault}"


def _count_wrong(block: torch.Tensor, kind: str) -> int:
    if not block.is_floating_point():
        return 0
    wrong = ~torch.isfinite(block)
    if kind == "exp_avg_sq":
        wrong |= block < 0
    return int(wrong.sum())
