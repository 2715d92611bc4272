# SPDX-License-Identifier: Apache-2.0
"""The directory of --save: nothing in it is overwritten unasked, and no two runs share it."""

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron.checkpoint.store import directory
from megatron.checkpoint.store.directory import TRACKER
from megatron.mcore_adapter.checkpoints import save_directory
from megatron.mcore_adapter.checkpoints.checkpoint_source import CheckpointSource
from megatron.mcore_adapter.checkpoints.save_directory import (
    LOCK,
    locked,
    refuse_overwriting,
    settle,
)
from megatron.mcore_adapter.run.report_files import HISTORY
from tests.pretrain.report.test_loss_history import killed_at
from tests.pretrain.test_newest_checkpoint import arguments
from tests.pretrain.test_non_persistent_saves import broken_off
from tests.pretrain.test_pretrain_gpt import tree
from tests.support.fork_servers import FORKSERVER, INSTALLED, forks_from
from tests.support.pretrain.saved_runs import LINE, saved_at
from tests.support.pretrain.training_runs import error_of, refuse, train, trained
from tests.support.rank_pool import run_ranks

SHORT = f"{LINE} --train-iters 3 --save-interval 1"


@pytest.mark.exhaustive
def test_a_run_overwrites_nothing_that_it_does_not_continue(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    run_ranks(2, train, f"{SHORT} --save {mine} --exit-interval 2")
    before = tree(tmp_path)
    for flags in ("", f"--load {other}", f"--load {mine} --finetune", f"--load {mine}/../mine/x"):
        error = error_of(f"{SHORT} --save {mine} {flags}")
        assert "iter_0000001, iter_0000002 already" in error
        for way_out in (f"--load {mine}", "another --save", "--overwrite"):
            assert way_out in error
        assert tree(tmp_path) == before
    going_on, elsewhere, anew = trained(
        f"{SHORT} --save {mine} --load {mine}",
        f"{SHORT} --save {other} --load {mine} --ckpt-step 1",
        f"{SHORT} --save {mine} --overwrite --exit-interval 1",
    )
    assert going_on.column("iteration") == [3] and elsewhere.column("iteration") == [2, 3]
    assert anew.column("iteration") == [1]
    assert (
        f"moved iter_0000001, iter_0000002, {TRACKER}, iter_0000003 of {mine} into replaced_1"
        in anew.lines
    )
    saved_at(mine, 1)
    saved_at(mine / "replaced_1", 1, 2, 3)
    saved_at(other, 2, 3)


def test_a_tracker_file_that_is_a_directory_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / TRACKER).mkdir()
    error = error_of(f"{SHORT} --save {tmp_path} --load {tmp_path}")
    assert f"--save {tmp_path}: {TRACKER} is a directory" in error
    assert [path.name for path in tmp_path.iterdir()] == [TRACKER]


@pytest.mark.parametrize(
    ("begin", "there", "is_refused"),
    [(0, (), False), (0, (2,), True), (1, (1, 2), True), (2, (1, 2), False)],
)
def test_later_checkpoints_than_those_that_a_run_goes_on_from_are_kept(
    begin: int, there: tuple[int, ...], is_refused: bool, tmp_path: Path
) -> None:
    for iteration in there:
        (tmp_path / "save" / f"iter_{iteration:07d}").mkdir(parents=True)
    args = arguments(tmp_path / "load", save=str(tmp_path / "save"), overwrite=False)
    source = CheckpointSource(tmp_path / "load" / f"iter_{begin:07d}", begin, False, True)
    for given in (source, None) if begin == 0 else (source,):
        if is_refused:
            with pytest.raises(ValueError, match=f"begins at iteration {begin}"):
                refuse_overwriting(args, given)
        else:
            refuse_overwriting(args, given)
    args.overwrite = True
    refuse_overwriting(args, source)


@pytest.mark.exhaustive
def test_what_a_run_replaces_is_moved_aside_and_can_be_loaded_from_there(tmp_path: Path) -> None:
    """Also the non-persistent one, and the history of losses."""
    kind = "--non-persistent-ckpt-type global --non-persistent-save-interval"
    line = f"{LINE} --save {tmp_path} {kind}"
    assert "broken off" in run_ranks(2, broken_off, f"{line} 5 --save-interval 2", 5)[0]
    anew = f"{line} 5 --seed 7 --save-interval 3"
    weights = f"--load {tmp_path} --finetune --overwrite --exit-interval 3"
    (other,) = trained(f"{anew} {weights}")
    assert f"loaded the weights of {tmp_path}/non_persistent/iter_0000005" in other.lines
    assert directory.iterations(tmp_path) == [3]
    assert not directory.iterations(tmp_path / "non_persistent")
    aside = tmp_path / "replaced_1"
    saved_at(aside, 2, 4)
    assert directory.iterations(tmp_path / "non_persistent" / "replaced_1") == [5]
    resumed, old = trained(
        f"{anew} --load {tmp_path} --exit-interval 4",
        f"{LINE} --load {aside} --save {aside} --exit-interval 5",
    )
    assert resumed.column("iteration") == [4] and old.column("iteration") == [5]
    for folder, last in ((tmp_path, 4), (aside, 5)):
        history = [json.loads(text) for text in (folder / HISTORY).read_text().splitlines()]
        assert [entry["iteration"] for entry in history] == list(range(1, last + 1))


