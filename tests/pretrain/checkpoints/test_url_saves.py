"""Runs whose checkpoints are at URLs. `local://` is a store that ranks share, and not a path."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

from megatron.checkpoint.commands.formats import open_checkpoint
from megatron.checkpoint.commands.verification import find_problems
from megatron.checkpoint.store.directory import TRACKER
from megatron.checkpoint.store.stores import Store
from megatron.checkpoint.store.url_staging import BASE_VARIABLE
from tests.pretrain.checkpoints.test_background_save import train_with_warm_writers
from tests.pretrain.test_pretrain_gpt import tree
from tests.support.pretrain.saved_runs import LINE, saved_at
from tests.support.pretrain.training_runs import Record, error_of, pretrain, refuse, train
from tests.support.rank_pool import run_ranks

CHANGES = ("pipe_file", "put_file", "cp_file", "rm_file", "rm")
"""Methods that change a store."""
SHORT = f"{LINE} --train-iters 3 --save-interval 1"


def set_memory(files: dict[str, Any]) -> None:
    """Let the memory of this process have these files, and no empty directories."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.store.update(files)
    MemoryFileSystem.pseudo_dirs[:] = [""]


def train_in_memory(*command_lines: str) -> tuple[list[Record], list[str]]:
    """Job: runs one after the other, and the names that are in memory then."""
    set_memory({})
    return [pretrain(line) for line in command_lines], sorted(MemoryFileSystem.store)


@pytest.mark.exhaustive
def test_a_run_in_memory_goes_on_bitwise() -> None:
    there = "--save memory://run --load memory://run"
    (whole, first, second), names = run_ranks(
        1,
        train_in_memory,
        LINE,
        f"{LINE} {there} --save-interval 2 --save-retain-interval 4 --exit-interval 4",
        f"{LINE} {there} --save-interval 6 --use-checkpoint-args --log-progress",
    )[0]
    assert first.losses + second.losses == whole.losses
    files = [".metadata", "__0_0.distcp", "manifest.json"]
    beside = ["config.json", TRACKER, "loss_curves.png", "losses.jsonl", "progress.txt"]
    expected = [f"iter_0000004/{file}" for file in files]
    expected += [f"iter_0000006/{file}" for file in files]
    assert names == sorted(f"/run/{name}" for name in expected + beside)


