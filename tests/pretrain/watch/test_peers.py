# SPDX-License-Identifier: Apache-2.0
"""Heartbeats of ranks in, the rank that has failed out, and the message about it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.fsdp.engine import observe
from megatron.fsdp.engine.gradients import GroupGradients
from megatron.fsdp.engine.param_group import ParamGroup, StoredForm
from megatron.fsdp.engine.states import WeightState
from megatron.mcore_adapter.watch import position
from megatron.mcore_adapter.watch.peers import (
    LEFT,
    RUNNING,
    TERMINATED,
    WAITING,
    Heartbeat,
    Peer,
    judge,
    message,
    this_machine,
)

GATHER = "the all-gather of unit 'decoder.layers.1'"


def beat(rank: int, **changes: object) -> Heartbeat:
    """Return the heartbeat of a rank that waits in an all-gather, in this process."""
    now = time.time()
    waiting = Heartbeat(
        rank=rank,
        host="node7",
        machine=this_machine(),
        pid=os.getpid(),
        number=9,
        time=now,
        state=WAITING,
        iteration=17,
        finished=now - 12,
        collective=GATHER,
        place="engine/device.py:66 in wait",
        work="",
        since=now - 10,
        file=f"errors/rank{rank}.txt",
    )
    return replace(waiting, **changes)


def busy(rank: int, **changes: object) -> Heartbeat:
    """Return the heartbeat of a rank that has read data for ten seconds."""
    place = "pretrain/data.py:88 in __getitem__"
    return beat(rank, **{"state": RUNNING, "collective": "", "place": place, **changes})


def trouble(*peers: Peer) -> tuple[str, list[int]]:
    verdict = judge(peers)
    return verdict.trouble, [each.rank for each in verdict.failed]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-SE", "-c", "input()"], stdin=subprocess.PIPE) as other:
        yield other
        other.kill()


def test_a_rank_whose_process_has_ended_is_named(process: subprocess.Popen[bytes]) -> None:
    dead = Peer(beat(1, pid=process.pid), False)
    assert trouble(Peer(beat(0), False), dead)[0] != "ended"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert trouble(Peer(beat(0), False), dead, Peer(busy(2), False)) == ("ended", [1])
    process.wait()
    assert trouble(Peer(beat(0), False), dead, Peer(busy(2), False)) == ("ended", [1])
    text = message(judge([Peer(beat(0), False), dead, Peer(beat(2), False)]), "Connection closed")
    assert text.startswith(f"error: rank 1 has died: process {process.pid} on node7 ended after ")
    assert f"ranks 0, 2 wait in {GATHER} since " in text and "iteration 18" in text
    assert "errors/rank0.txt, errors/rank2.txt\n" in text and "dmesg" in text
    assert text.endswith("error of torch: Connection closed")


def test_a_rank_whose_process_is_stopped_is_named(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    stopped = Peer(beat(0, pid=process.pid, state=RUNNING), True)
    assert trouble(stopped, Peer(beat(1), False)) == ("stopped", [0])
    assert "SIGSTOP" in message(judge([stopped, Peer(beat(1), False)]), "")


def test_a_rank_without_heartbeats_is_named() -> None:
    far = Peer(busy(1, machine="another"), True)
    assert trouble(Peer(beat(0), False), far, Peer(busy(2), False)) == ("silent", [1])
    # A process number of another machine says nothing here.
    assert far.process == "" and Peer(busy(1, pid=2**22 + 1), True).process == "ended"


def test_a_rank_that_is_in_no_collective_is_named() -> None:
    peers = [Peer(beat(0), False), Peer(busy(1), False), Peer(beat(2), False)]
    assert trouble(*peers) == ("hangs", [1])
    text = message(judge(peers), "Timed out waiting 6000ms")
    assert "rank 1 hangs or is too slow: process" in text
    assert "has been at pretrain/data.py:88 in __getitem__ since" in text
    assert "errors/rank1.txt" in text


def test_a_rank_that_has_just_begun_to_compute_does_not_hang() -> None:
    assert trouble(Peer(beat(0), False), Peer(busy(1, since=time.time() - 1), False))[0] != "hangs"


def test_a_rank_in_another_collective_is_named() -> None:
    odd = Peer(beat(2, collective="barrier at pretrain/ranks.py:110 in stop"), False)
    assert trouble(Peer(beat(0), False), Peer(beat(1), False), odd) == ("differs", [2])
    # Of two ranks nobody knows which one is right.
    assert trouble(Peer(beat(0), False), odd) == ("", [])
    text = message(judge([Peer(beat(0), False), odd]), "")
    assert f"rank 0 waits in {GATHER}" in text and "rank 2 waits in barrier at" in text
    assert "network" not in text
    found = "these two ranks differ first, in collective 7 of ranks 0, 2:\n  rank 0: all_gather"
    text = message(judge([Peer(beat(0), False), odd]), "", found)
    assert text.startswith("error: these two ranks differ first") and "name no cause" not in text
    assert "\n    rank 0: all_gather\n  rank 0 waits in" in text


def test_a_rank_that_has_left_is_not_blamed() -> None:
    gone = Peer(beat(1, pid=2**22 + 1, state=LEFT), True)
    assert trouble(Peer(beat(0), False), gone) == ("", [])
    ended = Peer(beat(1, pid=2**22 + 1, state=TERMINATED), True)
    assert trouble(Peer(beat(0), False), ended) == ("sigterm", [1])


def test_many_ranks_make_a_short_message() -> None:
    peers = [Peer(busy(rank), False) for rank in range(30)]
    peers += [Peer(beat(rank), False) for rank in range(30, 1000)]
    text = message(judge(peers), "")
    assert "the same holds for ranks 8-29" in text and "ranks 30-999 wait in" in text
    assert "and 992 more" in text and len(text) < 4000


def test_a_heartbeat_survives_the_store() -> None:
    sent = beat(3)
    assert Heartbeat(**json.loads(json.dumps(asdict(sent)))) == sent


def instruction_of_main_thread() -> tuple[str, int]:
    frame = sys._current_frames()[threading.main_thread().ident]
    return frame.f_code.co_name, frame.f_lasti


class Watcher:
    """Another thread that finds the position of the main one, which waits for it."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.looked = threading.Lock()  # its `acquire` is no frame of Python
        self.looked.acquire()

    def wait(self) -> None:
        """Wait on the main thread until it has been seen."""
        self.arrived.set()
        self.looked.acquire()

    def position_while(self, action: Callable[[], object]) -> position.Position:
        """Return the position of the main thread while it runs `action`, which waits."""
        found: list[position.Position] = []

        def look() -> None:
            self.arrived.wait()
            seen = [instruction_of_main_thread()]
            while len(seen) < 10 or len(set(seen[-10:])) > 1:  # until it waits in `acquire`
                time.sleep(0.03)
                seen.append(instruction_of_main_thread())
            found.append(position.current())
            self.looked.release()

        thread = threading.Thread(target=look)
        thread.start()
        action()
        thread.join()
        return found[0]


