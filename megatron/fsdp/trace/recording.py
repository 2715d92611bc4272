# SPDX-License-Identifier: Apache-2.0
"""Recording a part of a run: arguments, observers and files."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megatron.fsdp.engine import observe
from megatron.fsdp.engine.collectives import agree
from megatron.fsdp.trace.divergence import DivergenceWatch
from megatron.fsdp.trace.files import write_trace
from megatron.fsdp.trace.recorder import Recorder


@contextmanager
def record(
    directory: str | os.PathLike[str] | None = None,
    *,
    ranks: Collection[int] | None = None,
    keep: int | None = None,
) -> Iterator[Recorder]:
    """Record everything inside of the ``with`` block, on every rank. This is a collective.

        with trace.record("traces"):
            train_one_step()

    Files are written at its end, after an error too: ``traces/rank0.json``, which Perfetto
    (https://ui.perfetto.dev) and chrome://tracing open, and ``traces/rank0.tsv``, a table; the same
    for every rank. If a collective fails meanwhile, the error shows the last collectives of its
    rank and names the first rank that differs from the others; the other ranks print theirs. Over
    NCCL a timeout is an error only with ``TORCH_NCCL_BLOCKING_WAIT=1``; otherwise torch ends the
    process.

    Args:
        directory: gets the files, and is created; None: no files.
        ranks: ranks that write files; None: all. All ranks record, so that they can be compared.
        keep: the number of entries to keep, the last ones; None: all, about 200 bytes each.

    Yields:
        The recorder, with the entries so far.

    Raises:
        ValueError: on every rank, for wrong arguments, and if any rank cannot write into the
            directory.
        RuntimeError: without process groups.
        CollectiveError: inside the block, for a collective that fails.
    """
    if not dist.is_initialized():
        raise RuntimeError("record() expects that torch.distributed is initialised")
    problems = _problems_of_arguments(ranks, keep)
    _raise_everywhere(problems or _problems_of_directory(directory, ranks))
    origin = min(map(float, agree([repr(time.time())])))
    own = Recorder(keep)
    observe.add(own)
    watch = DivergenceWatch(own, repr(origin))
    try:
        yield own
    finally:
        observe.remove(own)
        watch.stop()
        if directory is not None and _writes(ranks):
            write_trace(Path(directory), dist.get_rank(), own.entries, origin, own.now())


def check_directory(
    directory: str | os.PathLike[str] | None, ranks: Collection[int] | None = None
) -> None:
    """Create the directory of a trace; a collective.

    Raises:
        ValueError: on every rank, if any of ``ranks`` (None: of all) cannot write files there.
    """
    _raise_everywhere(_problems_of_directory(directory, ranks))


def _problems_of_arguments(ranks: object, keep: object) -> list[str]:
    problems = []
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        problems.append(f"keep expects a positive number of entries or None but got {keep!r}")
    known = range(dist.get_world_size())
    if ranks is not None and not (
        isinstance(ranks, Collection)
        and not isinstance(ranks, str)
        and all(rank in known for rank in ranks)
    ):
        problems.append(
            f"ranks expects a collection of ranks from 0 to {known[-1]} or None but got {ranks!r}"
        )
    return problems


def _problems_of_directory(
    directory: str | os.PathLike[str] | None, ranks: Collection[int] | None
) -> list[str]:
    if directory is None or not _writes(ranks):
        return []
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        is_file = isinstance(error, FileExistsError)
        reason = "it is a file, not a directory" if is_file else error.strerror
        return [f"cannot write traces to {os.fspath(directory)}: {reason}"]
    return []


def _raise_everywhere(problems: list[str]) -> None:
    problems = agree(problems)
    if problems:
        raise ValueError("\n".join(problems))


def _writes(ranks: Collection[int] | None) -> bool:
    return ranks is None or dist.get_rank() in ranks
