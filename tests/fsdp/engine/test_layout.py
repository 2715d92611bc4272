# SPDX-License-Identifier: Apache-2.0
"""Layouts: every element has one owner, no cut divides an alignment, chunks are exactly the range.

Small modules are drawn by hypothesis and compared element by element; sweeps over random modules
reach world sizes of 4096.
"""

import subprocess
import sys
from itertools import combinations_with_replacement, product
from math import prod
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import strategies as st

from megatron.fsdp.engine import layout as layout_module
from megatron.fsdp.engine.layout import (
    PREFER_ROWS,
    PREFER_TENSORS,
    ROWS,
    FlatRange,
    Granularity,
    Layout,
    plan,
    row_size,
)
from megatron.fsdp.engine.planner import MIN_ALIGNMENT
from tests.support.fsdp.engine.layouts import (
    REQUIREMENTS,
    Module,
    allowed_cut,
    cuts,
    modules,
    padding_of,
    plan_module,
    random_modules,
    run_examples,
    world_sizes,
)


def check_shard_ranges(module: Module, world_size: int) -> None:
    """Write each element's name into the flat buffer and read every rank's shard back."""
    layout = plan_module(module, world_size)
    flat: list[tuple[int, int] | None] = [None] * layout.numel
    for index, position in enumerate(layout.positions):
        assert position.shape == module[index][0]
        assert position.start % MIN_ALIGNMENT == 0
        for element in range(position.numel):
            assert flat[position.start + element] is None
            flat[position.start + element] = (index, element)
    for rank in range(world_size):
        shard = flat[rank * layout.shard_size : (rank + 1) * layout.shard_size]
        assert len(shard) == layout.shard_size
        for index in range(len(module)):
            run, (begin, end) = layout.owned(index, rank), layout.shard_range(index, rank)
            assert run.shape == module[index][0] and prod(run.local_shape) == run.numel
            assert 0 <= begin <= end <= layout.shard_size
            assert shard[begin:end] == [(index, element) for element in range(run.start, run.stop)]
        assert len(shard) - shard.count(None) == sum(
            layout.owned(index, rank).numel for index in range(len(module))
        )


def test_shard_ranges_are_where_the_flat_buffer_has_them() -> None:
    run_examples(check_shard_ranges, 60, modules, world_sizes)


def check_whole_rows(module: Module, world_size: int) -> None:
    layout = plan_module(module, world_size)
    for index, position in enumerate(layout.positions):
        runs = [layout.owned(index, rank) for rank in range(world_size)]
        whole = all(
            run.start % row_size(position.shape) == 0 and run.stop % row_size(position.shape) == 0
            for run in runs
            if run.numel
        )
        assert position.by_rows == (whole and position.shape != ())
        if position.by_rows:
            assert all(run.local_shape[1:] == position.shape[1:] for run in runs if run.numel)


def test_shards_by_rows_are_whole_rows_on_every_rank() -> None:
    run_examples(check_whole_rows, 60, modules, world_sizes)


def test_no_cut_violates_a_granularity_in_random_modules() -> None:
    """Requirements hold always, and parameters by rows are cut between rows only."""
    cut_inside = 0
    for module, world_size in random_modules(seed=1, count=600, requirement_share=0.3):
        layout = plan_module(module, world_size)
        for position, (shape, granularity) in zip(layout.positions, module, strict=True):
            between_rows = all(allowed_cut(shape, ROWS, cut) for cut in cuts(position, layout))
            assert position.by_rows == (between_rows and shape != ())
            cut_inside += not between_rows
            if granularity.is_required:
                assert all(allowed_cut(shape, granularity, cut) for cut in cuts(position, layout))
    assert cut_inside > 200  # or this would say little about the fall back


def test_requirements_come_before_preferences_where_space_is_short() -> None:
    """Over two to five ranks there is no room for the rows of a few parameters."""
    random, given_up = Random(10), 0
    for _ in range(800):
        shapes = [
            (random.randint(1, 30), random.choice([1, 4, 6, 8, 10, 16, 50]))
            for _ in range(random.randint(2, 5))
        ]
        module = [
            (shape, random.choice([PREFER_ROWS, ROWS, Granularity("rows", 3)])) for shape in shapes
        ]
        layout = plan_module(module, random.randint(2, 5))
        for position, (shape, granularity) in zip(layout.positions, module, strict=True):
            assert not granularity.is_required or all(
                allowed_cut(shape, granularity, cut) for cut in cuts(position, layout)
            )
            given_up += not position.by_rows
    assert given_up > 20


