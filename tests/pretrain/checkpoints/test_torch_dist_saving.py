# SPDX-License-Identifier: Apache-2.0
"""Saves in torch_dist start no process, so that a killed rank leaves none."""

from __future__ import annotations

import os
import queue
import subprocess
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import pytest

from megatron.mcore_adapter.checkpoints.torch_dist_saving import error_of_disk, write_in_threads
from tests.support.pretrain.saved_runs import GATED, SIX, saved_at
from tests.support.pretrain.training_runs import error_of, refuse, train
from tests.support.rank_pool import run_ranks

LINE = f"{SIX} {GATED} --use-distributed-optimizer --train-iters 1 --save-interval 1"


def save_without_processes(command_line: str) -> None:
    """Job: a run that saves, in which no process can be started."""
    refused = AssertionError("a process was started")
    with (
        mock.patch.object(BaseProcess, "start", side_effect=refused),
        mock.patch.object(subprocess, "Popen", side_effect=refused),
        mock.patch.object(os, "fork", side_effect=refused),
    ):
        train(command_line)


def refuse_a_full_disk(command_line: str) -> str:
    """Job: the error of a run whose first rank cannot write one of its files."""
    write = os.fsync

    def fail(descriptor: int) -> None:
        if os.environ["RANK"] == "0" and ".distcp" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        write(descriptor)

    with mock.patch.object(os, "fsync", fail):
        return refuse(command_line)


def test_a_killed_rank_leaves_no_process_of_its_save(tmp_path: Path) -> None:
    run_ranks(2, save_without_processes, f"{LINE} --save {tmp_path}")
    saved_at(tmp_path, 1)


def test_a_file_that_cannot_be_written_ends_the_save_on_all_ranks(tmp_path: Path) -> None:
    error = error_of(f"{LINE} --save {tmp_path}", job=refuse_a_full_disk)
    assert "No space left on device" in error and error.startswith("RunError")


def archive_error(context: Exception | None) -> Exception:
    """Return an error of torch's writer of archives, raised while another one was handled."""
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
    error.__context__ = context
    return error


def test_errors_of_torch_are_told_as_those_of_the_disk(tmp_path: Path) -> None:
    full = OSError(28, "No space left on device")
    assert error_of_disk(archive_error(full), tmp_path) is full
    other = RuntimeError("a defect")
    other.__context__ = full
    assert error_of_disk(other, tmp_path) is other
    # Torch has opened the file itself: there is no other error.
    sound = archive_error(None)
    assert error_of_disk(sound, tmp_path) is sound
    with mock.patch.object(os, "fsync", side_effect=full):
        found = error_of_disk(sound, tmp_path)
    assert str(found) == f"[Errno 28] No space left on device: '{tmp_path}'"
    assert not list(tmp_path.iterdir())


def test_no_file_is_no_result() -> None:
    results: queue.Queue[dict[int, object]] = queue.Queue()
    write_in_threads([], False, 0, [], results)
    assert results.get_nowait() == {}


@pytest.mark.parametrize("failing", [0, 1])
def test_the_error_of_a_thread_is_the_result(failing: int, tmp_path: Path) -> None:
    buckets = [(tmp_path / f"{number}", f"{number}", ([], [])) for number in range(2)]
    buckets[failing] = (tmp_path / "absent" / "file", "file", ([], []))
    results: queue.Queue[object] = queue.Queue()
    write_in_threads([None], False, 0, buckets, results)
    assert isinstance(results.get_nowait(), FileNotFoundError)
