# SPDX-License-Identifier: Apache-2.0
"""Reader and planner for ``torch.distributed.checkpoint.load`` that unpickle data only."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron.checkpoint.core.reading_threads import in_threads
from megatron.checkpoint.dcp import safe_pickle
from megatron.checkpoint.dcp.stored_metadata import read_metadata
from megatron.checkpoint.dcp.tensor_payload import TensorPayload, read_chunk, read_header
from megatron.checkpoint.store import durable


class SafeReader(FileSystemReader):
    """A reader that reads ``.metadata`` as data, and the elements that are asked for into place.

    torch's own reader reads every chunk as a whole, into memory of its own.

    Raises:
        RefusedPickleError, DamagedCheckpointError: both a ValueError.
    """

    def read_metadata(self, *args: object, **options: object) -> Metadata:
        """Read ``.metadata``."""
        metadata: Metadata = read_metadata(Path(self.path))
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan."""
        places: dict[str, list[tuple[_StorageInfo, ReadItem]]] = {}
        for item in plan.items:
            info: _StorageInfo = self.storage_data[item.storage_index]
            places_of_file = places.setdefault(info.relative_path, [])
            places_of_file.append((info, item))
        for name, items in places.items():
            items.sort(key=lambda place: place[0].offset)
            path = Path(self.path) / name
            with durable.opened(path, 0) as file:
                _read_items(file, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _read_items(
    file: IO[bytes],
    items: Iterable[tuple[_StorageInfo, ReadItem]],
    planner: LoadPlanner,
) -> None:
    """Read objects one after another, and tensors, as far as they are asked for, in threads."""

    def tensors() -> Iterator[tuple[ReadItem, TensorPayload]]:
        for info, item in items:
            if item.type == LoadItemType.BYTE_IO:
                data = os.pread(file.fileno(), info.length, info.offset)
                stream = io.BytesIO(data)
                planner.load_bytes(item, stream)
            else:
                yield item, read_header(file, info, compares=False)

    def read(found: tuple[ReadItem, TensorPayload]) -> None:
        item, payload = found
        target = planner.resolve_tensor(item)
        target = target.detach()
        read_chunk(file, payload, item.storage_offsets, target)
        planner.commit_tensor(item, target)

    in_threads(read, tensors())


class SafePlanner(DefaultLoadPlanner):
    """A planner that reads objects as data.

    Raises:
        ValueError: for an object that is damaged or names a class that checkpoints do not hold,
            with its key.
    """

    def create_local_plan(self) -> LoadPlan:
        """Plan what this rank reads, and send the first rank nothing: it would change nothing."""
        self._plan = super().create_local_plan()
        return LoadPlan([])

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan of this rank."""
        return self._plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle one object and put it into the state dict that is loaded.

        Raises:
            ValueError: for an object that is damaged or names a class that checkpoints do not hold.
        """
        key = read_item.dest_index.fqn
        try:
            content = safe_pickle.load_torch(value.getvalue())
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], content)
        else:
            self.state_dict[key] = content
