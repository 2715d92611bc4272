# SPDX-License-Identifier: Apache-2.0
"""The launches of NCCL on all ranks: whether they are the same, and which wait for each other.

A kernel of NCCL runs until its partners on other ranks run too, and blocks what comes after it:

- the work of its stream, and what waits for that;
- the next launch on its communicator, which NCCL orders whatever their streams;
- the work of another stream that has the same one of torch's pool;
- for a collective, the next collective of this rank on any communicator. Two kernels may not fit on
  the device together, so NCCL's user guide wants them in one order on all ranks ("Using multiple
  NCCL communicators concurrently"). Messages may overlap with them, or pipelines could not run.

A launch starts when what blocks it is over, and is over when its partners have started. Launches
that can never start are a deadlock. The host waits where a communicator is made.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tools.cuda_model.reports import DEADLOCK, ORDER, CallStack

if TYPE_CHECKING:
    from tools.cuda_model.detector import Detector

Key = tuple[object, ...]
"""Identifies a part of a launch among those of its rank."""
STARTED, OVER = "started", "over"
Moment = tuple[int, int, str]
"""A rank, the number of a launch there, and one of the two above."""
HOST, COLLECTIVES = ("host",), ("collectives",)


@dataclass
class Launch:
    """A collective, a message, or several messages that are one launch."""

    text: str
    after: set[int] = field(default_factory=set)  # numbers of launches of this rank
    keys: list[Key] = field(default_factory=list)  # of its parts
    partners: list[tuple[int, Key]] = field(default_factory=list)  # rank, and key there


class Launches:
    """The launches of this rank, in their order."""

    def __init__(self, detector: Detector):
        self._detector = detector
        self._all: list[Launch] = []
        self._stacks: list[CallStack] = []
        self._kernels: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """By stream: numbers of kernels, each with that of its launch."""
        self._last: dict[Key, int] = {}  # launch on a communicator, on a real stream, ...
        self._counts: Counter[Key] = Counter()
        self._is_grouped = False
        self._group: Launch | None = None  # of the messages that are one launch
        self.connected: set[str] = set()  # communicators that have been made
        self.calls: dict[str, list[str]] = defaultdict(list)  # of each group, in order

    # ---- events

    def begin_group(self) -> None:
        """Make the messages that follow one launch."""
        self._is_grouped, self._group = True, None

    def end_group(self) -> None:
        """Let each message be a launch again."""
        self._is_grouped, self._group = False, None

    def connect(self, communicator: str, ranks: Sequence[int]) -> None:
        """Note that the ranks make a communicator, if there is none yet; their hosts wait."""
        if communicator not in self.connected:
            self.connected.add(communicator)
            self.on_host(communicator, ranks, f"the connection of {communicator}")

    def on_host(self, communicator: str, ranks: Sequence[int], text: str) -> None:
        """Note a collective for which the hosts wait, such as ``ncclCommSplit``."""
        launch = self._add(Launch(text))
        self._follow(launch, [HOST])
        self._last[HOST] = len(self._all) - 1
        self._match(launch, ("host", communicator), ranks)

    def collective(self, communicator: str, ranks: Sequence[int], text: str, stream: int) -> None:
        """Note a collective of ``ranks`` that is launched now, before its kernel.

        Args:
            communicator: its name, the same on all ranks.
            ranks: of the program, that take part.
            text: what it is.
            stream: the stream of its kernel.
        """
        launch = self._add(Launch(text))
        self._enqueue(launch, stream, [COLLECTIVES, ("communicator", communicator)])
        self._match(launch, ("collective", communicator), ranks)

    def message(self, communicator: str, peer: int, is_sent: bool, text: str, stream: int) -> None:
        """Note one end of a message, before its kernel.

        Args:
            communicator: its name, the same on both ranks.
            peer: the other rank, of the program.
            is_sent: whether this rank sends; otherwise it receives.
            text: what it is.
            stream: the stream of its kernel.
        """
        launch = self._group or self._add(Launch(text))
        if self._is_grouped:
            self._group = launch
        self._enqueue(launch, stream, [("communicator", communicator)])
        own, ends = ("send", "receive"), (dist.get_rank(), peer)
        if not is_sent:
            own, ends = own[::-1], ends[::-1]
        number = self._count((own[0], communicator, *ends))
        launch.keys.append((own[0], communicator, *ends, number))
        launch.partners.append((peer, (own[1], communicator, *ends, number)))

    def _add(self, launch: Launch) -> Launch:
        self._all.append(launch)
        self._stacks.append(CallStack(sys._getframe()))
        self._follow(launch, [HOST])
        return launch

    def _enqueue(self, launch: Launch, stream: int, places: list[Key]) -> None:
        """Let a launch follow what its stream has waited for, and the last ones at ``places``."""
        number = len(self._all) - 1
        waited_for = self._detector.syncs.current_sync_states[stream]
        for other, kernels in self._kernels.items():
            at = bisect_right(kernels, (waited_for.get(other, -1), number))
            if at:
                launch.after.add(kernels[at - 1][1])
        launch.after.discard(number)  # a message of the same launch
        self._kernels[stream].append((self._detector.seq_num + 1, number))
        places = [*places, ("stream", self._detector.streams.real(stream))]
        self._follow(launch, places)
        for place in places:
            self._last[place] = number

    def _follow(self, launch: Launch, places: list[Key]) -> None:
        number = len(self._all) - 1
        for place in places:
            if self._last.get(place, number) != number:
                launch.after.add(self._last[place])

    def _match(self, launch: Launch, kind: Key, ranks: Sequence[int]) -> None:
        key = (*kind, self._count(kind))
        launch.keys.append(key)
        launch.partners += [(rank, key) for rank in ranks if rank != dist.get_rank()]

    def _count(self, kind: Key) -> int:
        self._counts[kind] += 1
        return self._counts[kind]

    # ---- the end

    def compare(self) -> None:
        """Report differences between ranks, and launches that can never start; a collective."""
        own = (dict(self.calls), self._all)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        if not self._compare_calls([calls for calls, _ in of_ranks]):
            self._find_deadlock([launches for _, launches in of_ranks])

    def _compare_calls(self, of_ranks: list[dict[str, list[str]]]) -> bool:
        """Report groups whose ranks have not called the same; return True if any rank has one."""
        found = False
        for rank, theirs in enumerate(of_ranks):
            for other, calls in enumerate(of_ranks):
                different = [
                    name for name in theirs.keys() & calls.keys() if theirs[name] != calls[name]
                ]
                found = found or bool(different)
                if rank == dist.get_rank():
                    for name in sorted(different):
                        self._report_difference(name, theirs[name], other, calls[name])
        return found

    def _report_difference(self, name: str, calls: list[str], rank: int, others: list[str]) -> None:
        at = 0
        while calls[at : at + 1] == others[at : at + 1]:
            at += 1
        ours, theirs = [*calls, "nothing"][at], [*others, "nothing"][at]
        text = f"collective {at} over {name}: {ours}, on rank {rank}: {theirs}"
        self._detector.report(ORDER, text, (name, rank))

    def _find_deadlock(self, of_ranks: list[list[Launch]]) -> None:
        graph, missing = dependencies(of_ranks)
        if missing:
            rank, number, partner = missing[0]
            text = f"rank {partner} does not take part in {of_ranks[rank][number].text}"
            self._detector.report(ORDER, f"{text} of rank {rank}", (rank, number))
            return
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            cycle: list[Moment] = error.args[1]
            self._report_cycle(list(dict.fromkeys(each[:2] for each in cycle)), of_ranks)

    def _report_cycle(self, cycle: list[tuple[int, int]], of_ranks: list[list[Launch]]) -> None:
        own = dist.get_rank()
        stacks = {each: self._stacks[each[1]].format() for each in cycle if each[0] == own}
        known: list[Any] = [None] * len(of_ranks)
        dist.all_gather_object(known, stacks)
        lines = ["launches wait for each other, each for the one above it, the first for the last"]
        for rank, number in cycle:
            lines.append(f"rank {rank}: {of_ranks[rank][number].text}, which was called at")
            lines.append(known[rank][rank, number])
        self._detector.report(DEADLOCK, "\n".join(lines), tuple(cycle))


Graph = dict[Moment, set[Moment]]


def dependencies(of_ranks: Sequence[Sequence[Launch]]) -> tuple[Graph, list[tuple[int, int, int]]]:
    """Return what each moment of each launch waits for, and launches with ranks that lack them."""
    numbers: dict[tuple[int, Key], int] = {}
    for rank, launches in enumerate(of_ranks):
        for number, launch in enumerate(launches):
            for key in launch.keys:
                numbers[rank, key] = number
    graph: Graph = {}
    missing = []
    for rank, launches in enumerate(of_ranks):
        for number, launch in enumerate(launches):
            graph[rank, number, STARTED] = {(rank, before, OVER) for before in launch.after}
            waited_for = graph[rank, number, OVER] = {(rank, number, STARTED)}
            for partner in launch.partners:
                if partner in numbers:
                    waited_for.add((partner[0], numbers[partner], STARTED))
                else:
                    missing.append((rank, number, partner[0]))
    return graph, missing
