"""Stores of checkpoints behind URLs, and the local directories in which they are staged."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megatron.checkpoint.store import stores, url_staging
from megatron.checkpoint.store.directory import TRACKER
from megatron.checkpoint.store.stores import local_path, store_of
from megatron.checkpoint.store.url_staging import (
    BASE_VARIABLE,
    directory_token,
    url_of,
    with_urls,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def staging(tmp_path: Path) -> Iterator[Path]:
    """Put staged directories below the test's own, and empty the memory before."""
    MemoryFileSystem.store.clear()
    with patch.dict(os.environ, {BASE_VARIABLE: str(tmp_path / "staging")}):
        (tmp_path / "staging").mkdir()
        yield tmp_path / "staging"


def fill(**files: bytes) -> None:
    for name, content in files.items():
        MemoryFileSystem().pipe_file(name.replace("__", "/"), content)


def store_at(path: str | Path) -> stores.Store:
    store = store_of(path)
    assert store is not None
    return store


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


@pytest.mark.parametrize(
    ("location", "path"),
    [("/a/b", "/a/b"), ("c", "c"), ("file:///a/b%20c", "/a/b c"), ("file://localhost/a", "/a")],
)
def test_directories_of_this_machine_are_paths(location: str, path: str) -> None:
    assert local_path(location) == path
    assert not stores.is_staged(path) and with_urls(path) == path


class Unreachable(MemoryFileSystem):
    protocol = "unreachable"

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        raise ConnectionError("no route to host")


class ReadOnly(MemoryFileSystem):
    protocol = "readonly"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> Any:
        raise PermissionError("Access Denied")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file://host/x", "file:///path"),
        ("nothing://bucket/x", "Protocol not known: nothing"),
        ("absent://bucket/x", "Install absent_fs to open absent://"),
        ("unreachable://bucket/x", "ConnectionError: no route to host"),
        ("memory://file", "it is a file; a directory"),
        (f"memory://{'x' * 300}", "too long"),
    ],
)
def test_what_cannot_be_opened_is_named_in_one_message(url: str, message: str) -> None:
    fill(file=b"x")
    fsspec.register_implementation(
        "absent", "absent_fs.FileSystem", errtxt="Install absent_fs to open absent://", clobber=True
    )
    fsspec.register_implementation("unreachable", Unreachable, clobber=True)
    with pytest.raises(ValueError, match="x") as caught:
        local_path(url)
    assert str(caught.value).startswith(url) and message in str(caught.value)


def test_a_store_that_cannot_be_written_to_is_told_before_there_is_anything_to_write() -> None:
    fsspec.register_implementation("readonly", ReadOnly, clobber=True)
    store = store_at(local_path("readonly://bucket/run"))
    with pytest.raises(ValueError, match="readonly://bucket/run: PermissionError: Access Denied"):
        store.check_writable()
    assert not MemoryFileSystem.store


def test_the_staged_directory_has_the_names_and_what_is_fetched() -> None:
    fill(run__iter_0000003__a=b"abc", run__iter_0000003__deep__b=b"", run__losses=b"1")
    fill(**{f"run__{TRACKER}": b"3", "run__.hidden__x": b"1"})
    path = Path(local_path("memory://run/"))
    assert names(path) == ["iter_0000003", TRACKER, "losses"]
    assert (path / TRACKER).read_text() == "3" and not (path / "losses").stat().st_size
    assert not names(path / "iter_0000003")
    stores.fetch(path)  # which is no checkpoint itself
    assert not names(path / "iter_0000003")
    stores.fetch(path / "iter_0000003")
    assert names(path / "iter_0000003") == ["a", "deep"]
    assert (path / "iter_0000003" / "a").read_bytes() == b"abc"
    assert with_urls(f"saved to {path}/iter_0000003.") == "saved to memory://run/iter_0000003."
    assert url_of(path / "iter_0000003") == ("memory://run", path)
    assert local_path("memory://run/iter_0000003") == str(path / "iter_0000003")
    MemoryFileSystem().rm("/run", recursive=True)
    assert not names(Path(local_path("memory://run")))


def test_a_name_that_leads_out_of_the_directory_is_refused() -> None:
    fill(run__iter_0000003__a=b"abc")  # a key of an object store is any text
    path = Path(local_path("memory://run"))
    found = {"/run/iter_0000003/../../x": {"type": "file", "size": 3}}
    with (
        patch.object(MemoryFileSystem, "find", lambda self, path, **options: found),
        pytest.raises(OSError, match="is no name of a file"),
    ):
        stores.fetch(path / "iter_0000003")


def test_readers_see_an_upload_when_it_is_complete(tmp_path: Path) -> None:
    path = Path(local_path("memory://run"))
    store = store_at(path)
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    store.begin("iter_0000003")
    store.upload(tmp_path, "iter_0000003", ["a"])
    store.refresh()
    assert not names(path)
    with pytest.raises(OSError, match="not completely uploaded: iter_0000003/b"):
        store.finish("iter_0000003", {"a": 1, "b": 1})
    store.upload(tmp_path, "iter_0000003", ["b"])
    store.finish("iter_0000003", {"a": 1, "b": 1})
    store.refresh()
    assert names(path) == ["iter_0000003"]
    stores.fetch(path / "iter_0000003")
    assert names(path / "iter_0000003") == ["a", "b"]
    store.abandon("iter_0000003")  # of which there is no upload
    store.begin("iter_0000006")
    store.upload(tmp_path, "iter_0000006", ["a"])
    store.abandon("iter_0000006")
    assert sorted(MemoryFileSystem.store) == ["/run/iter_0000003/a", "/run/iter_0000003/b"]


