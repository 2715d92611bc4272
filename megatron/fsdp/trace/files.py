# SPDX-License-Identifier: Apache-2.0
"""Files of a trace: events for Chrome's trace viewer and Perfetto, and a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron.fsdp.engine.observe import GATHER, OTHER, REDUCE
from megatron.fsdp.trace.recorder import COMPUTE, STORAGE, TraceEntry

TRACKS = (COMPUTE, GATHER, REDUCE, OTHER)  # as threads, in the order in which viewers show them
LANES = 100  # numbers of threads between one track and the next
COLUMNS = (
    *("number", "begin_ms", "duration_ms", "track", "name", "bytes", "dtype", "unit", "phase"),
    *("microbatch", "ranks"),
)


def write_trace(
    directory: Path, rank: int, entries: Iterable[TraceEntry], origin: float, now: float
) -> None:
    """Write ``rank<N>.json`` and ``rank<N>.tsv``.

    Times are seconds since the epoch: ``origin`` becomes 0, and entries that are not over end
    ``now``.
    """
    entries = list(entries)
    events = list(chrome_events(rank, entries, origin, now))
    trace = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    (directory / f"rank{rank}.json").write_text(trace)
    (directory / f"rank{rank}.tsv").write_text(table(entries, origin))


def table(entries: Iterable[TraceEntry], origin: float) -> str:
    """Return a line with tab-separated columns for every entry, after a line with their names."""
    lines = ["\t".join(COLUMNS)]
    for number, entry in enumerate(entries):
        cells = [
            str(number),
            f"{1e3 * (entry.begin - origin):.3f}",
            "" if entry.end is None else f"{1e3 * (entry.end - entry.begin):.3f}",
            entry.track,
            entry.name,
            str(entry.num_bytes),
            entry.dtype,
            entry.unit,
            entry.phase,
            "" if entry.microbatch is None else str(entry.microbatch),
            ",".join(str(rank) for rank in entry.ranks),
        ]
        lines.append("\t".join(cells))
    return "\n".join(lines) + "\n"


def chrome_events(
    rank: int, entries: list[TraceEntry], origin: float, now: float
) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank in Chrome's trace event format; times are in microseconds."""
    # A process for each rank. Its threads are the tracks of the recorder: host work with the
    # forwards and backwards of units, gathers, reductions, other collectives; flat storage is a
    # counter. Entries of a track that overlap without one containing the other are on several
    # threads of the same name.
    yield _name("process_name", rank, 0, f"rank {rank}")
    for place, track in enumerate(TRACKS):
        lanes = Lanes()
        for entry in entries:
            if entry.track != track:
                continue
            end = now if entry.end is None else entry.end
            lane = lanes.lane_for(entry.begin, end)
            arguments: dict[str, Any] = {"unit": entry.unit, "phase": entry.phase}
            if entry.microbatch is not None:
                arguments["microbatch"] = entry.microbatch
            if entry.is_collective:
                arguments["bytes"] = entry.num_bytes
                arguments["dtype"] = entry.dtype
                arguments["ranks"] = list(entry.ranks)
                arguments["is_over"] = entry.end is not None
            yield {
                "ph": "X",
                "name": f"{entry.name} {entry.unit}".rstrip(),
                "cat": entry.phase,
                "ts": 1e6 * (entry.begin - origin),
                "dur": 1e6 * (end - entry.begin),
                "pid": rank,
                "tid": place * LANES + lane,
                "args": arguments,
            }
        for lane in range(lanes.count):
            yield _name("thread_name", rank, place * LANES + lane, track)
    yield from _storage_events(rank, entries, origin)


class Lanes:
    """Rows of spans of time; within a row, two spans are apart or one contains the other."""

    def __init__(self) -> None:
        self._open: list[list[float]] = []  # for each lane, the ends of the spans under way

    @property
    def count(self) -> int:
        """The number of lanes."""
        return len(self._open)

    def lane_for(self, begin: float, end: float) -> int:
        """Return the first lane that has room for a span; they come in the order of their begin."""
        for lane, ends in enumerate(self._open):
            while ends and ends[-1] <= begin:
                ends.pop()
            if not ends or end <= ends[-1]:
                ends.append(end)
                return lane
        self._open.append([end])
        return len(self._open) - 1


def _storage_events(
    rank: int, entries: list[TraceEntry], origin: float
) -> Iterator[dict[str, Any]]:
    """Yield the bytes of flat storage, above the least that was allocated during the trace."""
    # Storage that existed before is not known.
    changes = [entry for entry in entries if entry.track == STORAGE]
    sizes = [0]
    for entry in changes:
        sizes.append(sizes[-1] + (1 if entry.name == "allocate" else -1) * entry.num_bytes)
    least = min(sizes)
    for entry, size in zip(changes, sizes[1:]):
        yield {
            "ph": "C",
            "name": "flat storage",
            "ts": 1e6 * (entry.begin - origin),
            "pid": rank,
            "tid": 0,
            "args": {"bytes": size - least},
        }


def _name(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "ts": 0, "args": {"name": name}}
