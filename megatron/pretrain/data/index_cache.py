# SPDX-License-Identifier: Apache-2.0
"""The folder of index caches, which Megatron-Core's datasets would put beside the data.

Without --data-cache-path it is one of the user's cache directory, with a name that follows from the
datasets: their paths, sizes and times. Data that is written anew has a cache of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megatron.checkpoint.core.listing import some
from megatron.pretrain.first_rank import on_first_rank, wait_until_visible

DATASETS = "datasets.json"
"""File in the folder that says of which datasets it is."""


def cache_directory() -> Path:
    """Return the folder of all index caches of this user, by the XDG base directories."""
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "open-megatron-fsdp" / "indices"


def cache_of(prefixes: Iterable[str]) -> Path:
    """Make the folder of the caches of these datasets, and return its path.

    Raises:
        OSError: it cannot be made; the message has the way out.
    """
    datasets = {}
    for prefix in sorted({os.path.abspath(each) for each in prefixes}):
        status = os.stat(f"{prefix}.idx")
        datasets[prefix] = [status.st_size, status.st_mtime_ns, os.stat(f"{prefix}.bin").st_size]
    text = json.dumps(datasets, indent=1)
    try:
        folder = cache_directory() / hashlib.sha256(text.encode()).hexdigest()[:16]
    except RuntimeError as error:  # a user without a home
        raise OSError(f"no folder for index caches ({error}): give --data-cache-path") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / DATASETS).write_text(text)
    except OSError as error:
        raise OSError(f"{folder} cannot be written ({error}): give --data-cache-path") from error
    return folder


@contextmanager
def damage_named(folder: str | None) -> Iterator[None]:
    """Name the damaged files in a folder of caches where datasets cannot be made from them.

    Raises:
        ValueError: instead of the error that the first of them causes, which may not name it.
    """
    try:
        yield
    except (ValueError, OSError, EOFError) as error:
        damaged = [path for path in sorted(Path(folder or "").glob("*.npy")) if _is_cut(path)]
        if folder is None or not damaged:
            raise
        raise ValueError(
            f"index caches in {folder} are cut off or damaged, as a kill leaves them:"
            f" {some([path.name for path in damaged])}; remove them ({error})"
        ) from error


def _is_cut(path: Path) -> bool:
    try:
        np.load(path, mmap_mode="r")
    except (ValueError, OSError, EOFError):
        return True
    return False


def check_visible(folder: str) -> None:
    """Check that all ranks see the folder of caches that the first one has made; a collective.

    A node with a home of its own may have a folder of that name from an earlier run. So all look
    for a file that this run has just written there.

    Raises:
        ValueError: on every rank, naming those that do not see it.
        OSError: it cannot be written.
    """
    if not dist.is_initialized():
        return
    path = Path(folder)
    mark = on_first_rank(lambda: _write_mark(path))
    try:
        wait_until_visible(path, [mark])
    except ValueError as error:
        raise ValueError(
            f"{error}, which rank 0 has just written: give --data-cache-path, a folder that all see"
        ) from error
    finally:
        if dist.get_rank() == 0:  # all have looked
            (path / mark).unlink(missing_ok=True)


def _write_mark(folder: Path) -> str:
    mark = f".seen_{uuid.uuid4().hex}"
    (folder / mark).touch()
    return mark
