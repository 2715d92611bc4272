# SPDX-License-Identifier: Apache-2.0
"""The bytes around the elements of a tensor in a file of ``torch.save``, made without it.

``torch.save`` takes 70 microseconds for a small tensor: it pickles a description and makes an
archive of seven records. The description depends on shape and dtype alone, and the archive on it
and on one checksum. So both are made once for all tensors of a shape and dtype, byte for byte as
``torch.save`` makes them, but for a number that nothing reads (``.data/serialization_id``).
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
from collections import OrderedDict
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from megatron.checkpoint.integrity.block_digest import crc32

_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
"""The class by which ``torch.save`` names a dtype."""
_LARGEST = 1 << 31
"""Bytes of elements from which on an archive has fields of 64 bits, which are left to torch."""
_ALIGNMENT = 64
_LOCAL = struct.Struct("<4s5H3I2H")
_DESCRIPTOR = struct.Struct("<4s3I")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_FLAGS = 0x0808
"""The names are UTF-8, and a descriptor with checksum and size follows each record."""


class TensorArchive(NamedTuple):
    """An archive without the elements of its tensor.

    Attributes:
        before: the bytes that precede the elements.
        after: those that follow them, with zeros for their CRC-32.
        checksums: the positions of that CRC-32 in ``after``.
    """

    before: bytes
    after: bytes
    checksums: tuple[int, int]

    def end(self, checksum: int) -> bytes:
        """Return the bytes that follow elements with the CRC-32 ``checksum``."""
        after = bytearray(self.after)
        for position in self.checksums:
            struct.pack_into("<I", after, position, checksum)
        return bytes(after)


def archive_of(tensor: torch.Tensor) -> TensorArchive | None:
    """Return the archive for a tensor; None for one that is left to ``torch.save``.

    Args:
        tensor: on the CPU, without history of autograd. Its elements are written row after row.
    """
    is_plain = (
        type(tensor) is torch.Tensor
        and tensor.dtype in _STORAGES
        and tensor.is_contiguous()
        and tensor.numel() > 0  # torch gives a record of no bytes another header
        and tensor.nbytes < _LARGEST
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and not tensor.requires_grad
        and not tensor.is_neg()
        and not tensor.__dict__  # attributes would be pickled
        and sys.byteorder == "little"
    )
    return _archive(tensor.dtype, tuple(tensor.shape), tensor.stride()) if is_plain else None


@lru_cache(maxsize=4096)
def _archive(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorArchive:
    description = _description(dtype, shape, strides)
    archive = _ArchiveInTheMaking()
    archive.add("data.pkl", description)
    archive.add(".format_version", b"1")
    archive.add(".storage_alignment", str(_ALIGNMENT).encode())
    archive.add("byteorder", sys.byteorder.encode())
    archive.add_absent("data/0", math.prod(shape) * dtype.itemsize)
    elements = len(archive.content) - _DESCRIPTOR.size
    archive.add("version", b"3\n")
    archive.add(".data/serialization_id", b"%040d" % crc32(description))
    entry = archive.end()
    content = bytes(archive.content)
    # In the descriptor the CRC-32 follows four bytes.
    return TensorArchive(content[:elements], content[elements:], (4, entry - elements))


class _ArchiveInTheMaking:
    """A zip archive in the making, as PyTorchStreamWriter makes it.

    Attributes:
        content: its bytes, without those of the absent record.
    """

    def __init__(self) -> None:
        self.content = bytearray()
        self._num_absent = 0
        self._absent = 0
        self._entries: list[bytes] = []

    def add(self, name: str, data: bytes) -> None:
        """Append a record."""
        self._begin(name, crc32(data), len(data))
        self.content += data
        self._describe(crc32(data), len(data))

    def add_absent(self, name: str, num_bytes: int) -> None:
        """Append a record whose ``num_bytes`` bytes are left out, with zero for their CRC-32."""
        self._begin(name, 0, num_bytes)
        self._absent = len(self._entries) - 1
        self._num_absent = num_bytes
        self._describe(0, num_bytes)

    def _begin(self, name: str, checksum: int, num_bytes: int) -> None:
        full = f"archive/{name}".encode()
        position = len(self.content) + self._num_absent
        # An extra field "FB" pads the header, so that data begin at a multiple of the alignment.
        padding = -(position + _LOCAL.size + len(full) + 4) % _ALIGNMENT
        extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        self.content += _LOCAL.pack(b"PK\3\4", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(full), len(extra))
        self.content += full + extra
        lengths = (len(full), 0, 0, 0, 0)
        self._entries.append(
            _ENTRY.pack(
                *(b"PK\1\2", 0, 0, _FLAGS, 0, 0, 0),
                *(checksum, num_bytes, num_bytes, *lengths, 0, position),
            )
            + full
        )

    def _describe(self, checksum: int, num_bytes: int) -> None:
        self.content += _DESCRIPTOR.pack(b"PK\7\10", checksum, num_bytes, num_bytes)

    def end(self) -> int:
        """Append the directory, and return the position there of the absent bytes' CRC-32."""
        directory, count = b"".join(self._entries), len(self._entries)
        start = len(self.content) + self._num_absent
        before = len(b"".join(self._entries[: self._absent]))
        checksum = len(self.content) + before + 16  # the eighth field of an entry
        self.content += directory
        end = start + len(directory)
        sizes = (count, count, len(directory), start)
        self.content += _END_64.pack(b"PK\6\6", _END_64.size - 12, 0x31E, 45, 0, 0, *sizes)
        self.content += _LOCATOR_64.pack(b"PK\6\7", 0, end, 1)
        self.content += _END.pack(b"PK\5\6", 0, 0, *sizes, 0)
        return checksum


# ---- the description


class _StorageReference(NamedTuple):
    reference: tuple[Any, ...]


class _DescribedTensor(NamedTuple):
    arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_tensor_v2, self.arguments


class _DescriptionPickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        return value.reference if isinstance(value, _StorageReference) else None


def _description(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """Return the pickle that describes a tensor over the storage ``0``."""
    storage = _StorageReference(("storage", _STORAGES[dtype], "0", "cpu", math.prod(shape)))
    file = io.BytesIO()
    # The function is private, but files name it.
    _DescriptionPickler(file, protocol=2).dump(
        _DescribedTensor((storage, 0, shape, strides, False, OrderedDict()))
    )
    return file.getvalue()
