# SPDX-License-Identifier: Apache-2.0
"""Which rank owns which elements of which parameter: pure integers, the same on every rank.

A group of parameters is one flat buffer of ``world_size * shard_size`` elements. Parameters lie in
it whole and contiguous, in any order; rank r owns ``[r * shard_size, (r + 1) * shard_size)``, so
the multiples of ``shard_size`` are where parameters are cut. A parameter's *alignment* is the number of
elements that no cut divides: by wish one row.

How :func:`plan` chooses. A parameter longer than two shards is cut where the shard size says, so
its alignment must divide the shard size; a shorter one can be moved until its cut falls between alignments.

1. The smallest buffer is one where only requirements count and wishes are ignored. It cannot be
   refused, whatever it costs.
2. The buffer may be larger than the elements by 1 % (``PADDING_BUDGET``), by 8 elements a rank and 8 a
   parameter, or as large as the smallest one: the largest of the three. Where nothing is required
   the smallest one is below the second.
3. Within that, shard sizes are tried that are multiples of common multiples of the alignments. The
   layout in which the fewest parameters are cut inside a alignment wins, then the one with the smallest
   shard.

For one shard size, parameters are laid one behind the other: always the one that leaves the
smallest gap, and of equals the one with the largest alignment, so that small and undemanding ones are
left to fill gaps. Where even the smallest gap is
more than the buffer has to spare, a parameter with only a wish is cut anywhere on the alignment: an
element run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm, prod
from typing import Literal

MIN_ALIGNMENT = 8  # elements: 16 bytes of a 2-byte dtype, what vector loads and matrix kernels want
PADDING_BUDGET = 0.01  # padding, as a share of the parameters, that wishes may cost
# Common multiples of alignments worth trying; models have three or four alignments, so this binds for
# random shapes only
MAX_STEPS = 32

Chunk = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes in an N-d tensor


@dataclass(frozen=True)
class Granularity:
    """The smallest piece of a parameter that no cut divides: ``count`` elements or rows, or the whole tensor.

    A requirement is kept whatever the padding; a wish gives way to element runs where it does not
    fit the budget. Elements are counted from the start of the parameter, and cuts also stay on
    ``MIN_ALIGNMENT``.

    Raises:
        ValueError: the unit is unknown or the count is below 1.
    """

    unit: Literal["elements", "rows", "tensor"]
    count: int = 1
    is_required: bool = True

    def __post_init__(self) -> None:
        if self.unit not in ("elements", "rows", "tensor") or self.count < 1:
            raise ValueError(
                f"expects elements, rows or tensor and a count of at least 1 but got {self.unit!r},"
                f" {self.count}"
            )

    def alignment(self, shape: Sequence[int]) -> int:
        """Elements of a piece of a tensor of ``shape``."""
        if self.unit == "tensor":
            return max(prod(shape), 1)
        return self.count * (row_size(shape) if self.unit == "rows" else 1)


ELEMENTS = Granularity("elements")
ROWS = Granularity("rows")
WHOLE_TENSOR = Granularity("tensor")
PREFER_ROWS = Granularity("rows", is_required=False)


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

    def owned(self, index: int, rank: int) -> FlatRange:
        """The elements of parameter ``index`` that ``rank`` owns."""
        slot = self.slots[index]
        low = min(max(rank * self.shard_size - slot.start, 0), slot.numel)
        high = min(max((rank + 1) * self.shard_size - slot.start, 0), slot.numel)
        return FlatRange(slot.shape, low, high, slot.by_rows)

    def shard_range(self, index: int, rank: int) -> tuple[int, int]:
        """Where those elements lie in the rank's shard."""
        run = self.owned(index, rank)
        begin = self.slots[index].start + run.start - rank * self.shard_size if run.numel else 0
        return begin, begin + run.numel


