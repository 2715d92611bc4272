# SPDX-License-Identifier: Apache-2.0
"""Random modules to lay out, and where a layout cuts them."""

from collections.abc import Callable, Iterator
from math import prod
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fsdp.engine.layout import PREFER_ROWS, ROWS, Granularity, Layout, ParamPosition, plan
from megatron.fsdp.engine.planner import MIN_ALIGNMENT, PADDING_BUDGET

Shape = tuple[int, ...]


Module = list[tuple[Shape, Granularity]]


dims = st.one_of(st.integers(1, 9), st.integers(1, 70))


shapes = st.one_of(
    st.just(()),
    st.tuples(dims),
    st.tuples(dims, dims),
    st.tuples(dims, st.integers(1, 9), st.integers(1, 5)),
    st.just((0,)),
)


ELEMENTS = Granularity("elements")
BLOCKS = Granularity("blocks", 24)
REQUIREMENTS = [
    *(
        ELEMENTS,
        Granularity("elements", 32),
        ROWS,
        Granularity("rows", 3),
        BLOCKS,
        Granularity("tensor"),
    )
]


granularities = st.sampled_from(
    [
        PREFER_ROWS,
        PREFER_ROWS,
        PREFER_ROWS,
        Granularity("rows", 4, is_required=False),
        *REQUIREMENTS,
    ]
)


modules = st.lists(st.tuples(shapes, granularities), min_size=1, max_size=8)


world_sizes = st.one_of(st.integers(1, 5), st.integers(1, 33))


def run_examples(check: Callable[..., None], count: int, *strategies: st.SearchStrategy) -> None:
    """Call `check` with `count` drawn examples, the same in every run."""
    limits = settings(max_examples=count, deadline=None, database=None, derandomize=True)
    limits(given(*strategies)(check))()


def plan_module(module: Module, world_size: int) -> Layout:
    return plan(
        [shape for shape, _ in module], world_size, [granularity for _, granularity in module]
    )


def random_shape(random: Random, size: int) -> Shape:
    kind = random.random()
    if kind < 0.05:
        return random.choice([(), (0,), (0, 5), (5, 0), (1,), (1, 1)])
    dims = [random.randint(1, size) for _ in range(random.choice([1, 2, 2, 2, 3]))]
    return tuple(dim * random.choice([1, 1, 8, 64]) if kind < 0.6 else dim for dim in dims)


def random_modules(seed: int, count: int, requirement_share: float) -> Iterator[tuple[Module, int]]:
    """Yield modules and world sizes, small and large alike likely."""
    random = Random(seed)
    for _ in range(count):
        world_size = random.choice(
            [random.randint(1, 16), 2 ** random.randint(0, 12), random.randint(1, 4096)]
        )
        size = random.choice([4, 12, 40, 150])
        of_this_module = random.choice([0.0, requirement_share])
        yield (
            [
                (
                    random_shape(random, size),
                    (
                        random.choice(REQUIREMENTS)
                        if random.random() < of_this_module
                        else PREFER_ROWS
                    ),
                )
                for _ in range(random.randint(1, 9))
            ],
            world_size,
        )


def cuts(slot: ParamPosition, layout: Layout) -> list[int]:
    """Return the elements of a slot, counted from its first, before which it is cut."""
    borders = range(layout.shard_size, layout.numel, layout.shard_size)
    near = borders[max(slot.start // layout.shard_size - 2, 0) : slot.stop // layout.shard_size + 2]
    return [border - slot.start for border in near if slot.start < border < slot.stop]


def allowed_cut(shape: Shape, granularity: Granularity, cut: int) -> bool:
    if granularity.unit == "tensor":
        return False
    if granularity.unit == "rows":
        rows, rest = divmod(cut, prod(shape[1:]))
        return rest == 0 and rows % granularity.count == 0
    if granularity.unit == "blocks" and cut % prod(shape[1:]):
        return False
    if granularity.unit == "blocks" and prod(shape) % granularity.count:
        return True
    return cut % granularity.count == 0


def preferences_only(module: Module) -> bool:
    return not any(granularity.is_required for _, granularity in module)


def bound(module: Module, world_size: int) -> float:
    """Return the most padding that `plan` promises where no granularity is required."""
    return max(
        PADDING_BUDGET * sum(prod(shape) for shape, _ in module),
        MIN_ALIGNMENT * (world_size + len(module)),
    )


def padding_of(layout: Layout) -> int:
    """Return the number of elements of the buffer that belong to no parameter."""
    return layout.numel - sum(position.numel for position in layout.positions)
