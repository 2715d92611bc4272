"""The lease of a URL that a run saves at. `local://` is a store that ranks share, and no path."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron.checkpoint.commands.formats import open_checkpoint
from megatron.checkpoint.commands.verification import find_problems
from megatron.checkpoint.store.lease_object import LEASE, LeasedStore
from megatron.checkpoint.store.stores import Store
from megatron.checkpoint.store.url_staging import BASE_VARIABLE
from megatron.checkpoint.store.stores import local_path
from megatron.pretrain.checkpoints import save_lease
from megatron.pretrain.errors import RunError
from megatron.pretrain.checkpoints.save_lease import LeaseHolder, check, leased
from tests.support.pretrain.saved_runs import LINE, saved_at
from tests.support.pretrain.training_runs import refuse, train
from tests.support.rank_pool import run_ranks
from tests.support.warm_programs import ROOT

FAST = 0.1
"""Seconds between renewals."""
PATIENT = 1.0
"""Seconds between renewals for a run that must see one; it looks more often."""
NEVER = 1000.0
"""Seconds that no test waits."""
LINES = f"{LINE} --train-iters 3 --save-interval 1"


@contextmanager
def clock(renewal: float, settling: float = 0.0) -> Iterator[None]:
    """Let leases be renewed after so many seconds, and read again after so many."""
    with patch.multiple(save_lease, RENEWAL_SECONDS=renewal, SETTLING_SECONDS=settling):
        yield


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Stage a URL, whose store is the directory `store`."""
    (tmp_path / "staging").mkdir()
    with patch.dict(os.environ, {BASE_VARIABLE: str(tmp_path / "staging")}):
        (tmp_path / "store").mkdir()
        yield Path(local_path(f"local://{tmp_path / 'store'}"))


@pytest.fixture
def lease(tmp_path: Path) -> Path:
    """Return the file that the lease is in this store."""
    return tmp_path / "store" / LEASE


def content(lease: Path) -> dict[str, Any]:
    while True:
        with suppress(ValueError):  # it is just being written: this store overwrites in place
            found: dict[str, Any] = json.loads(lease.read_text())
            return found


def foreign(**changes: Any) -> LeaseHolder:
    """Return the lease of a run on another machine."""
    other = replace(LeaseHolder.of_this_run(), host="elsewhere", machine="elsewhere", job="7")
    return replace(other, **changes)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(FAST / 10)


@contextmanager
def renewed(lease: Path, holder: LeaseHolder) -> Iterator[None]:
    """Renew the lease of another run in a thread."""
    is_over = threading.Event()

    def renew() -> None:
        counter = 0
        while not is_over.wait(FAST / 2):
            counter += 1
            lease.write_bytes(replace(holder, counter=counter).to_bytes())

    lease.write_bytes(holder.to_bytes())
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


# ---- one run


def test_a_lease_says_whose_it_is_and_is_renewed_until_the_run_ends(
    root: Path, lease: Path
) -> None:
    with clock(FAST), leased(root, print):
        first = content(lease)
        wait_until(lambda: content(lease)["counter"] > first["counter"])
        assert {**content(lease), "counter": 0} == {**first, "counter": 0}
        assert first["process"] == os.getpid() and first["host"] == socket.gethostname()
        assert first["process_start"] and first["run"] and first["since"].startswith("2")
        check(root)
    assert not lease.exists()
    check(root)  # a run without a lease, as one in memory, has none to lose


def test_the_lease_of_a_run_that_fails_is_removed(root: Path, lease: Path) -> None:
    with pytest.raises(ValueError, match="of the run"), clock(NEVER), leased(root, print):
        assert lease.exists()
        raise ValueError("of the run")
    assert not lease.exists()


def test_a_store_that_is_out_of_reach_for_a_moment_is_a_warning(root: Path, lease: Path) -> None:
    lines: list[str] = []
    with clock(FAST), leased(root, lines.append):
        unreachable = OSError("local://: ConnectionError: no route to host")
        with patch.object(LeasedStore, "write_lease", side_effect=unreachable) as write:
            wait_until(lambda: write.call_count > 2)
            check(root)
        (line,) = lines
        assert "cannot be renewed" in line and "no route to host" in line
        counter = content(lease)["counter"]
        wait_until(lambda: content(lease)["counter"] > counter)
        check(root)
    assert len(lines) == 1 and not lease.exists()


