"""Commands that read and write checkpoints at URLs."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megatron.checkpoint.store.directory import TRACKER
from megatron.checkpoint.store.stores import INCOMPLETE, Store
from megatron.checkpoint.store.url_staging import BASE_VARIABLE
from tests.support.checkpoint.command_runs import TO_FSDP, TO_TORCH_DIST, run, run_json
from tests.support.checkpoint.samples import torch_dist


@pytest.fixture(autouse=True)
def memory(tmp_path: Path) -> Iterator[None]:
    """Put a checkpoint into memory, and staged directories below the test's own."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    MemoryFileSystem().put(f"{torch_dist('dense_swiglu_bf16_tp2_dp2')}/", "/in/", recursive=True)
    with patch.dict(os.environ, {BASE_VARIABLE: str(tmp_path)}):
        yield


def test_checkpoints_are_converted_compared_and_verified_at_urls() -> None:
    assert "-> memory://there/iter_0000003" in run(TO_FSDP, "memory://in", "memory://there").output
    assert MemoryFileSystem().cat_file(f"/there/{TRACKER}") == b"3"
    run(TO_TORCH_DIST, "memory://there/iter_0000003", "memory://back/iter_0000003")
    assert not [name for name in MemoryFileSystem.store if ".incomplete" in name]
    assert "no difference" in run("diff", "memory://in", "memory://back").output
    assert run_json("verify", "memory://there") == {
        "directory": "memory://there/iter_0000003",
        "format": "fsdp_dtensor",
        "sound": True,
        "problems": [],
        "notes": [],
    }
    listed = run_json("inspect", "memory://back/iter_0000003")
    assert listed["directory"] == "memory://back/iter_0000003" and listed["entries"]
    run("convert-to-hf", "memory://back", "memory://model")
    assert run_json("inspect", "memory://model")["format"] == "hugging_face"


def test_what_is_at_a_url_is_not_overwritten() -> None:
    MemoryFileSystem().pipe_file("/only/iter_0000003/.metadata", b"without a tracker file")
    before = dict(MemoryFileSystem.store)
    for output in ("memory://in", "memory://in/iter_0000003", "memory://only/iter_0000003"):
        message = run(TO_FSDP, "memory://in", output, code=1).output
        assert f"{output} exists; nothing is overwritten" in message
    assert dict(MemoryFileSystem.store) == before


def test_a_conversion_whose_upload_fails_leaves_nothing_at_the_url() -> None:
    upload = Store.upload

    def fail(self: Store, folder: Path, name: str, files: Any) -> None:
        upload(self, folder, name, files[:1])
        raise OSError("memory://out: ConnectionError: reset by peer")

    with patch.object(Store, "upload", fail):
        message = run(TO_FSDP, "memory://in", "memory://out", code=1).output
    assert "memory://out: ConnectionError: reset by peer" in message
    assert not [name for name in MemoryFileSystem.store if name.startswith("/out")]


@pytest.mark.parametrize("killed_in", ["put", "rm_file"], ids=["upload", "last step"])
@pytest.mark.parametrize("command", [TO_FSDP, "convert-to-hf"])
def test_an_upload_that_was_killed_is_ended_by_the_same_command_and_no_other(
    command: str, killed_in: str
) -> None:
    words = [command, "memory://in", "memory://out"]
    call = getattr(MemoryFileSystem, killed_in)

    def call_or_die(self: MemoryFileSystem, path: Any, *arguments: Any) -> None:
        if killed_in == "put" or path.endswith((INCOMPLETE, "_iter_0000003")):
            raise KeyboardInterrupt
        call(self, path, *arguments)

    with patch.object(MemoryFileSystem, killed_in, call_or_die):
        run(*words, code=1)
    is_model = command == "convert-to-hf"
    run("inspect", "memory://out", code=2 if is_model else 1)
    if is_model:
        message = run(*words, "--dtype", "fp32", code=1).output
        assert "an upload to it was broken off: remove what is there" in message
    run(*words)
    run("inspect", "memory://out")
    run(command, "memory://in", "memory://whole")
    names = {"out": set(), "whole": set()}
    for name in MemoryFileSystem.store:
        root, _, below = name.strip("/").partition("/")
        names.setdefault(root, set()).add(below)
    assert names["out"] == names["whole"] != set()


@pytest.mark.parametrize(
    ("url", "code", "message"),
    [
        ("nothing://x/run", 2, "nothing://x/run: Protocol not known: nothing"),
        ("memory://empty", 1, "memory://empty is no checkpoint: it has neither .metadata nor"),
        ("memory://in/iter_0000004", 1, "memory://in/iter_0000004 is not there"),
    ],
)
def test_a_url_without_a_checkpoint_is_named(url: str, code: int, message: str) -> None:
    assert message in run("inspect", url, code=code).output
