# SPDX-License-Identifier: Apache-2.0
"""Tensors in files that ``torch.save`` wrote: their place, their checksum, and any chunk of them.

``torch.save`` writes a zip archive: a pickle that describes the tensor, and a record with the bytes
of its storage, uncompressed, with a checksum in the directory of the archive. DCP files are such
archives one after another.
"""

from __future__ import annotations

import io
import math
import os
import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron.checkpoint.core.lazy_tensor import Shape, bytes_of
from megatron.checkpoint.dcp import safe_pickle
from megatron.checkpoint.dcp.chunk import Chunk
from megatron.checkpoint.dcp.safe_pickle import RefusedPickleError
from megatron.checkpoint.integrity.block_digest import crc32
from megatron.checkpoint.integrity.manifest import DamagedCheckpointError
from megatron.checkpoint.store.directory import METADATA

_CHECKED_BLOCK = 1 << 22
"""Bytes that are read at once to compute a checksum."""
_BLOCK = 1 << 24
"""Bytes that are read at once if they cannot be read into the tensor itself."""


@dataclass(frozen=True)
class TensorPayload:
    """The bytes of one stored tensor in a file.

    Attributes:
        file: path of the file.
        offset: offset of the storage in the file, in bytes.
        num_bytes: number of bytes of the storage.
        checksum: crc32 of the storage; None if the writer left it out.
        dtype: dtype of the tensor.
        size: size of the tensor, in elements.
        stride: stride of the tensor in the storage, in elements.
        start: start of the tensor in the storage, in elements.
    """

    file: Path
    offset: int
    num_bytes: int
    checksum: int | None
    dtype: torch.dtype
    size: Shape
    stride: Shape
    start: int

    @property
    def is_plain(self) -> bool:
        """True if the storage has the elements of the tensor and no others, row after row."""
        numel = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride)):
            if size > 1 and stride != numel:
                return False
            numel *= size
        return self.start == 0 and self.num_bytes == numel * self.dtype.itemsize


# ---- the place of a tensor


def read_header(
    file: IO[bytes],
    info: _StorageInfo,
    compares: bool = True,
) -> TensorPayload:
    """Find the elements of the tensor that ``torch.save`` wrote at ``info``, without reading them.

    Args:
        file: a file that is open for reading.
        info: the position of the archive in the file.
        compares: whether to compare checksums of everything but these elements, and with what torch
            would read. It is not needed where the digest of the file was compared.

    Raises:
        DamagedCheckpointError: if no tensor is there.
        RefusedPickleError: if the pickle names a class that checkpoints do not hold.
        NotImplementedError: if the file is encoded.
    """
    if getattr(info, "transform_descriptors", None):
        raise NotImplementedError(
            f"{file.name} is encoded with {info.transform_descriptors}, which is not read here"
        )
    try:
        return _payload_in(file, info, compares)
    except RefusedPickleError as error:
        raise RefusedPickleError(f"{file.name}: {error}") from None
    except Exception as error:  # bytes that were changed or cut off fail in every possible way
        raise DamagedCheckpointError(
            f"{file.name} is damaged at byte {info.offset}: {type(error).__name__}: {error}"
        ) from error


def _payload_in(
    file: IO[bytes],
    info: _StorageInfo,
    compares: bool,
) -> TensorPayload:
    window = _Window(file, info.offset, info.length)
    with zipfile.ZipFile(window) as archive:
        names = {}
        for name in archive.namelist():
            names[name.partition("/")[2]] = name
        key, tensor = _described(archive.read(names["data.pkl"]))
        record = archive.getinfo(names[f"data/{key}"])
        start = _start_of_record(file, info.offset + record.header_offset)
        if record.compress_type != zipfile.ZIP_STORED:
            raise ValueError("its data is compressed")
        if start + record.file_size > info.offset + info.length:
            raise ValueError("its data is longer than the file")
        if tensor.nbytes > record.file_size:
            raise ValueError(
                f"its {record.file_size} bytes are not enough for the shape {tuple(tensor.shape)}"
            )
        if compares:
            for other in archive.infolist():
                if other is not record and other.CRC:
                    archive.read(other)  # which compares its checksum
            if info.offset + _offset_by_torch(window, key) != start:
                raise ValueError("torch finds its data elsewhere")
    checksum: int | None = record.CRC
    if not checksum and record.file_size:
        checksum = None  # `torch.serialization.set_crc32_options(False)` writes none
    return TensorPayload(
        file=Path(file.name),
        offset=start,
        num_bytes=record.file_size,
        checksum=checksum,
        dtype=tensor.dtype,
        size=tuple(tensor.shape),
        stride=tensor.stride(),
        start=int(tensor.storage_offset()),
    )


def _offset_by_torch(window: _Window, key: str) -> int:
    """Return where torch finds the elements: by fields of the archive that have no checksum."""
    window.seek(0)
    # Any: torch's annotations lack the method.
    reader: Any = torch._C.PyTorchFileReader(cast(IO[bytes], window))
    offset: int = reader.get_record_offset(f"data/{key}")
    return offset


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
    """Some bytes of a file as a file of its own.

    Args:
        file: file that is open for reading; its position changes.
        offset: first byte.
        length: number of bytes.
    """

    def __init__(
        self,
        file: IO[bytes],
        offset: int,
        length: int,
    ):
        self._file = file
        self._offset = offset
        self._length = length
        self._position = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origins = {
            os.SEEK_SET: 0,
            os.SEEK_CUR: self._position,
            os.SEEK_END: self._length,
        }
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


