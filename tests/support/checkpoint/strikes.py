# SPDX-License-Identifier: Apache-2.0
"""Programs that are killed, or whose disk fails, at each change of a file, and begin again."""

import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.integrity.manifest import MANIFEST
from megatron.checkpoint.store.directory import METADATA

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")
"""Audit events of changes, beside `open` for writing. An fsync has none and is patched."""

Strike = Callable[..., None]


class Strikes:
    """A hook on the changes of files below a folder, which strikes at one of them."""

    def __init__(self, folder: Path, strike: Strike, at: int):
        self.folder, self.strike, self.at = str(folder), strike, at
        self.changes = 0
        fsync = os.fsync

        def counted(descriptor: int) -> None:
            self.count()
            fsync(descriptor)

        os.fsync = counted
        sys.addaudithook(self.see)

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        path = arguments[0] if arguments else None
        is_change = event in CHANGES
        if event == "open":
            is_change = isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if is_change and isinstance(path, (str, Path)) and self.is_below(str(path)):
            self.count(str(path))

    def is_below(self, path: str) -> bool:
        # `shutil.rmtree` gives names inside of a directory that it has opened.
        return path.startswith(self.folder) or not os.path.isabs(path)

    def count(self, *name: str) -> None:
        self.changes += 1
        if self.changes == self.at:
            self.strike(*name)


def kill(*name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*name: str) -> None:
    """Fail as a disk does: errors of fsync have no name of a file."""
    raise OSError(errno.EIO, os.strerror(errno.EIO), *name)


def struck(action: Callable[[], str], folder: Path, strike: Strike, at: int) -> dict[str, Any]:
    """Run an action in a forked process that is struck at a change of a file below a folder.

    Returns:
        Its error, and the number of changes; nothing if it was killed.
    """
    told = folder.parent / "told"
    told.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            strikes = Strikes(folder, strike, at)
            error = action()
            strikes.at = 0
            told.write_text(json.dumps({"error": error, "changes": strikes.changes}))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return json.loads(told.read_text()) if told.exists() else {}


def strike_everywhere(
    action: Callable[[Path], str],
    root: Path,
    strike: Strike,
    prepare: Callable[[Path], object] = Path.mkdir,
) -> int:
    """Strike an action at each change, and do it again; return the number of changes.

    Args:
        action: function that works in a folder and returns its error.
        root: place of the folders.
        strike: `kill` or `fail`.
        prepare: function that makes a folder.
    """
    whole = root / "whole"
    prepare(whole)
    changes = struck(lambda: action(whole), whole, strike, 0)["changes"]
    for at in range(1, changes + 1):
        folder = root / str(at)
        prepare(folder)
        first = struck(lambda folder=folder: action(folder), folder, strike, at)
        if strike is not kill and first["error"]:
            assert "Input/output error: '" in first["error"], (at, first)
        if not first or first["error"]:
            assert action(folder) == ""
        assert tree(folder) == tree(whole) and are_sound(folder), at
        shutil.rmtree(folder)
    return changes


def tree(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder; of those with an identifier of the save, the names."""
    found = {}
    for path in sorted(folder.rglob("*")):
        has_identifier = path.name in (METADATA, MANIFEST) or path.is_dir()
        content = b"" if has_identifier else path.read_bytes()
        found[path.relative_to(folder).as_posix()] = content
    return found


def are_sound(folder: Path) -> bool:
    """Compare all checkpoints below a folder with their manifests."""
    manifests = list(folder.rglob(MANIFEST))
    return not any(StoredCheckpoint(path.parent).damaged_files() for path in manifests)
