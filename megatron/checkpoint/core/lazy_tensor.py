# SPDX-License-Identifier: Apache-2.0
"""Tensors that are read when they are needed: a conversion is planned over them, and holds one of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that some file can give, row by row.

    Attributes:
        shape: of the whole tensor.
        dtype: of what is read.
        read_rows: rows ``[start, stop)`` of dim 0, new memory at every call; a 0-d tensor is row 0
            of one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read_rows: Callable[[int, int], torch.Tensor]

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """The whole tensor."""
        return self.read_rows(0, self.num_rows)

    def rows(self, start: int, stop: int) -> LazyTensor:
        """Rows ``[start, stop)`` of dim 0; nothing else is read for them.

        Raises:
            ValueError: for rows that it does not have.
        """
        if not 0 <= start <= stop <= self.num_rows:
            raise ValueError(f"rows {start} to {stop} of a tensor of shape {self.shape}")
        return LazyTensor(
            (stop - start, *self.shape[1:]),
            self.dtype,
            lambda first, last: self.read_rows(start + first, start + last),
        )

    def to(self, dtype: torch.dtype) -> LazyTensor:
        """The same values in another dtype."""
        if dtype == self.dtype:
            return self
        return LazyTensor(
            self.shape, dtype, lambda start, stop: self.read_rows(start, stop).to(dtype)
        )

    def map(
        self, shape: Sequence[int], function: Callable[[torch.Tensor], torch.Tensor]
    ) -> LazyTensor:
        """``function`` of the whole tensor, a tensor of ``shape``; every read reads the whole."""
        return LazyTensor(
            tuple(shape),
            self.dtype,
            lambda start, stop: _rows_of(function(self.read()), start, stop),
        )


def in_memory(tensor: torch.Tensor) -> LazyTensor:
    """A tensor that is there already."""
    return LazyTensor(
        tuple(tensor.shape), tensor.dtype, lambda start, stop: _rows_of(tensor, start, stop).clone()
    )


def concatenate(parts: Sequence[LazyTensor]) -> LazyTensor:
    """One after another along dim 0.

    Raises:
        ValueError: where their dtypes or other dims differ.
    """
    first = parts[0]
    if any(part.dtype != first.dtype or part.shape[1:] != first.shape[1:] for part in parts):
        raise ValueError(
            f"cannot be one tensor: {', '.join(f'{part.dtype} {part.shape}' for part in parts)}"
        )

    def read_rows(start: int, stop: int) -> torch.Tensor:
        pieces, offset = [], 0
        for part in parts:
            lowest, highest = max(start - offset, 0), min(stop - offset, part.num_rows)
            if lowest < highest:
                pieces.append(part.read_rows(lowest, highest))
            offset += part.num_rows
        return (
            torch.cat(pieces) if pieces else torch.empty((0, *first.shape[1:]), dtype=first.dtype)
        )

    return LazyTensor(
        (sum(part.num_rows for part in parts), *first.shape[1:]), first.dtype, read_rows
    )


def _rows_of(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return tensor[start:stop] if tensor.dim() else tensor