@lru_cache(maxsize=4096)  # tensors of one shape and dtype have the same description
def _described(description: bytes) -> tuple[str, torch.Tensor]:
    """Return the name of the record with the elements, and the tensor on the meta device."""
    unpickler = _TensorUnpickler(io.BytesIO(description))
    tensor = unpickler.load()
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"it is a {type(tensor).__name__}, not a tensor")
    return unpickler.key, tensor


class _TensorUnpickler(safe_pickle.Unpickler):
    """Reads how ``torch.save`` describes one tensor, and not its elements."""

    key: str

    def persistent_load(self, reference: tuple[Any, ...]) -> torch.TypedStorage:
        _, storage_type, self.key, _, _ = reference
        # On the meta device a tensor makes room for its elements without any memory.
        storage = torch.UntypedStorage(0, device="meta")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates the storages that its files name
            dtype = getattr(storage_type, "dtype", torch.uint8)
            return torch.TypedStorage(wrap_storage=storage, dtype=dtype)


# ---- its elements


def checksum_of(file: IO[bytes], payload: TensorPayload) -> int:
    """Read all of a stored tensor and return its crc32."""
    checksum = 0
    left = payload.num_bytes
    file.seek(payload.offset)
    while left:
        block = file.read(min(left, _CHECKED_BLOCK))
        if not block:
            break
        checksum = crc32(block, checksum)
        left -= len(block)
    return checksum


def read_chunk(
    file: IO[bytes],
    payload: TensorPayload,
    offsets: Sequence[int],
    target: torch.Tensor,
) -> None:
    """Read a chunk of a stored tensor into ``target``, which has the sizes of the chunk.

    Args:
        file: file that holds the tensor.
        payload: the tensor in the file.
        offsets: offsets of the chunk in the stored tensor.
        target: on any device and of any dtype.

    Raises:
        DamagedCheckpointError: if the stored tensor has no such chunk, or the file ends before.
    """
    is_inside = target.dim() == len(payload.size)
    for offset, length, size in zip(offsets, target.shape, payload.size):
        is_inside = is_inside and offset + length <= size
    if not is_inside:
        raise DamagedCheckpointError(
            f"{file.name} has a tensor of shape {payload.size} at byte {payload.offset}, where"
            f" {METADATA} has another one"
        )
    if not target.numel():
        return
    if payload.is_plain:
        _read_rows(
            file,
            position=payload.offset,
            whole=payload.size,
            dtype=payload.dtype,
            offsets=offsets,
            target=target,
        )
        return
    storage = torch.empty(payload.num_bytes, dtype=torch.uint8)
    _read_into(file, payload.offset, storage)
    elements = storage.view(payload.dtype)
    whole = elements.as_strided(payload.size, payload.stride, payload.start)
    target.copy_(whole[_index(offsets, target)])


def _read_rows(
    file: IO[bytes],
    position: int,
    whole: Sequence[int],
    dtype: torch.dtype,
    offsets: Sequence[int],
    target: torch.Tensor,
) -> None:
    """Read a chunk of a tensor of shape ``whole`` that is stored row after row at ``position``."""
    is_contiguous = tuple(target.shape[1:]) == tuple(whole[1:])
    row = math.prod(whole[1:]) * dtype.itemsize
    first = position
    if offsets:
        first += offsets[0] * row
    is_direct = target.is_cpu and target.dtype == dtype and target.is_contiguous()
    if is_contiguous and is_direct:
        _read_into(file, first, target)
    elif not offsets:
        element = torch.empty((), dtype=dtype)
        _read_into(file, first, element)
        target.copy_(element)
    elif not is_contiguous and (len(target) == 1 or row > _BLOCK // 16):
        # Example: columns 2 and 3 of a few long rows. Each row's columns are read on their own.
        for number in range(len(target)):
            part = target[number]
            _read_rows(
                file,
                position=first + number * row,
                whole=whole[1:],
                dtype=dtype,
                offsets=offsets[1:],
                target=part,
            )
    else:
        num_rows = max(_BLOCK // row, 1)
        columns = _index((0, *offsets[1:]), target)
        for begin in range(0, len(target), num_rows):
            part = target[begin : begin + num_rows]
            block = torch.empty((len(part), *whole[1:]), dtype=dtype)
            _read_into(file, first + begin * row, block)
            part.copy_(block[columns])


def _index(offsets: Sequence[int], target: torch.Tensor) -> tuple[slice, ...]:
    """Return the index of a chunk at ``offsets`` that has the sizes of ``target``."""
    chunk = Chunk(tuple(offsets), tuple(target.shape))
    return chunk.slices([0] * target.dim())


def _read_into(
    file: IO[bytes],
    position: int,
    target: torch.Tensor,
) -> None:
    """Fill a contiguous tensor on the CPU with the bytes at ``position``."""
    view = bytes_of(target)
    done = 0
    while done < len(view):
        rest = view[done:]
        count = os.preadv(file.fileno(), [rest], position + done)
        if not count:
            raise DamagedCheckpointError(f"{file.name} is cut off")
        done += count
