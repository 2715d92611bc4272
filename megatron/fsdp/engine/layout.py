# SPDX-License-Identifier: Apache-2.0
"""The layout: which rank owns which elements of which parameter, in integers alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm, prod
from typing import Literal

from megatron.fsdp.engine.planner import (
    MIN_ALIGNMENT,
    Request,
    cuts_are_aligned,
    find_placement,
)

# [Note: the flat buffer] A group of parameters is one flat buffer of ``world_size * shard_size``
# elements. Parameters lie in it whole and contiguous, in an order that :mod:`.planner` chooses, and
# rank r owns ``[r * shard_size, (r + 1) * shard_size)``. Example: shapes (3, 4) and (6,), 2 ranks.
#
#     element     0       8       16      24      32
#     shard       |    rank 0     |    rank 1     |
#     parameter   | (3, 4)    |...| (6,)|.........|      dots are padding
#
# Every rank computes the same layout, so no collective is ever needed to describe one.

# Offsets and sizes of a box in an N-dimensional tensor, as in torch's distributed checkpoints.
Chunk = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Granularity:
    """The smallest part of a parameter that no cut divides: elements, rows or the whole tensor.

    Args:
        unit: the unit of ``count``, from the parameter's start; blocks of elements are whole rows.
        count: number that stays together; not for whole tensors. Cuts also stay on multiples of
            ``MIN_ALIGNMENT`` elements.
        is_required: satisfy it whatever the padding costs. Otherwise it is a preference: if it
            exceeds the padding budget, whole tensors may be cut between rows, and rows anywhere.
    """

    unit: Literal["elements", "rows", "blocks", "tensor"]
    count: int = 1
    is_required: bool = True

    def alignment(self, shape: Sequence[int]) -> int:
        """Return the number of elements of a tensor of ``shape`` that stay together."""
        if self.unit == "tensor":
            return max(prod(shape), 1)
        if self.unit == "rows":
            return self.count * row_size(shape)
        if self.unit == "elements":
            return self.count
        if prod(shape) % self.count:  # the tensor does not consist of whole blocks
            return row_size(shape)
        return lcm(row_size(shape), self.count)


ROWS = Granularity("rows")
PREFER_ROWS = Granularity("rows", is_required=False)
PREFER_TENSORS = Granularity("tensor", is_required=False)


@dataclass(frozen=True)
class ParamPosition:
    """The position of one parameter in the flat buffer.

    Args:
        shape: shape of the whole parameter; of a DTensor that of its local tensor.
        start: position of the first element in the buffer.
        by_rows: no cut between shards falls inside one of its rows.
    """

    shape: tuple[int, ...]
    start: int
    by_rows: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def stop(self) -> int:
        """Position behind the last element."""
        return self.start + self.numel


@dataclass(frozen=True)
class Layout:
    """The flat buffer of a group over ``world_size`` ranks. See [Note: the flat buffer].

    Args:
        world_size: number of shards, one for each rank.
        shard_size: size of a shard in elements, a multiple of ``MIN_ALIGNMENT``.
        positions: positions of the parameters, in the order in which the group lists them, which
            need not be their order in the buffer.
    """

    world_size: int
    shard_size: int
    positions: tuple[ParamPosition, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.world_size * self.shard_size

    def owned(self, index: int, rank: int) -> FlatRange:
        """Return the elements of parameter ``index`` that ``rank`` owns; the range may be empty."""
        # Example: a parameter at [10, 30) of the buffer, shards of 16. Rank 0 owns [0, 6) of its
        # elements, rank 1 owns [6, 20), and rank 2, whose shard begins at 32, [20, 20).
        position = self.positions[index]
        first = rank * self.shard_size - position.start
        start = _clamp(first, position.numel)
        stop = _clamp(first + self.shard_size, position.numel)
        return FlatRange(position.shape, start, stop, position.by_rows)

    def shard_range(self, index: int, rank: int) -> tuple[int, int]:
        """Return the position of :meth:`owned` elements in the rank's shard: ``[start, stop)``."""
        # In the example above: [10, 16) in rank 0's shard, [0, 14) in rank 1's.
        owned = self.owned(index, rank)
        if not owned.numel:
            return 0, 0
        position = self.positions[index]
        start = position.start + owned.start - rank * self.shard_size
        return start, start + owned.numel


