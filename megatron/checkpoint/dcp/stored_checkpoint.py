# SPDX-License-Identifier: Apache-2.0
"""A directory of torch.distributed.checkpoint (DCP), opened by one process.

DCP's own reader unpickles whatever a file holds, reads whole chunks, and does not notice flipped
bits. This one unpickles data only (:mod:`megatron.checkpoint.dcp.safe_pickle`), reads only the rows
that are needed, and trusts no file: one that the manifest lists must have its digest, and without a
manifest the checksums are compared that ``torch.save`` has stored with all tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.checkpoint.core.lazy_tensor import LazyTensor, Shape
from megatron.checkpoint.core.parts import Progress, ignore_progress
from megatron.checkpoint.dcp import safe_pickle
from megatron.checkpoint.dcp.chunk import Chunk, ChunkIndex, chunks_overlap
from megatron.checkpoint.dcp.stored_metadata import read_metadata
from megatron.checkpoint.dcp.tensor_payload import (
    TensorPayload,
    checksum_of,
    read_chunk,
    read_header,
)
from megatron.checkpoint.integrity.manifest import DamagedCheckpointError, FileIntegrity, is_of_rank
from megatron.checkpoint.store import durable
from megatron.checkpoint.store.directory import METADATA


class StoredCheckpoint:
    """A DCP directory, for reading.

    Args:
        directory: path of it.
        verify: whether to compare digests and checksums. Sizes of files are always compared, and so
            are the checksums of objects, which are small.

    Attributes:
        directory: path of it.
        has_manifest: True if digests of all files are known.
        metadata: result of :func:`read_metadata`.
        tensors: key -> shape and dtype.
        chunks: key of a tensor -> its chunks in the files.
        objects: keys of everything else.

    Raises:
        DamagedCheckpointError: lists the files that are missing, or not of the size in the metadata
            or the manifest, and with ``verify`` those without tensors that have changed and those
            that the manifest does not list.
        RefusedPickleError: if ``.metadata`` names a class that checkpoints do not contain.
    """

    def __init__(self, directory: str | Path, verify: bool = True):
        self.directory = Path(directory)
        self._integrity = FileIntegrity(self.directory, verify)
        self.has_manifest = self._integrity.manifest is not None
        self.metadata = read_metadata(self.directory)
        entries = self.metadata.state_dict_metadata
        self.tensors: dict[str, TensorStorageMetadata] = {}
        self.chunks: dict[str, list[Chunk]] = {}
        self.objects: list[str] = []
        for key, entry in entries.items():
            if isinstance(entry, TensorStorageMetadata):
                self.tensors[key] = entry
                self.chunks[key] = [Chunk.of(chunk) for chunk in entry.chunks]
            else:
                self.objects.append(key)
        self._storage: dict[tuple[str, Shape], _StorageInfo] = {}
        for index, info in self.metadata.storage_data.items():
            offsets = tuple(index.offset or ())
            self._storage[index.fqn, offsets] = info
        self._chunk_indices: dict[str, ChunkIndex] = {}
        self._payloads: dict[tuple[str, int], TensorPayload] = {}
        self._unchanged: set[TensorPayload] = set()
        self._check_files()

    def _check_files(self) -> None:
        problems = list(self._integrity.problems_of_files(self.metadata))
        for key, chunks in self.chunks.items():
            absent = []
            for chunk in chunks:
                if (key, chunk.offsets) not in self._storage:
                    absent.append(chunk.offsets)
            if absent and all(self.shape(key)):
                problems.append(f"{key}: its chunks at {absent[:3]} are nowhere in {METADATA}")
        for key in self.objects:
            if (key, ()) not in self._storage:
                problems.append(f"{key} is nowhere in {METADATA}")
        described = self.metadata.state_dict_metadata
        for key in dict.fromkeys(key for key, _ in self._storage):
            if key not in described:
                problems.append(f"{key} is in the files, but not described in {METADATA}")
        self._integrity.raise_if_any(problems)

    # ---- integrity

    def damaged_files(
        self,
        rank: int = 0,
        world_size: int = 1,
        progress: Progress = ignore_progress,
    ) -> list[str]:
        """Find the files with tensors that have changed or are of another checkpoint.

        Without ``verify`` there are none.

        Args:
            rank: the rank of this process. It reads its share of the files; those of other ranks
                count as sound afterwards.
            world_size: number of ranks that share the work.
            progress: called with the size of every file that was read, in bytes.

        Returns:
            A message for each of these files.
        """
        problems = []
        if self._integrity.verify:
            for name in self._integrity.data_files:
                if is_of_rank(name, rank, world_size):
                    problem = self._integrity.problem_of_content(name, self._changed_entries)
                    if problem is not None:
                        problems.append(problem)
                    status = (self.directory / name).stat()
                    progress(status.st_size)
        self._integrity.trust(self._integrity.data_files)
        return problems

    def _changed_entries(self, file: str, keys: Sequence[str]) -> list[str]:
        """Return the keys of the entries in a file that have changed since they were written."""
        changed = []
        for key in keys:
            try:
                self.check_entry(key, file)
            except (ValueError, NotImplementedError):
                changed.append(key)
        return changed

    def check_entry(self, key: str, file: str | None = None) -> None:
        """Compare the checksums of an entry, or of those of its chunks that are in ``file``.

        Without ``verify`` only its description is compared with the metadata.

        Raises:
            DamagedCheckpointError: if it has changed, or does not match the metadata.
            RefusedPickleError: if it names a class that checkpoints do not contain.
        """
        if key not in self.tensors:
            self._unpickle(key)
            return
        for chunk in self.chunks[key]:
            info = self._storage.get((key, chunk.offsets))
            is_asked = info is not None and file in (None, info.relative_path)
            if is_asked:
                payload = self._payload(key, chunk)
                if self._integrity.verify:
                    self._compare_checksum(key, payload)

    def _refuse_damaged(self, file: str) -> None:
        """Refuse a file that is not the one of the manifest, before anything of it is used."""
        if self._integrity.verify and self.has_manifest:
            problem = self._integrity.problem_of_content(file, self._changed_entries)
            if problem is not None:
                self._integrity.raise_if_any([problem])

    # ---- entries

    def shape(self, key: str) -> Shape:
        """Return the shape of a tensor."""
        return tuple(self.tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self.tensors[key].properties.dtype

    def num_bytes(self, key: str) -> int:
        """Return the number of bytes that a tensor or an object takes up in the files."""
        if key not in self.tensors:
            return self._storage[key, ()].length
        num_bytes = 0
        for chunk in self.chunks[key]:
            info = self._storage[key, chunk.offsets]
            num_bytes += info.length
        return num_bytes

    def lazy(self, key: str, index: Sequence[int] = ()) -> LazyTensor:
        """Return the tensor ``key``, or its slice at ``index`` of its leading axes, unread."""
        shape = self.shape(key)[len(index) :]
        # At index (3,) of a shape (8, 5, 4), the slice is the chunk at (3, 0, 0) of (1, 5, 4).
        offsets = (*index, *[0] * len(shape))
        sizes = (*[1] * len(index), *shape)
        chunk = Chunk(offsets, sizes)
        return self.lazy_chunk(key, chunk, num_leading=len(index))

    def lazy_chunk(
        self,
        key: str,
        chunk: Chunk,
        num_leading: int = 0,
    ) -> LazyTensor:
        """Return a chunk of a tensor, unread.

        Args:
            key: key of the tensor.
            chunk: any region of the tensor; it need not be a chunk of the file.
            num_leading: number of leading dims, of size 1, that are left out of the result.
        """
        shape = chunk.sizes[num_leading:]

        def read_rows(start: int, stop: int) -> torch.Tensor:
            if not shape:
                element = self.read_chunk(key, chunk)
                return element.reshape(())
            chunk_of_rows = chunk.rows(start, stop, num_leading)
            rows = self.read_chunk(key, chunk_of_rows)
            return rows.reshape(stop - start, *shape[1:])

        return LazyTensor(shape, self.dtype(key), read_rows)

    def read_chunk(self, key: str, chunk: Chunk) -> torch.Tensor:
        """Read the elements of a chunk, which need not be one of the file.

        Raises:
            DamagedCheckpointError: if the file lacks some of them, or they have changed.
        """
        if key not in self._chunk_indices:
            self._chunk_indices[key] = ChunkIndex(self.chunks[key])
        found = list(self._chunk_indices[key].overlaps(chunk))
        parts = [part for _, part in found]
        num_stored = sum(part.numel for part in parts)
        missing = chunk.numel - num_stored
        if missing > 0:
            raise DamagedCheckpointError(
                f"{self.directory}: no chunk of {key} has {missing} of its elements"
            )
        if missing < 0 or chunks_overlap(parts):
            raise DamagedCheckpointError(f"{self.directory}: two chunks of {key} overlap")
        # All are checked before memory is allocated: the metadata of a file can have any size.
        payloads = [self._sound_payload(key, stored) for stored, _ in found]
        out = torch.empty(chunk.sizes, dtype=self.dtype(key))
        for (stored, part), payload in zip(found, payloads):
            starts = []
            for offset, first in zip(part.offsets, stored.offsets):
                starts.append(offset - first)
            target = out[part.slices(chunk.offsets)]
            with durable.opened(payload.file, 0) as file:
                read_chunk(file, payload, starts, target)
        return out

    def _sound_payload(self, key: str, stored: Chunk) -> TensorPayload:
        """Find a chunk in its file, and compare the digest of the file, or its own checksum."""
        info = self._storage[key, stored.offsets]
        self._refuse_damaged(info.relative_path)
        payload = self._payload(key, stored)
        if self._integrity.verify and not self.has_manifest:
            self._compare_checksum(key, payload)
        return payload

    def _payload(self, key: str, chunk: Chunk) -> TensorPayload:
        info = self._storage[key, chunk.offsets]
        position = (info.relative_path, info.offset)
        if position not in self._payloads:
            try:
                with durable.opened(self.directory / info.relative_path, 0) as file:
                    payload = read_header(file, info)
            except DamagedCheckpointError as error:
                raise DamagedCheckpointError(f"{error}; {key} should be there") from error
            has_size = payload.size == chunk.sizes
            has_dtype = payload.dtype == self.dtype(key)
            if not (has_size and has_dtype):
                raise DamagedCheckpointError(
                    f"{self.directory}: {key} is {payload.dtype} {payload.size} in"
                    f" {info.relative_path}, and {self.dtype(key)} {chunk.sizes} in {METADATA}"
                )
            self._payloads[position] = payload
        return self._payloads[position]

    def _compare_checksum(self, key: str, payload: TensorPayload) -> None:
        """Read all of a chunk, once, and compare its checksum."""
        if payload in self._unchanged:
            return
        with durable.opened(payload.file, 0) as file:
            checksum = checksum_of(file, payload)
        if payload.checksum not in (None, checksum):
            raise DamagedCheckpointError(
                f"{payload.file} has changed since it was written: the checksum of {key} at byte"
                f" {payload.offset} differs"
            )
        self._unchanged.add(payload)

    def read(self, key: str) -> Any:
        """Read a tensor as a whole, or an object."""
        if key in self.tensors:
            return self.lazy(key).read()
        return self.read_object(key)

    def read_object(self, key: str) -> Any:
        """Read the object that is stored under a key.

        Raises:
            DamagedCheckpointError: if it cannot be read.
            RefusedPickleError: if it names a class that checkpoints do not contain.
        """
        info = self._storage[key, ()]
        self._refuse_damaged(info.relative_path)
        return self._unpickle(key)

    def _unpickle(self, key: str) -> Any:
        info = self._storage[key, ()]
        with durable.opened(self.directory / info.relative_path) as file:
            file.seek(info.offset)
            data = file.read(info.length)
        with safe_pickle.naming(f"{self.directory}: {key} in {info.relative_path}"):
            return safe_pickle.load_torch(data)
