# SPDX-License-Identifier: Apache-2.0
"""The file ``.metadata`` of a DCP directory, read as data and checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron.checkpoint.dcp import safe_pickle
from megatron.checkpoint.integrity.manifest import DamagedCheckpointError
from megatron.checkpoint.store import durable
from megatron.checkpoint.store.directory import METADATA

_kept: dict[bytes, Any] | None = None
"""Content of ``.metadata`` files -> metadata, within :func:`metadata_read_once`."""


@contextmanager
def metadata_read_once() -> Iterator[None]:
    """Read the same content of ``.metadata`` only once within the context; nobody may change it."""
    global _kept
    _kept = {}
    try:
        yield
    finally:
        _kept = None


def read_metadata(directory: Path) -> Any:
    """Read ``.metadata``: DCP's ``Metadata``, or the stand-in of Megatron-Core's own class.

    Raises:
        DamagedCheckpointError: if it is missing or damaged.
        RefusedPickleError: if it names a class that checkpoints do not hold.
    """
    path = Path(directory) / METADATA
    if not path.is_file():
        raise DamagedCheckpointError(f"{directory} has no {METADATA}: it is no complete checkpoint")
    with durable.opened(path) as file:
        data = file.read()
    if _kept is not None and data in _kept:
        return _kept[data]
    with safe_pickle.naming(str(path)):
        metadata = safe_pickle.load(data)
        _check_form(metadata)
    if _kept is not None:
        _kept[data] = metadata
    return metadata


def _check_form(metadata: Any) -> None:
    """Check the types of all that is used of the metadata.

    Nothing else guarantees them: the file has no checksum, and a pickle has no types.
    """
    entries = metadata.state_dict_metadata
    storage = metadata.storage_data
    paths = getattr(metadata, "planner_data", None)
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        raise ValueError("it has no tables of entries and their places")
    has_tables = isinstance(getattr(metadata, "mcore_data", {}), dict)
    if not has_tables or not isinstance(paths, (dict, type(None))):
        raise ValueError("its tables of paths, or of Megatron-Core's own data, are no dicts")
    for key, entry in entries.items():
        if not _is_entry(entry) or not isinstance(key, str):
            raise ValueError(f"its entry {key!r} is neither a tensor nor an object")
        if paths and not isinstance(paths.get(key), tuple):
            raise ValueError(f"it has no path for the entry {key!r}")
    for index, info in storage.items():
        if not _is_storage(index, info):
            key = getattr(index, "fqn", index)
            raise ValueError(f"it has no valid place of {key!r} in the files")


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, TensorStorageMetadata):
        return isinstance(entry, BytesStorageMetadata)
    sizes = [entry.size]
    for chunk in entry.chunks:
        sizes += [chunk.offsets, chunk.sizes]
    return isinstance(entry.properties.dtype, torch.dtype) and _are_sizes(len(entry.size), *sizes)


def _is_storage(index: Any, info: Any) -> bool:
    return (
        isinstance(index, MetadataIndex)
        and isinstance(info, _StorageInfo)
        and isinstance(info.relative_path, str)
        and _are_sizes(2, (info.offset, info.length))
    )


def _are_sizes(length: int, *values: Sequence[int]) -> bool:
    """Return True if all values are tuples of ``length`` non-negative integers."""
    for value in values:
        if not isinstance(value, tuple) or len(value) != length:
            return False
        if not all(type(number) is int and number >= 0 for number in value):
            return False
    return True
