# SPDX-License-Identifier: Apache-2.0
"""--non-persistent-save-interval: one extra checkpoint, which the next takes the place of."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron.checkpoint.store import directory
from megatron.pretrain import loop
from tests.support.pretrain.saved_runs import LINE, saved_at
from tests.support.pretrain.training_runs import Record, refuse, trained
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
    older, resumed, again = trained(f"{line} --exit-interval 5", saving, f"{line} {loading}")
    assert older.losses == record.losses[4:5]
    if not is_elsewhere:
        assert any(f"{extra} has a newer one, of iteration 5" in each for each in older.lines)
    assert resumed.losses == record.losses[5:]
    assert f"loaded {extra}/iter_0000005, iteration 5" in resumed.lines
    assert again.iteration == 6 and not again.steps


@pytest.mark.exhaustive
def test_a_run_that_went_back_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    line = f"{LINE} --save {tmp_path} --load {tmp_path} {LOADED} --non-persistent-save-interval 1"
    assert "broken off" in run_ranks(2, broken_off, f"{line} --save-interval 2", 5)[0]
    extra = tmp_path / "non_persistent"
    back = f"{line} --save-interval 9 --ckpt-step 2"
    assert "broken off" in run_ranks(2, broken_off, back, 2)[0]
    assert directory.iterations(tmp_path) == [2] and directory.read_tracker(tmp_path) == 2
    assert (tmp_path / "replaced_1" / "iter_0000004").is_dir()
    assert (extra / "replaced_1" / "iter_0000005").is_dir()
    assert "broken off" in run_ranks(2, broken_off, back, 3)[0]
    (resumed,) = trained(f"{line} --save-interval 9 --exit-interval 4")
    assert f"loaded {extra}/iter_0000003, iteration 3" in resumed.lines
