"""Commands that read and write checkpoints at URLs."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megatron.checkpoint.store.directory import TRACKER
from megatron.checkpoint.store.stores import Store
from megatron.checkpoint.store.url_staging import BASE_VARIABLE
from tests.support.checkpoint.command_runs import TO_FSDP, TO_TORCH_DIST, run, run_json
from tests.support.checkpoint.samples import torch_dist


@pytest.fixture(autouse=True)
def memory(tmp_path: Path) -> Iterator[None]:
    """Put a checkpoint into memory, and staged directories below the test's own."""
    MemoryFileSystem.store.clear()
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
