# SPDX-License-Identifier: Apache-2.0
"""The first collective in which ranks differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

NUM_PUBLISHED = 200  # the last collectives of a rank, for the others
_NOT_STARTED = "not started"


Ranks = tuple[int, ...]  # of a process group


class PublishedCollective(NamedTuple):
    """A collective as other ranks see it."""

    ranks: Ranks
    number: int  # among the collectives of these ranks, from 0
    begin: float  # seconds since the epoch, by the clock of its rank
    what: str  # operation, operand and unit, which all ranks must have in common


Sequences = dict[int, list[PublishedCollective]]  # the last ones of each rank, in order


def first_difference(sequences: Sequences) -> str | None:
    """Name the first collective in which ranks of one group differ, and the first such rank."""
    groups: set[Ranks] = set()
    for published in sequences.values():
        groups.update(collective.ranks for collective in published)
    differences = []
    for ranks in groups:
        found = _difference_in(ranks, sequences)
        if found is not None:
            differences.append(found)
    if not differences:
        return None
    # Of several groups, the one whose ranks began that collective first.
    _, text = min(differences)
    return text


def _difference_in(ranks: Ranks, sequences: Sequences) -> tuple[float, str] | None:
    """Return the first difference in a process group, with the time of its first collective."""
    numbered: dict[int, dict[int, PublishedCollective]] = {}  # collectives by rank and number
    for rank in ranks:
        published = sequences.get(rank)
        if published is not None:
            by_number = {seen.number: seen for seen in published if seen.ranks == ranks}
            # A rank that published none of these may have had them before those it published.
            if by_number or len(published) < NUM_PUBLISHED:
                numbered[rank] = by_number
    first = last = 0  # what all of them have published, up to the last collective of any
    for by_number in numbered.values():
        if by_number:
            first = max(first, min(by_number))
            last = max(last, max(by_number))
    for number in range(first, last + 1):
        what_of = {}
        times = []
        for rank, by_number in numbered.items():
            what_of[rank] = _NOT_STARTED
            if number in by_number:
                what_of[rank] = by_number[number].what
                times.append(by_number[number].begin)
        if len(set(what_of.values())) > 1:
            return min(times), _described(number, ranks, what_of)
    return None


def _described(
    number: int,
    ranks: Ranks,
    what_of: dict[int, str],
) -> str:
    """Return which rank differs in a collective, and the operation of each rank."""
    counts = Counter(what_of.values())
    # Of equally many, the operation of the first rank that has started one.
    usual = max(counts, key=lambda what: (counts[what], what != _NOT_STARTED))
    odd = next(rank for rank, what in what_of.items() if what != usual)
    who = f"rank {odd} is the first that differs"
    if len(what_of) == 2 and _NOT_STARTED not in counts:
        who = "these two ranks differ first"
    lines = [f"{who}, in collective {number} of {named_ranks(ranks)}:"]
    for what in counts:
        having = [rank for rank in what_of if what_of[rank] == what]
        lines.append(f"  {named_ranks(having)}: {what}")
    return "\n".join(lines)


def named_ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = []
    for run in runs:
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    noun = "rank" if parts == [str(runs[0][0])] else "ranks"
    return f"{noun} {', '.join(parts)}"