def test_the_main_thread_is_seen_at_its_line() -> None:
    watcher = Watcher()

    def wait_here() -> None:
        watcher.arrived.set()
        watcher.looked.acquire()

    found = watcher.position_while(wait_here)
    assert found.collective == "" and found.place.endswith(" in wait_here")
    assert found.place.startswith(f"watch/{os.path.basename(__file__)}:")


def test_the_last_work_of_the_engine_is_known() -> None:
    position.last_work.begin_work("decoder.layers.0", "unshard")
    watcher = Watcher()
    found = watcher.position_while(watcher.wait)
    assert found.work == "unshard of unit 'decoder.layers.0'" and found.collective == ""


def waiting(wait: Callable[[], object]) -> SimpleNamespace:
    """Return what an all-gather and a reduction of a unit need, with a wait of the test's own."""
    work = SimpleNamespace(wait=wait)
    local = torch.zeros(1)
    group = SimpleNamespace(
        unit_name="head",
        _names=SimpleNamespace(unit="head"),
        _all_gather=work,
        change_state=lambda state: None,
        state=WeightState.UNSHARDING,
        guard=SimpleNamespace(open=lambda complete: complete()),
        form=StoredForm(),
        compute=SimpleNamespace(flat=local),
        comm_dtype=local.dtype,
        _local_flat=lambda reduces_now: local,
        _communicator=SimpleNamespace(reduce_scatter=lambda full, result: work),
        _drop_local=lambda: None,
    )
    target = SimpleNamespace(buffer_for=lambda dtype: local, add=lambda result: None)
    group._run = partial(GroupGradients._run, group)
    group._run(GroupGradients._reduce_inner(group, target))
    return group


METHODS: dict[str, Callable[[Any], object]] = {
    "all-gather": ParamGroup.wait_for_unshard,
    "gradient reduction": GroupGradients.advance_reduce,
}


@pytest.fixture(autouse=True)
def observed() -> Iterator[None]:
    observe.add(position.last_work)
    yield
    observe.remove(position.last_work)


@pytest.mark.parametrize("collective", METHODS)
def test_a_wait_of_the_engine_names_the_unit(collective: str) -> None:
    watcher = Watcher()
    group = waiting(watcher.looked.acquire)

    def wait_in_the_engine() -> None:
        watcher.arrived.set()
        METHODS[collective](group)

    found = watcher.position_while(wait_in_the_engine)
    assert found.collective == f"the {collective} of unit 'head'"


def failing(asynchronous: bool) -> SimpleNamespace:
    def wait() -> None:
        raise RuntimeError("[/pytorch/third_party/gloo/pair.cc:1] Connection closed by peer")

    return SimpleNamespace(wait=wait)


@pytest.mark.parametrize(
    ("work", "collective"), [("unshard", "all-gather"), ("reduce", "gradient reduction")]
)
def test_an_error_of_the_engine_names_the_unit_also_after_other_work(
    work: str, collective: str
) -> None:
    with observe.work("head", work):
        pending = observe.observed("gather", "all_gather", (), None, failing)(True)
    with observe.work("decoder.layers.0", "reshard"):
        pass
    with pytest.raises(RuntimeError) as caught:
        pending.wait()
    found = position.of_error(caught.value)
    assert found.collective == f"the {collective} of unit 'head'"
