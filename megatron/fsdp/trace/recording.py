# SPDX-License-Identifier: Apache-2.0
"""Recording a part of a run: arguments, observers, and files for trace viewers and as a table."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.fsdp.engine import observe
from megatron.fsdp.engine.collectives import agree, exchange
from megatron.fsdp.engine.observe import GATHER, OTHER, REDUCE
from megatron.fsdp.trace import failed_collectives
from megatron.fsdp.trace.recorder import COMPUTE, STORAGE, Recorder, TraceEntry

TRACKS = (COMPUTE, GATHER, REDUCE, OTHER)  # as threads, in the order in which viewers show them
LANES = 100  # numbers of threads between one track and the next
COLUMNS = (
    "number",
    "begin_ms",
    "duration_ms",
    "track",
    "name",
    "bytes",
    "dtype",
    "unit",
    "phase",
    "microbatch",
    "ranks",
)


@contextmanager
def record(
    directory: str | os.PathLike[str] | None = None,
    *,
    ranks: Collection[int] | None = None,
) -> Iterator[Recorder]:
    """Record everything inside of the ``with`` block, on every rank. This is a collective.

        with trace.record("traces"):
            train_one_step()

    Every rank writes files at its end, after an error too: ``traces/rank0.json`` for Perfetto
    (https://ui.perfetto.dev) or chrome://tracing, and a table, ``traces/rank0.tsv``.

    Args:
        directory: gets the files, and is created; None: no files.
        ranks: ranks that write files; None: all. All ranks record.

    Raises:
        ValueError: on every rank, for wrong arguments or a directory that a rank cannot write to.
        RuntimeError: if torch.distributed is not initialised.
        CollectiveError: inside the block, for a collective that fails.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "record() expects that torch.distributed is initialised: call init_process_group first"
        )
    failed_collectives.watch()
    check_directory(directory, ranks)
    origin = min(float(begin) for begin in exchange([repr(time.time())]))
    recorder = Recorder()
    observe.add(recorder)
    try:
        yield recorder
    finally:
        observe.remove(recorder)
        if directory is not None and _writes(ranks):
            write_trace(Path(directory), dist.get_rank(), recorder.entries, origin, recorder.now())