@pytest.mark.seldom("2")
@pytest.mark.parametrize("step", [None, 2])
def test_a_kill_while_checkpoints_are_moved_aside_loses_none(
    step: int | None, tmp_path: Path
) -> None:
    """The newest of those that have not been moved can be loaded."""
    old, change, is_killed = tmp_path / "old", 0, True
    for iteration in (2, 4, 6):
        (directory.prepare(old, iteration) / "content").write_text(str(iteration))
        directory.publish(old, iteration)
    while is_killed:
        change += 1
        save = Path(shutil.copytree(old, tmp_path / str(change)))
        load = None if step is None else str(save)
        args = arguments(save, overwrite=True, load=load, ckpt_step=step)
        source = CheckpointSource(save / "iter_0000002", 2, False, False) if step else None
        is_killed = killed_at(save, change, lambda args=args, source=source: settle(args, source))
        left = directory.iterations(save)
        tracked = directory.read_tracker(save)
        assert tracked in ((2,) if step and change > 3 else (None, 2, *left[:1]))
        assert {path.read_text() for path in save.rglob("content")} == {"2", "4", "6"}
        moved = directory.iterations(save / "replaced_1")
        assert sorted(left + moved) == [2, 4, 6] and (not left or max(left, default=0) >= 2)
        assert not moved or not left or step or max(left) > max(moved)
    assert left == ([2] if step else []) and change > 5


@pytest.mark.parametrize("name", ["save", "load"])
def test_the_directory_of_the_non_persistent_checkpoint_is_no_other_one(
    name: str, tmp_path: Path
) -> None:
    """Every save deletes the others there."""
    extra = f"{tmp_path}/here/../{name}/"
    flags = f"--save {tmp_path}/save --load {tmp_path}/load --non-persistent-save-interval 2"
    flags += f" --non-persistent-ckpt-type global --non-persistent-global-ckpt-dir {extra}"
    line = f"{LINE} --train-iters 3 --save-interval 3 {flags}"
    assert f"is the directory of --{name}: name another" in error_of(line)
    assert not list(tmp_path.iterdir())


def hold(folder: Path, holding: Connection) -> None:
    """Be another run in a directory; send the process that it has forked, and stay."""
    with locked(folder, print):
        child = os.fork()
        if child:
            holding.send(child)
        time.sleep(600)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[BaseProcess]:
    """Start another run in the directory `run`, which has forked a process."""
    here, there = multiprocessing.Pipe()
    with forks_from(INSTALLED):
        process = FORKSERVER.Process(target=hold, args=(tmp_path / "run", there))
        process.start()
    there.close()
    child = here.recv()
    yield process
    process.kill()
    process.join()
    os.kill(child, signal.SIGKILL)


def refuse_without_waiting(line: str) -> str:
    """Job: the error of a run that does not wait for another one."""
    with patch.object(save_directory, "WAIT_SECONDS", 0.0):
        return refuse(line)


def test_a_second_run_is_refused_until_the_first_is_dead(
    holder: BaseProcess, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    error = error_of(f"{SHORT} --save {folder}", job=refuse_without_waiting)
    assert f"in use by process {holder.pid} on {socket.gethostname()}, started 2" in error
    holder.kill()
    holder.join()
    # The child that it has forked lives, and has inherited the open file.
    with patch.object(save_directory, "WAIT_SECONDS", 0.0), locked(folder, print):
        assert str(os.getpid()) in (folder / LOCK).read_text()
    assert not (folder / LOCK).exists()


def test_a_run_waits_for_one_that_is_ending(holder: BaseProcess, tmp_path: Path) -> None:
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        holder.kill()

    with locked(tmp_path / "run", log):
        assert len(lines) == 1 and "waiting 30 s" in lines[0]


def test_a_lock_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="of the run"), locked(tmp_path / "a" / "b", print):
        raise ValueError("of the run")
    assert not list(tmp_path.iterdir())
    (tmp_path / LOCK).write_text("of a run that was killed")
    with locked(tmp_path, print):
        pass
    assert not list(tmp_path.iterdir())


def test_where_there_are_no_locks_a_run_goes_on_with_a_warning(tmp_path: Path) -> None:
    lines: list[str] = []
    with (
        patch.object(fcntl, "lockf", side_effect=OSError(errno.ENOLCK, "no locks")),
        locked(tmp_path, lines.append),
    ):
        (line,) = lines
        assert "cannot be locked" in line


def test_another_error_of_the_lock_is_one_of_the_run(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(OSError, match=LOCK), locked(tmp_path, print):
        raise AssertionError("it was locked")
