# SPDX-License-Identifier: Apache-2.0
"""Saves and loads at URLs, by all ranks together.

A save writes into staged directories, as it does into those of --save, and every rank uploads what
it has written. The ranks of a node may share one directory, or have their own. When all have agreed
that the upload is complete, the first rank makes it visible and lets the tracker file name it.
:func:`publish`, :func:`discard` and :func:`retain` do what functions of these names in
:mod:`megatron.checkpoint.store.directory` do for directories.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import torch.distributed as dist

from megatron.checkpoint.hugging_face.model_directory import CONFIG
from megatron.checkpoint.integrity.manifest import MANIFEST, Manifest, files_of_rank
from megatron.checkpoint.store import directory, stores
from megatron.checkpoint.store.stores import Store
from megatron.checkpoint.store.url_staging import directory_token, staged_directory, url_of
from megatron.mcore_adapter.checkpoints.checkpoint_format import attempt
from megatron.mcore_adapter.checkpoints.checkpoint_source import CheckpointSource
from megatron.mcore_adapter.run.errors import RunError
from megatron.mcore_adapter.run.files_beside import HISTORY, PICTURE, PROGRESS
from megatron.mcore_adapter.run.first_rank import on_first_rank

BESIDE = (HISTORY, PICTURE, PROGRESS, CONFIG)
"""Patterns of the files that a run writes beside its checkpoints."""


# ---- save


def upload(staging: Path) -> list[str]:
    """Upload a checkpoint that is written and signed; a collective.

    Every rank uploads the files that it has written. It stays incomplete, for readers, until
    :func:`publish`.

    Args:
        staging: the directory that :func:`directory.staging_directory` names.

    Returns:
        The problems of all ranks, the same on every rank.
    """
    store, name = _store(staging), _final_name(staging)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def begin() -> None:
        if rank == 0:
            store.begin(name)

    return attempt(begin) or attempt(
        lambda: store.upload(staging, name, files_of_rank(staging, rank, world_size))
    )


def publish(root: str | Path, iteration: int) -> None:
    """Make a checkpoint visible whose files all ranks have uploaded; called on one rank.

    The history of losses that belongs to it is there before.
    """
    store, staging = _store(root), directory.staging_directory(root, iteration)
    manifest = Manifest.read(staging)
    assert manifest is not None  # every save is signed
    sizes = {name: digest.bytes for name, digest in manifest.files.items()}
    sizes[MANIFEST] = (staging / MANIFEST).stat().st_size
    upload_beside(root)
    store.finish(_final_name(staging), sizes)
    store.write_tracker(iteration)


def discard(root: str | Path, iteration: int) -> None:
    """Remove what a failed save has left at the URL; called on one rank."""
    with suppress(OSError):  # what has failed may fail again; nothing of it is visible
        _store(root).abandon(directory.iteration_directory("", iteration).name)


def retain(root: str | Path, interval: int, newest: int) -> None:
    """Delete the checkpoints at the URL that ``--save-retain-interval`` does not keep."""
    _store(root).retain(interval, newest)


def upload_beside(root: str | Path) -> None:
    """Upload what the run writes beside its checkpoints; called on the rank that writes it."""
    store = _store(root)
    there = [path.name for path in store.staged.iterdir() if path.is_file()]
    beside = [name for name in there if any(fnmatch(name, pattern) for pattern in BESIDE)]
    store.upload(store.staged, "", beside)


def fetch_beside(root: str | Path) -> None:
    """Download what earlier runs have written beside their checkpoints, to continue it."""
    store = _store(root)
    store.fetch(store.staged, BESIDE)


def _final_name(staging: Path) -> str:
    return staging.name.removeprefix(directory.staging_directory("", 0).name.partition("iter_")[0])


# ---- load


def found_for_all(find: Callable[[], CheckpointSource | None]) -> CheckpointSource | None:
    """Find a checkpoint on the first rank, and download it to every node if it is at a URL.

    This is a collective.

    Raises:
        RunError: on every rank, if any rank cannot download it.
    """

    def find_with_url() -> tuple[CheckpointSource | None, str, str]:
        source = find()
        staged = None if source is None else url_of(source.path.absolute())
        if source is None or staged is None:
            return source, "", ""
        return source, staged[0], source.path.relative_to(staged[1]).as_posix()

    source, url, below = on_first_rank(find_with_url)
    if source is None or not url:
        return source
    paths: list[Path] = []

    def fetch() -> None:
        path = staged_directory(url) / below
        path.mkdir(parents=True, exist_ok=True)
        stores.fetch(path)
        paths.append(path)

    problems = attempt(fetch)
    if problems:
        raise RunError("\n".join(problems))
    return replace(source, path=paths[0])


def reading_share(path: Path) -> tuple[int, int]:
    """Return this rank's number among those that see the same files, and their number.

    A staged checkpoint has a copy on every node; a collective for it.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if not stores.is_staged(path):
        return rank, world_size
    here = directory_token(_store(path).staged.parent)
    of_all = [""] * world_size
    dist.all_gather_object(of_all, here)
    return of_all[:rank].count(here), of_all.count(here)


# ----


def _store(path: str | Path) -> Store:
    store = stores.store_of(path)
    assert store is not None  # whoever calls this has looked
    return store