def test_a_file_system_that_cannot_be_made_for_a_moment_is_a_warning(
    root: Path, lease: Path
) -> None:
    """Those that connect when they are made are made anew in every thread."""
    lines: list[str] = []
    with clock(FAST), leased(root, lines.append):
        refused = ValueError("sftp://host/runs: Connection refused")
        with patch.object(save_lease, "LeasedStore", side_effect=refused) as make:
            wait_until(lambda: make.call_count > 2)
        assert ["Connection refused" in line for line in lines] == [True]
        counter = content(lease)["counter"]
        wait_until(lambda: content(lease)["counter"] > counter)
    assert not lease.exists()


@pytest.mark.parametrize("rest", [None, b"", b"[1"], ids=["removed", "empty", "torn"])
def test_a_lease_that_is_damaged_is_written_anew(
    rest: bytes | None, root: Path, lease: Path
) -> None:
    with clock(NEVER), leased(root, print):
        before = content(lease)
        lease.unlink() if rest is None else lease.write_bytes(rest)
        check(root)
        assert content(lease)["run"] == before["run"]


# ---- a second run


def refuse_soon(line: str) -> str:
    """Job: the error of a run that looks often at the lease of another one."""
    with clock(PATIENT):
        return refuse(line)


def test_a_second_run_is_refused_while_the_first_one_lives(root: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with clock(FAST / 2), leased(root, print):
        before = content(store / LEASE)
        first, second = run_ranks(2, refuse_soon, f"{LINES} --save local://{store}")
        assert content(store / LEASE)["run"] == before["run"]
    host = socket.gethostname()
    assert first == second
    assert first.startswith("RunError: --save local://")
    assert f"is in use by process {os.getpid()} on {host}, started 2" in first
    assert not list(store.iterdir())


def test_a_run_waits_for_one_that_is_ending(root: Path, lease: Path) -> None:
    lease.write_bytes(foreign().to_bytes())
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        lease.unlink()

    with clock(PATIENT), leased(root, say):
        assert len(lines) == 1


HOLDER = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from megatron.checkpoint.store.stores import local_path
from megatron.pretrain.checkpoints.save_lease import leased
with leased(Path(local_path(sys.argv[1])), print):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_run_goes_on_at_once_after_a_kill(root: Path, lease: Path) -> None:
    command = [sys.executable, "-c", HOLDER, f"local://{lease.parent}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        process.kill()  # and it stays a zombie, as that of a batch system may
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert content(lease)["process"] == process.pid
        with clock(NEVER), leased(root, print):
            assert content(lease)["process"] == os.getpid()
    own = LeaseHolder.of_this_run()
    for dead in (
        replace(own, run="a", process=process.pid),
        replace(own, run="b", process_start="1"),  # this process has the number of that one
    ):
        lease.write_bytes(dead.to_bytes())
        with clock(NEVER), leased(root, print):
            assert content(lease)["process"] == os.getpid()


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (foreign().to_bytes(), f"of process {os.getpid()} on elsewhere, started 2"),
        (
            replace(LeaseHolder.of_this_run(), run="suspended").to_bytes(),
            f"of process {os.getpid()}",
        ),
        (b'{"run": 1}', "that cannot be read"),
    ],
    ids=["another host", "suspended here", "unreadable"],
)
def test_a_lease_that_nobody_renews_is_taken_after_three_renewals(
    found: bytes, told: str, root: Path, lease: Path
) -> None:
    lease.write_bytes(found)
    lines: list[str] = []
    begin = time.monotonic()
    with clock(FAST), leased(root, lines.append):
        assert time.monotonic() - begin > 3 * FAST
        assert content(lease)["process"] == os.getpid()
    (line,) = lines
    assert told in line and "has a lease" in line


def test_a_look_at_a_stale_lease_may_fail_but_not_the_last_one(root: Path, lease: Path) -> None:
    lease.write_bytes(foreign().to_bytes())
    looks: list[bytes | OSError | None] = [lease.read_bytes(), OSError("no route"), None]
    with clock(FAST), patch.object(LeasedStore, "read_lease", side_effect=looks) as read:
        save_lease.SaveLease(f"local://{lease.parent}", root, print)._wait_for_its_end()
    assert read.call_count == 3
    looks = [lease.read_bytes(), *[OSError("no route")] * 1000]
    with (
        clock(FAST),
        patch.object(LeasedStore, "read_lease", side_effect=looks),
        pytest.raises(OSError, match="no route"),
    ):
        save_lease.SaveLease(f"local://{lease.parent}", root, print)._wait_for_its_end()


def test_a_run_on_another_host_that_renews_its_lease_is_left_alone(root: Path, lease: Path) -> None:
    other = foreign()
    message = r"in use by process .* on elsewhere, started 2.*, job 7: two runs at one URL"
    with renewed(lease, other), clock(PATIENT), pytest.raises(RunError, match=message):
        leased(root, print).__enter__()
    assert content(lease)["run"] == other.run


