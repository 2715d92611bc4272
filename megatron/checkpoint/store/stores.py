# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at URLs, in any store for which fsspec has a file system.

A store can neither rename directories nor lock them. So a checkpoint is written into a local
directory (:mod:`megatron.checkpoint.store.url_staging`) and uploaded from there, and downloaded
before it is read. While it is uploaded, a marker in the same place shows that it is not complete,
and no reader here sees it; the tracker file names it when it is. An upload that replaces a
checkpoint removes the old one first. Nothing keeps two runs from saving at one URL.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from megatron.checkpoint.core.listing import some
from megatron.checkpoint.store import directory, durable
from megatron.checkpoint.store.url_staging import alone_in, staged_directory, url_of

INCOMPLETE = ".incomplete"
"""Name of the marker of a store that is uploaded as a whole; with ``_`` and a name, of that one."""

_SMALL_FILES = (directory.TRACKER, directory.METADATA, "config.json")
"""Small files that show what a directory is."""
BROKEN_OFF = "an upload to it was broken off: remove what is there"


class Store:
    """The directory of checkpoints at a URL, and the local one in which it is staged.

    Args:
        url: URL of the directory.
        staged: path of the local directory.

    Raises:
        ValueError: if there is no file system for the URL; the message names a package that is
            missing.
    """

    def __init__(self, url: str, staged: Path):
        self.url = url
        self.staged = staged
        try:
            self._system, root = fsspec.core.url_to_fs(url)
        except Exception as error:  # a store has its own ones
            raise ValueError(f"{url}: {error}") from error
        self._root = str(root).rstrip("/")

    @property
    def is_of_process(self) -> bool:
        """True if the content lives and dies with one process."""
        return isinstance(self._system, MemoryFileSystem)

    def refresh(self, is_output: bool = False) -> None:
        """Give the staged directory the names that are at the URL.

        Directories and files are empty there until they are fetched, but for the small files that
        show what the directory is.

        Args:
            is_output: whether to show nothing of an upload to the URL that was broken off, for a
                command that may upload it again.

        Raises:
            ValueError: if the URL cannot be reached, is a file, or has only a part of an upload.
        """
        with errors_of(self.url, ValueError):
            entries = self._entries()
            if INCOMPLETE in entries:
                if not is_output:
                    raise ValueError(BROKEN_OFF)
                entries = {}
            with alone_in(self.staged.parent):
                self._show(entries)

    def _show(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        self.staged.mkdir(exist_ok=True)
        for path in self.staged.iterdir():
            if path.name not in entries:
                directory.remove(path)
        small_files = {}
        for name, entry in entries.items():
            if entry["type"] == "directory":
                (self.staged / name).mkdir(exist_ok=True)
            elif name in _SMALL_FILES:
                small_files[entry["name"]] = self.staged / name
            else:
                (self.staged / name).touch()
        self._download(small_files)

    def _entries(self) -> dict[str, Mapping[str, Any]]:
        """Return what the first level has, by name, without incomplete and hidden directories."""
        self._system.invalidate_cache()
        try:
            found = self._system.ls(self._root, detail=True)
        except FileNotFoundError:
            return {}
        entries = {}
        for entry in found:
            name = _below(entry["name"], self._root)
            is_file = entry["type"] == "file" and entry.get("size")
            if is_file and not name:
                raise ValueError("it is a file; a directory with checkpoints is expected")
            is_hidden = entry["type"] == "directory" and name.startswith(".")
            if name and not is_hidden:
                entries[name] = entry
        markers = [name for name in entries if name.startswith(f"{INCOMPLETE}_")]
        for marker in markers:
            name = marker.removeprefix(f"{INCOMPLETE}_")
            entries.pop(marker)
            entries.pop(name, None)
        return entries

    def fetch(self, path: Path, patterns: Sequence[str] = ("*",)) -> None:
        """Download the files below a staged directory that match a pattern and are not there yet.

        Raises:
            OSError: if a file cannot be downloaded.
        """
        name_of_folder = path.relative_to(self.staged)
        remote = self._remote(name_of_folder.as_posix())
        missing = {}
        with errors_of(self.url), alone_in(self.staged.parent):
            for name, (source, size) in self._files(remote).items():
                target = path / name
                is_there = False
                if target.is_file():
                    is_there = target.stat().st_size == size
                is_wanted = any(fnmatch(name, pattern) for pattern in patterns)
                if is_wanted and not is_there:
                    missing[source] = target
            self._download(missing)

    def fetch_small_files(self, name: str) -> None:
        """Download the small files that show what the directory of an iteration is, if any.

        Raises:
            ValueError: if the URL cannot be reached.
        """
        try:
            if (self.staged / name).is_dir():
                self.fetch(self.staged / name, _SMALL_FILES)
        except OSError as error:
            raise ValueError(f"{error}") from error

    def has(self, name: str) -> bool:
        """Return True if a directory has files, and they are not a rest of an upload.

        Raises:
            OSError: if the URL cannot be reached.
        """
        if self.marker(name) is not None:
            return False
        with errors_of(self.url):
            return bool(self._files(self._remote(name)))

    def marker(self, name: str) -> bytes | None:
        """Return the content of the marker of an upload that has not ended; None without one.

        Raises:
            OSError: if the URL cannot be reached.
        """
        with errors_of(self.url):
            self._system.invalidate_cache()  # another process may have written the marker
            path = self._remote(_marker(name))
            if not self._system.exists(path):
                return None
            content: bytes = self._system.cat_file(path)
            return content

    def _files(self, remote: str) -> dict[str, tuple[str, int | None]]:
        """Return all files below a path of the store: name -> path in the store and size."""
        self._system.invalidate_cache()
        try:
            found = self._system.find(remote, detail=True)
        except FileNotFoundError:
            return {}
        files = {}
        for path, entry in found.items():
            name = _below(path, remote)
            if ".." in PurePosixPath(name).parts:
                raise ValueError(f"{path} is no name of a file")
            if name and not name.endswith("/"):
                files[name] = (path, entry.get("size"))
        return files

    def _download(self, files: Mapping[str, Path]) -> None:
        """Download files, each of which is there completely or not at all."""
        if not files:
            return
        folders = {target.parent for target in files.values()}
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        temporary = []
        for target in files.values():
            temporary.append(str(durable.temporary_of(target)))
        self._system.get(list(files), temporary)
        for name, target in zip(temporary, files.values()):
            os.replace(name, target)

    def _remote(self, name: str) -> str:
        name = name.strip("/")
        if name in ("", "."):
            return self._root
        return f"{self._root}/{name}"

    # ---- writing

    def check_writable(self) -> None:
        """Write a file and remove it.

        Raises:
            ValueError: if that fails.
        """
        # A name that :meth:`tidy` removes if this is killed.
        name = _marker(f"file_{socket.gethostname()}_{os.getpid()}")
        with errors_of(self.url, ValueError, "; it cannot be written to"):
            self._write(name, b"")
            self._remove(name)

    def begin(self, name: str, content: bytes = b"an upload has not ended") -> None:
        """Mark a directory as incomplete, and remove what is in it; called on one rank.

        The empty name stands for the whole store, which has no files then, or those of an upload
        with the same ``content`` of the marker, which are replaced.
        """
        with errors_of(self.url):
            self._write(_marker(name), content)
            if name:
                self._remove(name)

    def upload(
        self,
        folder: Path,
        name: str,
        files: Sequence[str],
    ) -> None:
        """Upload files; called on every rank, with those that it has written.

        Args:
            folder: a local directory.
            name: name of the directory at the URL; empty for the URL itself.
            files: paths of the files in both directories.
        """
        targets = []
        for file in files:
            path = PurePosixPath(name, file)
            targets.append(self._remote(path.as_posix()))
        with errors_of(self.url):
            parents = {target.rpartition("/")[0] for target in targets}
            for parent in sorted(parents):
                self._make_directory(parent)
            if files:
                sources = [str(folder / file) for file in files]
                self._system.put(sources, targets)

    def finish(
        self,
        name: str,
        sizes: Mapping[str, int],
        tracked: int | str | None = None,
    ) -> None:
        """Make a directory visible whose files all ranks have uploaded; called on one rank.

        Args:
            name: name of the directory at the URL; empty for the URL itself.
            sizes: path of each file in it -> its size in bytes.
            tracked: the iteration that the tracker file is to name; None leaves that file as it is.

        Raises:
            OSError: if some file is not there with its size in ``sizes``.
        """
        with errors_of(self.url):
            self._system.invalidate_cache()
            there = self._files(self._remote(name))
            wrong = []
            for file, size in sizes.items():
                if file not in there or there[file][1] != size:
                    wrong.append(f"{name}/{file}")
            if wrong:
                raise ValueError(f"not completely uploaded: {some(wrong)}")
            if tracked is not None:
                self.write_tracker(tracked)
            self._system.rm_file(self._remote(_marker(name)))

    def abandon(self, name: str) -> None:
        """Remove what there is of an upload that has failed; called on one rank."""
        if self.marker(name) is None:
            return
        with errors_of(self.url):
            if name:
                self._remove(name)
            self._system.rm_file(self._remote(_marker(name)))

    def write_tracker(self, iteration: int | str) -> None:
        """Name the newest complete iteration in the tracker file; called on one rank."""
        with errors_of(self.url):
            self._write(directory.TRACKER, str(iteration).encode())

    def tidy(self) -> None:
        """Remove what killed uploads and deletions have left; called on one rank."""
        with errors_of(self.url):
            self._system.invalidate_cache()
            for path in self._system.glob(f"{self._root}/{INCOMPLETE}_*"):
                marker = _below(path, self._root)
                self.abandon(marker.removeprefix(f"{INCOMPLETE}_"))

    def retain(self, interval: int, newest: int) -> None:
        """Delete checkpoints as :func:`directory.retain` does; called on one rank."""
        with errors_of(self.url):
            found = []
            for name in self._entries():
                iteration = directory.iteration_of(name)
                if iteration is not None:
                    found.append(iteration)
        self.delete(directory.not_retained(found, interval, newest))

    def delete(self, iterations: Iterable[int]) -> None:
        """Delete checkpoints; called on one rank."""
        with errors_of(self.url):
            for iteration in iterations:
                name = directory.iteration_directory("", iteration).name
                self._write(_marker(name), b"being deleted")  # a part of it is no checkpoint
                self._remove(name)
                self._system.rm_file(self._remote(_marker(name)))

    # ---- paths

    def _write(self, name: str, content: bytes) -> None:
        self._make_directory(self._root)
        self._system.pipe_file(self._remote(name), content)

    def _make_directory(self, path: str) -> None:
        # An object store has no directories, and a user may not be allowed to look at the bucket.
        with suppress(PermissionError):
            self._system.makedirs(path, exist_ok=True)

    def _remove(self, name: str) -> None:
        self._system.invalidate_cache()
        if self._system.exists(self._remote(name)):
            self._system.rm(self._remote(name), recursive=True)


@contextmanager
def errors_of(
    url: str,
    raised: type[Exception] = OSError,
    hint: str = "",
) -> Iterator[None]:
    """Raise any error of a file system as one type of error, with the URL.

    Args:
        url: URL that begins the message.
        raised: type of the error that is raised.
        hint: end of the message.
    """
    try:
        yield
    except Exception as error:  # each has its own
        message = str(error)
        if not isinstance(error, ValueError):
            message = f"{type(error).__name__}: {message}"
        raise raised(f"{url}: {message}{hint}") from error


def _below(path: str, above: str) -> str:
    whole = path.strip("/")
    below = whole.removeprefix(above.strip("/"))
    return below.strip("/")


def _marker(name: str) -> str:
    if not name:
        return INCOMPLETE
    return f"{INCOMPLETE}_{name}"


# ---- paths that may be staged


def local_path(location: str, is_output: bool = False) -> str:
    """Return the local path of a location.

    That is a path unchanged, the path of a URL ``file://``, and for any other URL the directory in
    which its checkpoints are staged, with the names that are at the URL now. ``is_output`` is that
    of :meth:`Store.refresh`.

    Raises:
        ValueError: if there is no file system for the URL, or it cannot be reached.
    """
    if "://" not in location:
        return location
    parts = urlsplit(location)
    if parts.scheme == "file":
        if parts.netloc in ("", "localhost") and parts.path.startswith("/"):
            return unquote(parts.path)
        raise ValueError(f"{location}: a directory of this machine is file:///path")
    url = location.rstrip("/")
    above, _, name = url.rpartition("/")
    is_iteration = directory.is_checkpoint_name(name) and not above.endswith("/")
    if is_iteration:
        url = above
    store = Store(url, staged_directory(url))
    store.refresh(is_output)
    if not is_iteration:
        return str(store.staged)
    store.fetch_small_files(name)
    return str(store.staged / name)


def store_of(path: str | Path) -> Store | None:
    """Return the store whose checkpoints are staged at or above a path; None for other paths."""
    found = url_of(Path(path).absolute())
    if found is None:
        return None
    url, staged = found
    return Store(url, staged)


def is_staged(path: str | Path) -> bool:
    """Return True if a path is in the staged directory of a store."""
    return url_of(Path(path).absolute()) is not None


def fetch(path: Path) -> None:
    """Download a checkpoint or a model whose path is a staged one; others are there already.

    Of the directory above checkpoints nothing is downloaded.

    Raises:
        OSError: if a file cannot be downloaded.
    """
    store = store_of(path)
    if store is None:
        return
    path = path.absolute()
    is_below = path != store.staged and path.is_dir()
    is_checkpoint = (path / directory.METADATA).is_file()
    is_model = (path / "config.json").is_file()
    if (path / directory.TRACKER).is_file():
        is_model = False  # in the directory of checkpoints, config.json is that of the run
    if is_below or is_checkpoint or is_model:
        store.fetch(path)


def drop(path: Path) -> None:
    """Remove the staged copy of a checkpoint; other paths stay."""
    if is_staged(path):
        shutil.rmtree(path, ignore_errors=True)
