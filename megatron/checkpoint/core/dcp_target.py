# SPDX-License-Identifier: Apache-2.0
"""Writes a directory of torch.distributed.checkpoint (DCP) from tensors that are read on the way.

DCP's own writer makes the files and ``.metadata``; here they are asked for part by part, each with
few tensors in memory.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron.checkpoint.core import safe_pickle
from megatron.checkpoint.core.lazy_tensor import LazyTensor
from megatron.checkpoint.core.parts import Part, Progress

PART_BYTES = 256 << 20
"""A part that has more is closed. DCP's writer keeps the tensors of a file until it is written."""


@dataclass(frozen=True)
class TensorEntry:
    """One box of a tensor in the file.

    Attributes:
        key: of the tensor.
        shape: of all of it.
        offsets: of the box; as long as ``shape``.
        tensor: the box, of as many elements; leading dims of size 1 may be left out.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: LazyTensor

    @property
    def sizes(self) -> tuple[int, ...]:
        return (1,) * (len(self.shape) - len(self.tensor.shape)) + self.tensor.shape


@dataclass(frozen=True)
class ObjectEntry:
    """Anything else, or a function that makes it when it is written."""

    key: str
    value: Any


Entry = TensorEntry | ObjectEntry


def whole(key: str, tensor: LazyTensor) -> TensorEntry:
    """A tensor in one box."""
    return TensorEntry(key, tensor.shape, (0,) * len(tensor.shape), tensor)


class DcpTarget:
    """A DCP directory with the given entries.

    Args:
        entries: boxes of tensors and objects. Those that stand together are written together.
        paths: key -> path in the nested dict that a loader fills; None for flat keys.
        extra_files: name -> content, of files beside DCP's; they are written last.
        notes: a list that reading appends to; what is appended during a part is a part of its
            result.
        more: fields of ``.metadata`` beside those of torch, by name.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        paths: dict[str, tuple[Any, ...]] | None = None,
        extra_files: dict[str, Callable[[], bytes]] | None = None,
        notes: list[str] | None = None,
        more: dict[str, Any] | None = None,
    ):
        self._entries = list(entries)
        self._paths = paths
        self._extra_files = extra_files or {}
        self._notes = notes if notes is not None else []
        self._more = more or {}
        self.parts = [
            Part(f"{number:05d}", sum(map(_num_bytes, chosen)), self._writer(number, chosen))
            for number, chosen in enumerate(_in_parts(self._entries))
        ]

    def _writer(self, number: int, entries: list[Entry]) -> Callable[[Path, Progress], Any]:
        def write(staging: Path, progress: Progress) -> dict[str, Any]:
            known = len(self._notes)
            planner = _Planner(entries, progress)
            plan = SavePlan(
                [_write_item(entry) for entry in entries],
                storage_data=_StoragePrefix(f"__{number}_"),
            )
            results = FileSystemWriter(staging).write_data(plan, planner).wait()
            places = [
                [*_index_to_list(result.index), *_place(result.storage_data)] for result in results
            ]
            return {"places": places, "notes": self._notes[known:]}

        return write

    def finish(self, staging: Path, results: dict[str, Any]) -> None:
        written = [
            WriteResult(_index(key, offset), length, _StorageInfo(file, start, length))
            for part in self.parts
            for key, offset, file, start, length in results[part.name]["places"]
        ]
        metadata = Metadata(self._described(), self._paths)
        vars(metadata).update(self._more)
        FileSystemWriter(staging).finish(metadata, [written])
        for name, content in self._extra_files.items():
            (staging / name).write_bytes(content())

    def _described(self) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for entry in self._entries:
            if isinstance(entry, ObjectEntry):
                described[entry.key] = BytesStorageMetadata()
                continue
            properties = TensorProperties(dtype=entry.tensor.dtype)
            tensor = described.setdefault(
                entry.key, TensorStorageMetadata(properties, torch.Size(entry.shape), [])
            )
            tensor.chunks.append(_chunk(entry))
        return described


class _Planner(DefaultSavePlanner):
    """Reads an entry when DCP's writer has come to it."""

    def __init__(self, entries: list[Entry], progress: Progress):
        super().__init__()
        self._entries = {_write_item(entry).index: entry for entry in entries}
        self._progress = progress

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        entry = self._entries[write_item.index]
        self._progress(_num_bytes(entry))
        if isinstance(entry, ObjectEntry):
            return io.BytesIO(
                safe_pickle.save_torch(entry.value() if callable(entry.value) else entry.value)
            )
        return entry.tensor.read().reshape(entry.sizes)


def _write_item(entry: Entry) -> WriteItem:
    if isinstance(entry, ObjectEntry):
        return WriteItem(MetadataIndex(entry.key), WriteItemType.BYTE_IO)
    data = TensorWriteData(
        _chunk(entry), TensorProperties(dtype=entry.tensor.dtype), torch.Size(entry.shape)
    )
    return WriteItem(_index(entry.key, entry.offsets), WriteItemType.SHARD, tensor_data=data)


def _chunk(entry: TensorEntry) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(entry.offsets), torch.Size(entry.sizes))


def _index(key: str, offset: Iterable[int] | None) -> MetadataIndex:
    return MetadataIndex(key, None if offset is None else torch.Size(offset))


def _index_to_list(index: MetadataIndex) -> list[Any]:
    return [index.fqn, None if index.offset is None else list(index.offset)]


def _place(info: _StorageInfo) -> list[Any]:
    return [info.relative_path, info.offset, info.length]


def _num_bytes(entry: Entry) -> int:
    return entry.tensor.num_bytes if isinstance(entry, TensorEntry) else 1 << 10


def _in_parts(entries: list[Entry]) -> Iterator[list[Entry]]:
    part: list[Entry] = []
    size = 0
    for entry in entries:
        if part and size + _num_bytes(entry) > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(entry)
        size += _num_bytes(entry)
    if part:
        yield part
