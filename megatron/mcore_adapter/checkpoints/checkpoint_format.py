# SPDX-License-Identifier: Apache-2.0
"""The interface of a checkpoint format, and functions that its implementations share."""

from __future__ import annotations

import argparse
import gc
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron.checkpoint.core.listing import some
from megatron.checkpoint.integrity.manifest import FileDigest, Manifest, digests_of_rank
from megatron.fsdp.engine.collectives import agree
from megatron.mcore_adapter.checkpoints.entered_together import PeerError, entered_together
from megatron.mcore_adapter.checkpoints.saved_state import StateDict
from megatron.mcore_adapter.run.first_rank import Log
from megatron.mcore_adapter.run.run_state import TrainedParts


class CheckpointFormat(Protocol):
    """A format in which a run saves and loads. All methods are collectives."""

    def collect(
        self,
        args: argparse.Namespace,
        state: StateDict,
        parts: TrainedParts,
    ) -> StateDict:
        """Return the content of a checkpoint, including the entry ``args``.

        Its tensors share storage with model and optimizer. All other entries can be pickled, for
        the writer process of a background save.

        Args:
            args: arguments of the run.
            state: everything but weights and optimizer, see
                :func:`~megatron.mcore_adapter.checkpoints.saved_state.run_state`.
            parts: model, and the optimizer if its state is saved.
        """

    def write(
        self,
        args: argparse.Namespace,
        content: StateDict,
        target: Path,
    ) -> list[str]:
        """Write content into a directory, and sign it.

        The ranks are those of the run, or the writer processes of a background save.

        Args:
            args: arguments of the run.
            content: result of :meth:`collect`, or a copy of it in host memory.
            target: empty directory, the same on all ranks.

        Returns:
            The problems of all ranks, the same on every rank.
        """

    def load(
        self,
        args: argparse.Namespace,
        state: StateDict,
        parts: TrainedParts,
        source: Path,
        log: Log,
    ) -> StateDict:
        """Load a checkpoint into the model and the optimizer, and return the rest of it.

        Args:
            args: arguments of the run.
            state: everything but weights and optimizer, as a run without a checkpoint has it.
            parts: model, and the optimizer if its state is loaded.
            source: directory of the checkpoint, whose files have been checked.
            log: prints a line on the first rank.

        Raises:
            ValueError: on every rank, before anything is overwritten, if the checkpoint does not
                fit this run.
        """


def attempt(action: Callable[[], object]) -> list[str]:
    """Run ``action`` and return the problems of all ranks, the same on every rank.

    If it fails on a rank, the other ranks do not wait for that one in a collective of the action:
    they leave it.
    """
    problems: list[str] = []
    try:
        with entered_together():
            action()
    except PeerError:
        pass  # the rank that failed reports it
    except CheckpointException as error:
        # torch raises it on every rank, and it is no Exception. Each rank reports its own problem.
        problem = cause_of(error, dist.get_rank())
        if problem is not None:
            problems.append(problem)
    except Exception as error:
        # A full disk, a missing permission, a broken file system: the other ranks wait.
        problems.append(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
    return agree(problems)


def cause_of(error: CheckpointException, rank: int) -> str | None:
    """Return the error of ``rank`` without its traceback, None if that rank has not failed."""
    if rank not in error.failures:
        return None
    cause = error.failures[rank][0]
    return f"rank {rank}: {type(cause).__name__}: {cause}"


def sign(target: Path) -> list[str]:
    """Write the manifest of a checkpoint whose files are complete; a collective.

    Every rank computes the digests of the files that it has written.

    Returns:
        The problems of all ranks, the same on every rank.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    digests: dict[str, FileDigest] = {}
    problems = attempt(lambda: digests.update(digests_of_rank(target, rank, world_size)))
    if problems:
        return problems
    of_ranks: list[dict[str, FileDigest]] = [{}] * world_size
    dist.all_gather_object(of_ranks, digests)

    def write_manifest() -> None:
        if rank == 0:
            Manifest(target, dict(ChainMap(*of_ranks))).write()

    return attempt(write_manifest)


def report_partial_load(
    source: Path,
    not_in_file: Sequence[str],
    not_in_model: Sequence[str],
    fits: bool,
    log: Log,
) -> None:
    """Print the entries that a load that is not strict leaves out.

    Args:
        source: directory of the checkpoint.
        not_in_file: keys that keep their values of this run; the same on all ranks.
        not_in_model: keys of the file that no rank uses; the same on all ranks.
        fits: True if some tensor of the model is in the file.
        log: prints a line on the first rank.

    Raises:
        ValueError: on every rank, if no tensor of the model is in the file.
    """
    lines = []
    if not_in_file:
        count = len(not_in_file)
        lines.append(
            f"{count} entries are not in the file and stay as they are: {some(not_in_file)}"
        )
    if not_in_model:
        count = len(not_in_model)
        lines.append(f"{count} entries of the file are not in the model: {some(not_in_model)}")
    if not fits:
        raise ValueError(f"{source} has no weight of this model:\n  " + "\n  ".join(lines))
    for line in lines:
        log(f"note: {source} is loaded in part: {line}")


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector inside the context.

    A save or a load makes thousands of objects that stay alive. For these the collector would
    traverse all objects of the process once or twice.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def without_warnings() -> Iterator[None]:
    """Ignore warnings: torch's checkpoint uses names that torch itself deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
