# SPDX-License-Identifier: Apache-2.0
"""The first collective in which ranks differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

NUM_PUBLISHED = 200  # the last collectives of a rank, for the others


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
        is_split = len(counts) == 2 == len(whats) and "not started" not in counts
        # Of equally many, the operation of the first rank that has started one.
        usual = max(counts, key=lambda what: (counts[what], what != "not started"))
        odd = next(rank for rank, what in whats.items() if what != usual)
        who = (
            "these two ranks differ first" if is_split else f"rank {odd} is the first that differs"
        )
        lines = [f"{who}, in collective {number} of {named_ranks(ranks)}:"]
        for what in counts:
            having = [rank for rank in whats if whats[rank] == what]
            lines.append(f"  {named_ranks(having)}: {what}")
        return min(seen.begin for seen in row.values() if seen), "\n".join(lines)
    return None


def named_ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(parts) > 1 or len(runs[0]) > 1 else ''} {', '.join(parts)}"
