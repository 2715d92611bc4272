# SPDX-License-Identifier: Apache-2.0
"""--async-save: the checkpoints of blocking saves, and errors that end the run on all ranks."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron.checkpoint.store import directory
from megatron.mcore_adapter.checkpoints.background_save import BackgroundSaves
from tests.support.checkpoint.command_runs import run_json
from tests.support.pretrain.saved_runs import (
    DROPOUT,
    FSDP,
    GATED,
    LINE,
    SIX,
    assert_equal,
    assert_same_state,
    keys,
    read,
    saved_at,
)
from tests.support.pretrain.training_runs import (
    Record,
    error_of,
    load_state,
    pretrain,
    refuse,
    train,
    trained,
)
from tests.support.pretrain.warm_writers import warm_writers
from tests.support.rank_pool import run_ranks

IN_BACKGROUND = f"{LINE} --async-save"


def train_with_late_writers(command_line: str) -> Record:
    """Job: a run whose writers are stopped until training waits for them."""
    save, wait = BackgroundSaves.save, BackgroundSaves.wait

    def save_and_stop(self: BackgroundSaves, *args: Any) -> None:
        save(self, *args)
        os.killpg(self._writer._process.pid, signal.SIGSTOP)

    def resume_and_wait(self: BackgroundSaves) -> None:
        if self._pending is not None:
            os.killpg(self._writer._process.pid, signal.SIGCONT)
        wait(self)

    with (
        patch.object(BackgroundSaves, "save", save_and_stop),
        patch.object(BackgroundSaves, "wait", resume_and_wait),
    ):
        return pretrain(command_line)


def bytes_before_saves(command_line: str) -> list[int]:
    """Job: the size of the host memory before each save, and after the last."""
    found: list[int] = []
    save, end = BackgroundSaves.save, BackgroundSaves.end

    def look_and_save(self: BackgroundSaves, *args: Any) -> None:
        self._buffer._end_reserving()
        found.append(self.num_staged_bytes)
        save(self, *args)

    def look_and_end(self: BackgroundSaves) -> None:
        found.append(self.num_staged_bytes)
        end(self)

    with (
        warm_writers(),
        patch.object(BackgroundSaves, "save", look_and_save),
        patch.object(BackgroundSaves, "end", look_and_end),
    ):
        pretrain(command_line)
    return found


@pytest.mark.exhaustive
def test_host_memory_is_allocated_once_before_the_first_save(tmp_path: Path) -> None:
    line = f"{IN_BACKGROUND} --use-persistent-ckpt-worker --save {tmp_path} --save-interval 2"
    sizes = run_ranks(2, bytes_before_saves, f"{line} --exit-interval 5")[0]
    assert len(sizes) == 3 and sizes[0] > 0 and len(set(sizes)) == 1


@pytest.mark.exhaustive
def test_a_save_in_the_background_is_a_blocking_one(
    fp32: tuple[Path, Record], tmp_path: Path
) -> None:
    """Training goes on for three steps before anything is written."""
    blocking, record = fp32
    line = f"{IN_BACKGROUND} --use-persistent-ckpt-worker --save {tmp_path} --save-interval 3"
    found = run_ranks(2, train_with_late_writers, line)[0]
    assert found.losses == record.losses
    expected = []
    for iteration in (3, 6):
        expected += [
            f"writing the checkpoint of iteration {iteration} in the background",
            f"waiting for the checkpoint of iteration {iteration}, which is still being written",
            f"saved checkpoint of iteration {iteration} to {tmp_path}/iter_000000{iteration}",
        ]
        assert_equal(read(tmp_path, iteration), read(blocking, iteration))
        assert keys(tmp_path, iteration) == keys(blocking, iteration)
    assert [
        each for each in found.lines if "the checkpoint of " in each or "saved" in each
    ] == expected
    saved_at(tmp_path, 3, 6)
    assert run_json("verify", tmp_path)["sound"]
    states = [
        run_ranks(2, load_state, f"{LINE} --load {folder} --ckpt-step 3")[0]
        for folder in (tmp_path, blocking)
    ]
    assert_same_state(*states)
    resumed = trained(f"{LINE} --load {tmp_path} --ckpt-step 3")[0]
    assert resumed.losses == record.losses[3:]


def refuse_with_killed_writer(command_line: str, rank: int) -> str:
    """Job: the error of a run in which the writer of one rank is killed at the first save."""
    save = BackgroundSaves.save

    def save_and_kill(self: BackgroundSaves, *args: Any) -> None:
        save(self, *args)
        if dist.get_rank() == rank:
            os.kill(self._writer._process.pid, signal.SIGKILL)

    with warm_writers(), patch.object(BackgroundSaves, "save", save_and_kill):
        return refuse(command_line)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("num_ranks", "flags", "rank"),
    [(2, "--save-interval 1", 1), (1, "--exit-interval 4 --save-interval 4", 0)],
    ids=["midway", "at_the_end"],
)
def test_a_killed_writer_ends_the_run_on_all_ranks_and_leaves_what_there_was(
    num_ranks: int, flags: str, rank: int, fp32: tuple[Path, Record], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(fp32[0], folder)
    line = f"{IN_BACKGROUND} --save {folder} --load {folder} --ckpt-step 3 {flags}"
    errors = run_ranks(num_ranks, refuse_with_killed_writer, line, rank)
    assert len(set(errors)) == 1
    assert errors[0].startswith("RunError: the checkpoint of iteration 4 was not written:")
    assert f"rank {rank}: the process that writes checkpoints was killed by SIGKILL" in errors[0]
    saved_at(folder, 3)


def train_without_writers(command_line: str) -> Record:
    """Job: a run that starts no process to save in the background."""
    with patch.object(BackgroundSaves, "_start_writer", side_effect=AssertionError):
        return train(command_line)


def test_a_save_at_the_end_waits_for_no_process_to_start(tmp_path: Path) -> None:
    """After SIGTERM, launchers kill a run that takes long to end."""
    line = f"{IN_BACKGROUND} --save {tmp_path} --save-interval 9 --exit-interval 2"
    run_ranks(2, train_without_writers, line)
    saved_at(tmp_path, 2)


def refuse_on_full_disk(command_line: str) -> str:
    """Job: the error of a run in which the file of the second rank is on a full disk."""
    prepare = directory.prepare

    def prepare_full(root: str, iteration: int) -> Path:
        staging = prepare(root, iteration)
        if iteration == 2:
            (staging / "__1_0.distcp").symlink_to("/dev/full")
        return staging

    with warm_writers(), patch.object(directory, "prepare", prepare_full):
        return refuse(command_line)


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
def test_a_full_disk_ends_the_run_on_all_ranks_and_leaves_the_checkpoint_before(
    tmp_path: Path,
) -> None:
    line = f"{IN_BACKGROUND} --use-persistent-ckpt-worker --save {tmp_path} --save-interval 1"
    error = error_of(line, job=refuse_on_full_disk)
    assert "RunError: the checkpoint of iteration 2 was not written:" in error
    assert "rank 1: OSError: [Errno 28] No space left on device" in error
    saved_at(tmp_path, 1)


def train_with_warm_writers(*command_lines: str) -> list[Record]:
    """Job: runs whose writers, one for each save, are forked."""
    with warm_writers():
        return train(*command_lines)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "line",
    [
        f"{SIX} {GATED} --bf16 --use-distributed-optimizer --overlap-grad-reduce"
        " --overlap-param-gather",
        f"{DROPOUT} {GATED} {FSDP} --data-parallel-sharding-strategy optim --bf16"
        " --outer-dp-sharding-strategy no_shard",
    ],
    ids=["torch_dist", "fsdp_dtensor"],
)
def test_a_run_resumes_bitwise_from_a_save_with_a_writer_of_its_own(
    line: str, tmp_path: Path
) -> None:
    saving = f"{line} --async-save --save {tmp_path} --save-interval 2 --save-retain-interval 4"
    loading = f"{line} --load {tmp_path} --ckpt-step 4"
    unbroken, resumed = run_ranks(2, train_with_warm_writers, saving, loading, timeout=300)[0]
    assert resumed.losses == unbroken.losses[4:]
    assert run_json("verify", tmp_path)["sound"]
