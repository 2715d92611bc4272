# SPDX-License-Identifier: Apache-2.0
"""A directory of torch.distributed.checkpoint (DCP), opened by one process: any box of any tensor, any object, nothing else.

DCP's own reader unpickles whatever a file holds, reads whole chunks, and does not notice flipped
bits. This one unpickles data only (:mod:`megatron.checkpoint.core.safe_pickle`), reads the rows that are
asked for, and compares the checksum that ``torch.save`` has put beside every tensor.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorStorageMetadata,
)

from megatron.checkpoint.core import safe_pickle
from megatron.checkpoint.core.chunk_index import _span, _Spans, chunks_overlap
from megatron.checkpoint.core.lazy_tensor import LazyTensor
from megatron.checkpoint.core.stored_metadata import METADATA, DamagedCheckpointError, read_metadata
from megatron.checkpoint.core.tensor_payload import _Payload, _read_header

_BLOCK = 1 << 22


class StoredCheckpoint:
    """A DCP directory.

    Attributes:
        metadata: of :func:`read_metadata`.
        tensors: key -> shape, dtype and chunks.
        objects: keys of everything else.

    Raises:
        DamagedCheckpointError: listing the files that are missing or shorter than the metadata says.
        RefusedPickleError: where ``.metadata`` names a class that checkpoints do not hold.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.metadata = read_metadata(self.directory)
        entries = self.metadata.state_dict_metadata
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
        }
        self.objects = [key for key in entries if key not in self.tensors]
        self._places: dict[tuple[str, tuple[int, ...]], _StorageInfo] = {
            (index.fqn, tuple(index.offset or ())): info
            for index, info in self.metadata.storage_data.items()
        }
        self._chunks: dict[str, _Spans] = {}
        self._scalars: dict[
            bytes, Any
        ] = {}  # the fields of param groups: a few values, thousands of times
        self._payloads: dict[tuple[str, int], _Payload] = {}
        self._unchanged: set[tuple[str, int]] = set()
        self._check_files()

    def _check_files(self) -> None:
        needed: dict[str, int] = {}
        problems = []
        for info in self.metadata.storage_data.values():
            needed[info.relative_path] = max(
                needed.get(info.relative_path, 0), info.offset + info.length
            )
        for name, length in sorted(needed.items()):
            path = self.directory / name
            if Path(name).is_absolute() or ".." in Path(name).parts:
                problems.append(f"{METADATA} names a file outside of the checkpoint: {name}")
            elif not path.is_file():
                problems.append(f"{name} is missing")
            elif path.stat().st_size < length:
                problems.append(f"{name} is cut off: {path.stat().st_size} bytes of {length}")
        for key, entry in self.tensors.items():
            absent = [
                tuple(chunk.offsets)
                for chunk in entry.chunks
                if (key, tuple(chunk.offsets)) not in self._places
            ]
            problems += (
                [f"{key}: its chunks at {absent[:3]} are nowhere"]
                if absent and entry.size.numel()
                else []
            )
        problems += [f"{key} is nowhere" for key in self.objects if (key, ()) not in self._places]
        if problems:
            raise DamagedCheckpointError(
                "\n  ".join([f"{self.directory} is damaged or not complete:", *problems])
            )

    # ---- tensors
    # ------------------------------------------------------------------------------------------------

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        return self.tensors[key].properties.dtype

    def lazy(self, key: str, index: Sequence[int] = ()) -> LazyTensor:
        """The tensor ``key``, or what lies at ``index`` of its leading axes."""
        shape, index = self.shape(key), tuple(index)
        rest = shape[len(index) :]

        def read_rows(start: int, stop: int) -> torch.Tensor:
            if not rest:
                return self.read_region(key, index, (1,) * len(index)).reshape(())
            offsets, sizes = (
                (*index, start, *(0,) * (len(rest) - 1)),
                (*(1,) * len(index), stop - start, *rest[1:]),
            )
            return self.read_region(key, offsets, sizes).reshape(stop - start, *rest[1:])

        return LazyTensor(rest, self.dtype(key), read_rows)

    def lazy_region(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> LazyTensor:
        """The elements ``[offset, offset + size)`` along every dim."""

        def read_rows(start: int, stop: int) -> torch.Tensor:
            if not sizes:
                return self.read_region(key, (), ())
            return self.read_region(
                key, (offsets[0] + start, *offsets[1:]), (stop - start, *sizes[1:])
            )

        return LazyTensor(tuple(sizes), self.dtype(key), read_rows)

    def read_region(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """The elements ``[offset, offset + size)`` along every dim.

        Raises:
            DamagedCheckpointError: where no chunk has some of them, or what is stored has changed.
        """
        found = list(self._chunks_in(key, offsets, sizes))
        missing = math.prod(sizes) - sum(math.prod(extent) for _, _, extent in found)
        if missing > 0:
            raise DamagedCheckpointError(
                f"{self.directory}: no chunk of {key} has {missing} of its elements"
            )
        if missing < 0 or chunks_overlap([(low, extent) for _, low, extent in found]):
            raise DamagedCheckpointError(f"{self.directory}: two chunks of {key} overlap")
        out = None
        for chunk, lowest, extent in found:
            part = self._read_chunk(
                key, chunk, [low - first for low, first in zip(lowest, chunk.offsets)], extent
            )
            if len(found) == 1:
                return part
            if out is None:
                out = torch.empty(tuple(sizes), dtype=self.dtype(key))
            out[
                tuple(
                    slice(low - first, low - first + length)
                    for low, first, length in zip(lowest, offsets, extent)
                )
            ] = part
        return out if out is not None else torch.empty(tuple(sizes), dtype=self.dtype(key))

    def _chunks_in(
        self, key: str, offsets: Sequence[int], sizes: Sequence[int]
    ) -> Iterator[tuple[ChunkStorageMetadata, tuple[int, ...], list[int]]]:
        """The chunks that have some of a box, with offset and size of what they have, in the tensor."""
        for chunk in self._chunks_near(key, offsets, sizes):
            lowest = tuple(max(a, b) for a, b in zip(offsets, chunk.offsets))
            highest = [
                min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, chunk.offsets, chunk.sizes)
            ]
            extent = [high - low for low, high in zip(lowest, highest)]
            if all(length > 0 for length in extent):
                yield chunk, lowest, extent

    def _chunks_near(
        self, key: str, offsets: Sequence[int], sizes: Sequence[int]
    ) -> Iterator[ChunkStorageMetadata]:
        """All chunks that overlap a box in the first two dims: of stacked layers and experts, thousands do not."""
        if key not in self._chunks:
            spans: _Spans = {}
            for chunk in self.tensors[key].chunks:
                spans.setdefault(_span(chunk, 0), {}).setdefault(_span(chunk, 1), []).append(chunk)
            self._chunks[key] = spans
        first, second = ((a, a + n) for a, n in zip((*offsets, 0, 0)[:2], (*sizes, 1, 1)[:2]))
        for span, rest in self._chunks[key].items():
            if span[0] < first[1] and first[0] < span[1]:
                for inner, chunks in rest.items():
                    if inner[0] < second[1] and second[0] < inner[1]:
                        yield from chunks

    def _read_chunk(
        self, key: str, chunk: ChunkStorageMetadata, offsets: list[int], sizes: list[int]
    ) -> torch.Tensor:
        """A box of one chunk, by offsets in the chunk."""
        payload = self._payload(key, chunk)
        if not payload.is_plain:
            storage = self._read_bytes(payload, 0, payload.num_bytes).view(payload.dtype)
            whole = storage.as_strided(payload.size, payload.stride, payload.start)
            return whole[tuple(slice(a, a + n) for a, n in zip(offsets, sizes))].contiguous()
        if not sizes:
            return self._read_bytes(payload, 0, payload.num_bytes).view(payload.dtype).reshape(())
        # The rows of one dim, where all dims before it are at one index: one run of bytes.
        dim = next((d for d, n in enumerate(sizes) if n > 1), len(sizes) - 1)
        strides = [
            math.prod(payload.size[d + 1 :]) * payload.dtype.itemsize for d in range(len(sizes))
        ]
        start = sum(a * stride for a, stride in zip(offsets[: dim + 1], strides))
        run = self._read_bytes(payload, start, sizes[dim] * strides[dim]).view(payload.dtype)
        run = run.reshape(*(1,) * dim, sizes[dim], *payload.size[dim + 1 :])
        box = (slice(None),) * (dim + 1) + tuple(
            slice(a, a + n) for a, n in zip(offsets[dim + 1 :], sizes[dim + 1 :])
        )
        return run[box].contiguous()

    def _read_bytes(self, payload: _Payload, start: int, length: int) -> torch.Tensor:
        if start or length != payload.num_bytes:
            self._check_unchanged(payload)
        data = torch.empty(length, dtype=torch.uint8)
        view = memoryview(data.numpy())
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

    def _check_unchanged(self, payload: _Payload) -> None:
        """Read all of a payload once, before parts of it are taken."""
        if (str(payload.file), payload.offset) in self._unchanged:
            return
        checksum, left = 0, payload.num_bytes
        with open(payload.file, "rb", buffering=0) as file:
            file.seek(payload.offset)
            while left and (block := file.read(min(left, _BLOCK))):
                checksum, left = zlib.crc32(block, checksum), left - len(block)
        self._compare(payload, checksum)

    def _compare(self, payload: _Payload, checksum: int) -> None:
        if payload.checksum is not None and checksum != payload.checksum:
            raise DamagedCheckpointError(
                f"{payload.file} has changed since it was written: the checksum of the tensor at"
                f" {payload.offset} differs"
            )
        self._unchanged.add((str(payload.file), payload.offset))

    def _payload(self, key: str, chunk: ChunkStorageMetadata) -> _Payload:
        info = self._places[key, tuple(chunk.offsets)]
        place = (info.relative_path, info.offset)
        if place not in self._payloads:
            payload = _read_header(self.directory / info.relative_path, info)
            if payload.size != tuple(chunk.sizes) or payload.dtype != self.dtype(key):
                raise DamagedCheckpointError(
                    f"{self.directory}: {key} is {payload.dtype} {payload.size} in"
                    f" {info.relative_path}, and {self.dtype(key)} {tuple(chunk.sizes)} in"
                    f" {METADATA}"
                )
            self._payloads[place] = payload
        return self._payloads[place]

    # ---- everything else
    # ----------------------------------------------------------------------------------------

    def num_bytes(self, key: str) -> int:
        """Of an entry in the files."""
        chunks = self.tensors[key].chunks if key in self.tensors else [None]
        return sum(
            self._places[key, tuple(chunk.offsets) if chunk else ()].length for chunk in chunks
        )

    def read_object(self, key: str) -> Any:
        """What is stored under the key of an object.

        Raises:
            DamagedCheckpointError: where it cannot be read.
            RefusedPickleError: where it names a class that checkpoints do not hold.
        """
        info = self._places[key, ()]
        with open(self.directory / info.relative_path, "rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        if data in self._scalars:
            return self._scalars[data]
        try:
            value = safe_pickle.load_torch(data)
            if safe_pickle.is_scalar(value):
                self._scalars[data] = value
            return value
        except safe_pickle.RefusedPickleError as error:
            raise safe_pickle.RefusedPickleError(f"{self.directory}, {key}: {error}") from None
        except ValueError as error:
            raise DamagedCheckpointError(
                f"{self.directory}: {key} in {info.relative_path} is damaged: {error}"
            ) from error
