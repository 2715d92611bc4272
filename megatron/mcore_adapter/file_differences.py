# SPDX-License-Identifier: Apache-2.0
"""Differences between the entries that a load asks for and those that a checkpoint file has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from megatron.checkpoint.core.listing import some


@dataclass(frozen=True)
class FileDifferences:
    """Entries that a load asks for and cannot get."""

    shapes: list[str]
    """A line for each tensor of another shape."""
    missing: list[str]
    """Keys that the file does not have."""

    @classmethod
    def between(
        cls,
        asked: Mapping[str, Any],
        stored: Mapping[str, STORAGE_TYPES],
        here: str,
    ) -> FileDifferences:
        """Compare the entries that this rank asks for with those of a file.

        Args:
            asked: tensors to load into, and other values, by key.
            stored: the metadata of the file, by key.
            here: words that follow the shape of a tensor of this run, such as "in the model".
        """
        shapes = []
        for key, value in asked.items():
            entry = stored.get(key)
            if not (isinstance(value, torch.Tensor) and isinstance(entry, TensorStorageMetadata)):
                continue
            if entry.size != value.shape:
                shapes.append(
                    f"{key}: {tuple(entry.size)} in the file, {tuple(value.shape)} {here}"
                )
        return cls(shapes, sorted(asked.keys() - stored.keys()))

    def problems(self, is_partial: bool = False) -> list[str]:
        """Describe the differences, shapes in one line and missing keys of a whole load in one."""
        lines = []
        if self.shapes:
            lines.append(f"other shapes: {some(self.shapes)}")
        if self.missing and not is_partial:
            lines.append(f"not in the file: {some(self.missing)}")
        return lines

    @property
    def concern_random_state(self) -> bool:
        """True if some of the entries are states of random generators."""
        differing = self.shapes + self.missing
        return any(entry.startswith("rng_state") for entry in differing)
