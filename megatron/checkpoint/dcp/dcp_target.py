# SPDX-License-Identifier: Apache-2.0
"""A DCP directory that is written from tensors while they are read.

Each part of the entries is a file, with one tensor in memory at a time. A run can also load the
entries without any files (:class:`EntryReader`).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.futures import Future

from megatron.checkpoint.core.lazy_tensor import LazyTensor, Shape
from megatron.checkpoint.core.parts import Part, Progress, ignore_progress
from megatron.checkpoint.dcp import safe_pickle
from megatron.checkpoint.dcp.chunk import Chunk
from megatron.checkpoint.dcp.signing_writer import SigningWriter

PART_BYTES = 256 << 20
"""Size of a part, and so of a file: small enough that ranks can share them evenly."""


@dataclass(frozen=True)
class TensorEntry:
    """One chunk of a tensor in the file.

    Attributes:
        key: key of the tensor.
        shape: shape of the whole tensor.
        offsets: offsets of the chunk; as long as ``shape``.
        tensor: elements of the chunk; leading dims of size 1 may be left out.
    """

    key: str
    shape: Shape
    offsets: Shape
    tensor: LazyTensor

    @property
    def sizes(self) -> Shape:
        """Sizes of the chunk; as long as ``shape``."""
        num_left_out = len(self.shape) - len(self.tensor.shape)
        return (1,) * num_left_out + self.tensor.shape


@dataclass(frozen=True)
class ObjectEntry:
    """An object in the file.

    Attributes:
        key: key of the object.
        value: the object, or a function that makes it when it is written.
    """

    key: str
    value: Any

    def pickled(self) -> io.BytesIO:
        """Return the object as ``torch.save`` writes it."""
        value = self.value
        if callable(value):
            value = value()
        return io.BytesIO(safe_pickle.save_torch(value))


Entry = TensorEntry | ObjectEntry


def whole(key: str, tensor: LazyTensor) -> TensorEntry:
    """Return the entry of a tensor in one chunk."""
    offsets = (0,) * len(tensor.shape)
    return TensorEntry(key, tensor.shape, offsets, tensor)


class DcpTarget:
    """A DCP directory with the given entries.

    Args:
        entries: chunks of tensors, and objects. Those that stand together are written together.
        paths: key -> path in the nested dict that a loader fills; None for flat keys.
        extra_files: name -> function that returns the content, of further files of the format;
            they are written last.
        notes: a list that reading appends to; notes of a part are in its result.
        more: fields of ``.metadata`` that torch does not have, by name.

    Attributes:
        entries: chunks of tensors, and objects.
        parts: parts of the directory, which can be written in any order.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        paths: dict[str, tuple[Any, ...]] | None = None,
        extra_files: dict[str, Callable[[], bytes]] | None = None,
        notes: list[str] | None = None,
        more: dict[str, Any] | None = None,
    ):
        self.entries = list(entries)
        self._paths = paths
        self._extra_files = extra_files or {}
        self._notes = [] if notes is None else notes
        self._more = more or {}
        self.parts = []
        for number, chosen in enumerate(_in_parts(self.entries)):
            num_bytes = sum(_num_bytes(entry) for entry in chosen)
            part = Part(
                name=f"{number:05d}",
                num_bytes=num_bytes,
                write=self._writer(number, chosen),
            )
            self.parts.append(part)

    def _writer(
        self,
        number: int,
        entries: list[Entry],
    ) -> Callable[[Path, Progress], Any]:
        def write(staging: Path, progress: Progress) -> dict[str, Any]:
            known = len(self._notes)
            plan = SavePlan(
                [_write_item(entry) for entry in entries],
                storage_data=_StoragePrefix(f"__{number}_"),
            )
            planner = EntryPlanner(entries, progress)
            written = SigningWriter(staging).write_data(plan, planner).wait()
            return {
                "written": written,
                "file": written[-1],
                "notes": self._notes[known:],
            }

        return write

    def finish(self, staging: Path, results: dict[str, Any]) -> None:
        """Write ``.metadata``, the extra files and the manifest; called on one rank.

        Args:
            staging: the directory.
            results: the results of the parts, by name.
        """
        extra_files = {}
        for name, content in self._extra_files.items():
            extra_files[name] = content()
        written = []
        for part in self.parts:
            written.append(results[part.name]["written"])
        writer = SigningWriter(staging, extra_files=extra_files)
        writer.finish(self.metadata(), written)

    def metadata(self) -> Metadata:
        """Return ``.metadata`` without the places of the entries in files."""
        plan = SavePlan([_write_item(entry) for entry in self.entries])
        _, metadata = create_default_global_save_plan([plan])
        metadata.planner_data = self._paths
        vars(metadata).update(self._more)
        return metadata


