# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint: the size and the digest of each of its files.

It is written when a checkpoint is published, and signs the set of files: a file of another
checkpoint or rank is as wrong as a damaged one, although its own checksums are right. Its digest of
itself shows a change of the manifest. Checkpoints of other programs have none. The digest of a file
is that of :mod:`megatron.checkpoint.integrity.block_digest`; in earlier versions it is the
SHA-256 of the content. Each is named beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.dcp.stored_metadata import DamagedCheckpointError
from megatron.checkpoint.integrity.block_digest import digest_of_blocks
from megatron.checkpoint.store import durable

MANIFEST = "manifest.json"

_BLOCK = 1 << 22
"""Bytes that are read at once."""
_WRITER = re.compile(r"^__(\d+)_")
_READ_BY_LOADERS = re.compile(r"^(\.metadata|metadata\.json|common\.pt|.*\.distcp)$")


BLOCKS = "sha256_of_crc32_of_128_KiB"
"""The algorithm of :mod:`megatron.checkpoint.integrity.block_digest`."""
SHA256 = "sha256"

_ALGORITHMS = (BLOCKS, SHA256)


@dataclass(frozen=True)
class FileDigest:
    """The entry of a file in the manifest.

    Attributes:
        bytes: its size.
        digest: of its content, in hexadecimal digits.
        algorithm: of the digest.
    """

    bytes: int
    digest: str
    algorithm: str = BLOCKS

    @classmethod
    def of_entry(cls, entry: Mapping[str, Any]) -> FileDigest:
        """Return the digest of which :meth:`entry` is the form in the manifest.

        Raises:
            ValueError: if the algorithm is not known.
        """
        (algorithm,) = entry.keys() - {"bytes"}
        if algorithm not in _ALGORITHMS:
            raise ValueError(f"{algorithm} is not known")
        return cls(entry["bytes"], entry[algorithm], algorithm)

    def entry(self) -> dict[str, Any]:
        """Return the form in the manifest: the size, and the digest under its algorithm."""
        return {"bytes": self.bytes, self.algorithm: self.digest}


def digest_of(path: Path, algorithm: str = BLOCKS) -> FileDigest:
    """Read a file and return its size and digest."""
    if algorithm == BLOCKS:
        return FileDigest(*digest_of_blocks(path))
    size, digest, buffer = 0, hashlib.new(algorithm), bytearray(_BLOCK)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            size += count
    return FileDigest(size, digest.hexdigest(), algorithm)


def is_of_rank(name: str, rank: int, world_size: int) -> bool:
    """Return True if a rank takes a file's share of the work: the rank that has written it.

    That node probably has the file in memory still. The first rank takes the files that no rank
    has signed with its number.
    """
    writer = _WRITER.match(name)
    return (int(writer[1]) if writer is not None else 0) % world_size == rank


def digests_of_rank(directory: Path, rank: int, world_size: int) -> dict[str, FileDigest]:
    """Return the digests of the files of a new checkpoint that are this rank's share, by name.

    The disk has these files afterwards: not every format waits for it.
    """
    digests = {}
    for name in files_of_rank(directory, rank, world_size):
        if name != MANIFEST:
            durable.sync_file(directory / name)
            digests[name] = digest_of(directory / name)
    return digests


def files_of_rank(directory: Path, rank: int, world_size: int) -> list[str]:
    """Return the names of the files that are a rank's share."""
    return [name for name in _files(directory) if is_of_rank(name, rank, world_size)]


def _files(directory: Path) -> list[str]:
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return sorted(path.relative_to(directory).as_posix() for path in paths)


class Manifest:
    """The manifest of a checkpoint.

    Args:
        directory: of the checkpoint.
        files: name -> size and digest.
    """

    def __init__(self, directory: Path, files: Mapping[str, FileDigest]):
        self.directory = directory
        self.files = dict(sorted(files.items()))

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """Read the manifest of a checkpoint; None if it has none.

        Raises:
            DamagedCheckpointError: if it has changed since it was written, or is no file.
        """
        path = directory / MANIFEST
        if not os.path.lexists(path):
            return None
        if not path.is_file():
            raise DamagedCheckpointError(f"{path} is no file, but a directory or a link to nothing")
        text = path.read_text(errors="replace")
        try:
            files = {}
            for name, entry in json.loads(text)["files"].items():
                files[name] = FileDigest.of_entry(entry)
            manifest = cls(directory, files)
        except (ValueError, KeyError, TypeError, AttributeError):
            manifest = cls(directory, {})
        if manifest._text() != text:
            raise DamagedCheckpointError(
                f"{path} has changed since it was written, and nothing else vouches for the files"
                " that it lists; --no-verify-integrity reads them without it"
            )
        return manifest

    def write(self) -> None:
        """Write the manifest, and wait until the disk has it."""
        with open(self.directory / MANIFEST, "w") as file:
            file.write(self._text())
            file.flush()
            os.fsync(file.fileno())

    def _text(self) -> str:
        files = {name: digest.entry() for name, digest in self.files.items()}
        signature = hashlib.sha256(json.dumps(files).encode()).hexdigest()
        return json.dumps({"sha256": signature, "files": files}, indent=1) + "\n"

    def size_problem(self, name: str) -> str | None:
        """Return what is wrong with a file if it is missing or of another size, else None."""
        path, expected = self.directory / name, self.files[name].bytes
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size < expected:
            return f"{name} is cut off: {size} bytes of {expected}"
        return f"{name} has {size} bytes instead of {expected}" if size > expected else None

    def has_changed(self, name: str) -> bool:
        """Return True if the content of a file is another one; reads all of it."""
        expected = self.files[name]
        return digest_of(self.directory / name, expected.algorithm) != expected

    def foreign_files(self) -> list[str]:
        """Return the files that loaders would read, and that the manifest does not list."""
        present = _files(self.directory)
        return [name for name in present if name not in self.files and _READ_BY_LOADERS.match(name)]