@dataclass(frozen=True)
class FlatRange:
    """A contiguous range ``[start, stop)`` of the elements of a tensor in row-major order.

    Args:
        shape: shape of the whole tensor.
        start: first element of the range.
        stop: element behind the last one; ``start`` if the range is empty.
        by_rows: no rank's range of this tensor begins or ends inside a row.
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    by_rows: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the elements as a tensor: whole rows keep their dims, other ranges are flat."""
        if self.numel == prod(self.shape):
            return self.shape
        if not self.by_rows:
            return (self.numel,)
        num_rows = self.numel // row_size(self.shape)
        return (num_rows, *self.shape[1:])

    def parts(self, count: int) -> list[FlatRange]:
        """Return the same elements as ranges of ``count`` equal tensors that make up dim 0."""
        # Example: [3, 10) of a tensor of shape (4, 3), seen as 2 tensors of shape (2, 3), is [3, 6)
        # of the first and [0, 4) of the second.
        shape = (self.shape[0] // count, *self.shape[1:])
        size = prod(shape)
        parts = []
        for number in range(count):
            first = number * size
            start = _clamp(self.start - first, size)
            stop = _clamp(self.stop - first, size)
            parts.append(FlatRange(shape, start, stop, self.by_rows))
        return parts

    def chunks(self) -> list[Chunk]:
        """Return the at most ``2 * ndim - 1`` chunks of the range, in row-major order."""
        if not self.numel:
            return []
        return list(_chunks(self.shape, self.start, self.stop))


# [Note: shards and owned shards] The ranks of the inner axis divide a group's flat buffer into
# shards, one each. In hybrid sharding the outer axis usually replicates a shard. If it shards
# optimizer state too, each shard is divided once more among its outer ranks, and every rank owns a
# different part. Example: a buffer of 12 elements, 2 inner and 3 outer ranks.
#
#     element          0   1   2   3   4   5 | 6   7   8   9  10  11
#     shard of         inner rank 0          | inner rank 1
#     owned shard of   outer 0 outer 1 outer 2 outer 0 outer 1 outer 2
#     number           0       1       2       3       4       5
#
# Both levels are contiguous, so all-gathers over the outer axis fill a shard and all-gathers over
# the inner axis fill the buffer, without a copy. The layout of the group counts owned shards.


@dataclass(frozen=True)
class Partition:
    """The number of shards, and the index of the one that this rank owns.

    Args:
        num_inner: number of shards of the flat buffer; 1 if every rank updates all parameters.
        num_outer: number of owned shards of a shard; 1 unless the outer axis shards optimizer
            state.
        inner_rank: index of this rank's shard.
        outer_rank: index of this rank's owned shard within its shard.
    """

    num_inner: int
    num_outer: int
    inner_rank: int
    outer_rank: int

    @property
    def num_owned(self) -> int:
        """Number of owned shards in the whole buffer."""
        return self.num_inner * self.num_outer

    @property
    def rank(self) -> int:
        """Index of this rank's owned shard among all of them."""
        return self.inner_rank * self.num_outer + self.outer_rank


def row_size(shape: Sequence[int]) -> int:
    """Return the number of elements of one row, a slice of dim 0; 1 for vectors and scalars."""
    return max(prod(shape[1:]), 1)


def plan(
    shapes: Sequence[Sequence[int]],
    world_size: int,
    granularity: Granularity | Sequence[Granularity] = PREFER_ROWS,
) -> Layout:
    """Lay parameters out over ``world_size`` ranks, cut between rows where that is cheap.

    Preferences cost at most 1 % of the elements of padding, or ``MIN_ALIGNMENT * (world_size +
    len(shapes))`` if that is more; requirements whatever they need. The result depends on the
    arguments only, so every rank can plan alone. Equal arguments return the same object.

    Args:
        shapes: shapes of the parameters, in the order of ``positions`` of the result.
        world_size: number of shards, at least 1.
        granularity: granularity of all parameters, or one for each.

    Raises:
        ValueError: for a world size below 1, or another number of granularities than of shapes.
    """
    if world_size < 1:
        raise ValueError(f"expects a world size of at least 1 but got {world_size}")
    if isinstance(granularity, Granularity):
        granularity = (granularity,) * len(shapes)
    sizes = tuple(tuple(shape) for shape in shapes)
    return _plan(sizes, world_size, tuple(granularity))


@lru_cache(maxsize=1024)  # most layers of a model are equal
def _plan(
    shapes: tuple[tuple[int, ...], ...],
    world_size: int,
    granularities: tuple[Granularity, ...],
) -> Layout:
    requests = []
    for shape, granularity in zip(shapes, granularities, strict=True):
        request = Request(
            numel=prod(shape),
            alignment=granularity.alignment(shape),
            is_required=granularity.is_required,
        )
        requests.append(request)
    placement = find_placement(requests, world_size)
    if placement.num_broken and PREFER_TENSORS in granularities:
        weaker = []
        for granularity in granularities:
            if granularity == PREFER_TENSORS:
                granularity = PREFER_ROWS
            weaker.append(granularity)
        return _plan(shapes, world_size, tuple(weaker))
    shard_size = placement.shard_size
    starts = dict(placement.starts)
    # Parameters without elements lie behind all others.
    end = 0
    for index, start in placement.starts:
        end = max(end, start + prod(shapes[index]))
    end += -end % MIN_ALIGNMENT
    positions = []
    for index, shape in enumerate(shapes):
        start = starts.get(index, end)
        by_rows = cuts_are_aligned(
            alignment=row_size(shape),
            start=start,
            numel=prod(shape),
            shard=shard_size,
        )
        if not shape:
            by_rows = False  # a scalar has no dim 0
        positions.append(ParamPosition(shape, start, by_rows))
    return Layout(world_size, shard_size, tuple(positions))


def _clamp(position: int, size: int) -> int:
    """Return the position in ``[0, size]`` that is closest to ``position``."""
    return min(max(position, 0), size)


def _chunks(
    shape: tuple[int, ...],
    start: int,
    stop: int,
) -> Iterator[Chunk]:
    """Yield the chunks of the range ``[start, stop)``, which is not empty."""
    # A range is the end of a first row, whole rows, and the beginning of a last row. The ends are
    # the same problem with one dimension less. Example: [2, 11) of shape (3, 4).
    #
    #     0  0  1  1      ((0, 2), (1, 2))    the end of row 0: [2, 4) of a vector of 4
    #     1  1  1  1      ((1, 0), (1, 4))    the whole row 1
    #     1  1  1  0      ((2, 0), (1, 3))    the beginning of row 2: [0, 3) of a vector of 4
    if not shape:
        yield (), ()
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    size = prod(shape[1:])
    while start < stop:
        row, offset = divmod(start, size)
        num_whole = (stop - start) // size
        if offset == 0 and num_whole:
            offsets = (row,) + (0,) * (len(shape) - 1)
            yield offsets, (num_whole, *shape[1:])
            start += num_whole * size
        else:
            end = min(stop, (row + 1) * size)
            inside = _chunks(shape[1:], offset, end - row * size)
            for offsets, sizes in inside:
                yield (row, *offsets), (1, *sizes)
            start = end
