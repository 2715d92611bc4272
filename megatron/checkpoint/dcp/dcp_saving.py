# SPDX-License-Identifier: Apache-2.0
"""Planner and writer for ``torch.distributed.checkpoint.save``: the same files, with less work.

torch's own planner sends every entry of every rank to the first one and back, its writer copies the
tensors of a file and keeps the copies until the file is complete, and neither computes digests.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    _validate_global_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron.checkpoint.dcp import safe_pickle
from megatron.checkpoint.dcp.plan_reuse import ChosenItems, PlanReuse
from megatron.checkpoint.dcp.tensor_archive import archive_of
from megatron.checkpoint.integrity.block_digest import BlockDigest, crc32
from megatron.checkpoint.integrity.manifest import FileDigest, Manifest, digest_of
from megatron.checkpoint.store import durable
from megatron.checkpoint.store.directory import METADATA

_OVERHEAD = 1200
"""About the bytes that ``torch.save`` writes beside the elements of a tensor, or for a number."""
_LARGE = 1 << 20
"""From this size on, checksums are computed by another thread while bytes are written."""


class EvenPlanner(DefaultSavePlanner):
    """A planner that has every entry written once, and about as many bytes by each rank.

    Ranks send the first one their tensors and the names of their objects, and get back the
    positions of those that they write: the thousands of small objects of param groups are on every
    rank.

    Args:
        is_whole: the ranks that save have all chunks of all tensors. False for the part of one
            rank: its metadata names tensors of which the rank has no chunk too.
        reuse: the plan of the save before, which is used again if it fits; None: none is kept.
        spreads: share out what several ranks have. False: the first of them writes it.
    """

    def __init__(self, is_whole: bool = True, reuse: PlanReuse | None = None, spreads: bool = True):
        super().__init__()
        self._is_whole, self._reuse, self._spreads = is_whole, reuse, spreads

    def own_entries(self) -> tuple[list[WriteItem], dict[str, Any] | None]:
        """Return the items that this rank could write.

        With them the paths of their keys in the nested dict, None for flat keys.
        """
        plan = super().create_local_plan()
        return plan.items, plan.planner_data

    def create_local_plan(self) -> SavePlan:
        """Return the tensors of this rank as items, and the paths of all entries."""
        items, self._paths = self.own_entries()
        self._own_items = sorted(items, key=lambda item: item.type == WriteItemType.BYTE_IO)
        if self._reuse is not None:
            unchanged = self._reuse.unchanged(self._own_items, self._paths)
            if unchanged is not None:
                return SavePlan([], planner_data=unchanged)
        tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
        objects = [item.index.fqn for item in self._own_items[len(tensors) :]]
        return SavePlan(tensors, planner_data=_LocalEntries(objects, self._paths))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Choose the rank that writes each entry; called on the first rank.

        Returns:
            For each rank the positions of its items that it writes, and the metadata of all.

        Raises:
            ValueError: if the chunks of a tensor overlap or do not make it up.
        """
        if self._reuse is not None:
            kept = self._reuse.metadata_of(all_plans)
            if kept is not None:
                self.metadata = kept
                return all_plans, kept
            all_plans = self._reuse.whole(all_plans)
        objects = _Items()
        items_of_ranks = [
            [*plan.items, *map(objects.__getitem__, plan.planner_data.objects)]
            for plan in all_plans
        ]
        chosen = assign(items_of_ranks, self._spreads)
        plans = [
            SavePlan([items[position] for position in positions])
            for items, positions in zip(items_of_ranks, chosen)
        ]
        plans, metadata = create_default_global_save_plan(plans, rewrite_index_hints=False)
        paths: dict[str, Any] = {}
        for plan in all_plans:
            for key, path in (plan.planner_data.paths or {}).items():
                paths.setdefault(key, path)
        metadata = dataclasses.replace(metadata, planner_data=paths or None)
        if not self._is_whole:
            self._name_tensors_without_chunks(metadata)
        elif problems := _validate_global_plan(plans, metadata):
            raise ValueError(f"the ranks do not have each tensor once: {'; '.join(problems)[:500]}")
        self.global_plan, self.metadata = plans, metadata
        save = "" if self._reuse is None else self._reuse.keep_all(all_plans, metadata)
        answers = [ChosenItems(positions, save) for positions in chosen]
        return [SavePlan([], planner_data=answer) for answer in answers], metadata

    def _name_tensors_without_chunks(self, metadata: Metadata) -> None:
        for key, value in self.state_dict.items():
            if isinstance(value, torch.Tensor):
                entry = TensorStorageMetadata(TensorProperties(value.dtype), value.size(), [])
                metadata.state_dict_metadata.setdefault(key, entry)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the items that this rank writes."""
        answer = new_plan.planner_data
        if isinstance(answer, ChosenItems):
            positions = answer.positions
            if self._reuse is not None:
                self._reuse.keep(self._own_items, self._paths, answer)
        else:
            assert self._reuse is not None  # nothing else lets a plan be unchanged
            positions = self._reuse.positions()
        items = [self._own_items[position] for position in positions]
        self.plan = SavePlan(items, storage_data=new_plan.storage_data)
        self._pickled: dict[tuple[type, str], bytes] = {}
        return self.plan

    def transform_object(self, write_item: WriteItem, object: Any) -> torch.Tensor | io.BytesIO:
        """Return a tensor, or the pickle of an object."""
        if write_item.type != WriteItemType.BYTE_IO or not safe_pickle.is_scalar(object):
            data: torch.Tensor | io.BytesIO = super().transform_object(write_item, object)
            return data
        # Fields of param groups are written thousands of times, once for each parameter.
        key = (type(object), repr(object))
        if key not in self._pickled:
            self._pickled[key] = super().transform_object(write_item, object).getvalue()
        return io.BytesIO(self._pickled[key])


@dataclass(frozen=True)
class _LocalEntries:
    """The entries of a rank beside its tensors.

    Attributes:
        objects: their keys.
        paths: key -> path in the nested dict, of tensors too; None for flat keys.
    """

    objects: list[str]
    paths: dict[str, Any] | None


class _Items(dict[str, WriteItem]):
    """The items of objects, by key: one for all ranks."""

    def __missing__(self, key: str) -> WriteItem:
        self[key] = WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
        return self[key]


def assign(items_of_ranks: Sequence[Sequence[WriteItem]], spreads: bool) -> list[list[int]]:
    """Choose for each item one of the ranks that have it.

    Items of one rank alone are its own. The others, from the largest to the smallest, go to the
    rank that has the fewest bytes until then, or to the first rank that has them.

    Args:
        items_of_ranks: the items that each rank could write.
        spreads: let ranks have about as many bytes.

    Returns:
        The positions of the items that each rank writes, in order.
    """
    candidates: dict[Any, list[tuple[int, int]]] = {}
    sizes: dict[Any, int] = {}
    for rank, items in enumerate(items_of_ranks):
        for position, item in enumerate(items):
            key = (item.index.fqn, item.index.offset)
            candidates.setdefault(key, []).append((rank, position))
            sizes[key] = _num_bytes(item)
    num_bytes = [0] * len(items_of_ranks)
    chosen: list[list[int]] = [[] for _ in items_of_ranks]
    for key in sorted(sizes, key=lambda key: (len(candidates[key]) > 1, -sizes[key])):
        owners = candidates[key] if spreads else candidates[key][:1]
        rank, position = min(owners, key=lambda owner: num_bytes[owner[0]])
        num_bytes[rank] += sizes[key]
        chosen[rank].append(position)
    return [sorted(positions) for positions in chosen]


def _num_bytes(item: WriteItem) -> int:
    """Return about the bytes of an item in a file.

    ``WriteItem.tensor_storage_size`` counts the whole tensor for each of its chunks.
    """
    data = item.tensor_data
    if data is None or data.chunk is None:
        return _OVERHEAD
    return _OVERHEAD + math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


class SigningWriter(FileSystemWriter):
    """A writer of one file for each rank, which computes its digest while it is written.

    Tensors are written from where they are if they are in the memory of the CPU; of others there is
    one copy at a time.

    Args:
        path: the directory.
        signs: compute digests, and write the manifest when all files are complete.
        beside: name -> content of other files, which the first rank writes and signs with them.
    """

    def __init__(self, path: Path, signs: bool = True, beside: Mapping[str, bytes] | None = None):
        super().__init__(path)
        self._signs, self._beside = signs, beside or {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        """Write the entries of this rank.

        Returns:
            The place of every entry, and the digest of the file as the last element.
        """
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results: list[Any] = []
        numbers: dict[tuple[Any, ...], bytes] = {}
        with ThreadPoolExecutor(1) as thread, open(Path(self.path) / name, "wb") as file:
            stream = _Stream(file, thread, self._signs)
            for item in sorted(plan.items, key=lambda item: item.type != WriteItemType.BYTE_IO):
                start = stream.size
                _write(planner.resolve_data(item), stream, numbers)
                info = _StorageInfo(name, start, stream.size - start)
                results.append(WriteResult(item.index, info.length, info))
            file.flush()
            os.fsync(file.fileno())
            results.append(_WrittenFile(name, stream.digest))
        done: Future[list[Any]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write ``.metadata``, the files beside, and the manifest; called on the first rank.

        Args:
            metadata: of all entries.
            results: of :meth:`write_data` on every rank.
        """
        # A string that stands in several tables is pickled once if it is one object.
        names = {key: key for key in metadata.state_dict_metadata}
        places: list[WriteResult] = []
        for *written, _ in results:
            for place in written:
                index = MetadataIndex(names[place.index.fqn], place.index.offset)
                places.append(dataclasses.replace(place, index=index))
        super().finish(metadata, [places])
        directory = Path(self.path)
        for name, content in self._beside.items():
            (directory / name).write_bytes(content)
            durable.sync_file(directory / name)
        if self._signs:
            files = {written[-1].name: written[-1].digest for written in results}
            for name in (METADATA, *self._beside):
                files[name] = digest_of(directory / name)
            Manifest(directory, files).write()


