# SPDX-License-Identifier: Apache-2.0
"""Position of a tensor's elements in a file that ``torch.save`` wrote, found without reading them.

``torch.save`` writes a zip archive: a pickle that describes the tensor, and a record with the bytes
of its storage, uncompressed, beside which the archive has a checksum. DCP files are such archives
one after another.
"""

from __future__ import annotations

import io
import math
import os
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron.checkpoint.dcp import safe_pickle
from megatron.checkpoint.dcp.stored_metadata import DamagedCheckpointError


@dataclass(frozen=True)
class TensorPayload:
    """The bytes of one chunk in a file.

    Attributes:
        file: that holds them.
        offset: of the storage in the file, in bytes.
        num_bytes: of the storage.
        checksum: crc32 of the storage; None if the writer left it out.
        dtype: of the tensor.
        size: of the tensor, in elements.
        stride: of the tensor in the storage, in elements.
        start: of the tensor in the storage, in elements.
        key: of the tensor, for messages.
    """

    file: Path
    offset: int
    num_bytes: int
    checksum: int | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    key: str = ""

    @property
    def is_plain(self) -> bool:
        """True if the storage has the elements of the tensor and no others, row after row."""
        if self.start or self.num_bytes != math.prod(self.size) * self.dtype.itemsize:
            return False
        return all(
            stride == math.prod(self.size[dim + 1 :])
            for dim, stride in enumerate(self.stride)
            if self.size[dim] > 1
        )


def read_header(path: Path, info: _StorageInfo) -> TensorPayload:
    """Find the elements of the tensor that ``torch.save`` wrote at ``info``.

    The checksums of everything but these elements are compared.

    Raises:
        DamagedCheckpointError: if no tensor is there.
        RefusedPickleError: if the pickle names a class that checkpoints do not hold.
        NotImplementedError: if the file is encoded.
    """
    if getattr(info, "transform_descriptors", None):
        raise NotImplementedError(
            f"{path} is encoded with {info.transform_descriptors}, which is not read here"
        )
    try:
        with (
            open(path, "rb") as file,
            zipfile.ZipFile(window := _Window(file, info.offset, info.length)) as archive,
        ):
            names = {name.partition("/")[2]: name for name in archive.namelist()}
            tensor = TensorUnpickler(io.BytesIO(archive.read(names["data.pkl"]))).load()
            record = archive.getinfo(names[f"data/{tensor.storage.key}"])
            for other in archive.infolist():
                if other is not record and other.CRC:
                    archive.read(other)  # which compares its checksum
            if record.compress_type != zipfile.ZIP_STORED:
                raise ValueError("its data is compressed")
            start = _start_of_record(file, info.offset + record.header_offset)
            # Torch reads the archive by other fields of it, which have no checksum.
            window.seek(0)
            # Any: torch's annotations lack the method.
            torch_reader: Any = torch._C.PyTorchFileReader(cast(IO[bytes], window))
            offset = torch_reader.get_record_offset(f"data/{tensor.storage.key}")
            if info.offset + offset != start:
                raise ValueError("torch finds its data elsewhere")
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
    return TensorPayload(
        path,
        start,
        record.file_size,
        checksum,
        tensor.storage.dtype,
        tensor.size,
        tensor.stride,
        tensor.start,
    )


def _start_of_record(file: IO[bytes], header: int) -> int:
    """Return the position of a record's bytes, which follow its local header in the zip archive.

    The header has 30 bytes, of which the last four are the lengths of the name and of the extra
    field that follow it. A header at 100 with a name of 12 bytes and an extra field of 20 ends at
    100 + 30 + 12 + 20 = 162.
    """
    file.seek(header + 26)
    lengths = file.read(4)
    name_length = int.from_bytes(lengths[:2], "little")
    extra_length = int.from_bytes(lengths[2:], "little")
    return header + 30 + name_length + extra_length


class _Window(io.RawIOBase):
    """Some bytes of a file as a file of its own."""

    def __init__(self, file: IO[bytes], offset: int, length: int):
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origins = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}
        position = offset + origins[whence]
        if position < 0:
            raise OSError("seek before the start")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._position)
        left = max(self._length - self._position, 0)
        data = self._file.read(min(len(buffer), left))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


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


class TensorUnpickler(safe_pickle.Unpickler):
    """Reads how ``torch.save`` describes one tensor, and not its elements."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class that a pickle names, or a stand-in for torch's function."""
        rebuild = _REBUILD.get(name) if module == "torch._utils" else None
        return super().find_class(module, name) if rebuild is None else rebuild

    def persistent_load(self, reference: tuple[Any, ...]) -> _Storage:
        """Return the dtype of a storage and its name in the archive."""
        _, storage_type, key, _, _ = reference
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates the storages that its files name
            return _Storage(getattr(storage_type, "dtype", torch.uint8), key)


def _tensor_v2(storage: _Storage, start: int, size: Any, stride: Any, *_: Any) -> _Tensor:
    return _Tensor(storage, start, tuple(size), tuple(stride))


def _tensor_v3(
    storage: _Storage,
    start: int,
    size: Any,
    stride: Any,
    requires_grad: bool,
    hooks: Any,
    dtype: torch.dtype,
    *_: Any,
) -> _Tensor:
    """Describe a tensor of a dtype without a class of storages, such as FP8."""
    return _Tensor(_Storage(dtype, storage.key), start, tuple(size), tuple(stride))


def _parameter(tensor: _Tensor, *_: Any) -> _Tensor:
    return tensor


_REBUILD: dict[str, Callable[..., _Tensor]] = {
    "_rebuild_tensor_v2": _tensor_v2,
    "_rebuild_tensor_v3": _tensor_v3,
    "_rebuild_parameter": _parameter,
}
"""Stand-ins for the functions of ``torch._utils`` that a pickle of a tensor calls."""
