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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron.checkpoint.core import safe_pickle
from megatron.checkpoint.core.stored_metadata import DamagedCheckpointError


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
    except safe_pickle.RefusedPickleError as error:
        raise safe_pickle.RefusedPickleError(f"{path}: {error}") from None
    except Exception as error:  # bytes that were changed or cut off fail in every possible way
        raise DamagedCheckpointError(
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
