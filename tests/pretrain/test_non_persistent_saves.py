# SPDX-License-Identifier: Apache-2.0
"""--non-persistent-save-interval: one extra checkpoint, which the next takes the place of."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron.checkpoint.store import directory
from megatron.pretrain import loop
from megatron.pretrain.checkpoints.followed_checkpoint import FOLLOWED
from tests.pretrain.test_newest_checkpoint import flip
from tests.support.pretrain.saved_runs import LINE, saved_at
from tests.support.pretrain.training_runs import Record, refuse, train
from tests.support.rank_pool import run_ranks

LOADED = "--non-persistent-ckpt-type global"


def broken_off(command_line: str, iteration: int) -> str:
    """Job: a run that ends by an error after an iteration."""
    original = loop.train_step

    def train_step(run: loop.TrainingRun, data: Any) -> None:
        if run.progress.iteration == iteration:
            raise RuntimeError("broken off")
        original(run, data)

    with patch.object(loop, "train_step", train_step):
        return refuse(command_line)


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_the_newer_checkpoint_of_both_kinds_is_loaded(
    is_elsewhere: bool, fp32: tuple[Path, Record], tmp_path: Path
) -> None:
    _, record = fp32
    folder, extra = tmp_path / "run", tmp_path / "run" / "non_persistent"
    line, loading = f"{LINE} --load {folder}", LOADED
    if is_elsewhere:
        extra = tmp_path / "extra"
        loading += f" --non-persistent-global-ckpt-dir {extra}"
    saving = f"{line} {loading} --save {folder} --save-interval 2 --non-persistent-save-interval 1"
    assert "broken off" in run_ranks(2, broken_off, saving, 5)[0]
    saved_at(extra, 5)
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "4"

    # Without the flag the newer one is named and left.
    older, resumed, again = run_ranks(
        2, train, f"{line} --exit-interval 5", saving, f"{line} {loading}"
    )[0]
    assert older.losses == record.losses[4:5]
    if not is_elsewhere:
        assert any(f"{extra} has a newer one, of iteration 5" in each for each in older.lines)
    assert resumed.losses == record.losses[5:]
    assert f"loaded {extra}/iter_0000005, iteration 5" in resumed.lines
    assert again.iteration == 6 and not again.steps


def test_a_tracker_file_that_was_edited_goes_before_a_newer_non_persistent_checkpoint(
    tmp_path: Path,
) -> None:
    line = f"{LINE} --save {tmp_path} --load {tmp_path} {LOADED}"
    saving = f"{line} --save-interval 2 --non-persistent-save-interval 1"
    assert "broken off" in run_ranks(2, broken_off, saving, 5)[0]
    tracker, extra = tmp_path / directory.TRACKER, tmp_path / "non_persistent" / "iter_0000005"
    assert (extra / FOLLOWED).read_text() == "4"
    tracker.write_text("2")
    (gone_back,) = run_ranks(2, train, f"{LINE} --load {tmp_path} {LOADED} --exit-interval 3")[0]
    assert f"loaded {tmp_path}/iter_0000002, iteration 2" in gone_back.lines
    (told,) = [text for text in gone_back.lines if str(extra) in text]
    assert told.startswith(f"{extra} is newer, and is not loaded: {tracker} names another")
    # What the tracker file names again is damaged: the newer one, which followed it, is sound.
    tracker.write_text("4")
    flip(tmp_path / "iter_0000004" / "__0_0.distcp")
    (resumed,) = run_ranks(2, train, f"{LINE} --load {tmp_path} {LOADED} --exit-interval 6")[0]
    assert f"loaded {extra}, iteration 5" in resumed.lines
    # A checkpoint of an earlier version does not say what it followed.
    (extra / FOLLOWED).unlink()
    tracker.write_text("2")
    (old,) = run_ranks(2, train, f"{LINE} --load {tmp_path} {LOADED} --exit-interval 6")[0]
    assert f"loaded {extra}, iteration 5" in old.lines
