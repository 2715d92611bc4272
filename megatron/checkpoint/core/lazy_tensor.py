# SPDX-License-Identifier: Apache-2.0
"""Tensors that are read when they are needed.

A conversion is planned over them and has one of them in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

_BLOCK_BYTES = 64 << 20

Shape = tuple[int, ...]
"""Lengths of the dims of a tensor."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that some file has, which is read by rows.

    Attributes:
        shape: shape of the whole tensor.
        dtype: dtype of the rows that are read.
        read_rows: function that reads the rows ``[start, stop)`` of dim 0 into new memory. A 0-d
            tensor has one row, the tensor itself.
    """

    shape: Shape
    dtype: torch.dtype
    read_rows: Callable[[int, int], torch.Tensor]

    @property
    def num_rows(self) -> int:
        """Length of dim 0; 1 for a 0-d tensor."""
        if not self.shape:
            return 1
        return self.shape[0]

    @property
    def num_bytes(self) -> int:
        """Size of the whole tensor in memory."""
        numel = torch.Size(self.shape).numel()
        return numel * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """Read the whole tensor."""
        return self.read_rows(0, self.num_rows)

    def row_blocks(self) -> Iterator[tuple[int, int]]:
        """Yield ``[start, stop)`` of rows that make up about 64 MiB, or of one row."""
        num_bytes = max(self.num_bytes, 1)
        rows_of_block = _BLOCK_BYTES * self.num_rows // num_bytes
        step = max(rows_of_block, 1)
        for start in range(0, self.num_rows, step):
            stop = min(start + step, self.num_rows)
            yield start, stop

    def rows(self, start: int, stop: int) -> LazyTensor:
        """Return the rows ``[start, stop)`` of dim 0; nothing else is read for them.

        Raises:
            ValueError: for rows that it does not have.
        """
        if not 0 <= start <= stop <= self.num_rows:
            raise ValueError(f"rows {start} to {stop} of a tensor of shape {self.shape}")

        def read_rows(first: int, last: int) -> torch.Tensor:
            return self.read_rows(start + first, start + last)

        shape = shape_of_rows(self.shape, start, stop)
        return LazyTensor(shape, self.dtype, read_rows)

    def to(self, dtype: torch.dtype) -> LazyTensor:
        """Return the tensor in another dtype."""
        if dtype == self.dtype:
            return self

        def read_rows(start: int, stop: int) -> torch.Tensor:
            rows = self.read_rows(start, stop)
            return rows.to(dtype)

        return LazyTensor(self.shape, dtype, read_rows)

    def map(
        self,
        shape: Sequence[int],
        function: Callable[[torch.Tensor], torch.Tensor],
    ) -> LazyTensor:
        """Return a function of the whole tensor, of this shape, that keeps its dtype.

        Reading any of its rows reads the whole tensor.
        """

        def read_rows(start: int, stop: int) -> torch.Tensor:
            whole = function(self.read())
            return _rows_of(whole, start, stop)

        return LazyTensor(tuple(shape), self.dtype, read_rows)


Tensors = dict[str, LazyTensor]
"""Tensors by name."""


def in_memory(tensor: torch.Tensor) -> LazyTensor:
    """Return a lazy tensor over a tensor that is already in memory."""

    def read_rows(start: int, stop: int) -> torch.Tensor:
        rows = _rows_of(tensor, start, stop)
        return rows.clone()

    return LazyTensor(tuple(tensor.shape), tensor.dtype, read_rows)


def zeros(shape: Shape, dtype: torch.dtype) -> LazyTensor:
    """Return a lazy tensor of zeros."""

    def read_rows(start: int, stop: int) -> torch.Tensor:
        rows_shape = shape_of_rows(shape, start, stop)
        return torch.zeros(rows_shape, dtype=dtype)

    return LazyTensor(shape, dtype, read_rows)


def shape_of_rows(
    shape: Shape,
    start: int,
    stop: int,
) -> Shape:
    """Return the shape of the rows ``[start, stop)`` of a tensor; that of a 0-d tensor is ()."""
    if not shape:
        return ()
    return (stop - start, *shape[1:])


def concatenate(parts: Sequence[LazyTensor]) -> LazyTensor:
    """Concatenate tensors along dim 0.

    Raises:
        ValueError: if their dtypes or other dims differ.
    """
    first = parts[0]
    row_shape = first.shape[1:]
    for part in parts:
        has_dtype = part.dtype == first.dtype
        has_row_shape = part.shape[1:] == row_shape
        if not (has_dtype and has_row_shape):
            kinds = [f"{part.dtype} {part.shape}" for part in parts]
            raise ValueError(f"cannot be one tensor: {', '.join(kinds)}")

    def read_rows(start: int, stop: int) -> torch.Tensor:
        # Rows 1 to 5 of parts of 3 and 4 rows are rows 1 to 3 of the first and, because the second
        # begins at row 3, rows 0 to 2 of the second.
        found = []
        offset = 0
        for part in parts:
            part_start = max(start - offset, 0)
            part_stop = min(stop - offset, part.num_rows)
            if part_start < part_stop:
                found.append(part.read_rows(part_start, part_stop))
            offset += part.num_rows
        if not found:
            return torch.empty((0, *row_shape), dtype=first.dtype)
        return torch.cat(found)

    num_rows = sum(part.num_rows for part in parts)
    shape = (num_rows, *row_shape)
    return LazyTensor(shape, first.dtype, read_rows)


def _rows_of(
    tensor: torch.Tensor,
    start: int,
    stop: int,
) -> torch.Tensor:
    if tensor.dim() == 0:
        return tensor
    return tensor[start:stop]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    content = tensor.reshape(-1).view(torch.uint8)
    return content.numpy().data
