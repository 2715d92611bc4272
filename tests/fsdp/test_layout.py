# SPDX-License-Identifier: Apache-2.0
"""Layouts: every element has one owner, cuts respect rows where they promise it, boxes are exactly the range, padding is small."""

from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fsdp.layout import ALIGNMENT, ROW_BUDGET, Layout, Run, plan, row_size

dims = st.one_of(st.integers(1, 9), st.integers(1, 70))
shapes = st.one_of(
    st.just(()), st.tuples(dims), st.tuples(dims, dims), st.tuples(dims, st.integers(1, 9), st.integers(1, 5)), st.just((0,))
)
modules = st.lists(shapes, min_size=1, max_size=8)
world_sizes = st.one_of(st.integers(1, 5), st.integers(1, 33))
examples = settings(max_examples=500, deadline=None, database=None, derandomize=True)


@examples
@given(modules, world_sizes)
def test_every_element_has_one_owner(module: list[tuple[int, ...]], world_size: int) -> None:
    layout = plan(module, world_size)
    for index, shape in enumerate(module):
        position = 0
        for rank in range(world_size):
            run = layout.owned(index, rank)
            assert run.shape == shape
            if run.numel:
                assert run.start == position
                position = run.stop
            assert prod(run.local_shape) == run.numel
        assert position == prod(shape)


@examples
@given(modules, world_sizes)
def test_shard_ranges_are_where_the_flat_buffer_has_them(module: list[tuple[int, ...]], world_size: int) -> None:
    """Brute force: write each element's name into the flat buffer and read every rank's shard back."""
    layout = plan(module, world_size)
    flat: list[tuple[int, int] | None] = [None] * layout.numel
    for index, slot in enumerate(layout.slots):
        assert slot.shape == module[index]
        assert slot.start % ALIGNMENT == 0
        for element in range(slot.numel):
            assert flat[slot.start + element] is None
            flat[slot.start + element] = (index, element)
    for rank in range(world_size):
        shard = flat[rank * layout.shard_size : (rank + 1) * layout.shard_size]
        assert len(shard) == layout.shard_size
        for index in range(len(module)):
            run, (begin, end) = layout.owned(index, rank), layout.shard_range(index, rank)
            assert 0 <= begin <= end <= layout.shard_size
            assert shard[begin:end] == [(index, element) for element in range(run.start, run.stop)]
        assert len(shard) - shard.count(None) == sum(layout.owned(index, rank).numel for index in range(len(module)))


@examples
@given(modules, world_sizes)
def test_a_parameter_by_rows_is_never_cut_inside_a_row(module: list[tuple[int, ...]], world_size: int) -> None:
    layout = plan(module, world_size)
    for index, slot in enumerate(layout.slots):
        runs = [layout.owned(index, rank) for rank in range(world_size)]
        whole = all(run.start % row_size(slot.shape) == 0 and run.stop % row_size(slot.shape) == 0 for run in runs if run.numel)
        if slot.by_rows:
            assert whole
            assert all(len(run.local_shape) == len(slot.shape) for run in runs if run.numel)


@examples
@given(modules, world_sizes)
def test_padding_is_bounded(module: list[tuple[int, ...]], world_size: int) -> None:
    """Aligning each parameter and rounding the shard up costs little; whole rows may add one percent, or one step a rank."""
    layout = plan(module, world_size)
    elements = sum(prod(shape) for shape in module)
    unavoidable = ALIGNMENT * len(module) + ALIGNMENT * world_size
    assert layout.shard_size % ALIGNMENT == 0
    assert 0 <= layout.padding <= unavoidable + ROW_BUDGET * elements


@st.composite
def runs(draw: st.DrawFn) -> Run:
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    start = draw(st.integers(0, prod(shape)))
    return Run(shape, start, draw(st.integers(start, prod(shape))), by_rows=False)


@settings(max_examples=1500, deadline=None, database=None, derandomize=True)
@given(runs())
def test_boxes_are_the_range_in_order(run: Run) -> None:
    """Brute force: the multi-indices of the boxes, one box behind the other, are those of the range."""
    expected = list(product(*(range(size) for size in run.shape)))[run.start : run.stop]
    boxes = run.boxes()
    covered = [
        index
        for offsets, sizes in boxes
        for index in product(*(range(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)))
    ]
    assert covered == expected
    assert all(prod(sizes) for _, sizes in boxes)
    assert len(boxes) <= max(2 * len(run.shape) - 1, 1)


def transformer_layer(hidden: int, feed_forward: int, key_value: int) -> list[tuple[int, ...]]:
    attention = [(hidden, hidden), (key_value, hidden), (key_value, hidden), (hidden, hidden)]
    return [(hidden,), *attention, (hidden,), (feed_forward, hidden), (feed_forward, hidden), (hidden, feed_forward)]


@pytest.mark.parametrize("world_size", [1, 3, 8, 64, 256, 1024, 4096])
@pytest.mark.parametrize(
    "module",
    [
        pytest.param(transformer_layer(8192, 28672, 1024), id="llama3_70b"),
        pytest.param(transformer_layer(3584, 18944, 512), id="qwen2_5_7b"),
        pytest.param(
            [(1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384), (2048, 7168), (2048, 7168), (7168, 2048)],
            id="deepseek_v3",
        ),
        pytest.param([(4096, 2880), (512, 2880), (512, 2880), (2880, 4096), (2880,), (128, 2880), (2880,)], id="gpt_oss_120b"),
    ],
)
def test_padding_of_known_models_is_at_most_one_percent(module: list[tuple[int, ...]], world_size: int) -> None:
    layout = plan(module, world_size)
    assert layout.padding <= 0.01 * sum(prod(shape) for shape in module)


def test_rows_are_kept_whole_where_that_is_cheap() -> None:
    layout = plan([(64, 16), (64,), (30, 16)], 4)
    assert all(slot.by_rows for slot in layout.slots)
    assert [layout.owned(0, rank).local_shape for rank in range(4)] == [(25, 16), (25, 16), (14, 16), (0, 16)]


def test_flat_runs_where_rows_would_cost_more() -> None:
    """Three rows of 1000 over two ranks: whole rows would cost a third of the memory."""
    layout = plan([(3, 1000)], 2)
    assert [layout.owned(0, rank).local_shape for rank in range(2)] == [(1504,), (1496,)]
    assert layout.owned(0, 0).boxes() == [((0, 0), (1, 1000)), ((1, 0), (1, 504))]


def test_shapes_that_broke_others() -> None:
    layout = plan([(1, 7), (6, 3)], 2)
    assert sum(layout.owned(index, rank).numel for index in (0, 1) for rank in (0, 1)) == 25


def test_one_rank_owns_everything_in_its_own_shape() -> None:
    layout: Layout = plan([(3, 5), (), (7,)], 1)
    assert [layout.owned(index, 0).local_shape for index in range(3)] == [(3, 5), (), (7,)]
