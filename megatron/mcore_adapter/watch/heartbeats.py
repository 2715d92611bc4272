# SPDX-License-Identifier: Apache-2.0
"""Heartbeats: the state that this rank publishes in the store, and those that it reads of others.

Every call to the store returns after a few seconds, even if the host of the store hangs or is down.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent import futures
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from megatron.mcore_adapter.run.environment import environment_rank, environment_world_size
from megatron.mcore_adapter.watch.peers import DEAD, RUNNING, Heartbeat, Peer, this_machine
from megatron.mcore_adapter.watch.position import Position

RANKS_PER_SECOND = 2000
"""Load on the store, in heartbeats of all ranks together: more ranks send them less often."""
SILENT_PERIODS = 4
"""Number of periods without a heartbeat after which a rank is silent."""

CALL_SECONDS = 5.0
"""Longest duration of a call to the store."""
T = TypeVar("T")

END = "end"
"""The report in the store is about the end of the run."""
STALL = "stall"
"""The report in the store is about a stall, at which torch will abort the process."""


class StoreError(RuntimeError):
    """The store does not answer."""


class ShortCalls:
    """A separate connection to the store of the process group, used from one thread.

    The process group's connection may be blocked by a collective that is about to begin. After one
    call that has hung, all further calls fail at once.

    Args:
        store: store of the process group.
        name: prefix of the keys, unique among the attempts that share the store.
    """

    def __init__(self, store: TCPStore, name: str):
        self.address = f"{store.host}:{store.port}"
        connection = TCPStore(
            store.host,
            store.port,
            is_master=False,
            timeout=timedelta(seconds=CALL_SECONDS),
            wait_for_workers=False,
        )
        self._store = PrefixStore(f"peers_{name}", connection)
        self._is_lost = False
        self._calls: queue.SimpleQueue[tuple[futures.Future[Any], Callable[[], Any]]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._work, name="store", daemon=True).start()

    @classmethod
    def to_default_store(cls) -> ShortCalls | None:
        """Connect to the store of the default process group; return None if it is no TCPStore.

        A collective: the first rank chooses a name for the run, so that a restart reads no
        heartbeats of the last attempt. The default store belongs to this attempt alone. The number
        of restarts is no part of the key: every agent counts its own, so ranks of several nodes may
        have different ones.
        """
        default = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            default.set("run", uuid.uuid4().hex)
        name = default.get("run").decode()
        store = default
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if not isinstance(store, TCPStore):
            return None
        return cls(store, name)

    def set(self, key: str, value: str) -> None:
        """Write a value under a key."""
        self._call(lambda: self._store.set(key, value))

    def get(self, key: str) -> str | None:
        """Return the value of a key, None if it has not been written."""

        def get_if_present() -> str | None:
            if not self._store.check([key]):
                return None  # `get` would wait for it
            return self._store.get(key).decode()

        return self._call(get_if_present)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its new value."""
        return self._call(lambda: self._store.add(key, amount))

    def _call(self, call: Callable[[], T]) -> T:
        """Run a call on the thread of the connection, and return its result.

        Raises:
            StoreError: the call failed or took longer than :data:`CALL_SECONDS`.
        """
        if self._is_lost:
            raise StoreError(f"the store at {self.address} does not answer")
        answer: futures.Future[T] = futures.Future()
        self._calls.put((answer, call))
        try:
            return answer.result(CALL_SECONDS)
        except (RuntimeError, futures.TimeoutError) as error:
            self._is_lost = True
            raise StoreError(f"the store at {self.address} does not answer") from error

    def _work(self) -> None:
        while True:
            answer, call = self._calls.get()
            try:
                answer.set_result(call())
            except RuntimeError as error:
                answer.set_exception(error)