CHANGES = ("pipe_file", "put_file", "rm_file", "rm")


class StoppedError(Exception):
    """The end of a process."""


@contextmanager
def stopped_at(number: int) -> Iterator[list[str]]:
    """Let nothing change in memory any more from a change on, counted from 1."""
    changes: list[str] = []

    def counting(name: str) -> Any:
        original = getattr(MemoryFileSystem, name)

        def change(self: MemoryFileSystem, *positional: Any, **keywords: Any) -> Any:
            changes.append(name)
            if len(changes) >= number:
                raise StoppedError
            return original(self, *positional, **keywords)

        return change

    with patch.multiple(MemoryFileSystem, **{name: counting(name) for name in CHANGES}):
        yield changes


def test_readers_see_the_old_checkpoint_or_the_new_one_or_none(tmp_path: Path) -> None:
    """An upload that replaces one is broken off before each of its changes, and tidied up."""
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"new {name}")
    old = {"/run/iter_0000003/a": b"old a", "/run/iter_0000003/c": b"old c"}
    new = {"/run/iter_0000003/a": b"new a", "/run/iter_0000003/b": b"new b"}
    seen = []
    for number in range(1, 100):
        MemoryFileSystem.store.clear()
        fill(run__iter_0000003__a=b"old a", run__iter_0000003__c=b"old c")
        path = Path(local_path("memory://run"))
        store = store_at(path)
        with stopped_at(number) as changes, suppress(OSError):
            store.begin("iter_0000003")
            store.upload(tmp_path, "iter_0000003", ["a", "b"])
            store.finish("iter_0000003", {"a": 5, "b": 5})
        store.refresh()
        is_visible = names(path) == ["iter_0000003"]
        store.tidy()
        there = {name: bytes(file.getbuffer()) for name, file in MemoryFileSystem.store.items()}
        assert there in ((old, new) if is_visible else ({},)), (number, there)
        seen.append(there)
        if len(changes) < number:
            break
    assert seen[0] == old and seen[-1] == new and {} in seen


def test_what_a_killed_upload_has_left_is_no_part_of_the_next_one(tmp_path: Path) -> None:
    MemoryFileSystem().pipe_file("run/iter_0000003/old", b"old")
    MemoryFileSystem().pipe_file("run/.incomplete_iter_0000003", b"")
    (tmp_path / "a").write_text("a")
    store = store_at(local_path("memory://run"))
    store.begin("iter_0000003")
    store.upload(tmp_path, "iter_0000003", ["a"])
    store.finish("iter_0000003", {"a": 1})
    assert sorted(MemoryFileSystem.store) == ["/run/iter_0000003/a"]


def test_a_directory_is_identified_by_what_is_in_it_and_not_by_names(tmp_path: Path) -> None:
    token = directory_token(tmp_path / "first")
    assert directory_token(tmp_path / "first") == token
    assert directory_token(tmp_path / "second") != token
    (tmp_path / "link").symlink_to(tmp_path / "first")
    assert directory_token(tmp_path / "link") == token


HOLDER = """
import sys, time
from megatron.checkpoint.store.url_staging import staged_directory
print(staged_directory("memory://run"), flush=True)
if len(sys.argv) > 1:
    time.sleep(600)
"""


def test_the_last_process_removes_its_room_and_the_next_one_what_a_kill_has_left(
    staging: Path,
) -> None:
    (base := staging / f"megatron_urls_{os.getuid()}").mkdir(mode=0o700)
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen([*command, "stay"], stdout=subprocess.PIPE, text=True, cwd=ROOT) as held:
        assert held.stdout is not None
        room = Path(held.stdout.readline()).parent
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
        assert names(base) == [room.name, f"{room.name}.lock"]  # the other's
        held.kill()
    assert room.is_dir()
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    assert not names(base)
    assert room not in url_staging._rooms


def test_what_killed_uploads_and_deletions_have_left_is_removed() -> None:
    fill(
        run__iter_0000001__part=b"1", run__iter_0000002__part=b"2", run__latest=b"2"
    )  # the first is incomplete
    MemoryFileSystem().pipe_file("run/.incomplete_iter_0000001", b"")
    store = store_at(local_path("memory://run"))
    assert store.has("iter_0000002") and not store.has("iter_0000001")
    store.tidy()
    assert sorted(MemoryFileSystem.store) == ["/run/iter_0000002/part", "/run/latest"]


def test_a_url_of_one_checkpoint_tells_what_it_is() -> None:
    MemoryFileSystem().pipe_file("run/iter_0000001/.metadata", b"m")
    MemoryFileSystem().pipe_file("run/iter_0000001/__0_0.distcp", b"d")
    assert names(Path(local_path("memory://run/iter_0000001"))) == [".metadata"]


def test_paths_need_no_directory_of_temporary_files() -> None:
    with patch.object(url_staging, "_base", side_effect=FileNotFoundError):
        assert with_urls("a line of /path") == "a line of /path"
        assert url_of(Path("/path")) is None
