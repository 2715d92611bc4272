# SPDX-License-Identifier: Apache-2.0
"""The other ranks of a run: their heartbeats, which of them have failed, and the message about it.

[Note: who has failed] A collective that fails names no rank: every rank of the group sees a closed
connection or a timeout, whoever caused it. The ranks' heartbeats show more, in this order:
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
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import psutil

from megatron.fsdp.trace.divergence import named_ranks

RUNNING = "running"
"""State of a rank that trains."""
WAITING = "waiting"
"""State of a rank whose collective has failed."""
LEFT = "left"
"""State of a rank that needs no other rank any more."""
TERMINATED = "terminated"
"""State of a rank that ends because it was sent SIGTERM."""

DEAD = ("ended", "stopped", "silent")
"""Troubles after which a rank will not join a collective again."""

PATIENCE = 3.0
"""Seconds that a rank may compute while others wait, before it counts as hanging."""

SHOWN = 8
"""Number of ranks, or of files, that a message names one by one."""


@dataclass(frozen=True)
class Heartbeat:
    """The state of a rank at one moment. Times are in seconds since the epoch, by its own clock.

    Attributes:
        rank: global rank.
        host: name of its machine.
        machine: namespace in which ``pid`` is valid, see :func:`this_machine`.
        pid: number of its process.
        number: how many heartbeats it has sent before this one.
        time: when it sent this one.
        state: :data:`RUNNING`, :data:`WAITING`, :data:`LEFT` or :data:`TERMINATED`.
        iteration: number of iterations that it has finished.
        finished: when it finished the last one; without any, when the run began.
        collective: see :class:`~megatron.mcore_adapter.watch.position.Position`, as ``place`` and
            ``work``.
        place: file, line and function.
        work: work of the engine that began last.
        since: when the rank came to this collective, or left the one before it for this work.
        file: path of the file to which it writes its traceback or its stacks.
    """

    rank: int
    host: str
    machine: str
    pid: int
    number: int
    time: float
    state: str
    iteration: int
    finished: float
    collective: str
    place: str
    work: str
    since: float
    file: str

    @property
    def position(self) -> str:
        """The collective or the line of code that the rank is in."""
        return self.collective or self.place


def this_machine() -> str:
    """Return the host and, on Linux, the namespace in which this process sees process numbers."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


@dataclass(frozen=True)
class Peer:
    """A rank as this process sees it.

    Attributes:
        beat: its last heartbeat.
        is_silent: True if the next one is overdue.
    """

    beat: Heartbeat
    is_silent: bool

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
        """The first of [Note: who has failed] that applies to this rank alone; empty for none."""
        beat = self.beat
        if beat.state == LEFT:
            return ""
        if beat.state == TERMINATED:
            return "sigterm"
        if self.process in ("ended", "stopped"):
            return self.process
        if self.is_silent:
            return "silent"
        is_busy = beat.state == RUNNING and not beat.collective
        if is_busy and beat.time - beat.since > PATIENCE:
            return "hangs"
        return ""


@dataclass(frozen=True)
class Verdict:
    """The cause of a failure.

    Attributes:
        trouble: one of [Note: who has failed]; empty if the heartbeats show no cause.
        failed: the ranks to which it applies.
        waiting: the other ranks, without those that have left the run.
    """

    trouble: str
    failed: Sequence[Heartbeat]
    waiting: Sequence[Heartbeat]


def judge(peers: Sequence[Peer]) -> Verdict:
    """Find the ranks that have failed, see [Note: who has failed]."""
    beats = []
    beats_of: defaultdict[str, list[Heartbeat]] = defaultdict(list)  # by trouble
    for peer in peers:
        if peer.beat.state != LEFT:
            beats.append(peer.beat)
            beats_of[peer.trouble].append(peer.beat)
    for trouble in (*DEAD, "sigterm", "hangs"):
        if trouble in beats_of:
            return _verdict(trouble, beats_of[trouble], beats)
    positions = Counter(beat.position for beat in beats).most_common(2)
    if len(positions) > 1:
        most_common, num_ranks = positions[0]
        _, num_others = positions[1]
        if num_ranks > num_others:
            failed = [beat for beat in beats if beat.position != most_common]
            return _verdict("differs", failed, beats)
    return Verdict("", [], beats)


def _verdict(
    trouble: str,
    failed: list[Heartbeat],
    beats: list[Heartbeat],
) -> Verdict:
    waiting = [beat for beat in beats if beat not in failed]
    return Verdict(trouble, failed, waiting)


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
    "stopped": "who sent SIGSTOP on {host}, or a debugger there; `kill -CONT {pid}` resumes it",
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


def message(
    verdict: Verdict,
    error: str,
    explanation: str | None = None,
) -> str:
    """Return the one message about a failure.

    Args:
        verdict: the cause, with at least one rank that has failed or waits.
        error: the first line of torch's error; empty if this rank ends for another reason.
        explanation: lines about the collectives in which ranks differ; None if they do not.
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
    first = [*verdict.failed, *verdict.waiting][0]
    lines.append(f"look at: {_filled(ADVICE[verdict.trouble], first)}")
    lines.append(f"error and stacks of each rank: {_files(verdict)}")
    if error:
        lines.append(f"error of torch: {error}")
    return "error: " + "\n  ".join(lines)


def _files(verdict: Verdict) -> str:
    """Name the files to which ranks write their stacks, which dead ranks do not."""
    beats = [*verdict.waiting]
    if verdict.trouble not in (*DEAD, "sigterm"):
        beats += verdict.failed
    files = ", ".join(beat.file for beat in beats[:SHOWN])
    if len(beats) > SHOWN:
        files += f" and {len(beats) - SHOWN} more"
    return files


def _filled(text: str, beat: Heartbeat) -> str:
    """Fill the fields of a line of :data:`HEADS` or :data:`ADVICE`."""
    fields = asdict(beat)
    fields["beat"] = _moment(beat.time)
    fields["since"] = _moment(beat.since)
    fields["position"] = beat.position
    return text.format(**fields)


def _history(beat: Heartbeat) -> str:
    """Return the last iteration of a rank, and its collective or its last work."""
    history = "it began at "
    if beat.iteration:
        history = f"it finished iteration {beat.iteration} at "
    history += _moment(beat.finished)
    if beat.collective:
        history += f"; it was in {beat.collective}"
    elif beat.work:
        history += f"; its engine began last: {beat.work}"
    return history


def _waiting(beats: Sequence[Heartbeat]) -> list[str]:
    """Return a line for each position at which ranks wait."""
    beats_at: defaultdict[tuple[str, int], list[Heartbeat]] = defaultdict(list)
    for beat in beats:
        beats_at[beat.position, beat.iteration].append(beat)
    lines = []
    for (position, iteration), there in list(beats_at.items())[:SHOWN]:
        since = _moment(min(beat.since for beat in there))
        named = named_ranks([beat.rank for beat in there])
        verb = "waits" if len(there) == 1 else "wait"
        lines.append(f"{named} {verb} in {position} since {since}, in iteration {iteration + 1}")
    return lines


def _moment(when: float) -> str:
    """Return a time as a time of day, with the seconds since then."""
    clock = time.strftime("%H:%M:%S", time.localtime(when))
    return f"{clock} ({max(time.time() - when, 0):.0f} s ago)"