def train_apart(folder: str, *command_lines: str) -> list[Record]:
    """Job: runs whose ranks see no staged directory of each other, as ranks on several nodes."""
    os.environ[BASE_VARIABLE] = f"{folder}/rank{dist.get_rank()}"
    Path(os.environ[BASE_VARIABLE]).mkdir()
    return train(*command_lines)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "form", ["fsdp_dtensor", pytest.param("torch_dist", marks=pytest.mark.exhaustive)]
)
def test_ranks_on_several_nodes_save_and_load_one_checkpoint(form: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    line = f"{LINE} --save local://{store} --load local://{store} --ckpt-format {form}"
    whole, *parts = run_ranks(
        2,
        train_apart,
        str(tmp_path),
        LINE,
        f"{line} --save-interval 2 --exit-interval 2",
        f"{line} --save-interval 6",
    )[0]
    assert parts[0].losses + parts[1].losses == whole.losses
    saved_at(store, 2, 6)
    assert not find_problems(open_checkpoint(store))
    # Nothing is left on the nodes.
    left = [path.name for path in tmp_path.glob("rank*/*/*/*")]
    assert set(left) <= {".downloading", ".token"}


@pytest.mark.exhaustive
def test_a_damaged_checkpoint_at_a_url_is_passed_over(tmp_path: Path) -> None:
    line = f"{LINE} --train-iters 4 --load local://{tmp_path} --save local://{tmp_path}"
    run_ranks(2, train, f"{line} --save-interval 1 --exit-interval 3")
    with open(tmp_path / "iter_0000003" / "__1_0.distcp", "r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"damage")
    ((record,), _) = run_ranks(2, train, f"{line} --save-interval 1 --exit-interval 1")
    (told,) = [text for text in record.lines if "is loaded instead" in text]
    assert "__1_0.distcp" in told and "iter_0000002 is loaded instead" in told
    assert record.column("iteration") == [3]
    saved_at(tmp_path, 1, 2, 3)
    assert not find_problems(open_checkpoint(tmp_path))


@pytest.mark.exhaustive
def test_checkpoints_at_a_url_are_not_overwritten_unasked(tmp_path: Path) -> None:
    url = f"local://{tmp_path}"
    run_ranks(2, train, f"{SHORT} --save {url} --exit-interval 2")
    before = tree(tmp_path)
    assert "iter_0000001, iter_0000002 already" in error_of(f"{SHORT} --save {url}")
    back = error_of(f"{SHORT} --save {url} --load {url} --ckpt-step 1")
    assert "iter_0000002 already" in back and "begins at iteration 1" in back
    assert tree(tmp_path) == before


def refuse_interrupted(command_line: str) -> str:
    """Job: a run whose second rank can upload its first checkpoint, and of the second nothing."""
    upload = Store.upload

    def fail(self: Store, folder: Path, name: str, files: Sequence[str]) -> Any:
        if name.endswith("iter_0000002") and dist.get_rank() == 1:
            raise OSError(f"{self.url}: ConnectionError: reset by peer")
        return upload(self, folder, name, files)

    with patch.object(Store, "upload", fail):
        return refuse(command_line)


@pytest.mark.exhaustive
def test_an_upload_that_fails_ends_the_run_with_the_checkpoint_before(tmp_path: Path) -> None:
    url = f"local://{tmp_path}"
    assert error_of(f"{SHORT} --save {url}", job=refuse_interrupted) == (
        "RunError: the checkpoint of iteration 2 was not written:\n"
        f"rank 1: OSError: {url}: ConnectionError: reset by peer"
    )
    saved_at(tmp_path, 1)
    ((record,), _) = run_ranks(2, train, f"{SHORT} --save {url} --load {url}")
    assert record.column("iteration") == [2, 3]


class Killed(BaseException):
    """The end of a process, which nothing handles."""


@contextmanager
def killed_at(number: int) -> Iterator[list[str]]:
    """Let nothing change in memory any more from a change on, counted from 1; 0: never."""
    changes: list[str] = []

    def counting(name: str) -> Any:
        original = getattr(MemoryFileSystem, name)

        def change(self: MemoryFileSystem, *positional: Any, **keywords: Any) -> Any:
            changes.append(name)
            if 0 < number <= len(changes):
                raise Killed
            return original(self, *positional, **keywords)

        return change

    with patch.multiple(MemoryFileSystem, **{name: counting(name) for name in CHANGES}):
        yield changes


def go_on_after_kills(line: str, step: int) -> tuple[int, list[tuple[int, list[float], list[int]]]]:
    """Job: kill a run before each ``step``-th change of a store and the last; start it again.

    Returns:
        The number of changes, and of every second start the iteration that it began from, its
        losses, and the iterations of the history.
    """
    set_memory({})
    pretrain(f"{line} --exit-interval 2")
    before = dict(MemoryFileSystem.store)
    with killed_at(0) as changes:
        pretrain(f"{line} --exit-interval 4")
    found = []
    for number in sorted({*range(1, len(changes), step), len(changes)}):
        set_memory(before)
        with killed_at(number), suppress(Killed):
            pretrain(f"{line} --exit-interval 4")
        record = pretrain(f"{line} --exit-interval 6")
        history = MemoryFileSystem().cat_file("/run/losses.jsonl").decode().splitlines()
        iterations = [json.loads(text)["iteration"] for text in history]
        found.append((record.column("iteration")[0] - 1, record.losses, iterations))
    return len(changes), found


@pytest.mark.exhaustive  # benchmarks/soak/kills.py strikes before every change
def test_a_run_that_is_killed_before_a_change_goes_on_from_a_whole_checkpoint() -> None:
    step = 8
    line = f"{LINE} --save memory://run --load memory://run --save-interval 2"
    line += " --save-retain-interval 4"
    (whole,) = run_ranks(1, train, LINE)[0]
    number, found = run_ranks(1, go_on_after_kills, line, step)[0]
    begins = [begin for begin, _, _ in found]
    assert begins == sorted(begins) and begins[0] == 2 and begins[-1] == 4, begins
    for begin, losses, history in found:
        assert losses == whole.losses[begin:]
        assert history == list(range(1, 7))
    assert number > 10 and len(found) > number // step


@pytest.mark.exhaustive  # the ranks start processes that fork writers
def test_saves_in_the_background_are_uploaded_in_the_background(tmp_path: Path) -> None:
    store = tmp_path / "store"
    line = f"{LINE} --save local://{store} --load local://{store} --save-interval 3"
    whole, first, second = run_ranks(
        2,
        train_with_warm_writers,
        LINE,
        f"{line} --async-save --exit-interval 3",
        line,
        timeout=300,
    )[0]
    assert first.losses + second.losses == whole.losses
    saved_at(store, 3, 6)