@dataclass(frozen=True)
class FlatRange:
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

    def parts(self, count: int) -> list[FlatRange]:
        """The same elements as runs of ``count`` tensors that lie one behind the other along dim 0."""
        if count == 1:
            return [self]
        shape = (self.shape[0] // count, *self.shape[1:])
        size = prod(shape)
        cuts = [
            (max(self.start, i * size) - i * size, min(self.stop, (i + 1) * size) - i * size)
            for i in range(count)
        ]
        return [
            FlatRange(shape, *(cut if cut[0] < cut[1] else (0, 0)), self.by_rows) for cut in cuts
        ]

    def chunks(self) -> list[Chunk]:
        """The range as chunks of the tensor, in row-major order: at most ``2 * ndim - 1`` of them."""
        return list(_chunks(self.shape, self.start, self.stop)) if self.numel else []


def row_size(shape: Sequence[int]) -> int:
    """Elements of one slice of dim 0; 1 for vectors and scalars."""
    return max(prod(shape[1:]), 1)


def plan(
    shapes: Sequence[Sequence[int]],
    world_size: int,
    granularity: Granularity | Sequence[Granularity] = PREFER_ROWS,
) -> Layout:
    """Lay parameters out for ``world_size`` ranks with little padding, cut between rows if that is cheap.

    With wishes only, padding is at most 1 % of the elements, or ``MIN_ALIGNMENT * (world_size +
    len(shapes))`` if that is more. Requirements are kept whatever they cost; wishes beside them add
    nothing beyond that bound. Equal arguments give the same object; the result depends on nothing
    else.

    Args:
        shapes: logical shapes; ``slots`` of the result has the same order, the buffer need not.
        world_size: size of the shard axis, at least 1.
        granularity: of all parameters, or one for each.

    Raises:
        ValueError: the world size is below 1, a dim is negative, or there are not as many
            granularities as shapes.
    """
    sizes = tuple(tuple(shape) for shape in shapes)
    wanted = (
        (granularity,) * len(sizes) if isinstance(granularity, Granularity) else tuple(granularity)
    )
    if world_size < 1:
        raise ValueError(f"expects a world size of at least 1 but got {world_size}")
    if len(wanted) != len(sizes):
        raise ValueError(
            f"expects one granularity for each of {len(sizes)} parameters but got {len(wanted)}"
        )
    if any(dim < 0 for shape in sizes for dim in shape):
        raise ValueError(
            "expects dims of at least 0 but got"
            f" {[shape for shape in sizes if min(shape, default=0) < 0]}"
        )
    return _plan(sizes, world_size, wanted)


@dataclass(frozen=True)
class _Kind:
    """Parameters that are alike to the planner.

    Its numbers are multiples of ``MIN_ALIGNMENT``, as all starts and cuts are.
    """

    room: int  # elements of one of them, rounded up
    alignment: int
    is_required: bool
    indices: tuple[int, ...]

    def roomy_shard(self) -> int:
        """From this shard size on there is always a start with no cut inside, or one, between alignments."""
        return self.room - self.room // (2 * self.alignment) * self.alignment

    def suits(self, shard: int) -> bool:
        """Whether there is a start from which no cut divides a alignment."""
        return shard % self.alignment == 0 or shard >= self.roomy_shard()

    def first_start(self, cursor: int, shard: int) -> int:
        """The first of these starts at or behind the cursor; the shard size must suit."""
        cut = _next_cut(cursor, shard)
        if cursor + self.room <= cut:
            return cursor
        moved = cursor + (cut - cursor) % self.alignment
        if moved < cut and (shard % self.alignment == 0 or moved + self.room <= cut + shard):
            return moved
        return self.first_start(cut, shard)

    def without_alignment(self) -> _Kind:
        return replace(self, alignment=MIN_ALIGNMENT)


@dataclass(frozen=True, order=True)
class _Placement:
    """Where everything lies for one shard size, the better ones first in order."""

    broken: int  # parameters that are cut inside a alignment
    shard: int
    starts: tuple[tuple[int, int], ...]  # index and start of each parameter that has elements


@lru_cache(maxsize=1024)  # most layers of a model are equal
def _plan(
    shapes: tuple[tuple[int, ...], ...], world_size: int, granularities: tuple[Granularity, ...]
) -> Layout:
    kinds = _kinds(shapes, granularities)
    total = sum(kind.room * len(kind.indices) for kind in kinds)
    low = max(_round_up(-(-total // world_size), MIN_ALIGNMENT), MIN_ALIGNMENT)
    # With a shard for everything nothing is cut, so this search finds something.
    best = _search(
        [kind if kind.is_required else kind.without_alignment() for kind in kinds],
        world_size,
        low,
        max(total, low),
    )
    assert best is not None
    if not all(kind.is_required for kind in kinds):
        elements = sum(prod(shape) for shape in shapes)
        allowed = elements + max(
            int(PADDING_BUDGET * elements), MIN_ALIGNMENT * (world_size + len(shapes))
        )
        best = _search(kinds, world_size, low, max(allowed // world_size, best.shard)) or best
    return _layout(shapes, world_size, best)


def _kinds(shapes: Sequence[tuple[int, ...]], granularities: Sequence[Granularity]) -> list[_Kind]:
    """Parameters that have elements, the largest alignments first."""
    alike: dict[tuple[int, int, bool], list[int]] = {}
    for index, (shape, granularity) in enumerate(zip(shapes, granularities)):
        if room := _round_up(prod(shape), MIN_ALIGNMENT):
            # A alignment of more than the parameter says no more than that it is not cut.
            alignment = min(lcm(granularity.alignment(shape), MIN_ALIGNMENT), room)
            alike.setdefault((alignment, room, granularity.is_required), []).append(index)
    return [
        _Kind(room, alignment, required, tuple(alike[alignment, room, required]))
        for alignment, room, required in sorted(alike)[::-1]
    ]


def _search(kinds: Sequence[_Kind], world_size: int, low: int, high: int) -> _Placement | None:
    """The best placement with a shard size in ``[low, high]``; None where the sizes tried do not do for the requirements."""
    best: _Placement | None = None
    for step in _steps(kinds, low, high):
        required = [
            kind.roomy_shard() for kind in kinds if kind.is_required and step % kind.alignment
        ]
        hopeless = sum(len(kind.indices) for kind in kinds if not kind.suits(high // step * step))
        for multiple in _ladder(-(-max([low, *required]) // step), high // step):
            shard = multiple * step
            if best and (best.broken, best.shard) <= (hopeless, shard):
                # Larger multiples are no better, but for those that are multiples of another step
                break
            found = _place(kinds, world_size, shard)
            if found and (best is None or found < best):
                best = found
    return best


def _steps(kinds: Sequence[_Kind], low: int, high: int) -> list[int]:
    """Shard sizes worth trying are multiples of these.

    Grains of parameters that fit in a shard need not divide it.
    """
    count: dict[int, int] = {}
    for kind in kinds:
        if kind.room > low:
            count[kind.alignment] = count.get(kind.alignment, 0) + len(kind.indices)
    steps = [MIN_ALIGNMENT]
    for alignment in sorted(
        count, key=lambda alignment: (-count[alignment], alignment)
    ):  # the most frequent ones first: the list is cut off
        common = {lcm(step, alignment) for step in steps}
        steps = [*steps, *sorted(step for step in common.difference(steps) if step <= high)][
            :MAX_STEPS
        ]
    return steps


def _ladder(first: int, last: int) -> Iterator[int]:
    """Numbers from first to last: the first nine, then ever fewer, so that what they add is known to a quarter."""
    rung = first
    while rung < last:
        yield rung
        rung += max((rung - first) // 4, 1)
    if first <= last:
        yield last


def _place(kinds: Sequence[_Kind], world_size: int, shard: int) -> _Placement | None:
    """One parameter behind the other, for one shard size; None where the buffer is too small for the requirements."""
    if not all(kind.suits(shard) for kind in kinds if kind.is_required):
        return None
    # Wishes that no start can grant are given up at once. These parameters can go anywhere: they
    # come last, to fill gaps.
    waiting = [(kind, [*kind.indices]) for kind in kinds if kind.suits(shard)]
    waiting += [
        (kind.without_alignment(), [*kind.indices]) for kind in kinds if not kind.suits(shard)
    ]
    starts: list[tuple[int, int]] = []
    cursor, spare = 0, world_size * shard - sum(kind.room * len(kind.indices) for kind in kinds)
    while waiting:
        position, start = _smallest_gap(waiting, cursor, shard)
        if start - cursor > spare:
            wishes = [
                position for position, (kind, _) in enumerate(waiting) if not kind.is_required
            ]
            if not wishes:
                return None
            position, start = wishes[0], cursor
        kind, indices = waiting[position]
        starts.append((indices.pop(0), start))
        spare -= start - cursor
        cursor = start + kind.room
        if not indices:
            del waiting[position]
    return _Placement(_broken(kinds, dict(starts), shard), shard, tuple(starts))


def _smallest_gap(
    waiting: Sequence[tuple[_Kind, list[int]]], cursor: int, shard: int
) -> tuple[int, int]:
    """Which kind can start closest behind the cursor, the first of equals, and where."""
    best = (0, waiting[0][0].first_start(cursor, shard))
    for position, (kind, _) in enumerate(waiting):
        if best[1] == cursor:
            break
        start = kind.first_start(cursor, shard)
        if start < best[1]:
            best = (position, start)
    return best


def _broken(kinds: Sequence[_Kind], starts: dict[int, int], shard: int) -> int:
    """How many parameters are cut inside a alignment."""
    return sum(
        not _cuts_fall_between(kind.alignment, starts[i], kind.room, shard)
        for kind in kinds
        for i in kind.indices
    )


def _layout(shapes: Sequence[tuple[int, ...]], world_size: int, placement: _Placement) -> Layout:
    """Parameters without elements lie behind all others, where they are between no two."""
    starts = dict(placement.starts)
    end = max((start + prod(shapes[index]) for index, start in placement.starts), default=0)
    slots = []
    for index, shape in enumerate(shapes):
        start = starts.get(index, _round_up(end, MIN_ALIGNMENT))
        # A scalar has no dim 0: it is a run of one element.
        by_rows = bool(shape) and _cuts_fall_between(
            row_size(shape), start, prod(shape), placement.shard
        )
        slots.append(Slot(shape, start, by_rows))
    return Layout(world_size, placement.shard, tuple(slots))


def _cuts_fall_between(alignment: int, start: int, numel: int, shard: int) -> bool:
    cuts = range(_next_cut(start, shard), start + numel, shard)
    return all((cut - start) % alignment == 0 for cut in cuts[:2])  # two good cuts make all good


def _next_cut(position: int, shard: int) -> int:
    return (position // shard + 1) * shard


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _chunks(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Chunk]:
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
        yield (first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Chunk]:
    row = prod(shape[1:])
    for offsets, sizes in _chunks(shape[1:], start - index * row, stop - index * row):
        yield (index, *offsets), (1, *sizes)
