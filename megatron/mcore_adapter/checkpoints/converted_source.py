# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other formats and optimizers, which a run with FSDP loads as if converted.

The converter's reader and writer plan the conversion to fsdp_dtensor, but nothing is written: every
rank reads the rows of its own shards from the original files.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer

from megatron.checkpoint.commands.formats import FSDP_DTENSOR, HUGGING_FACE, TORCH_DIST
from megatron.checkpoint.core.key_rules import entry_names
from megatron.checkpoint.core.listing import some
from megatron.checkpoint.core.spelling import choose_spelling
from megatron.checkpoint.core.training_state import MOMENTS, MOMENTUM, TrainingState
from megatron.checkpoint.dcp.dcp_target import EntryReader
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.fsdp_dtensor import dtensor_writer as fsdp_dtensor
from megatron.checkpoint.fsdp_dtensor.keys import STATE_PREFIX
from megatron.checkpoint.hugging_face import model_reader as hugging_face
from megatron.checkpoint.hugging_face.model_directory import is_model_directory
from megatron.checkpoint.store.directory import METADATA
from megatron.checkpoint.torch_dist import checkpoint as torch_dist
from megatron.fsdp.engine.collectives import agree
from megatron.mcore_adapter.checkpoints.saved_state import StateDict
from megatron.mcore_adapter.run.first_rank import Log


def format_of(source: Path) -> str:
    """Return the format of a checkpoint, which its files show.

    Raises:
        ValueError: the directory is no checkpoint, or not a complete one.
    """
    if is_model_directory(source):
        return HUGGING_FACE
    if not (source / METADATA).is_file():
        raise ValueError(f"{source} is no complete checkpoint: it has no {METADATA}")
    if (source / torch_dist.MARKER).is_file():
        return TORCH_DIST
    return FSDP_DTENSOR


def open_converted(
    source: Path,
    args: argparse.Namespace,
    log: Log,
) -> EntryReader:
    """Return a reader of a checkpoint as if it were converted to fsdp_dtensor; a collective.

    Args:
        source: directory of the checkpoint, which is in another format.
        args: arguments of the run that loads it.
        log: prints a line on the first rank.

    Raises:
        ValueError: on every rank, if it cannot be converted.
    """
    with _raised_together(source):
        state = _training_state(source, args)
        # The loader finds parameters by their canonical names, whatever layers its model has.
        target = fsdp_dtensor.target(state, choose_spelling(state, "local"))
    notes = set(state.notes)
    log(f"{source} is in the format {format_of(source)}: converted in memory")
    _share_comparisons(source, state)
    for note in agree(notes.union(state.notes)):
        log(f"note: {note}")
    return EntryReader(target, str(source))


def _training_state(source: Path, args: argparse.Namespace) -> TrainingState:
    if format_of(source) == TORCH_DIST:
        stored = StoredCheckpoint(source, verify=False)  # its files are verified already
        return torch_dist.read(stored, allow_unknown=not args.strict_fsdp_dtensor_load)
    state = hugging_face.read(source)
    assert state.args is not None  # config.json has them
    rows = state.args.padded_vocab_size
    own_rows = args.padded_vocab_size
    if rows < own_rows:
        state = hugging_face.read(source, vocabulary_multiple=own_rows)
        state.notes.append(f"its vocabulary of {rows} rows is padded with zeros to {own_rows}")
    return state


def _share_comparisons(source: Path, state: TrainingState) -> None:
    """Find the parameters whose moments are not in the file and start at zero; a collective.

    This compares whole tensors, which the ranks divide among them.
    """
    names = []
    for name, is_fresh in state.is_fresh.items():
        if is_fresh.known is None:
            names.append(name)
    # Sorted by size and dealt to the ranks in turn, so that all shares have about the same size.
    names.sort(key=lambda name: (-state.weights[name].num_bytes, name))
    fresh = []
    with _raised_together(source):
        for name in names[dist.get_rank() :: dist.get_world_size()]:
            if state.is_fresh[name]():
                fresh.append(name)
    all_fresh = set(agree(fresh))
    for name in names:
        state.is_fresh[name].known = name in all_fresh