class Heartbeats:
    """The heartbeats of all ranks. Nothing is sent before :meth:`connect`.

    Args:
        file: this rank's file for errors, which messages name.

    Attributes:
        period: seconds between two heartbeats.
        iteration: function that returns the number of finished iterations.
        is_connected: True if there are several ranks and a store for their heartbeats.
    """

    def __init__(self, file: Path):
        self.rank = environment_rank()
        self.num_ranks = environment_world_size()
        self.period = max(1.0, self.num_ranks / RANKS_PER_SECOND)
        self.iteration: Callable[[], int] = lambda: 0
        self.is_connected = False
        self._file = file
        self._store: ShortCalls | None = None
        self._num_sent = 0
        self._last_state = RUNNING
        self._last_sent = 0.0  # by the monotonic clock
        self._iteration = 0
        self._finished = time.time()
        self._position = Position("", "the start of the run", "")
        self._since = time.time()  # when this rank came to its position
        # Rank -> number of its last heartbeat, and when this process first read that one.
        self._seen: dict[int, tuple[int, float]] = {}

    @property
    def silence(self) -> float:
        """Seconds without a heartbeat after which a rank is silent."""
        return SILENT_PERIODS * self.period

    def connect(self) -> None:
        """Send heartbeats to the store of the process group from now on; a collective."""
        if self.num_ranks > 1:
            self._store = ShortCalls.to_default_store()
            self.is_connected = self._store is not None

    # ---- this rank

    def locate(self, now: Position) -> None:
        """Record the position of this rank, and the time at which it came there."""
        iteration = self.iteration()
        before = self._position
        if iteration != self._iteration:
            self._iteration = iteration
            self._finished = time.time()
            self._since = time.time()
        elif (now.collective or now.work) != (before.collective or before.work):
            self._since = time.time()
        self._position = now

    @property
    def age(self) -> float:
        """Seconds since this rank came to its position."""
        return time.time() - self._since

    def own(self, state: str) -> Heartbeat:
        """Make a heartbeat of this rank in a state, without sending it."""
        return Heartbeat(
            rank=self.rank,
            host=socket.gethostname(),
            machine=this_machine(),
            pid=os.getpid(),
            number=self._num_sent,
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
            StoreError: the store does not answer. All methods below raise it too.
        """
        if self._store is not None:
            heartbeat = self.own(state)
            text = json.dumps(asdict(heartbeat))
            self._store.set(str(self.rank), text)
            self._num_sent += 1
        self._last_state = state
        self._last_sent = time.monotonic()

    # ---- all ranks

    def peers(self) -> list[Peer]:
        """Return all ranks, including this one, as their last heartbeats show them."""
        peers = []
        for rank in range(self.num_ranks):
            text = self._connected.get(str(rank))
            if text is None:
                continue  # it has not joined yet
            beat = Heartbeat(**json.loads(text))
            number, first_read = self._seen.get(rank, (None, 0.0))
            if number != beat.number:
                first_read = time.monotonic()
                self._seen[rank] = (beat.number, first_read)
            is_late = time.monotonic() - first_read > self.silence
            is_silent = beat.state == RUNNING and rank != self.rank and is_late
            peers.append(Peer(beat, is_silent))
        return peers

    def gather(self) -> list[Peer]:
        """Return all ranks, after each has sent a new heartbeat or is known to send none.

        This rank keeps sending its own heartbeats, since other ranks may gather at the same moment.
        """
        before = {}
        for peer in self.peers():
            before[peer.beat.rank] = peer.beat.number
        while True:
            peers = self.peers()
            if not any(self._is_awaited(peer, before.get(peer.beat.rank)) for peer in peers):
                return peers
            time.sleep(0.1)
            if time.monotonic() - self._last_sent > self.period:
                self.send(self._last_state)

    def _is_awaited(self, peer: Peer, number: int | None) -> bool:
        """Return True if another rank may soon send the heartbeat after ``number``."""
        beat = peer.beat
        if beat.rank == self.rank or beat.state != RUNNING or beat.number != number:
            return False
        return peer.trouble not in DEAD

    def claim(self) -> bool:
        """Claim the right to print the report; return True on the first rank that does."""
        return self._connected.add("claims", 1) == 1

    def note_report(self, ends_run: bool = True) -> None:
        """Publish that a report has been printed.

        Args:
            ends_run: True if all ranks end after this report, False for the report of a stall.
        """
        report = END if ends_run else STALL
        with contextlib.suppress(StoreError):
            self._connected.set("report", report)

    def must_end(self) -> bool:
        """Return True if a rank has reported the end of the run."""
        if self._store is None:
            return False
        return self._store.get("report") == END

    def wait_for_report(self) -> None:
        """Wait until another rank has reported: torchrun kills all ranks when one has ended."""
        deadline = time.monotonic() + 2 * self.silence
        with contextlib.suppress(StoreError):
            while time.monotonic() < deadline and self._connected.get("report") is None:
                time.sleep(0.1)

    def keep_store(self) -> None:
        """Keep the store alive, if this process hosts it, until all ranks have read a report."""
        is_of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self.is_connected and self.rank == 0 and not is_of_agent:
            time.sleep(2 * self.period)

    @property
    def _connected(self) -> ShortCalls:
        if self._store is None:
            raise StoreError("the ranks have not found each other")
        return self._store