def test_every_element_has_one_owner_in_random_modules() -> None:
    for module, world_size in random_modules(seed=2, count=200, requirement_share=0.2):
        layout = plan_module(module, world_size)
        assert layout.numel == world_size * layout.shard_size
        end = 0
        for position in sorted(layout.positions, key=lambda position: position.start):
            assert position.start >= end and position.start % MIN_ALIGNMENT == 0
            end = position.stop
        assert end <= layout.numel
        for index, position in enumerate(layout.positions):
            owners = (
                range(position.start // layout.shard_size, -(-position.stop // layout.shard_size))
                if position.numel
                else range(0)
            )
            owned = [layout.owned(index, rank) for rank in owners]
            assert [run.start for run in owned] == [0, *(run.stop for run in owned)][: len(owned)]
            assert (
                all(run.numel for run in owned)
                and sum(run.numel for run in owned) == position.numel
            )
            others = {0, world_size // 2, world_size - 1, owners.start - 1, owners.stop}.difference(
                owners
            )
            assert not any(
                layout.owned(index, rank).numel for rank in others if 0 <= rank < world_size
            )


def test_chunks_of_random_modules_agree_with_brute_force() -> None:
    """Number the elements of a tensor and find the numbers of a range in its chunks."""
    random = Random(3)
    for module, world_size in random_modules(seed=3, count=150, requirement_share=0.2):
        layout = plan_module([entry for entry in module if prod(entry[0]) <= 100_000], world_size)
        for index, position in enumerate(layout.positions):
            ranks = {
                min(position.start // layout.shard_size + i, world_size - 1) for i in (0, 1)
            } | {random.randrange(world_size)}
            numbers = torch.arange(position.numel).view(position.shape)
            for run in (layout.owned(index, rank) for rank in ranks):
                boxes = run.chunks()
                parts = [
                    numbers[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].flatten()
                    for box in boxes
                ]
                assert torch.equal(
                    torch.cat([numbers.new_empty(0), *parts]), torch.arange(run.start, run.stop)
                )
                assert len(boxes) <= max(2 * len(position.shape) - 1, 1)
                assert not position.by_rows or len(boxes) <= 1


@st.composite
def runs(draw: st.DrawFn) -> FlatRange:
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    start = draw(st.integers(0, prod(shape)))
    return FlatRange(shape, start, draw(st.integers(start, prod(shape))), by_rows=False)


def check_chunks(run: FlatRange) -> None:
    """List the multi-indices of all chunks in order: they are those of the range."""
    expected = list(product(*(range(size) for size in run.shape)))[run.start : run.stop]
    boxes = run.chunks()
    covered: list[tuple[int, ...]] = []
    for offsets, sizes in boxes:
        covered += product(*(range(o, o + s) for o, s in zip(offsets, sizes, strict=True)))
    assert covered == expected
    assert all(prod(sizes) for _, sizes in boxes)
    assert len(boxes) <= max(2 * len(run.shape) - 1, 1)


def test_chunks_are_the_range_in_order() -> None:
    run_examples(check_chunks, 150, runs())


def test_rows_are_kept_whole_where_that_is_cheap() -> None:
    layout = plan([(64, 16), (64,), (30, 16)], 4)
    assert all(position.by_rows for position in layout.positions)
    assert [layout.owned(0, rank).local_shape for rank in range(4)] == [
        (25, 16),
        (25, 16),
        (14, 16),
        (0, 16),
    ]


def test_flat_runs_where_rows_would_cost_more() -> None:
    """Whole rows would cost a third of the memory: three rows of 1000 over two ranks."""
    layout = plan([(3, 1000)], 2)
    assert [layout.owned(0, rank).local_shape for rank in range(2)] == [(1504,), (1496,)]
    assert layout.owned(0, 0).chunks() == [((0, 0), (1, 1000)), ((1, 0), (1, 504))]


def test_required_rows_are_kept_whatever_they_cost() -> None:
    layout = plan([(3, 1000)], 2, ROWS)
    assert [layout.owned(0, rank).local_shape for rank in range(2)] == [(2, 1000), (1, 1000)]


def test_a_whole_tensor_has_one_owner_and_others_fill_what_it_leaves() -> None:
    layout = plan(
        [(64, 64), (32, 64), (16, 64)], 3, [Granularity("tensor"), PREFER_ROWS, PREFER_ROWS]
    )
    assert layout.shard_size == 4096
    assert sorted(layout.owned(0, rank).local_shape for rank in range(3)) == [
        (0, 64),
        (0, 64),
        (64, 64),
    ]


@pytest.mark.parametrize("num_equal", range(1, 13))
def test_tensors_are_whole_where_that_costs_little_and_else_cut_between_rows(
    num_equal: int,
) -> None:
    shapes = [(64, 48)] * num_equal + [(48,)]
    layout = plan(shapes, 4, PREFER_TENSORS)
    owned = [layout.owned(index, rank) for index, rank in product(range(num_equal), range(4))]
    are_whole = {each.numel for each in owned} == {0, 64 * 48}
    assert are_whole == (num_equal % 4 == 0)
    if not are_whole:
        assert layout == plan(shapes, 4, PREFER_ROWS)


def test_blocks_of_rows_are_cut_between_blocks() -> None:
    layout = plan([(300, 8)], 4, Granularity("rows", 128))
    assert [layout.owned(0, rank).local_shape for rank in range(4)] == [
        (128, 8),
        (128, 8),
        (44, 8),
        (0, 8),
    ]


def test_element_runs_stay_on_the_block_of_a_quantized_format() -> None:
    layout = plan([(33, 32)], 5, Granularity("elements", 32))
    assert [layout.owned(0, rank).numel for rank in range(5)] == [224, 224, 224, 224, 160]


def test_one_row_before_several_shorter_rows_is_owned_whole() -> None:
    layout = plan([(1, 7), (6, 3)], 2)
    owned = [layout.owned(index, rank).numel for index, rank in product((0, 1), (0, 1))]
    assert sum(owned) == 25


def test_one_rank_owns_everything_in_its_own_shape() -> None:
    layout: Layout = plan([(3, 5), (), (7,)], 1)
    assert [layout.owned(index, 0).local_shape for index in range(3)] == [(3, 5), (), (7,)]


@pytest.mark.parametrize(
    "granularity", [PREFER_ROWS, *REQUIREMENTS], ids=lambda wanted: f"{wanted.count}_{wanted.unit}"
)
def test_far_more_ranks_than_elements(granularity: Granularity) -> None:
    layout = plan([(), (1,), (2, 3), (0, 4)], 4096, granularity)
    assert [sum(layout.owned(index, rank).numel for rank in range(4096)) for index in range(4)] == [
        1,
        1,
        6,
        0,
    ]
    assert padding_of(layout) <= MIN_ALIGNMENT * (4096 + 4)


def test_parameters_without_elements_lie_behind_all_others() -> None:
    """Between two others they would split a gap, or look like an end inside a parameter."""
    layout = plan([(0,), (5, 3), (0, 7), (12,)], 2)
    assert all(
        position.start >= max(layout.positions[1].stop, layout.positions[3].stop)
        for position in (layout.positions[0], layout.positions[2])
    )
    assert plan([(0,), (3, 0)], 4).numel == 4 * MIN_ALIGNMENT
    assert plan([], 4).positions == ()


def test_the_layout_does_not_depend_on_the_hash_seed_and_needs_no_torch() -> None:
    # Empty packages stand in for those whose __init__.py imports torch.
    program = (
        "import random, sys, types\n"
        "for name in ('megatron', 'megatron.fsdp', 'megatron.fsdp.engine'):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        "sys.modules['megatron.fsdp.engine'].__path__ = [sys.argv[1]]\n"
        "from megatron.fsdp.engine import layout\n"
        "draw = random.Random(9)\n"
        "for _ in range(100):\n"
        "    shapes = [(draw.randint(1, 99), draw.randint(1, 99)) for _ in range(9)]\n"
        "    print(layout.plan(shapes, draw.randint(1, 99)))\n"
        "assert 'torch' not in sys.modules\n"
    )
    folder = Path(layout_module.__file__).parent
    printed = [
        subprocess.run(
            [sys.executable, "-c", program, folder],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1] and printed[0].count(b"Layout") == 100


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_parts_of_a_range_have_its_elements(count: int) -> None:
    size = 12 // count
    for start, stop in combinations_with_replacement(range(13), 2):
        elements: list[int] = []
        for number, part in enumerate(FlatRange((4, 3), start, stop, by_rows=False).parts(count)):
            assert part.shape == (4 // count, 3)
            elements += range(number * size + part.start, number * size + part.stop)
        assert elements == list(range(start, stop))


def test_equal_layers_are_planned_once() -> None:
    assert plan([[8, 8], torch.Size((3,))], 2) is plan(
        ((8, 8), (3,)), 2, [PREFER_ROWS, PREFER_ROWS]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([(2, 2)], 0), "world size of at least 1 but got 0"),
        (([(2, 2)], 2, [ROWS, ROWS]), "argument 2 is longer than argument 1"),
    ],
    ids=["world_size", "granularities"],
)
def test_bad_arguments_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(*arguments)
