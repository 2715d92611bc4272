# SPDX-License-Identifier: Apache-2.0
"""A directory of torch.distributed.checkpoint (DCP), opened by one process.

DCP's own reader unpickles whatever a file holds, reads whole chunks, and does not notice flipped
bits. This one unpickles data only (:mod:`megatron.checkpoint.core.safe_pickle`), reads the rows
that are asked for, and compares the checksum that ``torch.save`` has put beside every tensor.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from megatron.checkpoint.core import safe_pickle
from megatron.checkpoint.core.chunk_index import ChunkIndex, ChunkOverlap, chunks_overlap
from megatron.checkpoint.core.lazy_tensor import LazyTensor
from megatron.checkpoint.core.stored_metadata import (
    METADATA,
    DamagedCheckpointError,
    read_metadata,
)
from megatron.checkpoint.core.tensor_payload import TensorPayload, read_header

_BLOCK = 1 << 22
"""Bytes that are read at once to compute a checksum."""


class StoredCheckpoint:
    """A DCP directory, for reading.

    Attributes:
        directory: path of it.
        metadata: result of :func:`read_metadata`.
        tensors: key -> shape, dtype and chunks.
        objects: keys of everything else.

    Raises:
        DamagedCheckpointError: lists the files that are missing or shorter than the metadata says.
        RefusedPickleError: if ``.metadata`` names a class that checkpoints do not contain.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.metadata = read_metadata(self.directory)
        entries = self.metadata.state_dict_metadata
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
        }
        self.objects = [key for key in entries if key not in self.tensors]
        self._storage: dict[tuple[str, tuple[int, ...]], _StorageInfo] = {
            (index.fqn, tuple(index.offset or ())): info
            for index, info in self.metadata.storage_data.items()
        }
        self._chunk_indices: dict[str, ChunkIndex] = {}
        self._payloads: dict[tuple[str, int], TensorPayload] = {}
        self._unchanged: set[tuple[str, int]] = set()
        # Fields of param groups are a few values that are stored thousands of times.
        self._scalars: dict[bytes, Any] = {}
        self._check_files()

    def _check_files(self) -> None:
        needed: dict[str, int] = {}
        for info in self.metadata.storage_data.values():
            end = info.offset + info.length
            needed[info.relative_path] = max(needed.get(info.relative_path, 0), end)
        problems = []
        for name, length in sorted(needed.items()):
            path = self.directory / name
            if Path(name).is_absolute() or ".." in Path(name).parts:
                problems.append(f"{METADATA} names a file outside of the checkpoint: {name}")
            elif not path.is_file():
                problems.append(f"{name} is missing")
            elif path.stat().st_size < length:
                problems.append(f"{name} is cut off: {path.stat().st_size} bytes of {length}")
        for key, entry in self.tensors.items():
            offsets = [tuple(chunk.offsets) for chunk in entry.chunks]
            absent = [each for each in offsets if (key, each) not in self._storage]
            if absent and entry.size.numel():
                problems.append(f"{key}: its chunks at {absent[:3]} are nowhere")
        problems += [f"{key} is nowhere" for key in self.objects if (key, ()) not in self._storage]
        if problems:
            raise DamagedCheckpointError(
                "\n  ".join([f"{self.directory} is damaged or not complete:", *problems])
            )

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self.tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self.tensors[key].properties.dtype

    def num_bytes(self, key: str) -> int:
        """Return the number of bytes that a tensor or an object takes up in the files."""
        if key not in self.tensors:
            return self._storage[key, ()].length
        chunks = self.tensors[key].chunks
        return sum(self._storage[key, tuple(chunk.offsets)].length for chunk in chunks)

    def lazy(self, key: str, index: Sequence[int] = ()) -> LazyTensor:
        """Return the tensor ``key``, or its slice at ``index`` of its leading axes, unread."""
        index = tuple(index)
        shape = self.shape(key)[len(index) :]

        def read_rows(start: int, stop: int) -> torch.Tensor:
            ones = (1,) * len(index)
            if not shape:
                return self.read_region(key, index, ones).reshape(())
            # At index (3,) of a shape (8, 5, 4), rows 1 to 3 have the offsets (3, 1, 0) and the
            # sizes (1, 2, 4).
            offsets = (*index, start, *(0,) * (len(shape) - 1))
            sizes = (*ones, stop - start, *shape[1:])
            return self.read_region(key, offsets, sizes).reshape(stop - start, *shape[1:])

        return LazyTensor(shape, self.dtype(key), read_rows)

    def lazy_region(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> LazyTensor:
        """Return the elements ``[offset, offset + size)`` along every dim, unread."""

        def read_rows(start: int, stop: int) -> torch.Tensor:
            if not sizes:
                return self.read_region(key, (), ())
            return self.read_region(
                key, (offsets[0] + start, *offsets[1:]), (stop - start, *sizes[1:])
            )

        return LazyTensor(tuple(sizes), self.dtype(key), read_rows)

    def read_region(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Read the elements ``[offset, offset + size)`` along every dim, a tensor of ``sizes``.

        Raises:
            DamagedCheckpointError: if no chunk has some of them, or the stored bytes have changed.
        """
        if key not in self._chunk_indices:
            self._chunk_indices[key] = ChunkIndex(self.tensors[key].chunks)
        overlaps = list(self._chunk_indices[key].overlaps(offsets, sizes))
        missing = math.prod(sizes) - sum(math.prod(overlap.sizes) for overlap in overlaps)
        if missing > 0:
            raise DamagedCheckpointError(
                f"{self.directory}: no chunk of {key} has {missing} of its elements"
            )
        if missing < 0 or chunks_overlap((each.offsets, each.sizes) for each in overlaps):
            raise DamagedCheckpointError(f"{self.directory}: two chunks of {key} overlap")
        if len(overlaps) == 1:
            return self._read_chunk(key, overlaps[0])
        out = torch.empty(tuple(sizes), dtype=self.dtype(key))
        for overlap in overlaps:
            target = []
            for first, start, size in zip(offsets, overlap.offsets, overlap.sizes):
                target.append(slice(start - first, start - first + size))
            out[tuple(target)] = self._read_chunk(key, overlap)
        return out

    def _read_chunk(self, key: str, overlap: ChunkOverlap) -> torch.Tensor:
        """Read the elements that a region has in one chunk."""
        chunk, sizes = overlap.chunk, overlap.sizes
        payload = self._payload(key, chunk)
        starts = [offset - first for offset, first in zip(overlap.offsets, chunk.offsets)]
        region = [slice(start, start + size) for start, size in zip(starts, sizes)]
        if not payload.is_plain:
            storage = self._read_bytes(payload, 0, payload.num_bytes).view(payload.dtype)
            whole = storage.as_strided(payload.size, payload.stride, payload.start)
            return whole[tuple(region)].contiguous()
        if not sizes:
            return self._read_bytes(payload, 0, payload.num_bytes).view(payload.dtype).reshape(())
        # One contiguous range of bytes is read: the rows along the first dim that has several.
        # In an fp32 chunk of shape (4, 3, 5), the region at (2, 1, 0) of sizes (1, 2, 3) has two
        # rows along dim 1. Strides are 60, 20 and 4 bytes, so the range starts at 2 * 60 + 1 * 20 =
        # 140 and has 2 * 20 = 40 bytes, of shape (1, 2, 5), of which columns 0 to 3 are taken.
        several = [dim for dim, size in enumerate(sizes) if size > 1]
        rows_dim = several[0] if several else len(sizes) - 1
        itemsize = payload.dtype.itemsize
        strides = [math.prod(payload.size[dim + 1 :]) * itemsize for dim in range(len(sizes))]
        first_byte = sum(starts[dim] * strides[dim] for dim in range(rows_dim + 1))
        data = self._read_bytes(payload, first_byte, sizes[rows_dim] * strides[rows_dim])
        shape = (*(1,) * rows_dim, sizes[rows_dim], *payload.size[rows_dim + 1 :])
        rows = data.view(payload.dtype).reshape(shape)
        columns = [slice(None)] * (rows_dim + 1) + region[rows_dim + 1 :]
        return rows[tuple(columns)].contiguous()

    def _read_bytes(self, payload: TensorPayload, start: int, length: int) -> torch.Tensor:
        """Read some bytes of a storage, after its checksum was compared, as uint8."""
        if start or length != payload.num_bytes:
            self._check_unchanged(payload)
        data = torch.empty(length, dtype=torch.uint8)
        view: memoryview = data.numpy().data
        with open(payload.file, "rb", buffering=0) as file:
            file.seek(payload.offset + start)
            done = 0
            while done < length:
                count = file.readinto(view[done:])
                if not count:
                    raise DamagedCheckpointError(f"{payload.file} is cut off")
                done += count
        if length == payload.num_bytes:
            self._compare(payload, zlib.crc32(view))
        return data

    def _check_unchanged(self, payload: TensorPayload) -> None:
        """Read all of a storage once, before parts of it are used."""
        if (str(payload.file), payload.offset) in self._unchanged:
            return
        checksum, left = 0, payload.num_bytes
        with open(payload.file, "rb", buffering=0) as file:
            file.seek(payload.offset)
            while left and (block := file.read(min(left, _BLOCK))):
                checksum, left = zlib.crc32(block, checksum), left - len(block)
        self._compare(payload, checksum)

    def _compare(self, payload: TensorPayload, checksum: int) -> None:
        if payload.checksum is not None and checksum != payload.checksum:
            raise DamagedCheckpointError(
                f"{payload.file} has changed since it was written: the checksum of the tensor at"
                f" {payload.offset} differs"
            )
        self._unchanged.add((str(payload.file), payload.offset))

    def _payload(self, key: str, chunk: ChunkStorageMetadata) -> TensorPayload:
        info = self._storage[key, tuple(chunk.offsets)]
        position = (info.relative_path, info.offset)
        if position not in self._payloads:
            payload = read_header(self.directory / info.relative_path, info)
            if payload.size != tuple(chunk.sizes) or payload.dtype != self.dtype(key):
                raise DamagedCheckpointError(
                    f"{self.directory}: {key} is {payload.dtype} {payload.size} in"
                    f" {info.relative_path}, and {self.dtype(key)} {tuple(chunk.sizes)} in"
                    f" {METADATA}"
                )
            self._payloads[position] = payload
        return self._payloads[position]

    def read_object(self, key: str) -> Any:
        """Read the object that is stored under a key.

        Raises:
            DamagedCheckpointError: if it cannot be read.
            RefusedPickleError: if it names a class that checkpoints do not contain.
        """
        info = self._storage[key, ()]
        with open(self.directory / info.relative_path, "rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        if data in self._scalars:
            return self._scalars[data]
        try:
            value = safe_pickle.load_torch(data)
        except safe_pickle.RefusedPickleError as error:
            raise safe_pickle.RefusedPickleError(f"{self.directory}, {key}: {error}") from None
        except ValueError as error:
            raise DamagedCheckpointError(
                f"{self.directory}: {key} in {info.relative_path} is damaged: {error}"
            ) from error
        if safe_pickle.is_scalar(value):
            self._scalars[data] = value
        return value
