# SPDX-License-Identifier: Apache-2.0
"""Reader and planner for ``torch.distributed.checkpoint.load`` that unpickle data only."""

from __future__ import annotations

import io
from pathlib import Path

from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from megatron.checkpoint.core import safe_pickle
from megatron.checkpoint.core.stored_metadata import read_metadata


class SafeReader(FileSystemReader):
    """A reader that reads ``.metadata`` as data.

    Raises:
        RefusedPickleError, DamagedCheckpointError: both a ValueError.
    """

    def read_metadata(self, *args: object, **options: object) -> Metadata:
        """Read ``.metadata``."""
        metadata: Metadata = read_metadata(Path(self.path))
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """A planner that reads objects as data.

    Raises:
        ValueError: for an object that is damaged or names a class that checkpoints do not hold,
            with its key.
    """

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle one object and put it into the state dict that is loaded."""
        key = read_item.dest_index.fqn
        try:
            content = safe_pickle.load_torch(value.getvalue())
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], content)
        else:
            self.state_dict[key] = content
