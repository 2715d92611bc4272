# SPDX-License-Identifier: Apache-2.0
"""Which rank owns which elements of which parameter: pure integers, the same on every rank.

A group of parameters is one flat buffer of ``world_size * shard_size`` elements. Parameters lie in it whole and
contiguous; rank r owns ``[r * shard_size, (r + 1) * shard_size)``. Cuts prefer rows (slices of dim 0): a parameter is
moved behind a little padding until the cut falls between two rows. Where that would cost more than ``ROW_BUDGET``,
cuts fall anywhere on the alignment and the parameter's pieces are flat element runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, lcm, prod
from typing import Iterator, Sequence

ALIGNMENT = 8  # elements: 16 bytes of a 2-byte dtype, what vector loads and matrix kernels want
ROW_BUDGET = 0.01  # padding, as a share of the parameters, that whole rows may cost

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes in an N-d tensor


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in the flat buffer, and whether cuts respect its rows."""

    shape: tuple[int, ...]
    start: int
    by_rows: bool

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Layout:
    """The flat buffer of a group over ``world_size`` ranks."""

    world_size: int
    shard_size: int
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        return self.world_size * self.shard_size

    @property
    def padding(self) -> int:
        return self.numel - sum(slot.numel for slot in self.slots)

    def owned(self, index: int, rank: int) -> Run:
        """The elements of parameter ``index`` that ``rank`` owns."""
        slot = self.slots[index]
        low = min(max(rank * self.shard_size - slot.start, 0), slot.numel)
        high = min(max((rank + 1) * self.shard_size - slot.start, 0), slot.numel)
        return Run(slot.shape, low, high, slot.by_rows)

    def shard_range(self, index: int, rank: int) -> tuple[int, int]:
        """Where those elements lie in the rank's shard."""
        run = self.owned(index, rank)
        begin = self.slots[index].start + run.start - rank * self.shard_size if run.numel else 0
        return begin, begin + run.numel


@dataclass(frozen=True)
class Run:
    """A contiguous range ``[start, stop)`` of the elements of a tensor of ``shape``, in row-major order."""

    shape: tuple[int, ...]
    start: int
    stop: int
    by_rows: bool

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def local_shape(self) -> tuple[int, ...]:
        """A whole tensor and whole rows keep their dimensions, an element run is flat."""
        if self.numel == prod(self.shape):
            return self.shape
        if not self.by_rows:
            return (self.numel,)
        return (self.numel // row_size(self.shape), *self.shape[1:])

    def parts(self, count: int) -> list[Run]:
        """The same elements as runs of ``count`` tensors that lie one behind the other along dim 0."""
        if count == 1:
            return [self]
        shape = (self.shape[0] // count, *self.shape[1:])
        size = prod(shape)
        cuts = [(max(self.start, i * size) - i * size, min(self.stop, (i + 1) * size) - i * size) for i in range(count)]
        return [Run(shape, *(cut if cut[0] < cut[1] else (0, 0)), self.by_rows) for cut in cuts]

    def boxes(self) -> list[Box]:
        """The range as boxes of the tensor, in row-major order: at most ``2 * ndim - 1`` of them."""
        return list(_boxes(self.shape, self.start, self.stop)) if self.numel else []


def row_size(shape: Sequence[int]) -> int:
    """Elements of one slice of dim 0; 1 for vectors and scalars."""
    return max(prod(shape[1:]), 1)


def plan(shapes: Sequence[Sequence[int]], world_size: int) -> Layout:
    """Lay parameters out for ``world_size`` ranks with little padding, cut between rows if that is cheap.

    Args:
        shapes: logical shapes, in the order in which they are to lie.
        world_size: size of the shard axis, at least 1.
    """
    shapes = [tuple(shape) for shape in shapes]
    elements = sum(prod(shape) for shape in shapes)
    candidates = [_fit(shapes, world_size, step, respect_rows=True) for step in _steps(shapes, world_size)]
    rows = min((layout for layout in candidates if layout), key=lambda layout: layout.numel, default=None)
    if rows and rows.padding <= max(ROW_BUDGET * elements, world_size * ALIGNMENT):
        return rows
    return _fit(shapes, world_size, ALIGNMENT, respect_rows=False)


def _steps(shapes: Sequence[tuple[int, ...]], world_size: int) -> list[int]:
    """Shard sizes worth trying are multiples of these: a parameter with two cuts needs whole rows in a shard."""
    shard = ceil(sum(prod(shape) for shape in shapes) / world_size)
    rows = {row_size(shape) for shape in shapes if prod(shape) > shard}
    return [ALIGNMENT, *sorted({lcm(ALIGNMENT, row) for row in rows} | {lcm(ALIGNMENT, *rows)})]


def _fit(shapes: Sequence[tuple[int, ...]], world_size: int, step: int, respect_rows: bool) -> Layout | None:
    """The smallest shard, a multiple of ``step``, into which everything goes; None where rows cannot be kept whole."""
    elements = sum(prod(shape) for shape in shapes)
    shard = max(_round_up(ceil(elements / world_size), step), step)
    while True:
        slots, end = _place(shapes, shard, respect_rows)
        if end <= world_size * shard:
            break
        shard = max(shard + step, _round_up(ceil(end / world_size), step))
    if respect_rows and not all(slot.by_rows for slot in slots):
        return None
    return Layout(world_size, shard, tuple(slots))


def _place(shapes: Sequence[tuple[int, ...]], shard: int, respect_rows: bool) -> tuple[list[Slot], int]:
    """Put the parameters one behind the other; the end of the last one is returned beside their slots."""
    slots: list[Slot] = []
    cursor = 0
    for shape in shapes:
        start = _round_up(cursor, ALIGNMENT)
        if respect_rows:
            moved = start + (_next_cut(start, shard) - start) % row_size(shape)
            # Without a cut inside there is nothing to respect; with one, moving must not cost the alignment.
            if start + prod(shape) > _next_cut(start, shard) and moved % ALIGNMENT == 0:
                start = moved
        slot = Slot(shape, start, by_rows=_cuts_between_rows(shape, start, shard))
        slots.append(slot)
        cursor = slot.stop
    return slots, cursor


def _cuts_between_rows(shape: tuple[int, ...], start: int, shard: int) -> bool:
    if not shape:
        return False  # a scalar has no dim 0: it is a run of one element
    cuts = range(_next_cut(start, shard), start + prod(shape), shard)
    return all((cut - start) % row_size(shape) == 0 for cut in cuts[:2])  # two good cuts make all good


def _next_cut(position: int, shard: int) -> int:
    return (position // shard + 1) * shard


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Ragged first row, whole rows, ragged last row; the ragged ones are the same problem one dimension down."""
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        yield from _in_row(shape, last, start, stop)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first,) + (0,) * (len(shape) - 1), (last - first,) + shape[1:]
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    row = prod(shape[1:])
    for offsets, sizes in _boxes(shape[1:], start - index * row, stop - index * row):
        yield (index, *offsets), (1, *sizes)
