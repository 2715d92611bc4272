# SPDX-License-Identifier: Apache-2.0
"""A directory of torch.distributed.checkpoint (DCP), opened by one process: any box of any tensor, any object, nothing else.

DCP's own reader unpickles whatever a file holds, reads whole chunks, and does not notice flipped
bits. This one unpickles data only (:mod:`megatron.checkpoint.core.safe_pickle`), reads the rows that are
asked for, and compares the checksum that ``torch.save`` has put beside every tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron.checkpoint.core import safe_pickle

METADATA = ".metadata"


class DamagedCheckpointError(ValueError):
    """A file of a checkpoint is missing, cut off or changed."""


def read_metadata(directory: Path) -> Any:
    """``.metadata``: DCP's, or what stands in for Megatron-Core's own.

    Raises:
        DamagedCheckpointError: where it is missing or damaged.
        RefusedPickleError: where it names a class that checkpoints do not hold.
    """
    path = Path(directory) / METADATA
    if not path.is_file():
        raise DamagedCheckpointError(f"{directory} has no {METADATA}: it is no complete checkpoint")
    try:
        metadata = safe_pickle.load(path.read_bytes())
        _check_form(metadata)
    except safe_pickle.RefusedPickleError as error:
        raise safe_pickle.RefusedPickleError(f"{path}: {error}") from None
    except (ValueError, AttributeError, TypeError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from error
    return metadata


def _check_form(metadata: Any) -> None:
    """Nothing vouches for ``.metadata``, no checksum and no type: all that is used of it has the type that it should."""
    paths = getattr(metadata, "planner_data", None)
    if not isinstance(metadata.state_dict_metadata, dict) or not isinstance(
        metadata.storage_data, dict
    ):
        raise ValueError("it has no tables of entries and their places")
    if not isinstance(getattr(metadata, "mcore_data", {}), dict) or not isinstance(
        paths, (dict, type(None))
    ):
        raise ValueError("its tables beside the entries are none")
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            boxes = [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
            is_good = isinstance(entry.properties.dtype, torch.dtype) and _are_sizes(
                len(entry.size), entry.size
            )
            is_good = is_good and all(_are_sizes(len(entry.size), *box) for box in boxes)
        else:
            is_good = isinstance(entry, BytesStorageMetadata)
        if not is_good or not isinstance(key, str):
            raise ValueError(f"its entry {key!r} is neither a tensor nor an object")
        if paths and not isinstance(paths.get(key), tuple):
            raise ValueError(f"it has no path for the entry {key!r}")
    for index, info in metadata.storage_data.items():
        is_good = (
            isinstance(index, MetadataIndex)
            and isinstance(info, _StorageInfo)
            and isinstance(info.relative_path, str)
        )
        if not is_good or not _are_sizes(2, (info.offset, info.length)):
            raise ValueError(f"its place of {getattr(index, 'fqn', index)!r} is none")


def _are_sizes(length: int, *rows: Sequence[int]) -> bool:
    """Whether these are tuples of so many integers, none of them negative."""
    return all(
        isinstance(row, tuple)
        and len(row) == length
        and all(type(number) is int and number >= 0 for number in row)
        for row in rows
    )
