# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose format is found out from their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.core.training_state import TrainingState
from megatron.checkpoint.dcp.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.fsdp_dtensor import dtensor_reader as fsdp_dtensor
from megatron.checkpoint.fsdp_dtensor.keys import MODEL_KEY_PREFIX
from megatron.checkpoint.hugging_face import model_reader as hugging_face
from megatron.checkpoint.hugging_face.model_directory import is_model_directory
from megatron.checkpoint.store import directory, stores
from megatron.checkpoint.torch_dist import checkpoint as torch_dist
from megatron.checkpoint.torch_dist.unsharded_state import COMMON_FILE, COMMON_OBJECT

TORCH_DIST = "torch_dist"
FSDP_DTENSOR = "fsdp_dtensor"
HUGGING_FACE = "hugging_face"
PLAIN = "torch.distributed.checkpoint"
"""The format of a DCP directory that no training run has written."""


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose format is known.

    Attributes:
        directory: directory of the iteration, or of the model.
        format: one of the names above.
        stored: the files of a DCP directory; None for a Hugging Face model.
    """

    directory: Path
    format: str
    stored: StoredCheckpoint | None

    def state(
        self,
        group_numbers: Mapping[str, Any] | None = None,
        allow_unknown: bool = False,
    ) -> TrainingState:
        """Read the checkpoint. Tensors are read later, when they are needed.

        ``group_numbers`` are those of param groups by parameter, for torch_dist, which does not
        store them; by default they follow from Megatron-Core's rules.

        Raises:
            ValueError: if it has no model, or does not follow its format.
        """
        if self.stored is None:
            return hugging_face.read(self.directory)
        if self.format == TORCH_DIST:
            return torch_dist.read(self.stored, group_numbers, allow_unknown)
        if self.format == FSDP_DTENSOR:
            return fsdp_dtensor.read(self.stored, allow_unknown)
        raise ValueError(
            f"{self.directory} holds no model of a training run: it has neither {torch_dist.MARKER}"
            " (torch_dist) nor keys that begin with model.module. (fsdp_dtensor)"
        )

    def dcp_files(self) -> StoredCheckpoint:
        """Return the files of a DCP directory.

        Raises:
            ValueError: for a Hugging Face model.
        """
        if self.stored is None:
            raise ValueError(
                f"{self.directory} is a Hugging Face model; its tensors are printed by other tools"
            )
        return self.stored


def open_checkpoint(path: str | Path, verify: bool = True) -> Opened:
    """Open the directory of an iteration, one with a tracker file, or a Hugging Face model.

    What is at a URL is downloaded.

    Args:
        path: the directory.
        verify: whether to compare digests and checksums of what is read of a DCP directory.

    Raises:
        ValueError: if it is missing or damaged.
    """
    path = Path(path)
    stores.fetch(path)
    if is_model_directory(path):
        return Opened(path, HUGGING_FACE, None)
    path = directory.locate(path)
    stores.fetch(path)
    stored = StoredCheckpoint(path, verify)
    if (path / torch_dist.MARKER).is_file() or COMMON_OBJECT in stored.objects:
        return Opened(path, TORCH_DIST, stored)
    if any(key.startswith(MODEL_KEY_PREFIX) for key in stored.tensors):
        return Opened(path, FSDP_DTENSOR, stored)
    if (path / COMMON_FILE).is_file():
        raise ValueError(
            f"{path} has no {torch_dist.MARKER}, which is written last: the checkpoint was not"
            " finished"
        )
    return Opened(path, PLAIN, stored)
