# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of ranks that torchrun restarts, played by threads that share a store."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron.fsdp.backends import rendezvous

PATIENCE = timedelta(seconds=60)


class Launcher:
    """An agent of torchrun: it has the store, and starts ranks."""

    def __init__(self, pool: ThreadPoolExecutor):
        self.pool = pool
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(self, rank: int, world_size: int, patience: timedelta = PATIENCE) -> "Future[str]":
        """Start a rank, which agrees with the others on the name of their attempt.

        It has a connection of its own: whoever waits for a key lets nobody else use the connection.
        """
        store = dist.TCPStore("127.0.0.1", self.store.port)
        return self.pool.submit(rendezvous.agree_on_attempt, store, rank, world_size, patience)

    def attempt(self, world_size: int) -> str:
        """Start all ranks and return the name on which they agree."""
        ranks = [self.start(rank, world_size) for rank in reversed(range(world_size))]
        (name,) = {rank.result() for rank in ranks}
        return name

    def die_after_answering(self, rank: int, call: str) -> str:
        """Draw a ticket and answer a call, as a rank does that is then killed."""
        attempts = dist.PrefixStore("attempts", self.store)
        ticket = str(attempts.add("tickets", 1))
        attempts.set(f"{call}/{rank}", ticket)
        return ticket


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    with ThreadPoolExecutor() as pool, patch.object(rendezvous, "CALL_SECONDS", 0.3):
        yield Launcher(pool)


@pytest.mark.seldom("5")
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_each_attempt_has_a_name_of_its_own(world_size: int, launcher: Launcher) -> None:
    names = [launcher.attempt(world_size) for _ in range(4)]
    assert len(set(names)) == 4


def test_ranks_of_a_new_attempt_wait_for_a_new_first_rank(launcher: Launcher) -> None:
    """One node notices a failure first: its ranks find the calls of ranks that still run."""
    before = launcher.attempt(3)
    early = [launcher.start(rank, 3) for rank in (1, 2)]
    with pytest.raises(TimeoutError):
        early[0].result(timeout=0.5)
    names = {rank.result() for rank in [launcher.start(0, 3), *early]}
    assert len(names) == 1 and names != {before}


def test_a_rank_that_died_after_it_answered_is_not_admitted(launcher: Launcher) -> None:
    waiting = [launcher.start(rank, 4) for rank in (0, 1)]
    launcher.store.wait(["attempts/call"])
    dead = launcher.die_after_answering(2, launcher.store.get("attempts/call").decode())
    with pytest.raises(TimeoutError):
        waiting[0].result(timeout=0.5)  # longer than a call, which the dead rank has answered
    last = [launcher.start(rank, 4) for rank in (2, 3)]
    assert len({rank.result() for rank in waiting + last}) == 1
    assert not launcher.store.check([f"attempts/admitted/{dead}"])


def test_calls_of_a_first_rank_that_died_are_forgotten(launcher: Launcher) -> None:
    with pytest.raises(TimeoutError, match="start: 1, 2 of 3"):
        launcher.start(0, 3, timedelta()).result()
    launcher.die_after_answering(1, launcher.store.get("attempts/call").decode())
    launcher.attempt(3)


def test_missing_ranks_are_named(launcher: Launcher) -> None:
    second = launcher.start(1, 3)
    for seconds in (1, 60):  # a machine under load may take longer than a second to answer
        with pytest.raises(TimeoutError) as error:
            launcher.start(0, 3, timedelta(seconds=seconds)).result()
        if "start: 2 of 3" in str(error.value):
            break
    assert "start: 2 of 3" in str(error.value)
    rest = [launcher.start(rank, 3) for rank in (0, 2)]
    assert len({rank.result() for rank in [second, *rest]}) == 1
    with pytest.raises(TimeoutError, match="rank 1 has waited"):
        launcher.start(1, 3, timedelta(seconds=0.2)).result()


def test_an_earlier_signal_of_nccl_is_removed(launcher: Launcher) -> None:
    launcher.store.set(rendezvous.DUMP_SIGNAL, "rank")
    launcher.attempt(2)
    assert not launcher.store.check([rendezvous.DUMP_SIGNAL])


@pytest.mark.parametrize("agent", ["True", "False", None])
def test_only_a_store_of_an_agent_is_divided(
    agent: str | None, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torchrun the first rank has the store, and it ends with the rank."""
    port = launcher.store.port if agent == "True" else 0
    place = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if agent is not None:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    store, rank, world_size = next(dist.rendezvous(rendezvous.INIT_METHOD, timeout=PATIENCE))
    assert (rank, world_size) == (0, 1)
    assert isinstance(store, dist.PrefixStore if agent == "True" else dist.TCPStore)
