# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint, the size and the digest of each of its files, and its comparison.

It is written when a checkpoint is published, and signs the set of files: a file of another
checkpoint or rank is as wrong as a damaged one, although its own checksums are right. Its digest of
itself shows a change of the manifest. Checkpoints of other programs have none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpoint.core.listing import listed, some
from megatron.checkpoint.integrity.block_digest import digest_of_blocks
from megatron.checkpoint.store import durable
from megatron.checkpoint.store.directory import METADATA

MANIFEST = "manifest.json"


class DamagedCheckpointError(ValueError):
    """A file of a checkpoint is missing, cut off or changed."""


_WRITER = re.compile(r"^__(\d+)_")
_READ_BY_LOADERS = re.compile(r"^(\.metadata|metadata\.json|common\.pt|.*\.distcp)$")


BLOCKS = "sha256_of_crc32_of_128_KiB"
"""Name of the digest of :mod:`megatron.checkpoint.integrity.block_digest`."""
SHA256 = "sha256"
"""Name of the digest of earlier versions, of the content as it is."""


class FileDigest(NamedTuple):
    """The entry of a file in the manifest.

    Attributes:
        bytes: its size.
        digest: digest of its content, in hexadecimal digits.
        algorithm: name of the digest.
    """

    bytes: int
    digest: str
    algorithm: str = BLOCKS


def digest_of(path: Path, algorithm: str = BLOCKS) -> FileDigest:
    """Read a file and return its size and digest."""
    if algorithm == BLOCKS:
        return FileDigest(*digest_of_blocks(path))
    digest = hashlib.sha256()
    with durable.opened(path) as file:
        while block := file.read(1 << 22):
            digest.update(block)
    num_bytes = path.stat().st_size
    return FileDigest(num_bytes, digest.hexdigest(), SHA256)


def is_of_rank(
    name: str,
    rank: int,
    world_size: int,
) -> bool:
    """Return True if a rank takes a file's share of the work: the rank that has written it.

    The node of that rank probably still caches the file. The first rank takes the files that have
    no number of a rank in their name.

    Args:
        name: name of the file.
        rank: the rank.
        world_size: number of ranks that share the work, which may differ from that of the writers.
    """
    writer = 0
    match = _WRITER.match(name)
    if match is not None:
        writer = int(match[1])
    return writer % world_size == rank


def digests_of_rank(
    directory: Path,
    rank: int,
    world_size: int,
) -> dict[str, FileDigest]:
    """Return the digests of the files of a new checkpoint that are this rank's share, by name.

    The disk has these files afterwards: not every format waits for it.

    Args:
        directory: directory of the checkpoint.
        rank: rank of this process.
        world_size: number of ranks that share the work.
    """
    digests = {}
    for name in files_of_rank(directory, rank, world_size):
        if name != MANIFEST:
            durable.sync_file(directory / name)
            digests[name] = digest_of(directory / name)
    return digests


def files_of_rank(
    directory: Path,
    rank: int,
    world_size: int,
) -> list[str]:
    """Return the names of the files that are a rank's share.

    Args:
        directory: directory of the checkpoint.
        rank: the rank.
        world_size: number of ranks that share the work.
    """
    names = []
    for name in _files(directory):
        if is_of_rank(name, rank, world_size):
            names.append(name)
    return names


def _files(directory: Path) -> list[str]:
    paths = []
    for path in directory.rglob("*"):
        if path.is_file():
            paths.append(path)
    return sorted(path.relative_to(directory).as_posix() for path in paths)


