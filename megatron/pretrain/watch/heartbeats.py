# SPDX-License-Identifier: Apache-2.0
"""Heartbeats: what this rank says of itself through the store, and what it reads of others."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

from megatron.pretrain.progress import Progress
from megatron.pretrain.ranks import environment_rank, environment_world_size
from megatron.pretrain.watch.peers import DEAD, RUNNING, Heartbeat, Peer, this_machine
from megatron.pretrain.watch.position import Position
from megatron.pretrain.watch.short_calls import ShortCalls, StoreError

RANKS_PER_SECOND = 2000
"""Heartbeats that the store shall have to take; more ranks send them less often."""
SILENT_PERIODS = 4
"""A rank that has sent no heartbeat for so many periods is silent."""

END, STALL = "end", "stall"
"""Reports, as ranks know of them: of an end, and of a stall that torch will end."""


class Heartbeats:
    """The heartbeats of all ranks. Nothing is sent before :meth:`connect`.

    Args:
        file: for this rank's errors.

    Attributes:
        period: seconds between two heartbeats.
        progress: of the run.
        is_connected: True if there are other ranks and a store to which heartbeats go.
    """

    def __init__(self, file: Path):
        self.rank, self.num_ranks = environment_rank(), environment_world_size()
        self.period = max(1.0, self.num_ranks / RANKS_PER_SECOND)
        self.progress = Progress()
        self.is_connected = False
        self._file = file
        self._store: ShortCalls | None = None
        self._number = 0
        self._state, self._sent = RUNNING, 0.0  # of the last heartbeat
        self._iteration, self._finished = 0, time.time()
        self._position, self._since = Position("", "the start of the run", ""), time.time()
        # Numbers of the last heartbeats of the ranks, and when they were first seen.
        self._seen: dict[int, tuple[int, float]] = {}

    @property
    def silence(self) -> float:
        """Seconds without a heartbeat after which a rank is silent."""
        return SILENT_PERIODS * self.period

    def connect(self) -> None:
        """Use the store of the process group from now on."""
        if self.num_ranks > 1:
            self._store = ShortCalls.to_default_store()
            self.is_connected = self._store is not None

    # ---- of this rank

    def locate(self, now: Position) -> None:
        """Note where this rank is, and since when."""
        iteration, before = self.progress.iteration, self._position
        if iteration != self._iteration:
            self._iteration, self._finished = iteration, time.time()
            self._since = time.time()
        elif now.key != before.key:
            self._since = time.time()
        self._position = now

    @property
    def age(self) -> float:
        """Seconds for which this rank has been at its position."""
        return time.time() - self._since

    def own(self, state: str) -> Heartbeat:
        """Return a heartbeat of this rank."""
        return Heartbeat(
            rank=self.rank,
            host=socket.gethostname(),
            machine=this_machine(),
            pid=os.getpid(),
            number=self._number,
            time=time.time(),
            state=state,
            iteration=self._iteration,
            finished=self._finished,
            collective=self._position.collective,
            place=self._position.place,
            work=self._position.work,
            since=self._since,
            file=str(self._file),
        )

    def send(self, state: str) -> None:
        """Send a heartbeat, if there is a store.

        Raises:
            StoreError: the store does not answer; so do all methods below.
        """
        if self._store is not None:
            self._store.set(str(self.rank), self.own(state).to_json())
            self._number += 1
        self._state, self._sent = state, time.monotonic()

    # ---- of all ranks

    def peers(self) -> list[Peer]:
        """Return all ranks as their last heartbeats show them, this one too."""
        peers = []
        for rank in range(self.num_ranks):
            text = self._connected.get(str(rank))
            if text is None:
                continue  # it has not joined yet
            beat = Heartbeat.from_json(text)
            if rank not in self._seen or self._seen[rank][0] != beat.number:
                self._seen[rank] = (beat.number, time.monotonic())
            age = time.monotonic() - self._seen[rank][1]
            is_silent = beat.state == RUNNING and rank != self.rank and age > self.silence
            peers.append(Peer(beat, is_silent))
        return peers

    def gather(self) -> list[Peer]:
        """Return all ranks, after each has sent a new heartbeat or is known not to.

        This rank goes on sending its own: others may gather at the same moment.
        """
        before = {peer.beat.rank: peer.beat.number for peer in self.peers()}
        while True:
            peers = self.peers()
            if not any(self._is_awaited(peer, before.get(peer.beat.rank)) for peer in peers):
                return peers
            time.sleep(0.1)
            if time.monotonic() - self._sent > self.period:
                self.send(self._state)

    def _is_awaited(self, peer: Peer, number: int | None) -> bool:
        """Return True if a rank may soon send a heartbeat after the one of that number."""
        beat = peer.beat
        is_old = beat.rank != self.rank and beat.state == RUNNING and beat.number == number
        return is_old and peer.trouble not in DEAD

    def claim(self) -> bool:
        """Return True on the first rank that has something to report."""
        return self._connected.add("claims", 1) == 1

    def note_report(self, ends_run: bool = True) -> None:
        """Let all ranks know that there has been a report, after which they end."""
        with contextlib.suppress(StoreError):
            self._connected.set("report", END if ends_run else STALL)

    def must_end(self) -> bool:
        """Return True if a rank has reported the end of the run."""
        return self._store is not None and self._store.get("report") == END

    def wait_for_report(self) -> None:
        """Give the rank that reports the time for it: torchrun ends all when the first one ends."""
        deadline = time.monotonic() + 2 * self.silence
        with contextlib.suppress(StoreError):
            while time.monotonic() < deadline and self._connected.get("report") is None:
                time.sleep(0.1)

    def keep_store(self) -> None:
        """Keep the store, if this process has it, until the other ranks have seen a report."""
        is_of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self.is_connected and self.rank == 0 and not is_of_agent:
            time.sleep(2 * self.period)

    @property
    def _connected(self) -> ShortCalls:
        if self._store is None:
            raise StoreError("the ranks have not found each other")
        return self._store
