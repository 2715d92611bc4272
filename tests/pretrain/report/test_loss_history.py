# SPDX-License-Identifier: Apache-2.0
"""The history of losses has no hole and no double, however a run ends."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.checkpoint.store import directory
from megatron.pretrain.report.loss_history import HISTORY, LossHistory
from tests.support.pretrain.kills import KINDS, Strike, Striker


def extended(folder: Path, begin: int, end: int, loss: float = 1.0) -> LossHistory:
    """Resume at ``begin`` and count the losses up to ``end``."""
    history = LossHistory(folder)
    if begin:
        assert history.resume(begin) is None
    history.entries += [
        {"iteration": number, "train": loss} for number in range(begin + 1, end + 1)
    ]
    return history


def iterations(folder: Path, at: int) -> list[int]:
    history = LossHistory(folder)
    history.resume(at)
    return [iteration for iteration, _ in history.curve("train")]


def test_a_history_follows_the_checkpoint_that_is_loaded(tmp_path: Path) -> None:
    history = extended(tmp_path, 0, 4)
    history.stage(4)
    history.keep()
    assert [path.name for path in tmp_path.iterdir()] == [HISTORY]
    history = extended(tmp_path, 4, 6, loss=2.0)
    history.stage(6)
    # Killed here, either of them may have been published.
    assert iterations(tmp_path, 6) == [1, 2, 3, 4, 5, 6]
    assert iterations(tmp_path, 4) == [1, 2, 3, 4]
    # A run that goes back to 2, and is killed before it has published 3, leaves the rest as it is.
    history.keep()
    extended(tmp_path, 2, 3, loss=3.0).stage(3)
    assert iterations(tmp_path, 6) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("line", ['{"iteration": 5, "tr', "\x00\xff", "[]", '{"train": 1}', '{"a'])
def test_a_damaged_file_is_set_aside_with_a_note(line: str, tmp_path: Path) -> None:
    extended(tmp_path, 0, 2).keep()
    with open(tmp_path / HISTORY, "a", encoding="latin-1") as file:
        file.write(line)
    (tmp_path / f"{HISTORY}.damaged_1").touch()
    history = LossHistory(tmp_path)
    note = history.resume(2)
    assert note is not None and f"it is now {HISTORY}.damaged_2" in note
    assert (tmp_path / f"{HISTORY}.damaged_2").is_file() and len(history.entries) == 2
    history.keep()
    assert len((tmp_path / HISTORY).read_text().splitlines()) == 2


def save(folder: Path, begin: int, end: int) -> None:
    """Save a checkpoint as a run does that resumes at ``begin``."""
    if folder.is_dir():
        directory.tidy(folder)
    history = extended(folder, begin, end)
    history.stage(end)
    (directory.prepare(folder, end) / "content").write_text(str(end))
    directory.publish(folder, end)
    directory.retain(folder, 100, end)
    history.keep()


def killed_at(folder: Path, change: int, action: Callable[[], None]) -> bool:
    """Run an action in a process that is killed before a change; False if it makes fewer."""
    process = os.fork()
    if process == 0:
        Striker(folder, Strike(KINDS[0], change)).install()
        action()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(process, 0)[1])


def test_a_kill_at_any_change_of_a_save_costs_no_checkpoint_and_no_loss(tmp_path: Path) -> None:
    """`python -m tests.support.pretrain.kills` kills whole runs."""
    change, is_killed = 0, True
    while is_killed:
        change += 1
        folder = tmp_path / str(change)
        save(folder, 0, 2)
        save(folder, 2, 4)
        directory.write_tracker(folder, 2)  # so that 4 is replaced
        (folder / "iter_0000002").mkdir()
        (folder / "iter_0000002" / "content").write_text("2")
        is_killed = killed_at(folder, change, lambda folder=folder: save(folder, 2, 4))
        for end in (6, 8):
            begin = directory.read_tracker(folder)
            assert begin in (2, 4, 6)
            path = directory.find(folder, begin)
            assert path is not None and (path / "content").read_text() == str(begin)
            assert iterations(folder, begin) == list(range(1, begin + 1))
            save(folder, begin, end)
        assert sorted(path.name for path in folder.iterdir()) == [
            "iter_0000008",
            directory.TRACKER,
            HISTORY,
        ]
        lines = (folder / HISTORY).read_text().splitlines()
        assert [json.loads(line)["iteration"] for line in lines] == list(range(1, 9))
    assert change > 25
