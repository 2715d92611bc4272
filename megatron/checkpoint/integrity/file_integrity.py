# SPDX-License-Identifier: Apache-2.0
"""Comparison of the files of a checkpoint with its metadata and its manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.checkpoint.core.listing import some
from megatron.checkpoint.dcp.stored_metadata import METADATA, DamagedCheckpointError
from megatron.checkpoint.integrity.manifest import MANIFEST, Manifest


class FileIntegrity:
    """Comparison of the files of a DCP directory with what is known about them.

    Args:
        directory: of the checkpoint.
        verify: compare the content of files, by their digests; sizes are always compared.

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
        self.raise_if_any([f"{problem}; it lists all tensors"] if problem else [])

    def raise_if_any(self, problems: Sequence[str]) -> None:
        """Raise one error with all problems."""
        if problems:
            raise DamagedCheckpointError(
                "\n  ".join([f"{self._directory} is damaged or not complete:", *problems])
            )

    def problems_of_files(self, metadata: Any) -> Iterator[str]:
        """Find missing files, wrong sizes, and changes of small files; reads no tensor.

        Args:
            metadata: the content of ``.metadata``.
        """
        for index, info in metadata.storage_data.items():
            name = info.relative_path
            self._ends[name] = max(self._ends.get(name, 0), info.offset + info.length)
            self._keys.setdefault(name, set()).add(index.fqn)
        self.data_files = sorted(self._ends)
        for name in self.data_files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                yield f"{METADATA} names a file outside of the checkpoint: {name}"
            elif self.manifest is None or name not in self.manifest.files:
                yield from self._problem_of_length(name)
        if self.manifest is not None:
            yield from self._unlike_manifest(self.manifest)

    def _problem_of_length(self, name: str) -> Iterator[str]:
        path, length = self._directory / name, self._ends[name]
        if not path.is_file():
            yield f"{name} is missing; {self._content_of(name)}"
        elif path.stat().st_size < length:
            size = path.stat().st_size
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
        """Return the entries of a file in words."""
        keys = sorted(self._keys.get(name, ()))
        return f"it has {some(keys)}" if keys else "it has no tensors"

    def problem_of_content(
        self, name: str, changed_entries: Callable[[str, Sequence[str]], Sequence[str]]
    ) -> str | None:
        """Return what is wrong with the content of a file, None if nothing is; reads all of it.

        The digest of the manifest is compared, or all checksums in the file if there is none. A
        file is read once.

        Args:
            name: of a file with tensors.
            changed_entries: takes the file and the keys in it, and returns those whose checksums
                differ.
        """
        if name not in self._verdicts:
            self._verdicts[name] = self._compared(name, changed_entries)
        return self._verdicts[name]

    def _compared(
        self, name: str, changed_entries: Callable[[str, Sequence[str]], Sequence[str]]
    ) -> str | None:
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
        """Take these files for sound if they were not compared: another rank compares them."""
        for name in names:
            self._verdicts.setdefault(name, None)
