# SPDX-License-Identifier: Apache-2.0
"""Reader for ``torch.distributed.checkpoint.load`` of a conversion that is not written."""

from __future__ import annotations

import io
import os

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megatron.checkpoint.dcp import safe_pickle
from megatron.checkpoint.dcp.dcp_target import DcpTarget, Entry, TensorEntry


class EntryReader(StorageReader):
    """A reader of the entries of a DCP directory that would be written.

    Of a tensor it reads the rows that are asked for, one tensor after another.

    Args:
        target: the directory; every tensor in one chunk.
        name: of the checkpoint in messages.
    """

    def __init__(self, target: DcpTarget, name: str):
        self._metadata = target.metadata()
        self._entries: dict[str, Entry] = {entry.key: entry for entry in target.entries}
        self._name = name

    def __str__(self) -> str:
        return self._name

    def read_metadata(self, *args: object, **options: object) -> Metadata:
        """Return the metadata of the directory."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the entries of a plan."""
        items_of: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            items_of.setdefault(item.storage_index.fqn, []).append(item)
        for key, items in items_of.items():
            entry = self._entries[key]
            if isinstance(entry, TensorEntry):
                _read_tensor(entry, items, planner)
                continue
            value = entry.value() if callable(entry.value) else entry.value
            for item in items:
                planner.load_bytes(item, io.BytesIO(safe_pickle.save_torch(value)))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # ---- what torch asks of every reader

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: there is no state of a load."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing: the entries are known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: no name stands for entries in memory."""
        return False


def _read_tensor(entry: TensorEntry, items: list[ReadItem], planner: LoadPlanner) -> None:
    """Read the regions of one tensor that a rank asks for, by one read of the rows they span."""
    if not entry.tensor.shape:
        for item in items:
            _hand_over(entry.tensor.read(), item, planner)
        return
    start = min(item.storage_offsets[0] for item in items)
    stop = max(item.storage_offsets[0] + item.lengths[0] for item in items)
    rows = entry.tensor.read_rows(start, stop)
    for item in items:
        # Rows 5 to 9 were read. The region at (6, 2) of sizes (3, 4) is [1:4, 2:6] of them.
        offsets = (item.storage_offsets[0] - start, *item.storage_offsets[1:])
        region = [slice(first, first + size) for first, size in zip(offsets, item.lengths)]
        _hand_over(rows[tuple(region)], item, planner)


def _hand_over(value: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    target: torch.Tensor = planner.resolve_tensor(item).detach()
    target.copy_(value)
    planner.commit_tensor(item, target)
