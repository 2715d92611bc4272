# SPDX-License-Identifier: Apache-2.0
"""Writer for ``torch.distributed.checkpoint.save``: the same files, with less work, and signed.

torch's own writer copies the tensors of a file and keeps the copies until the file is complete, and
computes no digests. ``torch.save`` takes 70 microseconds for a small tensor: it pickles a
description and makes an archive of seven records. All of it but the elements and their checksum
depends on shape and dtype alone, so it is made once for all tensors of a shape and dtype.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron.checkpoint.core.lazy_tensor import Shape, bytes_of
from megatron.checkpoint.integrity.block_digest import BlockDigest, crc32
from megatron.checkpoint.integrity.manifest import FileDigest, Manifest, digest_of
from megatron.checkpoint.store import durable
from megatron.checkpoint.store.directory import METADATA

_LARGE = 1 << 20
"""From this size on, checksums are computed by another thread while bytes are written."""
_LARGEST = 1 << 31
"""Bytes of elements from which on an archive has fields of 64 bits: it is left to torch."""
_CRC_BEFORE_NAME = 30
"""The checksum of a record lies as many bytes before its name in the directory of the archive."""


class SigningWriter(FileSystemWriter):
    """A writer of one file for each rank, which computes its digest while it is written.

    Tensors are written from where they are if they are in the memory of the CPU; of others there is
    one copy at a time.

    Args:
        path: the directory.
        extra_files: name -> content of further files, which the first rank writes and signs too.
    """

    def __init__(self, path: Path, extra_files: Mapping[str, bytes] | None = None):
        super().__init__(path)
        self._extra_files = extra_files or {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        """Write the entries of this rank.

        Returns:
            The place of every entry, and as the last element the name and digest of the file.
        """
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results: list[Any] = []
        numbers: dict[tuple[Any, ...], bytes] = {}
        with ThreadPoolExecutor(1) as thread, durable.written(Path(self.path) / name) as file:
            stream = _Stream(file, thread)
            for item in sorted(plan.items, key=lambda item: item.type != WriteItemType.BYTE_IO):
                start = stream.size
                _write(planner.resolve_data(item), stream, numbers)
                info = _StorageInfo(name, start, stream.size - start)
                results.append(WriteResult(item.index, info.length, info))
            results.append((name, stream.digest))
        done: Future[list[Any]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write ``.metadata``, the further files, and the manifest; called on the first rank.

        Args:
            metadata: metadata of all entries.
            results: results of :meth:`write_data` on every rank.
        """
        # A string that stands in several tables is pickled once if it is one object.
        names = {key: key for key in metadata.state_dict_metadata}
        metadata.storage_data = {}
        for *written, _ in results:
            for place in written:
                index = MetadataIndex(names[place.index.fqn], place.index.offset)
                metadata.storage_data[index] = place.storage_data
        # Not left to torch: 2.10 writes a copy, without the fields that Megatron-Core adds.
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_meta = self.storage_meta()
        directory = Path(self.path)
        durable.write_bytes(directory / METADATA, pickle.dumps(metadata))
        for name, content in self._extra_files.items():
            with durable.written(directory / name) as file:
                file.write(content)
        files = dict(written[-1] for written in results)
        for name in (METADATA, *self._extra_files):
            files[name] = digest_of(directory / name)
        Manifest(directory, files).write()


def _write(
    data: torch.Tensor | io.BytesIO,
    stream: _Stream,
    numbers: dict[tuple[Any, ...], bytes],
) -> None:
    """Write a tensor, or the pickle of an object.

    Scalars are kept in ``numbers`` with their bytes: the steps of Adam are thousands of equal ones.
    """
    if isinstance(data, io.BytesIO):
        stream.write(data.getbuffer())
        return
    tensor = without_others(data)
    key = None
    if not tensor.ndim:
        key = (tensor.dtype, bytes_of(tensor).tobytes())
        if key in numbers:
            stream.write(numbers[key])
            return
    archive = archive_of(tensor)
    if archive is None:
        torch.save(tensor, cast(IO[bytes], stream))
        return
    elements = bytes_of(tensor)
    if tensor.nbytes >= _LARGE:
        stream.write(archive.before)
        stream.write(archive.end(stream.write_elements(elements)))
        return
    end = archive.end(crc32(elements))
    content = b"".join((archive.before, elements, end))
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
    elements = torch.frombuffer(bytes_of(tensor), dtype=tensor.dtype)
    return elements.view(tensor.shape)


class _Stream(io.RawIOBase):
    """A file that ``torch.save`` can write into, with its size and digest until now.

    Args:
        file: file that is open for writing.
        thread: computes the checksums of large tensors while they are written.
    """

    def __init__(self, file: IO[bytes], thread: ThreadPoolExecutor):
        self._file = file
        self._thread = thread
        self._digest = BlockDigest()
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self._file.write(data)
        num_bytes = memoryview(data).nbytes
        self.size += num_bytes
        return num_bytes

    def write_elements(self, elements: memoryview) -> int:
        """Write the bytes of a large tensor, and return their CRC-32."""
        checksum = self._thread.submit(self._digest.update, elements)
        try:
            self._file.write(elements)
        finally:
            result = checksum.result()  # the bytes may be gone when this returns
        self.size += elements.nbytes
        return result

    @property
    def digest(self) -> FileDigest:
        """Digest of all that has been written."""
        return FileDigest(self.size, self._digest.hexdigest())


# ---- the archive of a tensor, without its elements


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
        and tensor.is_contiguous()
        and 0 < tensor.nbytes < _LARGEST  # torch gives a record of no bytes another header
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and not tensor.requires_grad
        and not tensor.is_neg()
        and not tensor.is_conj()
        and not tensor.__dict__  # attributes would be pickled
    )
    if not is_plain:
        return None
    return _archive(tensor.dtype, tuple(tensor.shape), tensor.stride())


@lru_cache(maxsize=4096)
def _archive(
    dtype: torch.dtype,
    shape: Shape,
    strides: Shape,
) -> TensorArchive:
    file = _FileWithGap()
    with torch.serialization.skip_data():
        tensor = torch.empty_strided(shape, strides, dtype=dtype)
        torch.save(tensor, cast(IO[bytes], file))
    after = file.getvalue()
    # A descriptor with the checksum after its signature follows the elements.
    name = after.index(b"archive/data/0", after.index(b"PK\1\2"))
    return TensorArchive(file.before, after, checksums=(4, name - _CRC_BEFORE_NAME))


class _FileWithGap(io.BytesIO):
    """A file in which ``torch.save`` leaves out the elements by moving on.

    ``before`` is what was written until then; the file has what is written afterwards.
    """

    before = b""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.before = self.getvalue()
        super().seek(0)
        self.truncate()
        return offset
