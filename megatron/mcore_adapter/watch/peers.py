# SPDX-License-Identifier: Apache-2.0
"""The other ranks of a run: what each says of itself, which of them has failed, and the message.

[Note: who has failed] A collective that fails names no rank: every rank of the group sees a closed
connection or a timeout, whoever caused it. The ranks' heartbeats tell more, in this order:
    ended     its process no longer exists
    stopped   its process is suspended (SIGSTOP, a debugger)
    silent    it sends no heartbeats: its process cannot be seen from here, or runs native code that
              keeps the lock of Python's interpreter
    sigterm   it was sent SIGTERM and has ended, which the others were not
    hangs     it sends heartbeats, but is in no collective while others wait in one
    differs   it is in another collective than most
Only the first of these that applies to any rank is reported, since the rest follows from it.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import psutil

from megatron.fsdp.trace.divergence import named_ranks

RUNNING, WAITING, LEFT, TERMINATED = "running", "waiting", "left", "terminated"
"""States of a rank: trains; its collective has failed; needs no others any more; had SIGTERM."""

DEAD = ("ended", "stopped", "silent")
"""Troubles of a rank that will not come back."""

PATIENCE = 3.0
"""Seconds that a rank may compute while others wait, before it is said to hang."""

SHOWN = 8
"""Ranks, or files, that a message names one by one."""


@dataclass(frozen=True)
class Heartbeat:
    """The last that is known of a rank. Times are in seconds since the epoch, by its own clock."""

    rank: int
    host: str
    machine: str
    """Of the process number: host and, on Linux, namespace."""
    pid: int
    number: int
    """Heartbeats sent before this one."""
    time: float
    state: str
    iteration: int
    """The last one that was finished."""
    finished: float
    """When it was, or when the run began."""
    collective: str
    """See :class:`~megatron.mcore_adapter.watch.position.Position`."""
    place: str
    work: str
    since: float
    """When the rank was first seen in this collective, or in none, after this work."""
    file: str
    """The rank writes its traceback there, or its stacks."""

    @property
    def position(self) -> str:
        """The collective or the line of code that the rank is in."""
        return self.collective or self.place


def this_machine() -> str:
    """Return a name for the processes that this process sees by their numbers."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


@dataclass(frozen=True)
class Peer:
    """A rank as another one sees it."""

    beat: Heartbeat
    is_silent: bool
    """It has sent no heartbeat for longer than it should have."""

    @property
    def process(self) -> str:
        """The state of its process: "ended", "stopped", "runs" or, on another machine, ""."""
        if self.beat.machine != this_machine():
            return ""
        try:
            status = psutil.Process(self.beat.pid).status()
        except psutil.NoSuchProcess:
            return "ended"
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return "ended"
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return "stopped"
        return "runs"

    @property
    def trouble(self) -> str:
        """The first of [Note: who has failed] that this rank alone shows; empty for none."""
        if self.beat.state in (LEFT, TERMINATED):
            return "sigterm" if self.beat.state == TERMINATED else ""
        if self.process in ("ended", "stopped"):
            return self.process
        if self.is_silent:
            return "silent"
        beat = self.beat
        is_busy = beat.state == RUNNING and not beat.collective
        if is_busy and beat.time - beat.since > PATIENCE:
            return "hangs"
        return ""


@dataclass(frozen=True)
class Verdict:
    """The ranks that have failed, in what way, and those that wait for them."""

    trouble: str
    """One of [Note: who has failed], or empty if nothing is known."""
    failed: Sequence[Heartbeat]
    waiting: Sequence[Heartbeat]


def judge(peers: Sequence[Peer]) -> Verdict:
    """Return who has failed, see [Note: who has failed]."""
    troubles = {peer.beat.rank: peer.trouble for peer in peers}
    beats = [peer.beat for peer in peers if peer.beat.state != LEFT]
    found, failed = "", []
    for trouble in (*DEAD, "sigterm", "hangs"):
        if trouble in troubles.values():
            found, failed = trouble, [beat for beat in beats if troubles[beat.rank] == trouble]
            break
    else:
        positions = Counter(beat.position for beat in beats).most_common(2)
        if len(positions) > 1 and positions[0][1] > positions[1][1]:
            found, failed = "differs", [beat for beat in beats if beat.position != positions[0][0]]
    return Verdict(found, failed, [beat for beat in beats if beat not in failed])


# ---- the message

