# SPDX-License-Identifier: Apache-2.0
"""The first collective in which ranks differ, found through the store when one has failed.

A rank whose collective fails publishes its last ones. A thread of every other rank sees that, then
publishes and prints those of its rank, even if the rank hangs or computes. A rank whose recording
has ended has published its own. Nothing here is a collective.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch.distributed as dist

from megatron.fsdp.trace.recorder import Recorder, TraceEntry, last_lines

NUM_PUBLISHED = 200
"""Collectives that a rank publishes, the last ones."""

POLL_SECONDS = 0.5
"""Time between two looks at the store."""

PATIENCE_SECONDS = 5.0
"""Time that a failed rank waits for the collectives of the others."""


@dataclass(frozen=True)
class PublishedCollective:
    """A collective as other ranks see it.

    Attributes:
        ranks: of its process group.
        number: of this collective among those of these ranks, from 0.
        begin: in seconds since the epoch, by the clock of its rank.
        what: what the ranks must have in common: operation, operand and unit.
    """

    ranks: tuple[int, ...]
    number: int
    begin: float
    what: str

    @classmethod
    def of(cls, entry: TraceEntry) -> PublishedCollective:
        """Return what other ranks see of an entry of the recorder."""
        unit = entry.unit or "no unit"
        what = f"{entry.name} of {entry.num_bytes} bytes {entry.dtype} of {unit}"
        return cls(entry.ranks, entry.number, entry.begin, what)


Sequences = dict[int, list[PublishedCollective]]
"""The last collectives of each rank, in the order in which they began."""


def first_difference(sequences: Sequences) -> str | None:
    """Name the first collective in which ranks of one group differ, and the first such rank.

    Of several groups, the one whose ranks began that collective first; None without a difference.
    """
    by_group: dict[tuple[int, ...], Sequences] = defaultdict(dict)
    for rank, collectives in sequences.items():
        for each in collectives:
            by_group[each.ranks].setdefault(rank, []).append(each)
    found = []
    for ranks, of_group in by_group.items():
        # A rank that published none of this group's may have had them before those it published.
        members = {
            rank: of_group.get(rank, [])
            for rank in ranks
            if rank in of_group or (rank in sequences and len(sequences[rank]) < NUM_PUBLISHED)
        }
        row = _first_difference_in(members)
        if row:
            begin = min(each.begin for each in row.values() if each is not None)
            found.append((begin, ranks, row))
    if not found:
        return None
    _, ranks, row = min(found, key=lambda each: each[0])
    number = next(each.number for each in row.values() if each is not None)
    lines = [
        f"rank {_odd_rank(row)} is the first that differs, in collective {number} of ranks"
        f" {list(ranks)}:"
    ]
    for rank, seen in row.items():
        lines.append(f"  rank {rank}: {'not started' if seen is None else seen.what}")
    return "\n".join(lines)


def _first_difference_in(
    members: Sequences,
) -> dict[int, PublishedCollective | None] | None:
    """Return the first collective of each rank of a group that is not the same on all of them."""
    numbered = {rank: {each.number: each for each in members[rank]} for rank in members}
    first = max(min(numbers) for numbers in numbered.values() if numbers)
    last = max(max(numbers) for numbers in numbered.values() if numbers)
    for number in range(first, last + 1):
        row = {rank: numbers.get(number) for rank, numbers in numbered.items()}
        if len({each and each.what for each in row.values()}) > 1:
            return row
    return None


def _odd_rank(row: dict[int, PublishedCollective | None]) -> int:
    """Return the first rank that differs from most; of two, the one that has not started."""
    whats = [each and each.what for each in row.values()]
    # Of equally many, the operation of the first rank that has started one.
    usual = max(whats, key=lambda what: (whats.count(what), what is not None))
    return next(rank for rank, what in zip(row, whats) if what != usual)


class DivergenceWatch:
    """Compares the recorded collectives of all ranks when one of them fails.

    Args:
        recorder: of this rank.
        name: of the recording, the same on all ranks and different from all others.
    """

    def __init__(self, recorder: Recorder, name: str):
        self._recorder = recorder
        self._rank = dist.get_rank()
        self._num_ranks = dist.get_world_size()
        self._name = name
        self._store = dist.distributed_c10d._get_default_store()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="trace", daemon=True)
        recorder.explain = self._explain

    def start(self) -> None:
        """Start to look for failures of other ranks."""
        self._thread.start()

    def stop(self) -> None:
        """Stop looking, and leave the last collectives of this rank to ranks that fail later.

        They may wait for this one, which has failed elsewhere or had fewer batches.
        """
        self._is_over.set()
        self._thread.join()
        with suppress(RuntimeError):  # the store has ended with the process that has it
            self._publish()

    def _look(self) -> None:
        """Publish and print the last collectives of this rank when another rank has failed."""
        try:
            while not self._is_over.wait(POLL_SECONDS):
                if self._store.check([self._key("failed")]):
                    self._publish()
                    print(self._own_lines(), file=sys.stderr, flush=True)
                    return
        except RuntimeError:  # the store has ended with the process that has it
            return

    def _explain(self, entry: TraceEntry, error: Exception) -> str:
        """Return the message for a collective that failed on this rank."""
        # The thread would print what the message says.
        self._is_over.set()
        parts = [
            f"failed: {entry}: {error}",
            self._own_lines(),
        ]
        try:
            self._store.set(self._key("failed"), str(self._rank))
            self._publish()
            sequences = self._collect()
            silent = sorted(set(range(self._num_ranks)) - set(sequences))
            if silent:
                parts.append(f"no answer from ranks {silent}")
            parts.append(
                first_difference(sequences)
                or "the ranks that answered have issued the same collectives so far"
            )
        except RuntimeError as store_error:
            parts.append(f"the ranks could not be compared: {store_error}")
        return "\n".join(parts)

    def _own_lines(self) -> str:
        return f"the last collectives of rank {self._rank}:\n{last_lines(self._recorder)}"

    def _key(self, what: str | int) -> str:
        return f"trace_{self._name}/{what}"

    def _publish(self) -> None:
        collectives = self._recorder.collectives[-NUM_PUBLISHED:]
        rows = [asdict(PublishedCollective.of(entry)) for entry in collectives]
        self._store.set(self._key(self._rank), json.dumps(rows))

    def _collect(self) -> Sequences:
        """Return the collectives of all ranks that answer in time."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        sequences: Sequences = {}
        while len(sequences) < self._num_ranks and time.monotonic() < deadline:
            for rank in range(self._num_ranks):
                if rank not in sequences and self._store.check([self._key(rank)]):
                    rows = json.loads(self._store.get(self._key(rank)))
                    sequences[rank] = [
                        PublishedCollective(**{**row, "ranks": tuple(row["ranks"])}) for row in rows
                    ]
            time.sleep(POLL_SECONDS / 10)
        return sequences
