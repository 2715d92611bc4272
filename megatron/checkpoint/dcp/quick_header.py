# SPDX-License-Identifier: Apache-2.0
"""Position of a tensor's elements in a file of ``torch.save``, found by two short reads.

:func:`megatron.checkpoint.dcp.tensor_payload.read_header` checks all that it reads, which takes
longer than it takes to read a small tensor.
"""

from __future__ import annotations

import io
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron.checkpoint.dcp.tensor_payload import TensorPayload, TensorUnpickler, read_header
from megatron.checkpoint.integrity.checksum import crc32

_READ = 1 << 11
"""Bytes that are read at the start and at the end of an archive."""
_END = struct.Struct("<4s4H2IH")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL_LENGTHS = struct.Struct("<2H")


@dataclass(frozen=True)
class _Record:
    """A file in a zip archive.

    Attributes:
        header: position of its local header in the archive.
        num_bytes: of its content, which is not compressed.
        checksum: crc32 of its content.
    """

    header: int
    num_bytes: int
    checksum: int


class QuickHeaders:
    """Headers of tensors in files whose content was verified, or is not to be."""

    def __init__(self) -> None:
        # Tensors of one shape and dtype have the same description.
        self._described: dict[bytes, Any] = {}

    def read(self, file: IO[bytes], path: Path, info: _StorageInfo) -> TensorPayload:
        """Return the result of :func:`read_header`, which reads every archive of another form.

        Args:
            file: open for reading.
            path: of the file.
            info: the position of the archive in the file.
        """
        payload = None
        if not getattr(info, "transform_descriptors", None):
            try:
                payload = self._read(file, path, info)
            except (ValueError, LookupError, struct.error):
                payload = None
        return payload or read_header(path, info)

    def _read(self, file: IO[bytes], path: Path, info: _StorageInfo) -> TensorPayload | None:
        head = os.pread(file.fileno(), min(_READ, info.length), info.offset)
        records = _records(file, info)
        pickle = records["data.pkl"]
        start = _start(head, pickle)
        description = head[start : start + pickle.num_bytes]
        if crc32(description) != pickle.checksum:
            return None
        if description not in self._described:
            self._described[description] = TensorUnpickler(io.BytesIO(description)).load()
        tensor = self._described[description]
        storage = records[f"data/{tensor.storage.key}"]
        start = _start(head, storage)
        payload = TensorPayload(
            path,
            info.offset + start,
            storage.num_bytes,
            storage.checksum,
            tensor.storage.dtype,
            tensor.size,
            tensor.stride,
            tensor.start,
        )
        return payload if payload.is_plain and start + storage.num_bytes <= info.length else None


def _records(file: IO[bytes], info: _StorageInfo) -> dict[str, _Record]:
    """Return the records of an archive by their names, from the directory at its end."""
    tail = os.pread(
        file.fileno(), min(_READ, info.length), info.offset + max(info.length - _READ, 0)
    )
    signature, _, _, _, count, size, start, _ = _END.unpack(tail[-_END.size :])
    position = len(tail) - (info.length - start)
    if signature != b"PK\5\6" or position < 0 or position + size > len(tail):
        raise ValueError("the directory is elsewhere")
    records = {}
    for _ in range(count):
        entry = _ENTRY.unpack_from(tail, position)
        signature, method, checksum, compressed, num_bytes = entry[0], entry[4], *entry[7:10]
        name_length, extra_length, comment_length, header = *entry[10:13], entry[16]
        position += _ENTRY.size
        name = tail[position : position + name_length].decode().partition("/")[2]
        if signature != b"PK\1\2" or method or compressed != num_bytes or num_bytes == 0xFFFFFFFF:
            raise ValueError("it is compressed, or larger than this directory can say")
        records[name] = _Record(header, num_bytes, checksum)
        position += name_length + extra_length + comment_length
    return records


def _start(head: bytes, record: _Record) -> int:
    """Return the position of a record's content in the archive; see ``_start_of_record``."""
    if head[record.header : record.header + 4] != b"PK\3\4":
        raise ValueError("its header is not at the start of the archive")
    lengths: tuple[int, int] = _LOCAL_LENGTHS.unpack_from(head, record.header + 26)
    return record.header + 30 + sum(lengths)
