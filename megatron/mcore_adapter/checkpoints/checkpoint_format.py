# SPDX-License-Identifier: Apache-2.0
"""The interface of a checkpoint format, and what its implementations share."""

from __future__ import annotations

import argparse
import gc
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron.checkpoint.core.listing import some
from megatron.checkpoint.integrity.manifest import FileDigest, Manifest, digests_of_rank
from megatron.fsdp.engine.collectives import agree
from megatron.mcore_adapter.checkpoints.entered_together import PeerError, entered_together
from megatron.mcore_adapter.run.first_rank import Say
from megatron.mcore_adapter.run.run_state import TrainedParts


class CheckpointFormat(Protocol):
    """A format in which a run saves and loads. The methods are collectives."""

    def collect(
        self, args: argparse.Namespace, state: dict[str, Any], parts: TrainedParts
    ) -> dict[str, Any]:
        """Return the content of a checkpoint, with ``args`` among it.

        Its tensors share storage with model and optimizer. All else can be pickled, for the process
        of a background save.

        Args:
            args: arguments of the run.
            state: everything but weights and optimizer.
            parts: what is saved beside it.
        """

    def write(self, args: argparse.Namespace, content: dict[str, Any], target: Path) -> list[str]:
        """Write content, or a copy of it, into the empty directory ``target``, and sign it.

        The ranks are those of the run, or the writer processes of a background save.

        Returns:
            The problems of all ranks, the same on every rank.
        """

    def load(
        self,
        args: argparse.Namespace,
        state: dict[str, Any],
        parts: TrainedParts,
        source: Path,
        say: Say,
    ) -> dict[str, Any]:
        """Load a checkpoint into the model and the optimizer, and return the rest of it.

        Args:
            args: arguments of the run.
            state: everything but weights and optimizer, as a fresh run has it.
            parts: what is loaded beside it.
            source: the directory of the checkpoint, whose files have been checked.
            say: prints a line on the first rank.

        Raises:
            ValueError: on every rank, if the checkpoint does not fit this run; before anything is
                overwritten.
        """


def attempt(action: Callable[[], object]) -> list[str]:
    """Run ``action`` and return the problems of all ranks, the same on every rank.

    A rank that fails does not wait for those that are in a collective of the action: they leave it.
    """
    problem = None
    try:
        with entered_together():
            action()
    except PeerError:
        pass  # which its rank reports
    except CheckpointException as error:
        # This is raised on every rank, and is no Exception: each rank reports its own problem.
        problem = cause_of(error, dist.get_rank())
    except Exception as error:
        # A full disk, a missing permission, a broken file system: the other ranks wait.
        problem = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    return agree([problem] if problem else [])


def cause_of(error: CheckpointException, rank: int) -> str | None:
    """Return the error of ``rank`` without its traceback, None if it had none."""
    if rank not in error.failures:
        return None
    cause = error.failures[rank][0]
    return f"rank {rank}: {type(cause).__name__}: {cause}"


def sign(target: Path) -> list[str]:
    """Write the manifest of a checkpoint whose files are complete; a collective.

    Every rank reads the files that it has written.

    Returns:
        The problems of all ranks, the same on every rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
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


def tell_of_partial_load(
    source: Path, not_in_file: Sequence[str], not_in_model: Sequence[str], fits: bool, say: Say
) -> None:
    """Say what a load that is not strict leaves out, which is the same on all ranks.

    Args:
        source: directory of the checkpoint.
        not_in_file: keys that keep the values that they have in this run.
        not_in_model: keys of the file that no rank uses.
        fits: some tensor of the model is in the file.
        say: prints a line on the first rank.

    Raises:
        ValueError: nothing fits.
    """
    absent = f"{len(not_in_file)} entries are not in the file and stay as they are: "
    unused = f"{len(not_in_model)} entries of the file are not in the model: "
    lines = [absent + some(not_in_file)] if not_in_file else []
    lines += [unused + some(not_in_model)] if not_in_model else []
    if not fits:
        raise ValueError(f"{source} has no weight of this model:\n  " + "\n  ".join(lines))
    for line in lines:
        say(f"note: {source} is loaded in part: {line}")


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector.

    A save or a load makes thousands of objects that stay, for which it would look through all
    objects of the process, once or twice.
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
    """Silence warnings: torch's checkpoint uses names that torch itself deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
