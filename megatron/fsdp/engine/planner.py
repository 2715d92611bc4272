# SPDX-License-Identifier: Apache-2.0
"""The planner: the order and the starts of parameters in a buffer that is cut into shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm

# [Note: how the planner chooses] A flat buffer of ``world_size * shard_size`` elements is cut at
# the multiples of the shard size. Parameters lie in it whole, in any order. The *alignment* of a
# parameter is a number of elements, usually those of one row, that no cut should divide. A
# parameter that is longer than two shards is cut wherever the shard size demands, so its alignment
# must divide the shard size. A shorter one can be moved until its cut falls between rows.
#
# 1. The smallest buffer that satisfies the required alignments is accepted whatever its padding.
# 2. To satisfy preferred ones, the buffer may exceed the elements by 1 % (``PADDING_BUDGET``), by 8
#    elements for each rank and parameter, or be as large as the smallest buffer, whichever is most.
# 3. Within that limit, the shard sizes tried are multiples of common multiples of the alignments.
#    The best placement cuts the fewest parameters inside their alignment; among equals, it has the
#    smallest shard.
#
# For one shard size, parameters are placed one after the other: always the one that leaves the
# smallest gap, and among equals the one with the largest alignment. If the gap is larger than the
# padding that is left, a parameter whose alignment is only preferred is placed without a gap.

# In elements, of all starts and cuts: 16 bytes of a 2-byte dtype, which matrix kernels want.
MIN_ALIGNMENT = 8
# Padding that preferred alignments may cost, as a share of the elements.
PADDING_BUDGET = 0.01
# Common multiples of alignments worth trying. Only random shapes reach this limit.
MAX_STEPS = 32


@dataclass(frozen=True)
class Request:
    """The size and the alignment of a parameter.

    Args:
        numel: number of elements, which may be 0.
        alignment: number of elements that no cut should divide, counted from the first element.
        is_required: satisfy the alignment whatever the padding costs.
    """

    numel: int
    alignment: int
    is_required: bool


@dataclass(frozen=True, order=True)
class Placement:
    """A shard size and the starts of the parameters. Of two placements the smaller is better.

    Args:
        num_broken: number of parameters that are cut inside their alignment.
        shard_size: size of a shard in elements.
        starts: index and start of each parameter that has elements, in the order of the buffer.
    """

    num_broken: int
    shard_size: int
    starts: tuple[tuple[int, int], ...]


def find_placement(requests: Sequence[Request], world_size: int) -> Placement:
    """Return the best placement for ``world_size`` shards. See [Note: how the planner chooses]."""
    classes = _size_classes(requests)
    total = _total_size(classes)
    smallest_shard = _round_up(_ceil_div(total, world_size), MIN_ALIGNMENT)
    smallest_shard = max(smallest_shard, MIN_ALIGNMENT)
    # A shard that is large enough for everything is never cut, so this search finds something.
    required = [size_class.without_preference() for size_class in classes]
    largest_shard = max(total, smallest_shard)
    best = _search(required, world_size, smallest_shard, largest_shard)
    assert best is not None
    if all(size_class.is_required for size_class in classes):
        return best
    numel = sum(request.numel for request in requests)
    padding = max(
        int(PADDING_BUDGET * numel),
        MIN_ALIGNMENT * (world_size + len(requests)),
    )
    largest_shard = max((numel + padding) // world_size, best.shard_size)
    return _search(classes, world_size, smallest_shard, largest_shard) or best


@dataclass(frozen=True)
class _SizeClass:
    """Parameters of the same size and alignment, both multiples of ``MIN_ALIGNMENT``."""

    size: int  # elements of one of them, rounded up
    alignment: int
    is_required: bool
    indices: tuple[int, ...]

    def one_cut_shard(self) -> int:
        """Return the smallest shard size at which some start needs at most one, aligned cut."""
        # A parameter of 40 elements with alignment 16 can be cut into 16 + 24 or 32 + 8. There is
        # no second cut if both parts fit in a shard: the more even split needs 24.
        smaller_part = self.size // (2 * self.alignment) * self.alignment  # 40 // 32 * 16
        return self.size - smaller_part

    def suits(self, shard: int) -> bool:
        """Return True if there is a start for which every cut is aligned."""
        return shard % self.alignment == 0 or shard >= self.one_cut_shard()

    def first_start(self, cursor: int, shard: int) -> int:
        """Return the first start at or after ``cursor`` for which every cut is aligned."""
        # The shard size must suit the class. Example: size 40, alignment 16, shards of 24. From 16,
        # the next cut is at 24, too close. From 24, it is at 48, and aligned for a start at
        # 48 - 16 = 32. That is the result: 32 + 40 = 72 does not cross the cut after it.
        while True:
            cut = _next_cut(cursor, shard)
            if cursor + self.size <= cut:
                return cursor
            # The first position from the cursor whose distance to the cut is aligned.
            start = cursor + (cut - cursor) % self.alignment
            crosses_one_cut = start + self.size <= cut + shard
            if start < cut and (crosses_one_cut or shard % self.alignment == 0):
                return start
            cursor = cut

    def without_alignment(self) -> _SizeClass:
        """Return the same parameters with the minimum alignment: they may be cut anywhere."""
        return replace(self, alignment=MIN_ALIGNMENT)

    def without_preference(self) -> _SizeClass:
        """Return the same parameters, with the minimum alignment unless theirs is required."""
        if self.is_required:
            return self
        return self.without_alignment()


def _size_classes(requests: Sequence[Request]) -> list[_SizeClass]:
    """Group the parameters that have elements, the largest alignments first."""
    members: dict[tuple[int, int, bool], list[int]] = {}
    for index, request in enumerate(requests):
        size = _round_up(request.numel, MIN_ALIGNMENT)
        if size:
            # An alignment larger than the parameter only means that it must not be cut.
            alignment = min(lcm(request.alignment, MIN_ALIGNMENT), size)
            key = (alignment, size, request.is_required)
            members.setdefault(key, []).append(index)
    classes = []
    for key in sorted(members, reverse=True):
        alignment, size, is_required = key
        classes.append(_SizeClass(size, alignment, is_required, tuple(members[key])))
    return classes


def _total_size(classes: Sequence[_SizeClass]) -> int:
    return sum(size_class.size * len(size_class.indices) for size_class in classes)


def _search(
    classes: Sequence[_SizeClass],
    world_size: int,
    smallest: int,
    largest: int,
) -> Placement | None:
    """Return the best placement with a shard size in ``[smallest, largest]``, or None."""
    best: Placement | None = None
    for step in _steps(classes, smallest, largest):
        last = largest // step
        floor = smallest
        num_misaligned = 0  # misaligned parameters at every multiple of this step
        for size_class in classes:
            # If a required alignment does not divide the step, the shard must be large enough for
            # one cut through its parameters.
            if size_class.is_required and step % size_class.alignment:
                floor = max(floor, size_class.one_cut_shard())
            if not size_class.suits(last * step):
                num_misaligned += len(size_class.indices)
        for multiple in _ladder(_ceil_div(floor, step), last):
            shard = multiple * step
            # No placement is better than this bound: it is known before the parameters are placed.
            if best is not None:
                least = (num_misaligned, shard)
                if (best.num_broken, best.shard_size) <= least:
                    break  # larger multiples are no better, unless another step tries them too
            found = _place(classes, world_size, shard)
            if found is None:
                continue
            if best is None or found < best:
                best = found
    return best


def _steps(
    classes: Sequence[_SizeClass],
    smallest: int,
    largest: int,
) -> list[int]:
    """Return the numbers whose multiples are worth trying as shard sizes."""
    # They are common multiples of alignments. Parameters that fit in a shard are ignored, because
    # their alignments need not divide it.
    count: Counter[int] = Counter()
    for size_class in classes:
        if size_class.size > smallest:
            count[size_class.alignment] += len(size_class.indices)
    steps = [MIN_ALIGNMENT]
    # The most frequent alignments first, because the list is truncated to MAX_STEPS.
    for alignment in sorted(count, key=lambda alignment: (-count[alignment], alignment)):
        common = {lcm(step, alignment) for step in steps}
        for step in sorted(common.difference(steps)):
            if step <= largest and len(steps) < MAX_STEPS:
                steps.append(step)
    return steps


def _ladder(first: int, last: int) -> Iterator[int]:
    """Yield numbers from ``first`` to ``last`` at growing distances."""
    # The first nine are consecutive. After that, each step is a quarter of the distance from
    # `first`. Example: `_ladder(10, 40)` is 10 to 18, then 20, 22, 25, 28, 32, 37 and 40.
    rung = first
    while rung < last:
        yield rung
        rung += max((rung - first) // 4, 1)
    if first <= last:
        yield last


def _place(
    classes: Sequence[_SizeClass],
    world_size: int,
    shard: int,
) -> Placement | None:
    """Place the parameters one after the other; return None if that breaks a requirement."""
    # Parameters whose preference no start can satisfy may start anywhere: they fill gaps.
    suited = []
    unsuited = []
    for size_class in classes:
        if size_class.suits(shard):
            suited.append((size_class, [*size_class.indices]))
        elif size_class.is_required:
            return None
        else:
            unsuited.append((size_class.without_alignment(), [*size_class.indices]))
    waiting = suited + unsuited
    starts: list[tuple[int, int]] = []
    cursor = 0
    spare = world_size * shard - _total_size(classes)
    while waiting:
        candidates = []
        for position, (size_class, _) in enumerate(waiting):
            candidates.append((size_class.first_start(cursor, shard), position))
        # Among equal gaps the first class, which has the largest alignment.
        start, position = min(candidates)
        if start - cursor > spare:
            preferred = _first_preferred(waiting)
            if preferred is None:
                return None
            position = preferred
            start = cursor
        chosen, indices = waiting[position]
        starts.append((indices.pop(0), start))
        spare -= start - cursor
        cursor = start + chosen.size
        if not indices:
            del waiting[position]
    start_of = dict(starts)
    num_broken = 0
    for size_class in classes:
        for index in size_class.indices:
            is_whole = cuts_are_aligned(
                alignment=size_class.alignment,
                start=start_of[index],
                numel=size_class.size,
                shard=shard,
            )
            if not is_whole:
                num_broken += 1
    return Placement(num_broken, shard, tuple(starts))


def _first_preferred(waiting: list[tuple[_SizeClass, list[int]]]) -> int | None:
    """Return the position of the first class whose alignment is only preferred; None without."""
    for position, (size_class, _) in enumerate(waiting):
        if not size_class.is_required:
            return position
    return None


def cuts_are_aligned(
    alignment: int,
    start: int,
    numel: int,
    shard: int,
) -> bool:
    """Return True if every cut of ``[start, start + numel)`` is aligned, counted from the start.

    Args:
        alignment: number of elements that no cut may divide.
        start: position in the flat buffer, in elements.
        numel: number of elements; 0 is never cut.
        shard: size of a shard in elements; cuts are at its multiples.
    """
    # If the first two cuts are aligned, so is their distance, the shard size, and every other cut.
    cuts = range(_next_cut(start, shard), start + numel, shard)
    distances = [cut - start for cut in cuts[:2]]
    return all(distance % alignment == 0 for distance in distances)


def _next_cut(position: int, shard: int) -> int:
    """Return the first multiple of ``shard`` greater than ``position``."""
    return (position // shard + 1) * shard


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _round_up(value: int, step: int) -> int:
    return _ceil_div(value, step) * step
