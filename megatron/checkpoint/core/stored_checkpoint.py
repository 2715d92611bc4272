# SPDX-License-Identifier: Apache-2.0
"""A directory of torch.distributed.checkpoint (DCP), opened by one process: any box of any tensor, any object, nothing else.

DCP's own reader unpickles whatever a file holds, reads whole chunks, and does not notice flipped
bits. This one unpickles data only (:mod:`megatron.checkpoint.core.safe_pickle`), reads the rows that are
asked for, and compares the checksum that ``torch.save`` has put beside every tensor.
"""

from __future__ import annotations

import io
import math
import os
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron.checkpoint.core import safe_pickle
from megatron.checkpoint.core.lazy_tensor import LazyTensor

METADATA = ".metadata"
_BLOCK = 1 << 22


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is missing, cut off or changed."""


def read_metadata(directory: Path) -> Any:
    """``.metadata``: DCP's, or what stands in for Megatron-Core's own.

    Raises:
        DamagedCheckpoint: where it is missing or damaged.
        RefusedPickle: where it names a class that checkpoints do not hold.
    """
    path = Path(directory) / METADATA
    if not path.is_file():
        raise DamagedCheckpoint(f"{directory} has no {METADATA}: it is no complete checkpoint")
    try:
        metadata = safe_pickle.load(path.read_bytes())
        _check_form(metadata)
    except safe_pickle.RefusedPickle as error:
        raise safe_pickle.RefusedPickle(f"{path}: {error}") from None
    except (ValueError, AttributeError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from error
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


@dataclass(frozen=True)
class _Payload:
    """Where the elements of one chunk lie.

    Attributes:
        file: that holds them.
        offset, num_bytes: of the storage in it.
        checksum: crc32 of the storage; None where the writer left it out.
        dtype, size, stride, start: of the tensor in the storage, in elements.
    """

    file: Path
    offset: int
    num_bytes: int
    checksum: int | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    @property
    def is_plain(self) -> bool:
        """Whether the storage is the tensor, row after row."""
        return (
            self.start == 0
            and self.num_bytes == math.prod(self.size) * self.dtype.itemsize
            and all(
                stride == math.prod(self.size[dim + 1 :])
                for dim, stride in enumerate(self.stride)
                if self.size[dim] > 1
            )
        )


class StoredCheckpoint:
    """A DCP directory.

    Attributes:
        metadata: of :func:`read_metadata`.
        tensors: key -> shape, dtype and chunks.
        objects: keys of everything else.

    Raises:
        DamagedCheckpoint: listing the files that are missing or shorter than the metadata says.
        RefusedPickle: where ``.metadata`` names a class that checkpoints do not hold.
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
            raise DamagedCheckpoint(
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
                return self.read_box(key, index, (1,) * len(index)).reshape(())
            offsets, sizes = (
                (*index, start, *(0,) * (len(rest) - 1)),
                (*(1,) * len(index), stop - start, *rest[1:]),
            )
            return self.read_box(key, offsets, sizes).reshape(stop - start, *rest[1:])

        return LazyTensor(rest, self.dtype(key), read_rows)

    def lazy_box(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> LazyTensor:
        """The elements ``[offset, offset + size)`` along every dim."""

        def read_rows(start: int, stop: int) -> torch.Tensor:
            if not sizes:
                return self.read_box(key, (), ())
            return self.read_box(
                key, (offsets[0] + start, *offsets[1:]), (stop - start, *sizes[1:])
            )

        return LazyTensor(tuple(sizes), self.dtype(key), read_rows)

    def read_box(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """The elements ``[offset, offset + size)`` along every dim.

        Raises:
            DamagedCheckpoint: where no chunk has some of them, or what is stored has changed.
        """
        found = list(self._chunks_in(key, offsets, sizes))
        missing = math.prod(sizes) - sum(math.prod(extent) for _, _, extent in found)
        if missing > 0:
            raise DamagedCheckpoint(
                f"{self.directory}: no chunk of {key} has {missing} of its elements"
            )
        if missing < 0 or overlap([(low, extent) for _, low, extent in found]):
            raise DamagedCheckpoint(f"{self.directory}: two chunks of {key} overlap")
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
                    raise DamagedCheckpoint(f"{payload.file} is cut off")
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
            raise DamagedCheckpoint(
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
                raise DamagedCheckpoint(
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
            DamagedCheckpoint: where it cannot be read.
            RefusedPickle: where it names a class that checkpoints do not hold.
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
        except safe_pickle.RefusedPickle as error:
            raise safe_pickle.RefusedPickle(f"{self.directory}, {key}: {error}") from None
        except ValueError as error:
            raise DamagedCheckpoint(
                f"{self.directory}: {key} in {info.relative_path} is damaged: {error}"
            ) from error


_Spans = dict[tuple[int, int], dict[tuple[int, int], list[ChunkStorageMetadata]]]
"""Chunks by what they take up of dim 0, and of dim 1."""


def _span(chunk: ChunkStorageMetadata, dim: int) -> tuple[int, int]:
    return (
        (chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim])
        if dim < len(chunk.offsets)
        else (0, 1)
    )


def _read_header(path: Path, info: _StorageInfo) -> _Payload:
    """Where a tensor that ``torch.save`` wrote at ``info`` lies in the file."""
    if getattr(info, "transform_descriptors", None):
        raise NotImplementedError(
            f"{path} is encoded with {info.transform_descriptors}, which is not read here"
        )
    try:
        with (
            open(path, "rb") as file,
            zipfile.ZipFile(_Window(file, info.offset, info.length)) as archive,
        ):
            names = {name.partition("/")[2]: name for name in archive.namelist()}
            tensor = _TensorUnpickler(io.BytesIO(archive.read(names["data.pkl"]))).load()
            record = archive.getinfo(names[f"data/{tensor.storage.key}"])
            if record.compress_type != zipfile.ZIP_STORED:
                raise ValueError("its data is compressed")
            file.seek(
                info.offset + record.header_offset + 26
            )  # past the fixed part of the local header
            lengths = file.read(4)
            skip = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
            start = info.offset + record.header_offset + 30 + skip
            if start + record.file_size > info.offset + info.length:
                raise ValueError("its data is longer than the file")
            if math.prod(tensor.size) * tensor.storage.dtype.itemsize > record.file_size:
                raise ValueError(
                    f"its {record.file_size} bytes are not enough for the shape {tensor.size}"
                )
    except safe_pickle.RefusedPickle as error:
        raise safe_pickle.RefusedPickle(f"{path}: {error}") from None
    except Exception as error:  # bytes that were changed or cut off fail in every possible way
        raise DamagedCheckpoint(
            f"{path} is damaged at byte {info.offset}: {type(error).__name__}: {error}"
        ) from error
    # `torch.serialization.set_crc32_options(False)` writes no checksum.
    checksum = record.CRC or (None if record.file_size else 0)
    return _Payload(
        path,
        start,
        record.file_size,
        checksum,
        tensor.storage.dtype,
        tensor.size,
        tensor.stride,
        tensor.start,
    )


class _Window(io.RawIOBase):
    """Some bytes of a file as a file of its own."""

    def __init__(self, file: IO[bytes], offset: int, length: int):
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position = (
            offset
            + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        )
        if position < 0:
            raise OSError("seek before the start")
        self._position = position
        return position

    def read(self, size: int = -1) -> bytes:
        left = max(self._length - self._position, 0)
        self._file.seek(self._offset + self._position)
        data = self._file.read(left if size < 0 else min(size, left))
        self._position += len(data)
        return data


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    key: str


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    start: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _TensorUnpickler(safe_pickle.Unpickler):
    """Reads what ``torch.save`` says about one tensor, and not its elements."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, start, size, stride, *_: _Tensor(
                storage, start, tuple(size), tuple(stride)
            )
        if (module, name) == (
            "torch._utils",
            "_rebuild_tensor_v3",
        ):  # of dtypes without a class of storages, such as FP8
            return lambda storage, start, size, stride, grad, hooks, dtype, *_: _Tensor(
                _Storage(dtype, storage.key), start, tuple(size), tuple(stride)
            )
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *_: tensor
        return super().find_class(module, name)

    def persistent_load(self, reference: tuple[Any, ...]) -> _Storage:
        _, kind, key, _, _ = reference
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates the storages that its files name
            return _Storage(getattr(kind, "dtype", torch.uint8), key)


def overlap(boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether two of some boxes, by offset and size, have an element in common.

    Swept along dim 0.
    """
    active: list[tuple[Sequence[int], Sequence[int]]] = []
    for offsets, sizes in sorted(boxes):
        active = [
            other for other in active if not offsets or other[0][0] + other[1][0] > offsets[0]
        ]
        for start, extent in active:
            if all(a < b + m and b < a + n for a, n, b, m in zip(offsets, sizes, start, extent)):
                return True
        active.append((offsets, sizes))
    return False