class Manifest:
    """The manifest of a checkpoint.

    Args:
        directory: directory of the checkpoint.
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
        with durable.naming(path):
            text = path.read_text(errors="replace")
        try:
            files = {}
            for name, entry in json.loads(text)["files"].items():
                algorithm = BLOCKS if BLOCKS in entry else SHA256
                files[name] = FileDigest(entry["bytes"], entry[algorithm], algorithm)
            manifest = cls(directory, files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            manifest = cls(directory, {})
        if manifest._text() != text:
            raise DamagedCheckpointError(
                f"{path} has changed since it was written, and nothing else vouches for the files"
                " that it lists; --no-verify-integrity reads them without it"
            )
        return manifest

    def write(self) -> None:
        """Write the manifest, and wait until the disk has it."""
        with durable.written(self.directory / MANIFEST) as file:
            file.write(self._text().encode())

    def _text(self) -> str:
        files = {}
        for name, found in self.files.items():
            files[name] = {"bytes": found.bytes, found.algorithm: found.digest}
        signed = json.dumps(files).encode()
        signature = hashlib.sha256(signed).hexdigest()
        return json.dumps({"sha256": signature, "files": files}, indent=1) + "\n"

    def size_problem(self, name: str) -> str | None:
        """Return what is wrong with a file if it is missing or of another size, else None."""
        path = self.directory / name
        expected = self.files[name].bytes
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size < expected:
            return f"{name} is cut off: {size} bytes of {expected}"
        if size > expected:
            return f"{name} has {size} bytes instead of {expected}"
        return None

    def has_changed(self, name: str) -> bool:
        """Return True if the content of a file is another one; reads all of it."""
        expected = self.files[name]
        return digest_of(self.directory / name, expected.algorithm) != expected

    def foreign_files(self) -> list[str]:
        """Return the files that loaders would read, and that the manifest does not list."""
        foreign = []
        for name in _files(self.directory):
            if name not in self.files and _READ_BY_LOADERS.match(name):
                foreign.append(name)
        return foreign


ChangedEntries = Callable[[str, Sequence[str]], Sequence[str]]
"""Name of a file and the keys in it -> those of the keys whose checksums differ."""


class FileIntegrity:
    """Comparison of the files of a DCP directory with what is known about them.

    Args:
        directory: directory of the checkpoint.
        verify: whether to compare the content of files, by their digests; sizes are always
            compared.

    Attributes:
        manifest: None if the checkpoint has none, and if a damaged one is not to be verified.
        data_files: names of the files in which ``.metadata`` places entries.

    Raises:
        DamagedCheckpointError: if the manifest or ``.metadata`` has changed since it was written.
    """

    def __init__(self, directory: Path, verify: bool):
        self._directory = directory
        self.verify = verify
        self.manifest: Manifest | None = None
        try:
            self.manifest = Manifest.read(directory)
        except DamagedCheckpointError:
            if verify:
                raise
        self.data_files: list[str] = []
        self._ends: dict[str, int] = {}
        self._keys: dict[str, set[str]] = {}
        # Name of a file whose content was compared -> what is wrong with it.
        self._verdicts: dict[str, str | None] = {}
        self._check_metadata()

    def _check_metadata(self) -> None:
        if self.manifest is None or METADATA not in self.manifest.files:
            return
        problem = self.manifest.size_problem(METADATA)
        if problem is None and self.verify and self.manifest.has_changed(METADATA):
            problem = f"{METADATA} has changed since it was written"
        if problem is not None:
            self.raise_if_any([f"{problem}; it lists all tensors"])

    def raise_if_any(self, problems: Sequence[str]) -> None:
        """Raise one error with all problems."""
        if problems:
            title = f"{self._directory} is damaged or not complete"
            raise DamagedCheckpointError(listed(title, problems, limit=len(problems)))

    def problems_of_files(self, metadata: Any) -> Iterator[str]:
        """Find missing files, wrong sizes, and changes of small files; reads no tensor."""
        for index, info in metadata.storage_data.items():
            name = info.relative_path
            end = info.offset + info.length
            end_before = self._ends.get(name, 0)
            self._ends[name] = max(end_before, end)
            keys = self._keys.setdefault(name, set())
            keys.add(index.fqn)
        self.data_files = sorted(self._ends)
        for name in self.data_files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                yield f"{METADATA} names a file outside of the checkpoint: {name}"
            elif self.manifest is None or name not in self.manifest.files:
                yield from self._problem_of_length(name)
        if self.manifest is not None:
            yield from self._unlike_manifest(self.manifest)

    def _problem_of_length(self, name: str) -> Iterator[str]:
        path = self._directory / name
        length = self._ends[name]
        if not path.is_file():
            yield f"{name} is missing; {self._content_of(name)}"
            return
        size = path.stat().st_size
        if size < length:
            yield f"{name} is cut off: {size} bytes of {length}; {self._content_of(name)}"

    def _unlike_manifest(self, manifest: Manifest) -> Iterator[str]:
        for name in manifest.files:
            problem = manifest.size_problem(name)
            if problem is not None:
                yield f"{problem}; {self._content_of(name)}"
            elif self.verify and name not in self._ends and manifest.has_changed(name):
                yield f"{name} has changed since it was written; {self._content_of(name)}"
        if self.verify:
            for name in manifest.foreign_files():
                yield f"{name} is not listed in {MANIFEST}; {self._content_of(name)}"

    def _content_of(self, name: str) -> str:
        """Describe the entries of a file."""
        if name not in self._keys:
            return "it has no tensors"
        return f"it has {some(sorted(self._keys[name]))}"

    def problem_of_content(
        self,
        name: str,
        changed_entries: ChangedEntries,
    ) -> str | None:
        """Return what is wrong with the content of a file; None if it is sound. Reads it once.

        The digest of the manifest is compared, or without a manifest all checksums in the file.

        Args:
            name: name of the file.
            changed_entries: takes the name of a file and the keys in it, and returns the keys whose
                checksums differ.
        """
        if name not in self._verdicts:
            self._verdicts[name] = self._compared(name, changed_entries)
        return self._verdicts[name]

    def _compared(self, name: str, changed_entries: ChangedEntries) -> str | None:
        if self.manifest is not None and name not in self.manifest.files:
            return f"{name} is not listed in {MANIFEST}; {self._content_of(name)}"
        if self.manifest is not None and not self.manifest.has_changed(name):
            return None
        changed = changed_entries(name, sorted(self._keys[name]))
        if changed:
            return f"{name} has changed since it was written, in {some(changed)}"
        if self.manifest is None:
            return None
        return (
            f"{name} is not the file of which {MANIFEST} has the digest. The checksums in it are"
            f" right: it may be of another checkpoint or rank; {self._content_of(name)}"
        )

    def trust(self, names: Sequence[str]) -> None:
        """Regard these files as sound if they were not compared: another rank compares them."""
        for name in names:
            self._verdicts.setdefault(name, None)
