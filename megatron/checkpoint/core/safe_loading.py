# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint without its trust in pickles: the reader and the planner to give to ``load``."""

from __future__ import annotations

import io

from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from megatron.checkpoint.core import safe_pickle
from megatron.checkpoint.core.stored_metadata import read_metadata


class SafeReader(FileSystemReader):
    """Reads ``.metadata`` as data.

    Raises:
        RefusedPickleError, DamagedCheckpointError: both a ValueError.
    """

    def read_metadata(self, *args: object, **options: object) -> Metadata:
        return read_metadata(self.path)


class SafePlanner(DefaultLoadPlanner):
    """Reads objects as data.

    Raises:
        ValueError: for an object that is damaged or names a class that checkpoints do not hold,
            with its key.
    """

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            content = safe_pickle.load_torch(value.getvalue())
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], content)
        else:
            self.state_dict[key] = content