def check_directory(
    directory: str | os.PathLike[str] | None, ranks: Collection[int] | None = None
) -> None:
    """Create the directory of a trace, in which ``ranks`` can write files; a collective.

    Raises:
        ValueError: on every rank, for wrong arguments or a directory that a rank cannot write to.
    """
    problems = []
    world_size = dist.get_world_size()
    if ranks is not None:
        is_collection = isinstance(ranks, Collection)
        if not is_collection or not set(ranks) <= set(range(world_size)):
            problems.append(
                f"ranks expects a collection of ranks from 0 to {world_size - 1} or None but got"
                f" {ranks!r}"
            )
    try:
        if directory is not None and not problems and _writes(ranks):
            os.makedirs(directory, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
    except OSError as error:
        reason = error.strerror
        if isinstance(error, FileExistsError):
            reason = "it is a file, not a directory"
        problems.append(f"cannot write traces to {directory}: {reason}")
    problems = agree(problems)
    if problems:
        raise ValueError("\n".join(problems))


def _writes(ranks: Collection[int] | None) -> bool:
    return ranks is None or dist.get_rank() in ranks


def write_trace(
    directory: Path,
    rank: int,
    entries: list[TraceEntry],
    origin: float,
    now: float,
) -> None:
    """Write ``rank<N>.json`` and ``rank<N>.tsv``.

    Args:
        directory: exists, and gets the files.
        rank: the rank of the entries.
        entries: in the order in which they began.
        origin: the time that becomes 0, in seconds since the epoch.
        now: the end of entries that are not over, in seconds since the epoch.
    """
    events = list(chrome_events(rank, entries, origin, now))
    trace = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    (directory / f"rank{rank}.json").write_text(trace)
    (directory / f"rank{rank}.tsv").write_text(table(entries, origin))


def table(entries: Iterable[TraceEntry], origin: float) -> str:
    """Return a line with tab-separated columns for every entry, after a line with their names."""
    lines = ["\t".join(COLUMNS)]
    for number, entry in enumerate(entries):
        duration = ""
        if entry.end is not None:
            duration = f"{1e3 * (entry.end - entry.begin):.3f}"
        cells = (
            number,
            f"{1e3 * (entry.begin - origin):.3f}",
            duration,
            entry.track,
            entry.name,
            entry.num_bytes,
            entry.dtype,
            entry.unit,
            entry.phase,
            "" if entry.microbatch is None else entry.microbatch,
            ",".join([str(rank) for rank in entry.ranks]),
        )
        lines.append("\t".join([str(cell) for cell in cells]))
    return "\n".join(lines) + "\n"


def chrome_events(
    rank: int,
    entries: list[TraceEntry],
    origin: float,
    now: float,
) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank in Chrome's trace event format, with times in microseconds.

    Args:
        rank: becomes a process of the viewer.
        entries: in the order in which they began.
        origin: the time that becomes 0, in seconds since the epoch.
        now: the end of entries that are not over, in seconds since the epoch.
    """
    # Threads are tracks, several for one whose entries overlap; storage is a counter.
    yield _event("M", "process_name", rank, 0, {"name": f"rank {rank}"})
    for position, track in enumerate(TRACKS):
        first_thread = position * LANES
        lanes: list[list[float]] = []
        for entry in entries:
            if entry.track != track:
                continue
            end = entry.end
            if end is None:
                end = now
            thread = first_thread + lane_for(lanes, entry.begin, end)
            arguments: dict[str, Any] = {"unit": entry.unit, "phase": entry.phase}
            if entry.microbatch is not None:
                arguments["microbatch"] = entry.microbatch
            if entry.is_collective:
                arguments["bytes"] = entry.num_bytes
                arguments["dtype"] = entry.dtype
                arguments["ranks"] = list(entry.ranks)
                arguments["is_over"] = entry.end is not None
            name = f"{entry.name} {entry.unit}".rstrip()
            event = _event("X", name, rank, thread, arguments)
            event["ts"] = 1e6 * (entry.begin - origin)
            event["dur"] = 1e6 * (end - entry.begin)
            event["cat"] = entry.phase
            yield event
        for lane in range(len(lanes)):
            yield _event("M", "thread_name", rank, first_thread + lane, {"name": track})
    # The bytes of storage above the least during the trace, since those at its start are unknown.
    changes = [entry for entry in entries if entry.track == STORAGE]
    sizes = [0]
    for entry in changes:
        change = entry.num_bytes if entry.name == "allocate" else -entry.num_bytes
        sizes.append(sizes[-1] + change)
    least = min(sizes)
    for entry, size in zip(changes, sizes[1:]):
        event = _event("C", "flat storage", rank, 0, {"bytes": size - least})
        event["ts"] = 1e6 * (entry.begin - origin)
        yield event


def lane_for(
    lanes: list[list[float]],
    begin: float,
    end: float,
) -> int:
    """Return the number of the first lane with room for a span, and add the span to it.

    Args:
        lanes: for each lane, the ends of its spans that are not over, innermost last; changed.
        begin: of the span, not before that of the previous call.
        end: of the span.
    """
    # Viewers show spans of one lane that are apart, or of which one contains the other.
    for lane, ends in enumerate(lanes):
        while ends and ends[-1] <= begin:
            ends.pop()
        if not ends or end <= ends[-1]:
            ends.append(end)
            return lane
    lanes.append([end])
    return len(lanes) - 1


def _event(
    kind: str,
    name: str,
    rank: int,
    thread: int,
    arguments: dict[str, Any],
) -> Any:
    """Return an event at the time 0."""
    return {"ph": kind, "name": name, "pid": rank, "tid": thread, "ts": 0, "args": arguments}