@dataclass(frozen=True)
class _WrittenFile:
    name: str
    digest: FileDigest | None


def _write(
    data: torch.Tensor | io.BytesIO, stream: _Stream, numbers: dict[tuple[Any, ...], bytes]
) -> None:
    """Write one entry.

    Args:
        data: a tensor, or the pickle of an object.
        stream: is written to.
        numbers: scalars that were written -> their bytes in the file. The steps of Adam are
            thousands of equal ones.
    """
    if isinstance(data, io.BytesIO):
        stream.write(data.getbuffer())
        return
    tensor = without_others(data)
    key = None
    if not tensor.ndim:
        key = (tensor.dtype, tensor.reshape(1).view(torch.uint8).numpy().tobytes())
        if key in numbers:
            stream.write(numbers[key])
            return
    archive = archive_of(tensor)
    if archive is None:
        torch.save(tensor, cast(IO[bytes], stream))
        return
    elements = tensor.reshape(-1).view(torch.uint8).numpy().data
    if tensor.nbytes >= _LARGE:
        stream.write(archive.before)
        stream.write(archive.end(stream.write_elements(elements)))
        return
    content = b"".join((archive.before, elements, archive.end(crc32(elements))))
    if key is not None:
        numbers[key] = content
    stream.write(content)


def without_others(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the CPU, with a storage that has its elements and no others.

    ``torch.save`` writes storages as a whole. A part of a flat buffer is not copied for that.
    """
    tensor = tensor.detach().cpu()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if not tensor.is_contiguous() or not tensor.numel():
        return tensor.clone()
    elements = tensor.reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(elements).view(tensor.dtype).view(tensor.shape)


class _Stream(io.RawIOBase):
    """A file that ``torch.save`` can write into, of which the digest is computed meanwhile.

    Args:
        file: is written to.
        thread: computes checksums of large tensors while they are written.
        signs: compute the digest.

    Attributes:
        size: bytes that have been written.
    """

    def __init__(self, file: IO[bytes], thread: ThreadPoolExecutor, signs: bool):
        self._file, self._thread = file, thread
        self._digest = BlockDigest() if signs else None
        self._checksum = crc32 if self._digest is None else self._digest.update
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self._digest is not None:
            self._digest.update(data)
        self._file.write(data)
        num_bytes = memoryview(data).nbytes
        self.size += num_bytes
        return num_bytes

    def write_elements(self, elements: memoryview) -> int:
        """Write the bytes of a large tensor, and return their CRC-32."""
        checksum = self._thread.submit(self._checksum, elements)
        try:
            self._file.write(elements)
        finally:
            result = checksum.result()  # the bytes may be gone when this returns
        self.size += elements.nbytes
        return result

    @property
    def digest(self) -> FileDigest | None:
        """Digest of all that has been written."""
        return None if self._digest is None else FileDigest(self.size, self._digest.hexdigest())
