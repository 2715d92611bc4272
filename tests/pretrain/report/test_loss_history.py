# SPDX-License-Identifier: Apache-2.0
"""The history of losses has no hole and no double, however a run ends."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.soak.kills import KINDS, Strike, Striker
from megatron.checkpoint.store import directory
from megatron.mcore_adapter.run.report_files import HISTORY
from megatron.pretrain.report.loss_history import LossHistory, draw_loss_curves


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
    extended(tmp_path, 0, 4).write()
    assert [path.name for path in tmp_path.iterdir()] == [HISTORY]
    extended(tmp_path, 4, 6, loss=2.0).write()
    # Killed here, either of them may have been published.
    assert iterations(tmp_path, 6) == [1, 2, 3, 4, 5, 6]
    assert iterations(tmp_path, 4) == [1, 2, 3, 4]


@pytest.mark.parametrize("line", ['{"iteration": 5, "tr', "\x00\xff", "[]", '{"train": 1}', '{"a'])
def test_damaged_lines_are_left_out_with_a_note(line: str, tmp_path: Path) -> None:
    extended(tmp_path, 0, 2).write()
    with open(tmp_path / HISTORY, "a", encoding="latin-1") as file:
        file.write(line)
    history = LossHistory(tmp_path)
    note = history.resume(2)
    assert note == f"1 of 3 lines of {tmp_path / HISTORY} are damaged and left out"
    history.write()
    assert len((tmp_path / HISTORY).read_text().splitlines()) == 2


def save(folder: Path, begin: int, end: int) -> None:
    """Save a checkpoint as a run does that resumes at ``begin``."""
    if folder.is_dir():
        directory.tidy(folder)
    history = extended(folder, begin, end)
    history.write()
    (directory.prepare(folder, end) / "content").write_text(str(end))
    directory.publish(folder, end)
    directory.retain(folder, 100, end)


def killed_at(folder: Path, change: int, action: Callable[[], None]) -> bool:
    """Run an action in a process that is killed before a change; False if it makes fewer."""
    process = os.fork()
    if process == 0:
        Striker(folder, Strike(KINDS[0], change)).install()
        action()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(process, 0)[1])


@pytest.mark.exhaustive
def test_a_kill_at_any_change_of_a_save_costs_no_checkpoint_and_no_loss(tmp_path: Path) -> None:
    """`python -m benchmarks.soak.kills` kills whole runs."""
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
    assert change > 20  # changes of files in one save


@pytest.mark.exhaustive
def test_loss_curves_become_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "made" / "loss.png"
    train = [(i, 5.0 / i + 1) for i in range(1, 200)]
    assert draw_loss_curves(target, train, [(50, 1.3), (100, float("nan")), (150, 1.2)])
    assert target.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in target.parent.iterdir()] == ["loss.png"]
    assert draw_loss_curves(tmp_path / "one.png", [(1, 2.0)], [])


def test_no_picture_without_points_or_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not draw_loss_curves(tmp_path / "loss.png", [], [])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw_loss_curves(tmp_path / "loss.png", [(1, 2.0)], [])
    assert list(tmp_path.iterdir()) == []
