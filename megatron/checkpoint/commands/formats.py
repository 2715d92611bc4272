# SPDX-License-Identifier: Apache-2.0
"""Which format a directory is in, and what it says whichever it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.core import directory
from megatron.checkpoint.core.stored_checkpoint import StoredCheckpoint
from megatron.checkpoint.core.stored_metadata import METADATA
from megatron.checkpoint.core.training_state import TrainingState
from megatron.checkpoint.fsdp_dtensor import checkpoint as fsdp_dtensor
from megatron.checkpoint.hugging_face import checkpoint as hugging_face
from megatron.checkpoint.torch_dist import checkpoint as torch_dist

TORCH_DIST, FSDP_DTENSOR, HUGGING_FACE, PLAIN = (
    "torch_dist",
    "fsdp_dtensor",
    "hugging_face",
    "torch.distributed.checkpoint",
)


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose format is known.

    Attributes:
        directory: of the iteration, or of the model.
        format: one of the names above; the last is a DCP directory of no training run.
        stored: of a DCP directory.
    """

    directory: Path
    format: str
    stored: StoredCheckpoint | None

    def state(
        self, group_numbers: Mapping[str, Any] | None = None, allow_unknown: bool = False
    ) -> TrainingState:
        """What it says.

        Raises:
            ValueError: where it has no model, or does not keep to its format.
        """
        if self.format == HUGGING_FACE:
            return hugging_face.read(self.directory)
        if self.format == TORCH_DIST:
            return torch_dist.read(self.stored, group_numbers, allow_unknown)
        if self.format == FSDP_DTENSOR:
            return fsdp_dtensor.read(self.stored, allow_unknown)
        raise ValueError(
            f"{self.directory} holds no model of a training run: it has neither {torch_dist.MARKER}"
            " (torch_dist) nor keys that begin with model.module. (fsdp_dtensor)"
        )


def open_checkpoint(path: str | Path) -> Opened:
    """The checkpoint at ``path``: an iteration, a directory with a tracker file, or a Hugging Face model.

    Raises:
        ValueError: where there is none, or a damaged one.
    """
    path = Path(path)
    if (path / "config.json").is_file() and not (path / METADATA).is_file():
        return Opened(path, HUGGING_FACE, None)
    path = directory.locate(path)
    stored = StoredCheckpoint(path)
    if (path / torch_dist.MARKER).is_file() or torch_dist.COMMON_OBJECT in stored.objects:
        return Opened(path, TORCH_DIST, stored)
    if any(key.startswith("model." + fsdp_dtensor.MODEL_PREFIX) for key in stored.tensors):
        return Opened(path, FSDP_DTENSOR, stored)
    if (path / torch_dist.COMMON_FILE).is_file():
        raise ValueError(
            f"{path} has no {torch_dist.MARKER}, which is written last: the checkpoint was not"
            " finished"
        )
    return Opened(path, PLAIN, stored)
