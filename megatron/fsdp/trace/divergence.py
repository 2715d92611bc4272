# SPDX-License-Identifier: Apache-2.0
"""The first collective in which ranks differ, found through the store when one has failed.

A rank whose collective fails publishes its last ones. A thread of every other rank sees that, then
publishes and prints those of its rank, even if that hangs. Nothing here is a collective.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from megatron.fsdp.trace.recorder import Recorder, TraceEntry

NUM_PUBLISHED = 200  # the last collectives of a rank, for the others
NUM_PRINTED = 20  # the last collectives of a rank, for the user
POLL_SECONDS = 0.5  # between two looks at the store
PATIENCE_SECONDS = 5.0  # that a failed rank waits for the collectives of the others


class PublishedCollective(NamedTuple):
    """A collective as other ranks see it."""

    ranks: tuple[int, ...]  # of its process group
    number: int  # among the collectives of these ranks, from 0
    begin: float  # in seconds since the epoch, by the clock of its rank
    what: str  # what the ranks must have in common: operation, operand and unit


Sequences = dict[int, list[PublishedCollective]]  # the last ones of each rank, in order


def first_difference(sequences: Sequences) -> str | None:
    """Name the first collective in which ranks of one group differ, and the first such rank."""
    groups = {collective.ranks for collective in chain(*sequences.values())}
    differences = [_difference_in(ranks, sequences) for ranks in groups]
    # Of several groups, the one whose ranks began that collective first.
    return min(filter(None, differences), default=(0.0, None))[1]


def _difference_in(ranks: tuple[int, ...], sequences: Sequences) -> tuple[float, str] | None:
    numbered: dict[int, dict[int, PublishedCollective]] = {}
    for rank in ranks:
        published = sequences.get(rank)
        if published is not None:
            own = {seen.number: seen for seen in published if seen.ranks == ranks}
            # A rank that published none of these may have had them before those it published.
            if own or len(published) < NUM_PUBLISHED:
                numbered[rank] = own
    begun = [own for own in numbered.values() if own]
    for number in range(max(map(min, begun)), max(map(max, begun)) + 1):
        row = {rank: own.get(number) for rank, own in numbered.items()}
        whats = {rank: seen.what if seen else "not started" for rank, seen in row.items()}
        counts = Counter(whats.values())
        if len(counts) == 1:
            continue
        # Of equally many, the operation of the first rank that has started one.
        usual = max(counts, key=lambda what: (counts[what], what != "not started"))
        odd = next(rank for rank, what in whats.items() if what != usual)
        lines = [
            f"rank {odd} is the first that differs, in collective {number} of ranks {list(ranks)}:",
            *(f"  rank {rank}: {what}" for rank, what in whats.items()),
        ]
        return min(seen.begin for seen in row.values() if seen), "\n".join(lines)
    return None


class DivergenceWatch:
    """Compares the recorded collectives of all ranks when one of them fails."""

    def __init__(self, recorder: Recorder, name: str):
        # All ranks know the recording by this name, and no other.
        self._recorder = recorder
        self._rank = dist.get_rank()
        self._num_ranks = dist.get_world_size()
        self._store = PrefixStore(f"trace_{name}", dist.distributed_c10d._get_default_store())
        self._is_over = threading.Event()
        recorder.explain = self._explain
        self._thread = threading.Thread(target=self._look, name="trace", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop looking, and leave the last collectives of this rank to ranks that fail later."""
        self._is_over.set()
        self._thread.join()
        with suppress(RuntimeError):  # the store has ended with the process that has it
            self._publish()

    def _look(self) -> None:
        with suppress(RuntimeError):  # as above
            while not self._is_over.wait(POLL_SECONDS):
                if self._store.check(["failed"]):
                    self._publish()
                    print(self._last_lines(), file=sys.stderr, flush=True)
                    return

    def _explain(self, entry: TraceEntry, error: Exception) -> str:
        self._is_over.set()  # the thread would print what the message says
        parts = [f"failed: {entry}: {error}", self._last_lines()]
        try:
            self._store.set("failed", str(self._rank))
            self._publish()
            sequences = self._collect()
            if silent := sorted(set(range(self._num_ranks)) - set(sequences)):
                parts.append(f"no answer from ranks {silent}")
            parts.append(
                first_difference(sequences)
                or "the ranks that answered have issued the same collectives so far"
            )
        except RuntimeError as store_error:
            parts.append(f"the ranks could not be compared: {store_error}")
        return "\n".join(parts)

    def _last_lines(self) -> str:
        lines = [f"the last collectives of rank {self._rank}:"]
        for entry in self._recorder.collectives[-NUM_PRINTED:]:
            lines.append(f"  {entry}" + (" (not over)" if entry.end is None else ""))
        return "\n".join(lines)

    def _publish(self) -> None:
        rows = []
        for entry in self._recorder.collectives[-NUM_PUBLISHED:]:
            unit = entry.unit or "no unit"
            what = f"{entry.name} of {entry.num_bytes} bytes {entry.dtype} of {unit}"
            rows.append(PublishedCollective(entry.ranks, entry.number, entry.begin, what))
        self._store.set(str(self._rank), json.dumps(rows))

    def _collect(self) -> Sequences:
        """Return the collectives of all ranks that answer in time."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        sequences: Sequences = {}
        while len(sequences) < self._num_ranks and time.monotonic() < deadline:
            for rank in range(self._num_ranks):
                if rank not in sequences and self._store.check([str(rank)]):
                    rows = json.loads(self._store.get(str(rank)))
                    sequences[rank] = [
                        PublishedCollective(tuple(ranks), *others) for ranks, *others in rows
                    ]
            time.sleep(POLL_SECONDS / 10)
        return sequences
