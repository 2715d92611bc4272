# SPDX-License-Identifier: Apache-2.0
"""Reader and planner for ``torch.distributed.checkpoint.load`` that unpickle data only."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron.checkpoint.dcp import safe_pickle
from megatron.checkpoint.dcp.quick_header import QuickHeaders
from megatron.checkpoint.dcp.reading_threads import in_threads
from megatron.checkpoint.dcp.stored_metadata import (
    METADATA,
    DamagedCheckpointError,
    read_metadata,
)
from megatron.checkpoint.dcp.tensor_payload import TensorPayload

_BLOCK = 1 << 24
"""Bytes that are read at once if they cannot be read into the tensor itself."""


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
        headers = QuickHeaders()
        places: dict[str, list[tuple[_StorageInfo, ReadItem]]] = {}
        for item in plan.items:
            info: _StorageInfo = self.storage_data[item.storage_index]
            places.setdefault(info.relative_path, []).append((info, item))
        for name, items in places.items():
            with open(Path(self.path) / name, "rb", buffering=0) as file:
                items.sort(key=lambda place: place[0].offset)
                read = partial(_read_tensor, file, planner)
                in_threads(read, _tensors(file, items, headers, planner))
        done: Future[None] = Future()
        done.set_result(None)
        return done


class PartReader(SafeReader):
    """A reader of a directory that one rank alone has written, and that it reads alone."""

    def __str__(self) -> str:
        return str(self.path)


def _tensors(
    file: IO[bytes],
    items: Iterable[tuple[_StorageInfo, ReadItem]],
    headers: QuickHeaders,
    planner: LoadPlanner,
) -> Iterator[tuple[ReadItem, TensorPayload]]:
    """Yield the tensors among the items and their places in the file, and read the objects.

    Args:
        file: that holds all of them.
        items: places in the file and what is asked for there.
        headers: reads those of the tensors.
        planner: takes the objects.
    """
    for info, item in items:
        if item.type == LoadItemType.BYTE_IO:
            data = os.pread(file.fileno(), info.length, info.offset)
            planner.load_bytes(item, io.BytesIO(data))
        else:
            yield item, headers.read(file, Path(file.name), info)


def _read_tensor(
    file: IO[bytes], planner: LoadPlanner, found: tuple[ReadItem, TensorPayload]
) -> None:
    """Read what is asked for of a tensor into the planner's tensor."""
    item, payload = found
    target = planner.resolve_tensor(item).detach()
    _read_region(file, payload, item.storage_offsets, target)
    planner.commit_tensor(item, target)


def _read_region(
    file: IO[bytes], payload: TensorPayload, offsets: Sequence[int], target: torch.Tensor
) -> None:
    """Read a region of a stored tensor into ``target``, which has its shape.

    Args:
        file: that holds the tensor.
        payload: the tensor in the file.
        offsets: of the region in the stored tensor.
        target: on any device and of any dtype.

    Raises:
        DamagedCheckpointError: if the stored tensor does not have the region.
    """
    sizes, whole = tuple(target.shape), payload.size
    ends = map(sum, zip(offsets, sizes))
    if len(sizes) != len(whole) or any(end > size for end, size in zip(ends, whole)):
        raise DamagedCheckpointError(
            f"{payload.file} has a tensor of shape {whole} at byte {payload.offset}, where"
            f" {METADATA} has another one"
        )
    if not target.numel():
        return
    if payload.is_plain:
        _read_rows(file, payload.offset, whole, payload.dtype, offsets, target)
        return
    storage = torch.empty(payload.num_bytes, dtype=torch.uint8)
    _read_into(file, payload.offset, storage)
    tensor = storage.view(payload.dtype).as_strided(whole, payload.stride, payload.start)
    target.copy_(tensor[_slices(offsets, sizes)])


def _read_rows(
    file: IO[bytes],
    position: int,
    whole: Sequence[int],
    dtype: torch.dtype,
    offsets: Sequence[int],
    target: torch.Tensor,
) -> None:
    """Read a region of a tensor that is stored row after row.

    Args:
        file: that holds the tensor.
        position: of its first element in the file, in bytes.
        whole: its shape.
        dtype: of the stored elements.
        offsets: of the region.
        target: of the region's shape.
    """
    is_contiguous = tuple(target.shape[1:]) == tuple(whole[1:])
    row = math.prod(whole[1:]) * dtype.itemsize
    first = position + (offsets[0] * row if offsets else 0)
    is_direct = target.is_cpu and target.dtype == dtype and target.is_contiguous()
    if is_contiguous and is_direct:
        _read_into(file, first, target)
    elif not offsets:
        element = torch.empty((), dtype=dtype)
        _read_into(file, first, element)
        target.copy_(element)
    elif not is_contiguous and (len(target) == 1 or row > _BLOCK // 16):
        # Example: columns 2 and 3 of a few long rows. Each row's columns are read on their own.
        for number in range(len(target)):
            part = target[number]
            _read_rows(file, first + number * row, whole[1:], dtype, offsets[1:], part)
    else:
        num_rows = max(_BLOCK // row, 1)
        columns = (slice(None), *_slices(offsets[1:], target.shape[1:]))
        for begin in range(0, len(target), num_rows):
            part = target[begin : begin + num_rows]
            block = torch.empty((len(part), *whole[1:]), dtype=dtype)
            _read_into(file, first + begin * row, block)
            part.copy_(block[columns])


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))


def _read_into(file: IO[bytes], position: int, target: torch.Tensor) -> None:
    """Fill a contiguous tensor on the CPU with the bytes at ``position``.

    Raises:
        DamagedCheckpointError: if the file ends before.
    """
    view: memoryview = target.reshape(-1).view(torch.uint8).numpy().data
    done = 0
    while done < len(view):
        count = os.preadv(file.fileno(), [view[done:]], position + done)
        if not count:
            raise DamagedCheckpointError(f"{file.name} is cut off")
        done += count


class SafePlanner(DefaultLoadPlanner):
    """A planner that reads objects as data.

    Raises:
        ValueError: for an object that is damaged or names a class that checkpoints do not hold,
            with its key.
    """

    def create_local_plan(self) -> LoadPlan:
        """Plan what this rank reads, and tell the first rank nothing: it would change nothing."""
        self._plan = super().create_local_plan()
        # Fields of param groups are a few values that are stored thousands of times.
        self._scalars: dict[bytes, Any] = {}
        return LoadPlan([])

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan of this rank."""
        return self._plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle one object and put it into the state dict that is loaded."""
        key, data = read_item.dest_index.fqn, value.getvalue()
        try:
            content = self._scalars[data] if data in self._scalars else safe_pickle.load_torch(data)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        if safe_pickle.is_scalar(content):
            self._scalars[data] = content
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], content)
        else:
            self.state_dict[key] = content
