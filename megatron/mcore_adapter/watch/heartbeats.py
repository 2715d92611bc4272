# SPDX-License-Identifier: Apache-2.0
"""Heartbeats: what this rank says of itself through the store, and what it reads of others.

Calls of the store end soon, also when its host hangs or is gone.
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
"""Heartbeats that the store shall have to take; more ranks send them less often."""
SILENT_PERIODS = 4
"""A rank that has sent no heartbeat for so many periods is silent."""

CALL_SECONDS = 5.0
"""Time that a call of the store may take."""
T = TypeVar("T")

END, STALL = "end", "stall"
"""Reports, as ranks know of them: of an end, and of a stall that torch will end."""


class StoreError(RuntimeError):
    """The store does not answer."""


class ShortCalls:
    """A connection of its own to the store of the process group, used from one thread.

    The process group's connection may be blocked by a collective that is about to begin. A store
    that hangs once is not asked again.

    Args:
        store: store of the process group.
        name: name of the run among those that share the store.
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
        """Connect to the store of the default process group; None if it is no TCPStore.

        A collective: the first rank names the run, so that a restart finds nothing of the last one.
        The default store is one of this attempt alone. The number of restarts is no part of the
        key: every agent counts for itself, so ranks of several nodes may have different ones.
        """
        default = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            default.set("run", uuid.uuid4().hex)
        name = default.get("run").decode()
        store = default
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        return cls(store, name) if isinstance(store, TCPStore) else None

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        self._call(lambda: self._store.set(key, value))

    def get(self, key: str) -> str | None:
        """Return a value; None if there is none."""
        return self._call(
            lambda: self._store.get(key).decode() if self._store.check([key]) else None
        )

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its new value."""
        return self._call(lambda: self._store.add(key, amount))

    def _call(self, call: Callable[[], T]) -> T:
        """Return the result of a call.

        Raises:
            StoreError: it failed, or took too long.
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
        file: file for this rank's errors.

    Attributes:
        period: seconds between two heartbeats.
        iteration: returns the number of finished iterations.
        is_connected: True if there are other ranks and a store to which heartbeats go.
    """

    def __init__(self, file: Path):
        self.rank, self.num_ranks = environment_rank(), environment_world_size()
        self.period = max(1.0, self.num_ranks / RANKS_PER_SECOND)
        self.iteration: Callable[[], int] = lambda: 0
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
        iteration, before = self.iteration(), self._position
        if iteration != self._iteration:
            self._iteration, self._finished = iteration, time.time()
            self._since = time.time()
        elif (now.collective or now.work) != (before.collective or before.work):
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
            **asdict(self._position),
            since=self._since,
            file=str(self._file),
        )

    def send(self, state: str) -> None:
        """Send a heartbeat, if there is a store.

        Raises:
            StoreError: the store does not answer; so do all methods below.
        """
        if self._store is not None:
            self._store.set(str(self.rank), json.dumps(asdict(self.own(state))))
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
            beat = Heartbeat(**json.loads(text))
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