HEADS = {
    "ended": "has died: process {pid} on {host} ended after {beat}",
    "stopped": "is suspended: process {pid} on {host} is stopped, its last heartbeat was at {beat}",
    "silent": "is silent: process {pid} on {host} has sent no heartbeat since {beat}",
    "sigterm": "was sent SIGTERM and has ended: process {pid} on {host}, at {beat}",
    "hangs": "hangs or is too slow: process {pid} on {host} has been at {place} since {since}",
    "differs": "is in another collective: process {pid} on {host} is in {position} since {since}",
}
ADVICE = {
    "ended": (
        "the log of rank {rank}; `dmesg -T` on {host}, where the kernel reports a process that it"
        " ended for lack of memory"
    ),
    "stopped": "who sent SIGSTOP on {host}, or a debugger there; `kill -CONT {pid}` lets it go on",
    "silent": (
        "whether {host} and its network are up, and whether process {pid} still runs there:"
        " `py-spy dump --pid {pid}` shows where"
    ),
    "sigterm": "who ended process {pid} on {host}: a batch system, or a person",
    "hangs": (
        "its stacks in its file below; what its data loader reads; --distributed-timeout-minutes if"
        " it needs longer"
    ),
    "differs": "data or settings of rank {rank} that differ from those of other ranks; --profile",
    "": "the logs of these ranks; --distributed-timeout-minutes if a step needs longer; --profile",
}
"""Trouble -> what to look at."""


def message(verdict: Verdict, error: str, explanation: str | None = None) -> str:
    """Return the one message about a failure.

    Args:
        verdict: who has failed.
        error: the first line of torch's error, or another reason of the end.
        explanation: what the last collectives of the ranks say of it.
    """
    lines = []
    for beat in verdict.failed[:SHOWN]:
        lines.append(f"rank {beat.rank} {_filled(HEADS[verdict.trouble], beat)}")
        lines.append(f"  {_history(beat)}")
    if len(verdict.failed) > SHOWN:
        others = [beat.rank for beat in verdict.failed[SHOWN:]]
        lines.append(f"the same holds for {named_ranks(others)}")
    if not verdict.failed and not explanation:
        lines.append("a collective failed, and the ranks' heartbeats name no cause")
    if explanation:
        lines += explanation.splitlines()
    lines += _waiting(verdict.waiting)
    first = verdict.failed[0] if verdict.failed else verdict.waiting[0]
    lines.append(f"look at: {_filled(ADVICE[verdict.trouble], first)}")
    files = [beat.file for beat in (*verdict.waiting, *verdict.failed)]
    if verdict.trouble in (*DEAD, "sigterm"):
        files = [beat.file for beat in verdict.waiting]
    rest = f" and {len(files) - SHOWN} more" if len(files) > SHOWN else ""
    lines.append(f"error and stacks of each rank: {', '.join(files[:SHOWN])}{rest}")
    if error:
        lines.append(f"torch says: {error}")
    return f"error: {lines[0]}\n" + "\n".join(f"  {line}" for line in lines[1:])


def _filled(text: str, beat: Heartbeat) -> str:
    times = {"beat": _moment(beat.time), "since": _moment(beat.since)}
    return text.format(**asdict(beat) | times, position=beat.position)


def _history(beat: Heartbeat) -> str:
    begun = f"finished iteration {beat.iteration} at" if beat.iteration else "began at"
    last = f"; its engine began last: {beat.work}" if beat.work else ""
    waits = f"; it was in {beat.collective}" if beat.collective else ""
    return f"it {begun} {_moment(beat.finished)}{waits or last}"


def _waiting(beats: Sequence[Heartbeat]) -> list[str]:
    """Return a line for each position at which ranks wait."""
    ranks: dict[tuple[str, int], list[Heartbeat]] = {}
    for beat in beats:
        ranks.setdefault((beat.position, beat.iteration), []).append(beat)
    lines = []
    for (position, iteration), there in list(ranks.items())[:SHOWN]:
        since = _moment(min(beat.since for beat in there))
        named = named_ranks([beat.rank for beat in there])
        verb = "waits" if len(there) == 1 else "wait"
        lines.append(f"{named} {verb} in {position} since {since}, in iteration {iteration + 1}")
    return lines


def _moment(when: float) -> str:
    """Return a time of day, and how long ago it was."""
    clock = time.strftime("%H:%M:%S", time.localtime(when))
    return f"{clock} ({max(time.time() - when, 0):.0f} s ago)"
