# SPDX-License-Identifier: Apache-2.0
"""Calls of the store that end soon, also when its host hangs or is gone."""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

SECONDS = 5.0
"""Time that a call may take."""

T = TypeVar("T")


class StoreError(RuntimeError):
    """The store does not answer."""


class ShortCalls:
    """A connection of its own to the store of the process group, used from one thread.

    The process group's connection may be blocked by a collective that is about to begin. A store
    that hangs once is not asked again.

    Args:
        store: of the process group.
        name: of the run among those that share the store.
    """

    def __init__(self, store: TCPStore, name: str):
        self.address = f"{store.host}:{store.port}"
        connection = TCPStore(
            store.host,
            store.port,
            is_master=False,
            timeout=timedelta(seconds=SECONDS),
            wait_for_workers=False,
        )
        self._store = PrefixStore(f"peers_{name}", connection)
        self._is_lost = False
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
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
        results: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

        def run() -> None:
            try:
                results.put((True, call()))
            except RuntimeError as error:
                results.put((False, error))

        self._calls.put(run)
        try:
            is_done, result = results.get(timeout=SECONDS)
        except queue.Empty:
            is_done, result = False, None
        if not is_done:
            self._is_lost = True
            raise StoreError(f"the store at {self.address} does not answer") from result
        value: T = result
        return value

    def _work(self) -> None:
        while True:
            self._calls.get()()
