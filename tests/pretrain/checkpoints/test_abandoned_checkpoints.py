# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that --overwrite gives up are never loaded as those of the run that gave them up."""

import json
import shutil
from pathlib import Path

import pytest

from megatron.checkpoint.commands.formats import open_checkpoint
from megatron.checkpoint.commands.verification import find_problems
from megatron.checkpoint.store import directory
from megatron.checkpoint.store.directory import TRACKER
from megatron.pretrain.checkpoints.abandoned_checkpoints import LIST, delete, give_up, mark, settle
from megatron.pretrain.report.loss_history import HISTORY
from tests.pretrain.report.test_loss_history import killed_at
from tests.pretrain.test_newest_checkpoint import flip
from tests.pretrain.test_non_persistent_saves import broken_off
from tests.support.pretrain.saved_runs import LINE, saved_at
from tests.support.pretrain.training_runs import refuse, train
from tests.support.rank_pool import run_ranks

GLOBAL = "--non-persistent-ckpt-type global"


@pytest.mark.always("")
@pytest.mark.parametrize("flags", ["", "--ckpt-format torch_dist", "--async-save"])
def test_checkpoints_of_an_overwritten_run_are_not_loaded_as_those_of_the_new_one(
    flags: str, tmp_path: Path
) -> None:
    line = f"{LINE} {flags} --save {tmp_path}"
    anew = f"{line} --seed 7 --overwrite --save-interval 3"
    run_ranks(2, train, f"{line} --save-interval 2")
    before = sorted(path.name for path in tmp_path.iterdir())
    # It ends before its first save: the old checkpoints are still what there is.
    assert "broken off" in run_ranks(2, broken_off, anew, 2)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, LIST])
    (still,) = run_ranks(2, train, f"{line} --load {tmp_path}")[0]
    assert not still.steps and still.iteration == 6
    saved_at(tmp_path, 2, 4, 6)

    run_ranks(2, train, f"{anew} --exit-interval 3")
    saved_at(tmp_path, 3)
    assert not (tmp_path / LIST).exists() and not find_problems(open_checkpoint(tmp_path))
    (tmp_path / TRACKER).unlink()
    (resumed,) = run_ranks(2, train, f"{line} --seed 7 --load {tmp_path} --exit-interval 4")[0]
    assert resumed.column("iteration") == [4]
    history = (tmp_path / HISTORY).read_text().splitlines()
    assert [json.loads(text)["iteration"] for text in history] == [1, 2, 3, 4]
    for iteration in (3, 4):
        flip(next((tmp_path / f"iter_{iteration:07d}").glob("__1_*.distcp")))
    problem = run_ranks(2, refuse, f"{line} --seed 7 --load {tmp_path}")[0]
    assert "iter_0000003" in problem and "iter_0000002" not in problem


def test_non_persistent_checkpoints_of_an_overwritten_run_are_deleted_too(tmp_path: Path) -> None:
    line = f"{LINE} {GLOBAL} --save {tmp_path} --non-persistent-save-interval"
    assert "broken off" in run_ranks(2, broken_off, f"{line} 5 --save-interval 2", 5)[0]
    assert directory.iterations(tmp_path / "non_persistent") == [5]
    anew = f"{line} 5 --seed 7"
    run_ranks(2, train, f"{anew} --overwrite --save-interval 3 --exit-interval 3")
    assert not directory.iterations(tmp_path / "non_persistent")
    (resumed,) = run_ranks(2, train, f"{anew} --load {tmp_path} --exit-interval 4")[0]
    assert resumed.column("iteration") == [4]


def test_the_first_checkpoint_of_the_new_run_may_be_a_non_persistent_one(tmp_path: Path) -> None:
    line = f"{LINE} --save {tmp_path}"
    run_ranks(2, train, f"{line} --save-interval 2")
    anew = f"{line} {GLOBAL} --seed 7 --non-persistent-save-interval 1 --save-interval 6"
    assert "broken off" in run_ranks(2, broken_off, f"{anew} --overwrite", 2)[0]
    assert not directory.iterations(tmp_path) and not (tmp_path / TRACKER).exists()
    (resumed,) = run_ranks(2, train, f"{anew} --load {tmp_path}")[0]
    assert resumed.column("iteration") == [3, 4, 5, 6]
    assert directory.iterations(tmp_path) == [6]


def publish(save: Path, root: Path, iteration: int, content: str) -> None:
    """Publish a checkpoint as a run does."""
    staging = directory.prepare(root, iteration)
    (staging / "content").write_text(content)
    mark(save, staging)
    directory.publish(root, iteration)
    delete(save, iteration)


def start(save: Path) -> None:
    """Tidy the directories as a run does that begins."""
    for root in (save, save / "non_persistent"):
        if root.is_dir():
            directory.tidy(root)
    settle(save, [save / "non_persistent"])


@pytest.mark.always("6")
@pytest.mark.parametrize("first", ["3", "6", "non_persistent/7"])
def test_a_kill_at_any_change_leaves_the_checkpoints_of_one_of_the_runs(
    first: str, tmp_path: Path
) -> None:
    """The first iteration of the new run is another one than those of the old run, or the same."""
    below, _, number = first.rpartition("/")
    old, change, is_killed, ends = tmp_path / "old", 0, True, []
    for root, iteration in ((old / "non_persistent", 7), (old, 4), (old, 6)):
        publish(old, root, iteration, "old")
    while is_killed:
        change += 1
        save = tmp_path / str(change)
        extra = save / "non_persistent"
        shutil.copytree(old, save)

        def overwrite(save: Path = save, extra: Path = extra) -> None:
            give_up(save, [extra])
            publish(save, save / below, int(number), "new")

        is_killed = killed_at(save, change, overwrite)
        start(save)
        found = [(save, each) for each in directory.iterations(save)]
        found += [(extra, each) for each in directory.iterations(extra)]
        paths = [directory.iteration_directory(root, each) for root, each in found]
        contents = {(path / "content").read_text() for path in paths}
        assert len(contents) == 1 and not (save / LIST).exists()
        ends += contents
        if contents == {"old"}:
            assert found == [(save, 6), (save, 4), (extra, 7)]
        else:
            assert found == [(save / below, int(number))]
        tracked = directory.read_tracker(save)
        assert tracked == next((each for root, each in found if root == save), None)
        assert not [path for path in save.rglob(".*") if path.is_dir()]
    assert ends == sorted(ends, reverse=True) and set(ends) == {"old", "new"} and change > 15


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"identifier": "a", "iterations": [1]}', "\x00"])
def test_a_damaged_list_deletes_nothing(text: str, tmp_path: Path) -> None:
    publish(tmp_path, tmp_path, 4, "old")
    (tmp_path / LIST).write_text(text)
    publish(tmp_path, tmp_path, 6, "new")
    start(tmp_path)
    saved_at(tmp_path, 4, 6)
    assert not (tmp_path / LIST).exists()


def test_directories_that_a_run_does_not_use_are_left_as_they_are(tmp_path: Path) -> None:
    save, extra = tmp_path / "save", tmp_path / "extra"
    publish(save, save, 4, "old")
    publish(save, extra, 7, "old")
    give_up(save, [extra])
    staging = directory.prepare(save, 3)
    mark(save, staging)
    directory.publish(save, 3)
    settle(save, [])
    saved_at(save, 3)
    assert directory.iterations(extra) == [7]
