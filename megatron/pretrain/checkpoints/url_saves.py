# SPDX-License-Identifier: Apache-2.0
"""Saves and loads at URLs, by all ranks together.

A save writes into staged directories, as it does into those of --save, and every rank uploads what
it has written. The ranks of a node may share one directory, or have their own. When all have agreed
that the upload is complete, the first rank makes it visible and lets the tracker file name it.
:func:`prepare`, :func:`publish`, :func:`discard` and :func:`retain` do what functions of these
names in :mod:`megatron.checkpoint.store.directory` do for directories. A run that has lost the lease
of the URL (:mod:`megatron.pretrain.checkpoints.save_lease`) does not get beyond the first three.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

import torch.distributed as dist

from megatron.checkpoint.store import directory
from megatron.checkpoint.store import stores
from megatron.checkpoint.integrity.manifest import MANIFEST, Manifest, files_of_rank
from megatron.checkpoint.store.stores import Store
from megatron.checkpoint.store.url_staging import directory_token, staged_directory, url_of
from megatron.checkpoint.hugging_face.model_directory import CONFIG
from megatron.fsdp.engine.collectives import agree
from megatron.pretrain.checkpoints import save_lease
from megatron.pretrain.checkpoints.checkpoint_source import CheckpointSource
from megatron.pretrain.errors import RunError
from megatron.pretrain.report.loss_history import HISTORY, STAGED_HISTORIES
from megatron.pretrain.report.report import PICTURE, PROGRESS

BESIDE = (HISTORY, STAGED_HISTORIES, PICTURE, PROGRESS, CONFIG)
"""Patterns of the files that a run writes beside its checkpoints."""


# ---- save


def prepare(root: str | Path, iteration: int) -> None:
    """Make the empty directory in which a checkpoint is written; called on one rank.

    Raises:
        RunError: the run has lost the lease of the URL.
    """
    save_lease.check(root)
    directory.prepare(root, iteration)


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
    problems = _problems(lambda: store.begin(name) if rank == 0 else None)
    return problems or _problems(
        lambda: store.upload(staging, name, files_of_rank(staging, rank, world_size))
    )


def publish(root: str | Path, iteration: int) -> None:
    """Make a checkpoint visible whose files all ranks have uploaded; called on one rank.

    The history of losses that belongs to it is there before.

    Raises:
        RunError: the run has lost the lease of the URL.
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
    # What has failed may fail again; nothing of it is visible. It may also be another run's.
    with suppress(OSError, RunError):
        save_lease.check(root)
        _store(root).abandon(directory.iteration_directory("", iteration).name)


def retain(root: str | Path, interval: int, newest: int) -> None:
    """Delete the checkpoints at the URL that ``--save-retain-interval`` does not keep."""
    _store(root).retain(interval, newest)


def remove_staged(root: str | Path, iteration: int) -> None:
    """Remove the local files of a save that is at its URL, or has failed; called on every rank."""
    shutil.rmtree(directory.staging_directory(root, iteration), ignore_errors=True)


def upload_beside(root: str | Path) -> None:
    """Upload what the run writes beside its checkpoints; called on the rank that writes it.

    Raises:
        RunError: the run has lost the lease of the URL.
    """
    save_lease.check(root)
    store = _store(root)
    there = [path.name for path in store.staged.iterdir() if path.is_file()]
    beside = [name for name in there if any(fnmatch(name, pattern) for pattern in BESIDE)]
    store.upload(store.staged, "", beside)
    store.remove_files(STAGED_HISTORIES, but=there)


def fetch_beside(root: str | Path) -> None:
    """Download what earlier runs have written beside their checkpoints, to continue it."""
    store = _store(root)
    store.fetch(store.staged, BESIDE)


def _final_name(staging: Path) -> str:
    return staging.name.removeprefix(directory.staging_directory("", 0).name.partition("iter_")[0])


# ---- load


@dataclass(frozen=True)
class FoundSource:
    """A checkpoint that the first rank has found, and that every node has or downloads."""

    source: CheckpointSource
    url: str | None
    """At which it is; None for a directory."""
    below: str
    """Its path below the URL."""

    def fetched(self) -> CheckpointSource:
        """Download it to every node and return it with the path on this one; a collective.

        Raises:
            RunError: on every rank, if any rank cannot.
        """
        if self.url is None:
            return self.source
        url, paths = self.url, []

        def fetch() -> None:
            path = staged_directory(url) / self.below
            path.mkdir(parents=True, exist_ok=True)
            stores.fetch(path)
            paths.append(path)

        problems = _problems(fetch)
        if problems:
            raise RunError("\n".join(problems))
        return replace(self.source, path=paths[0])


def found_by(find: Callable[[], CheckpointSource | None]) -> FoundSource | None:
    """Return what ``find`` does, for all ranks; called on the first one."""
    source = find()
    if source is None:
        return None
    staged = url_of(source.path.absolute())
    if staged is None:
        return FoundSource(source, None, "")
    return FoundSource(source, staged[0], source.path.relative_to(staged[1]).as_posix())


def drop(*paths: Path) -> None:
    """Remove copies of checkpoints when every rank has read them; a collective."""
    agree([])
    for path in paths:
        stores.drop(path)


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


def _problems(action: Callable[[], None]) -> list[str]:
    """Run ``action`` and return the problems of all ranks, the same on every rank."""
    problem = None
    try:
        action()
    except Exception as error:  # of a store, or a network; the other ranks wait
        problem = f"rank {dist.get_rank()}: {error}"
    return agree([problem] if problem else [])
