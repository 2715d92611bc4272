# SPDX-License-Identifier: Apache-2.0
"""Ranges of bytes of a block of memory, each with a history of accesses of its own.

[Note: ranges] Torch's sanitizer keeps accesses by a number. A block begins as one range with one
number. An access to a part of it splits the ranges that it does not cover whole, and both sides
keep the history; ranges that one access has written to are one again. A view that is not contiguous
counts from its first to its last byte.

    a buffer of 32 bytes      [ 1                     ]
    bytes 8 to 16 are read    [ 1 ][ 2 ][ 3           ]
    all bytes are written     [ 1                     ]
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.cuda._sanitizer import Access, TensorInfo

if TYPE_CHECKING:
    from tools.cuda_model.memory import MemoryBlock


class Extent(NamedTuple):
    """The bytes of a block from ``start`` to ``stop``."""

    block: MemoryBlock
    start: int
    stop: int


def bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where in its storage the bytes of ``tensor`` begin and end, those between included."""
    start = int(tensor.storage_offset())
    if tensor.is_contiguous():
        last = tensor.numel() - 1
    else:
        last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride()))
    stop = start + last + 1 if tensor.numel() else start
    return start * tensor.element_size(), stop * tensor.element_size()


def extent_of(tensor: torch.Tensor, block: MemoryBlock) -> Extent:
    """Return the bytes of ``tensor`` in its block."""
    return Extent(block, *bytes_of(tensor))


def written_by_gather(rank: int, output: torch.Tensor, given: torch.Tensor) -> list[torch.Tensor]:
    """Return what an all-gather by NCCL writes: not the slice of this rank if that is its operand.

    Args:
        rank: that in the group.
        output: the tensor with the slices of all ranks.
        given: the operand.
    """
    # NVLS does write it, but with the values that are there, which no reader can tell.
    start = rank * given.numel()
    is_in_place = given.data_ptr() == output.data_ptr() + start * given.element_size()
    if not given.numel() or not is_in_place or not output.is_contiguous():
        return [output]
    flat = output.detach().view(-1)
    slices = flat[:start], flat[start + given.numel() :]
    return [other for other in slices if other.numel()]


class Ranges:
    """The ranges of one block, in order, and their numbers."""

    def __init__(self, num_bytes: int, first: int):
        self._starts = [0]
        self._numbers = [first]
        self._num_bytes = num_bytes

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def within(self, start: int, stop: int) -> list[int]:
        """Return the numbers of the ranges that have bytes between two."""
        first, end = self._between(start, stop)
        return self._numbers[first:end]

    def split(self, at: int, accesses: Accesses) -> None:
        """Let a range begin at byte ``at``, with the history of the range that it was in."""
        index = bisect_left(self._starts, at)
        if at >= self._num_bytes or (index < len(self._starts) and self._starts[index] == at):
            return
        self._starts.insert(index, at)
        self._numbers.insert(index, accesses.copy(self._numbers[index - 1]))

    def join(self, start: int, stop: int, accesses: Accesses) -> None:
        """Let ranges between two bytes be one again: the same access was the last to write."""
        first, end = self._between(start, stop)
        for number in self._numbers[first + 1 : end]:
            accesses.pop(number)
        del self._starts[first + 1 : end], self._numbers[first + 1 : end]

    def _between(self, start: int, stop: int) -> tuple[int, int]:
        return bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop)


class Accesses:
    """The accesses that torch's sanitizer keeps, by the numbers of ranges.

    Attributes:
        numbers: those of new ranges.
    """

    def __init__(self, infos: dict[int, TensorInfo]):
        self._infos = infos
        self.numbers = count(1)

    def copy(self, number: int) -> int:
        """Return the number of another range with the accesses of one."""
        other = next(self.numbers)
        info = self._infos.get(number)
        if info is not None:
            self._infos[other] = TensorInfo(None, list(info.reads), info.write)
        return other

    def of(self, number: int) -> list[Access]:
        """Return the last write and the reads since then."""
        info = self._infos.get(number)
        if info is None:
            return []
        return list(info.reads) if info.write is None else [*info.reads, info.write]

    def pop(self, number: int) -> list[Access]:
        """Forget the accesses of a range; return them."""
        accesses = self.of(number)
        self._infos.pop(number, None)
        return accesses