@contextmanager
def _raised_together(source: Path) -> Iterator[None]:
    """Raise the errors of all ranks as one ValueError on every rank; the exit is a collective."""
    problems: list[str] = []
    try:
        yield
    except Exception as error:  # files can hold anything, and the other ranks wait
        problems = [_message(source, error)]
    problems = agree(problems)
    if problems:
        raise ValueError("\n".join(problems))


def _message(source: Path, error: Exception) -> str:
    if not isinstance(error, ValueError):
        return f"{source} cannot be loaded: {type(error).__name__}: {error}"
    message = f"{source} cannot be converted in memory: {error}"
    if "(--" in str(error):
        message += "\nThe flags are those of tools/checkpoint/checkpoint_inspector.py"
    return message


# ---- state of another optimizer
#
# The momentum of Muon and the first moment of Adam are the same average of gradients. (That of SGD
# is a sum.) Muon has no second moment: it begins at the square of the first, below which it cannot
# be, and counts as many steps as those of other parameters. Then no element of an update is above
# sqrt(b1^2 / b2 + (1 - b1)^2 / (1 - b2)) times the rate, 3.3 for b1 = 0.9 and b2 = 0.999.


def ask_for_momentum(
    entries: dict[str, StateDict],
    stored: Collection[str],
    gated: bool,
) -> dict[str, StateDict]:
    """Request the momentum of parameters that the file's run updated by the other optimizer.

    Args:
        entries: state and settings of this run's optimizer by the names in the file; changed.
        stored: keys of the file.
        gated: True if the MLPs are gated: the file stores the halves of their weights.

    Returns:
        The state that this run's optimizer has for these parameters, by their names in the file.
        The requested tensors share its storage.
    """
    if not any(key.startswith(STATE_PREFIX) and key.endswith(MOMENTS[0]) for key in stored):
        return {}  # the momentum of SGD is a sum, which neither of both can continue
    state = entries["state"]
    settings = entries["param_to_group_meta"]
    changed: dict[str, StateDict] = {}
    for name, slots in state.items():
        own = MOMENTUM
        other = MOMENTS[0]
        if MOMENTS[0] in slots:
            own = MOMENTS[0]
            other = MOMENTUM
        prefix = f"{STATE_PREFIX}{name}."
        if own in slots and prefix + own not in stored and prefix + other in stored:
            changed[name] = slots
            state[name] = {other: slots[own]}
    for name in list(settings):
        if not changed.keys().isdisjoint(entry_names(name, gated)):
            del settings[name]  # the parameters keep the settings of this run
    return changed


def take_momentum(
    changed: dict[str, StateDict],
    optimizer: MegatronOptimizer,
    content: StateDict,
    log: Log,
) -> None:
    """Complete the state of parameters whose momentum was read from another optimizer's.

    This is a collective.

    Args:
        changed: result of :func:`ask_for_momentum`; the second moments in it are computed.
        optimizer: optimizer of this run, whose param groups take the file's step.
        content: loaded content of the checkpoint.
        log: prints a line on the first rank.
    """
    step = _latest_step(optimizer, content)
    if changed:
        for group in optimizer.param_groups:
            if "step" in group:
                group["step"] = type(group["step"])(step)
    of_adam = []
    of_muon = []
    for name, slots in changed.items():
        if MOMENTS[1] not in slots:
            of_muon.append(name)
            continue
        of_adam.append(name)
        first = slots[MOMENTS[0]]
        second = slots[MOMENTS[1]]
        torch.square(first._local_tensor, out=second._local_tensor)
        if "step" in slots:
            slots["step"].fill_(step)
    of_adam = agree(of_adam)
    of_muon = agree(of_muon)
    if of_adam:
        log(f"note: Muon's momentum is loaded as Adam's two moments: {some(of_adam)}")
    if of_muon:
        log(
            f"note: Adam's first moment is loaded as Muon's, the second one is not: {some(of_muon)}"
        )


def _latest_step(optimizer: MegatronOptimizer, content: StateDict) -> float:
    """Return the step of the parameters whose state was loaded, or else the iteration."""
    steps = []
    for slots in content["optimizer"]["state"].values():
        if "step" in slots:
            steps.append(float(slots["step"]))
    for group in optimizer.param_groups:
        if group.get("step"):
            steps.append(float(group["step"]))
    return max(steps, default=float(content["iteration"]))
