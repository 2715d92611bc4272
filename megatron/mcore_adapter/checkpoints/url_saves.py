# SPDX-License-Identifier: Apache-2.0
"""Saves and loads at URLs, by all ranks together.

A save writes into staged directories, as it does into those of --save, and every rank uploads the
files that it has written. The ranks of a node may share one directory, or have separate ones. When
all ranks have agreed that the upload is complete, the first rank makes the checkpoint visible and
writes the tracker file. :func:`publish`, :func:`discard` and :func:`retain` are the counterparts of
the functions of these names for directories, in :mod:`megatron.checkpoint.store.directory`.
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
from megatron.mcore_adapter.run.first_rank import on_first_rank
from megatron.mcore_adapter.run.report_files import HISTORY, PICTURE, PROGRESS

REPORT_FILES = (HISTORY, PICTURE, PROGRESS, CONFIG)
"""Patterns of the files that a run writes into the directory of its checkpoints."""


# ---- save


def upload(staging: Path) -> list[str]:
    """Upload a checkpoint that is written and signed; a collective.

    Every rank uploads the files that it has written. Readers do not see the checkpoint before
    :func:`publish`.

    Args:
        staging: result of :func:`directory.staging_directory`.

    Returns:
        The problems of all ranks, the same on every rank.
    """
    store = _store(staging)
    name = _final_name(staging)
    rank = dist.get_rank()

    def begin() -> None:
        if rank == 0:
            store.begin(name)

    def upload_own_files() -> None:
        names_of_files = files_of_rank(staging, rank, dist.get_world_size())
        store.upload(staging, name, names_of_files)

    problems = attempt(begin)
    if not problems:
        problems = attempt(upload_own_files)
    return problems


def publish(root: str | Path, iteration: int) -> None:
    """Make a checkpoint visible whose files all ranks have uploaded; called on one rank.

    The history of losses that belongs to it is uploaded first.
    """
    store = _store(root)
    staging = directory.staging_directory(root, iteration)
    manifest = Manifest.read(staging)
    assert manifest is not None  # every save is signed
    sizes = {}
    for name, digest in manifest.files.items():
        sizes[name] = digest.bytes
    manifest_status = (staging / MANIFEST).stat()
    sizes[MANIFEST] = manifest_status.st_size
    upload_report_files(root)
    store.finish(_final_name(staging), sizes)
    store.write_tracker(iteration)


def discard(root: str | Path, iteration: int) -> None:
    """Remove the files of a failed save at the URL; called on one rank."""
    with suppress(OSError):  # the URL may fail again; no reader sees the files
        name = directory.iteration_directory("", iteration).name
        _store(root).abandon(name)


def retain(
    root: str | Path,
    interval: int,
    newest: int,
) -> None:
    """Delete the checkpoints at the URL that ``--save-retain-interval`` does not keep.

    Args:
        root: staged directory of the checkpoints.
        interval: iterations at multiples of it are kept.
        newest: iteration that is kept too.
    """
    _store(root).retain(interval, newest)


def upload_report_files(root: str | Path) -> None:
    """Upload the files of :data:`REPORT_FILES`; called on the rank that writes them."""
    store = _store(root)
    names = []
    for path in store.staged.iterdir():
        is_report = any(fnmatch(path.name, pattern) for pattern in REPORT_FILES)
        if is_report and path.is_file():
            names.append(path.name)
    store.upload(store.staged, "", names)


def fetch_report_files(root: str | Path) -> None:
    """Download the files of :data:`REPORT_FILES` of earlier runs, which this one continues."""
    store = _store(root)
    store.fetch(store.staged, REPORT_FILES)


def _final_name(staging: Path) -> str:
    """Return the name of a checkpoint without the prefix of its staging directory."""
    example = directory.staging_directory("", 0)
    prefix, _, _ = example.name.partition("iter_")
    return staging.name.removeprefix(prefix)


# ---- load


def found_for_all(find: Callable[[], CheckpointSource | None]) -> CheckpointSource | None:
    """Find a checkpoint on the first rank, and download it to every node if it is at a URL.

    This is a collective.

    Args:
        find: finds the checkpoint, on the first rank; returns None without one.

    Returns:
        The checkpoint, with the path of this node's copy.

    Raises:
        RunError: on every rank, if any rank cannot download it.
    """

    def find_with_url() -> tuple[CheckpointSource | None, str, str]:
        source = find()
        if source is None:
            return None, "", ""
        staged = url_of(source.path.absolute())
        if staged is None:
            return source, "", ""
        url, root = staged
        path_at_url = source.path.relative_to(root)
        return source, url, path_at_url.as_posix()

    source, url, path_at_url = on_first_rank(find_with_url)
    if source is None or not url:
        return source
    paths: list[Path] = []

    def fetch() -> None:
        path = staged_directory(url) / path_at_url
        path.mkdir(parents=True, exist_ok=True)
        stores.fetch(path)
        paths.append(path)

    problems = attempt(fetch)
    if problems:
        raise RunError("\n".join(problems))
    return replace(source, path=paths[0])


def reading_share(path: Path) -> tuple[int, int]:
    """Return this rank's index among the ranks that see the same files, and the number of these.

    A collective for a staged checkpoint, of which every node has a copy.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    if not stores.is_staged(path):
        return rank, world_size
    store = _store(path)
    own_token = directory_token(store.staged.parent)
    tokens = [""] * world_size
    dist.all_gather_object(tokens, own_token)
    index = tokens[:rank].count(own_token)
    num_readers = tokens.count(own_token)
    return index, num_readers


def _store(path: str | Path) -> Store:
    store = stores.store_of(path)
    assert store is not None  # all callers have a staged path
    return store
