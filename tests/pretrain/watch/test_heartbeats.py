# SPDX-License-Identifier: Apache-2.0
"""Heartbeats of several ranks, played by threads that share a store."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.mcore_adapter.watch.heartbeats import Heartbeats, ShortCalls
from megatron.mcore_adapter.watch.peers import RUNNING, Peer


def test_ranks_that_gather_at_the_same_moment_do_not_seem_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("WORLD_SIZE", "3")
    ranks = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        hearts = Heartbeats(tmp_path / f"rank{rank}.txt")
        hearts.period = 0.5  # a machine under load takes a second for what takes none
        hearts._store, hearts.is_connected = ShortCalls(store, "test"), True
        ranks.append(hearts)
    all_have_sent = threading.Barrier(3)

    def gather(hearts: Heartbeats) -> list[Peer]:
        hearts.send(RUNNING)
        all_have_sent.wait()
        return hearts.gather()

    with ThreadPoolExecutor(3) as pool:
        for peers in pool.map(gather, ranks):
            assert [peer.beat.rank for peer in peers] == [0, 1, 2]
            assert not [peer.beat.rank for peer in peers if peer.trouble]


def test_ranks_whose_agents_have_counted_other_restarts_share_their_heartbeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.PrefixStore("attempt", host)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    calls = []
    for rank, count in enumerate(("2", "0")):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        store.set_timeout(timedelta(seconds=60))
        calls.append(ShortCalls.to_default_store())
    first, second = calls
    assert first is not None and second is not None
    first.set("0", "beats")
    assert second.get("0") == "beats"