def test_of_two_runs_that_start_at_once_one_goes_on(root: Path, lease: Path) -> None:
    both = threading.Barrier(2)
    outcomes: list[str] = []
    is_over = threading.Event()

    def start(number: int) -> None:
        try:
            with leased(root, print):
                outcomes.append("")
                is_over.wait(20)
        except RunError as error:
            outcomes.append(str(error))

    write = LeasedStore.write_lease

    def look_and_write(self: LeasedStore, content: bytes) -> None:
        is_first = LeaseHolder.parsed(content).counter == 1
        if is_first:
            both.wait(20)  # and have seen no lease
        write(self, content)
        if is_first:
            both.wait(20)

    with clock(NEVER), patch.object(LeasedStore, "write_lease", look_and_write):
        threads = [threading.Thread(target=start, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(outcomes) == 2)
        assert lease.exists()
        is_over.set()
        for thread in threads:
            thread.join()
    first, second = sorted(outcomes)
    assert not first and "is in use by process" in second
    assert not lease.exists()


# ---- a lost lease


def test_a_run_that_was_suspended_has_lost_a_lease_that_another_one_has_taken(
    root: Path, lease: Path
) -> None:
    lines: list[str] = []
    with clock(FAST), leased(root, lines.append):
        lease.write_bytes(foreign().to_bytes())
        wait_until(lambda: bool(lines))
        assert "on elsewhere" in lines[0]
        for _ in range(2):
            with pytest.raises(RunError, match=r"has lost its lease .* process .* on elsewhere"):
                check(root)
    assert content(lease)["host"] == "elsewhere" and len(lines) == 1


def test_a_lease_that_is_gone_after_a_long_suspension_is_lost(root: Path, lease: Path) -> None:
    with clock(NEVER), leased(root, print):
        lease.unlink()
        with clock(0.0), pytest.raises(RunError, match="another run, which has ended"):
            check(root)
    assert not lease.exists()


def refuse_after_a_loss(line: str, other: bytes) -> str:
    """Job: a run whose lease another one takes when it has published its first checkpoint."""
    write_tracker = Store.write_tracker

    def write(self: Store, iteration: int | str) -> None:
        write_tracker(self, iteration)
        Path(self.url.removeprefix("local://"), LEASE).write_bytes(other)

    with clock(NEVER), patch.object(Store, "write_tracker", write):
        return refuse(line)


def test_the_next_save_fails_on_all_ranks_when_the_lease_is_lost(tmp_path: Path) -> None:
    other = foreign().to_bytes()
    first, second = run_ranks(2, refuse_after_a_loss, f"{LINES} --save local://{tmp_path}", other)
    assert first == second
    assert first.startswith("RunError: this run has lost its lease of --save local://")
    assert "on elsewhere" in first
    saved_at(tmp_path, 1)
    assert (tmp_path / LEASE).read_bytes() == other


def load_and_go_on(line: str, url: str) -> list[Any]:
    """Job: a run that only loads from a URL, and one that goes on there and often looks."""
    with clock(FAST):
        return train(f"{line} --load {url}", f"{line} --load {url} --save {url}")


def test_a_run_goes_on_where_another_host_has_died_and_a_load_needs_no_lease(
    tmp_path: Path,
) -> None:
    url = f"local://{tmp_path}"
    run_ranks(2, train, f"{LINES} --save {url} --exit-interval 1")
    (tmp_path / LEASE).write_bytes(foreign().to_bytes())
    assert not find_problems(open_checkpoint(tmp_path))
    (loaded, saved), _ = run_ranks(2, load_and_go_on, LINES, url)
    assert loaded.column("iteration") == saved.column("iteration") == [2, 3]
    assert not (tmp_path / LEASE).exists()
    saved_at(tmp_path, 1, 2, 3)


def refuse_after_the_end_of_another(line: str, folder: str) -> str:
    """Job: a run that has listed the names at the URL when another one saves there and ends."""
    take = save_lease.SaveLease.take

    def save_and_take(self: save_lease.SaveLease) -> None:
        Path(folder, "iter_0000002").mkdir()
        Path(folder, "iter_0000002", ".metadata").touch()
        take(self)

    with patch.object(save_lease.SaveLease, "take", save_and_take):
        return refuse(line)


def test_a_checkpoint_of_a_run_that_has_ended_meanwhile_is_seen(tmp_path: Path) -> None:
    line = f"{LINES} --save local://{tmp_path}"
    first, second = run_ranks(2, refuse_after_the_end_of_another, line, str(tmp_path))
    assert first == second and "has iter_0000002 already" in first