class EntryPlanner(DefaultSavePlanner):
    """A planner that reads an entry when DCP's writer asks for it.

    With one of them on every rank, ``torch.distributed.checkpoint.save`` writes the entries of all
    ranks. An entry that several ranks have is written by one of them.

    Args:
        entries: the entries of this rank.
        progress: called with the number of bytes of each entry before it is read.
    """

    def __init__(self, entries: list[Entry], progress: Progress = ignore_progress):
        super().__init__(flatten_state_dict=False)
        self._entries = {}
        for entry in entries:
            self._entries[_write_item(entry).index] = entry
        self._progress = progress

    def create_local_plan(self) -> SavePlan:
        """Return the plan of this rank: to write all of its entries."""
        items = [_write_item(entry) for entry in self._entries.values()]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Read an entry."""
        entry = self._entries[write_item.index]
        self._progress(_num_bytes(entry))
        if isinstance(entry, ObjectEntry):
            return entry.pickled()
        return entry.tensor.read().reshape(entry.sizes)


def _write_item(entry: Entry) -> WriteItem:
    if isinstance(entry, ObjectEntry):
        return WriteItem(MetadataIndex(entry.key), WriteItemType.BYTE_IO)
    shape = torch.Size(entry.shape)
    offsets = torch.Size(entry.offsets)
    chunk = ChunkStorageMetadata(offsets, torch.Size(entry.sizes))
    properties = TensorProperties(dtype=entry.tensor.dtype)
    data = TensorWriteData(chunk, properties, shape)
    index = MetadataIndex(entry.key, offsets)
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _num_bytes(entry: Entry) -> int:
    if isinstance(entry, ObjectEntry):
        return 1 << 10  # most objects are numbers
    return entry.tensor.num_bytes


def _in_parts(entries: list[Entry]) -> Iterator[list[Entry]]:
    """Cut the entries into parts of at most ``PART_BYTES``, or of one larger entry."""
    part: list[Entry] = []
    size = 0
    for entry in entries:
        if part and size + _num_bytes(entry) > PART_BYTES:
            yield part
            part = []
            size = 0
        part.append(entry)
        size += _num_bytes(entry)
    if part:
        yield part


class EntryReader(FileSystemReader):
    """A reader of a DCP directory that is not written, with every tensor in one chunk.

    Of a tensor it reads only the rows that are needed, one tensor after another.

    Args:
        target: the directory that would be written.
        name: path of the checkpoint, for messages.
    """

    def __init__(self, target: DcpTarget, name: str):
        super().__init__(name)
        self._metadata = target.metadata()
        self._metadata.storage_data = {}  # no entry has a place in a file
        self._entries: dict[str, Entry] = {}
        for entry in target.entries:
            self._entries[entry.key] = entry

    def __str__(self) -> str:
        return str(self.path)

    def read_metadata(self, *args: object, **options: object) -> Metadata:
        """Return the metadata of the directory."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the entries of a plan."""
        items_of: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            items_of_key = items_of.setdefault(item.storage_index.fqn, [])
            items_of_key.append(item)
        for key, items in items_of.items():
            entry = self._entries[key]
            if isinstance(entry, TensorEntry):
                _read_tensor(entry, items, planner)
                continue
            pickled = entry.pickled().getvalue()
            for item in items:
                planner.load_bytes(item, io.BytesIO(pickled))
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _read_tensor(
    entry: TensorEntry,
    items: list[ReadItem],
    planner: LoadPlanner,
) -> None:
    """Read the regions of one tensor that a rank asks for, by one read of the rows they span."""
    if not entry.tensor.shape:
        for item in items:
            _hand_over(entry.tensor.read(), item, planner)
        return
    start = min(item.storage_offsets[0] for item in items)
    stop = max(item.storage_offsets[0] + item.lengths[0] for item in items)
    rows = entry.tensor.read_rows(start, stop)
    for item in items:
        # Rows 5 to 9 were read. The region at (6, 2) of sizes (3, 4) is [1:4, 2:6] of them.
        offsets = (item.storage_offsets[0] - start, *item.storage_offsets[1:])
        chunk = Chunk(offsets, tuple(item.lengths))
        region = chunk.slices([0] * rows.dim())
        _hand_over(rows[region], item, planner)


def _hand_over(
    value: torch.Tensor,
    item: ReadItem,
    planner: LoadPlanner,
) -> None:
    target: torch.Tensor = planner.resolve_tensor(item).detach()
    target.copy_(value)
    planner.commit_tensor(item, target)
