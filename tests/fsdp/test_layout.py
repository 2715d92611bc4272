# SPDX-License-Identifier: Apache-2.0
"""Layouts: every element has one owner, no cut divides a grain, boxes are exactly the range, padding is small.

Small modules are drawn by hypothesis and compared element by element; sweeps over thousands of
random modules reach world sizes of 4096.
"""

import subprocess
import sys
from collections.abc import Iterator
from itertools import permutations, product
from math import lcm, prod
from pathlib import Path
from random import Random

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.padding_table import MODELS, Unit, main, shapes_on_one_rank
from megatron.fsdp.engine import layout as layout_module
from megatron.fsdp.engine.layout import (
    ALIGNMENT,
    ELEMENTS,
    PREFER_ROWS,
    ROW_BUDGET,
    ROWS,
    WHOLE_TENSOR,
    Granularity,
    Layout,
    Run,
    Slot,
    plan,
    row_size,
)

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
REQUIREMENTS = [ELEMENTS, Granularity("elements", 32), ROWS, Granularity("rows", 3), WHOLE_TENSOR]
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
examples = settings(max_examples=500, deadline=None, database=None, derandomize=True)


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
    """Modules and world sizes, small and large alike likely."""
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


def cuts(slot: Slot, layout: Layout) -> list[int]:
    """Where the slot is cut, counted from its first element."""
    borders = range(layout.shard_size, layout.numel, layout.shard_size)
    near = borders[max(slot.start // layout.shard_size - 2, 0) : slot.stop // layout.shard_size + 2]
    return [border - slot.start for border in near if slot.start < border < slot.stop]


def allowed_cut(shape: Shape, granularity: Granularity, cut: int) -> bool:
    if granularity.unit == "tensor":
        return False
    if granularity.unit == "rows":
        rows, rest = divmod(cut, prod(shape[1:]))
        return rest == 0 and rows % granularity.count == 0
    return cut % granularity.count == 0


@examples
@given(modules, world_sizes)
def test_every_element_has_one_owner(module: Module, world_size: int) -> None:
    layout = plan_module(module, world_size)
    for index, (shape, _) in enumerate(module):
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
def test_shard_ranges_are_where_the_flat_buffer_has_them(module: Module, world_size: int) -> None:
    """Brute force: write each element's name into the flat buffer and read every rank's shard back."""
    layout = plan_module(module, world_size)
    flat: list[tuple[int, int] | None] = [None] * layout.numel
    for index, slot in enumerate(layout.slots):
        assert slot.shape == module[index][0]
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
        assert len(shard) - shard.count(None) == sum(
            layout.owned(index, rank).numel for index in range(len(module))
        )


@examples
@given(modules, world_sizes)
def test_pieces_by_rows_are_whole_rows_on_every_rank(module: Module, world_size: int) -> None:
    layout = plan_module(module, world_size)
    for index, slot in enumerate(layout.slots):
        runs = [layout.owned(index, rank) for rank in range(world_size)]
        whole = all(
            run.start % row_size(slot.shape) == 0 and run.stop % row_size(slot.shape) == 0
            for run in runs
            if run.numel
        )
        assert slot.by_rows == (whole and slot.shape != ())
        if slot.by_rows:
            assert all(run.local_shape[1:] == slot.shape[1:] for run in runs if run.numel)


def test_no_cut_violates_a_granularity_in_thousands_of_modules() -> None:
    """Requirements hold always; parameters by rows are cut between rows only, and the others really are cut inside one."""
    cut_inside = 0
    for module, world_size in random_modules(seed=1, count=3000, requirement_share=0.3):
        layout = plan_module(module, world_size)
        for slot, (shape, granularity) in zip(layout.slots, module, strict=True):
            between_rows = all(allowed_cut(shape, ROWS, cut) for cut in cuts(slot, layout))
            assert slot.by_rows == (between_rows and shape != ())
            cut_inside += not between_rows
            if granularity.is_required:
                assert all(allowed_cut(shape, granularity, cut) for cut in cuts(slot, layout))
    assert cut_inside > 1000  # or this would say little about the fall back


def test_requirements_do_not_give_way_to_wishes_where_space_is_short() -> None:
    """Two to five ranks and a few parameters of some rows: there is not room for everybody's rows."""
    random, given_up = Random(10), 0
    for _ in range(4000):
        shapes = [
            (random.randint(1, 30), random.choice([1, 4, 6, 8, 10, 16, 50]))
            for _ in range(random.randint(2, 5))
        ]
        module = [
            (shape, random.choice([PREFER_ROWS, ROWS, Granularity("rows", 3)])) for shape in shapes
        ]
        layout = plan_module(module, random.randint(2, 5))
        for slot, (shape, granularity) in zip(layout.slots, module, strict=True):
            assert not granularity.is_required or all(
                allowed_cut(shape, granularity, cut) for cut in cuts(slot, layout)
            )
            given_up += not slot.by_rows
    assert given_up > 100


def test_every_element_has_one_owner_in_thousands_of_modules() -> None:
    for module, world_size in random_modules(seed=2, count=1500, requirement_share=0.2):
        layout = plan_module(module, world_size)
        assert layout.numel == world_size * layout.shard_size
        end = 0
        for slot in sorted(layout.slots, key=lambda slot: slot.start):
            assert slot.start >= end and slot.start % ALIGNMENT == 0
            end = slot.stop
        assert end <= layout.numel
        for index, slot in enumerate(layout.slots):
            owners = (
                range(slot.start // layout.shard_size, -(-slot.stop // layout.shard_size))
                if slot.numel
                else range(0)
            )
            owned = [layout.owned(index, rank) for rank in owners]
            assert [run.start for run in owned] == [0, *(run.stop for run in owned)][: len(owned)]
            assert all(run.numel for run in owned) and sum(run.numel for run in owned) == slot.numel
            others = {0, world_size // 2, world_size - 1, owners.start - 1, owners.stop}.difference(
                owners
            )
            assert not any(
                layout.owned(index, rank).numel for rank in others if 0 <= rank < world_size
            )


def test_chunk_boxes_of_random_modules_agree_with_brute_force() -> None:
    """Number the elements of a tensor, take its boxes, and find the numbers of the run."""
    random = Random(3)
    for module, world_size in random_modules(seed=3, count=400, requirement_share=0.2):
        layout = plan_module([entry for entry in module if prod(entry[0]) <= 100_000], world_size)
        for index, slot in enumerate(layout.slots):
            ranks = {min(slot.start // layout.shard_size + i, world_size - 1) for i in (0, 1)} | {
                random.randrange(world_size)
            }
            numbers = torch.arange(slot.numel).view(slot.shape)
            for run in (layout.owned(index, rank) for rank in ranks):
                boxes = run.boxes()
                parts = [
                    numbers[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].flatten()
                    for box in boxes
                ]
                assert torch.equal(
                    torch.cat([numbers.new_empty(0), *parts]), torch.arange(run.start, run.stop)
                )
                assert len(boxes) <= max(2 * len(slot.shape) - 1, 1)
                assert not slot.by_rows or len(boxes) <= 1


def wishes_only(module: Module) -> bool:
    return not any(granularity.is_required for _, granularity in module)


def bound(module: Module, world_size: int) -> float:
    """What the docstring of `plan` promises where nothing is required."""
    return max(
        ROW_BUDGET * sum(prod(shape) for shape, _ in module), ALIGNMENT * (world_size + len(module))
    )


def test_padding_is_bounded_in_thousands_of_modules() -> None:
    for module, world_size in random_modules(seed=4, count=4000, requirement_share=0.0):
        layout = plan_module(module, world_size)
        assert layout.shard_size % ALIGNMENT == 0
        assert 0 <= layout.padding <= bound(module, world_size)


def test_element_runs_cost_alignment_only() -> None:
    for module, world_size in random_modules(seed=5, count=1000, requirement_share=0.0):
        layout = plan([shape for shape, _ in module], world_size, ELEMENTS)
        assert layout.padding <= max(
            (ALIGNMENT - 1) * len(module) + ALIGNMENT * (world_size - 1), ALIGNMENT * world_size
        )


def test_wishes_add_no_padding_to_what_requirements_cost() -> None:
    mixed = 0
    for module, world_size in random_modules(seed=6, count=2000, requirement_share=0.4):
        required = [
            (shape, granularity if granularity.is_required else ELEMENTS)
            for shape, granularity in module
        ]
        layout, without_wishes = plan_module(module, world_size), plan_module(required, world_size)
        assert layout.padding <= max(bound(module, world_size), without_wishes.padding)
        mixed += not wishes_only(module) and any(
            not granularity.is_required for _, granularity in module
        )
    assert mixed > 500


def test_required_rows_cost_no_more_than_the_usual_rule() -> None:
    """The usual rule pads the buffer to the world size times the least common multiple of all row sizes."""
    random = Random(7)
    for _ in range(2000):
        world_size = random.choice([2, 3, 8, 64, 1000])
        shapes = [
            (random.randint(1, 60), random.choice([1, 3, 8, 20, 48]))
            for _ in range(random.randint(1, 5))
        ]
        rows = [lcm(row_size(shape), ALIGNMENT) for shape in shapes]
        usual = world_size * lcm(*rows)
        assert plan(shapes, world_size, ROWS).padding <= usual + sum(rows)


def best_of_all_orders(shapes: list[Shape], world_size: int, largest_shard: int) -> tuple[int, int]:
    """Brute force over orders and shard sizes: fewest parameters cut inside a row, then the smallest shard."""
    found = [(len(shapes), largest_shard)]
    for shard in range(ALIGNMENT, largest_shard + 1, ALIGNMENT):
        found += [
            (0, shard) for order in permutations(shapes) if fits_by_rows(order, world_size, shard)
        ]
    return min(found)


def fits_by_rows(order: tuple[Shape, ...], world_size: int, shard: int) -> bool:
    cursor = 0
    for shape in order:
        starts = range(
            -(-cursor // ALIGNMENT) * ALIGNMENT, world_size * shard - prod(shape) + 1, ALIGNMENT
        )
        borders = range(0, world_size * shard, shard)
        good = (
            s
            for s in starts
            if all((b - s) % row_size(shape) == 0 for b in borders if s < b < s + prod(shape))
        )
        start = next(good, None)
        if start is None:
            return False
        cursor = start + prod(shape)
    return True


def test_small_modules_keep_all_rows_nearly_as_often_as_the_best_order_and_shard_size() -> None:
    """The planner is greedy; what it misses among these modules is known and must not grow."""
    random, possible, reached, smallest = Random(8), 0, 0, 0
    for _ in range(400):
        world_size = random.choice([2, 3, 4])
        shapes = [
            (random.randint(1, 30), random.choice([1, 4, 6, 8, 10, 16]))
            for _ in range(random.randint(1, 3))
        ]
        elements = sum(map(prod, shapes))
        largest = (
            int(elements + bound([(shape, PREFER_ROWS) for shape in shapes], world_size))
            // world_size
        )
        broken, shard = best_of_all_orders(shapes, world_size, largest)
        layout = plan(shapes, world_size)
        if not broken:
            possible += 1
            reached += all(slot.by_rows for slot in layout.slots)
            smallest += all(slot.by_rows for slot in layout.slots) and layout.shard_size == shard
    assert possible > 300
    assert reached >= 0.98 * possible and smallest >= 0.97 * possible


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
        for index in product(
            *(range(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        )
    ]
    assert covered == expected
    assert all(prod(sizes) for _, sizes in boxes)
    assert len(boxes) <= max(2 * len(run.shape) - 1, 1)


UNITS = [
    pytest.param(unit, id=f"{model}-{unit.name}".replace(" ", "_"))
    for model, units in MODELS.items()
    for unit in units
]


@pytest.mark.parametrize("unit", UNITS)
def test_padding_of_known_models_is_at_most_one_percent(unit: Unit) -> None:
    for world_size in (1, 3, 8, 64, 256, 1024, 4096):
        layout = plan(shapes_on_one_rank(unit, 1), world_size)
        assert layout.padding <= 0.01 * sum(slot.numel for slot in layout.slots)


def test_the_padding_table_is_a_command_that_judges_its_figures() -> None:
    result = CliRunner().invoke(main, ["--dp", "64", "--expert-parallel", "8"])
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if line.startswith("| DeepSeek-V3")]
    assert len(rows) == len(MODELS["DeepSeek-V3"]) + 1  # and one of seconds
    assert CliRunner().invoke(main, ["--expert-parallel", "3"]).exit_code == 2


@pytest.mark.parametrize(
    ("model", "unit", "millions"),
    [
        ("Llama-3-70B", "layer", 856),
        ("Qwen2.5-7B", "layer", 233),
        ("DeepSeek-V3", "dense", 233),
        ("GPT-OSS-120B", "dense", 26.9),
    ],
)
def test_the_shapes_of_known_models_add_up(model: str, unit: str, millions: float) -> None:
    (shapes,) = (candidate.shapes for candidate in MODELS[model] if candidate.name == unit)
    assert sum(map(prod, shapes)) / 1e6 == pytest.approx(millions, rel=2e-3)


def test_rows_are_kept_whole_where_that_is_cheap() -> None:
    layout = plan([(64, 16), (64,), (30, 16)], 4)
    assert all(slot.by_rows for slot in layout.slots)
    assert [layout.owned(0, rank).local_shape for rank in range(4)] == [
        (25, 16),
        (25, 16),
        (14, 16),
        (0, 16),
    ]


def test_flat_runs_where_rows_would_cost_more() -> None:
    """Three rows of 1000 over two ranks: whole rows would cost a third of the memory."""
    layout = plan([(3, 1000)], 2)
    assert [layout.owned(0, rank).local_shape for rank in range(2)] == [(1504,), (1496,)]
    assert layout.owned(0, 0).boxes() == [((0, 0), (1, 1000)), ((1, 0), (1, 504))]


def test_only_the_parameter_whose_rows_cost_too_much_falls_back() -> None:
    """Whole rows of 8192 and of 28672 elements would need shards of a multiple of 57344: 1.2 % here."""
    layer = MODELS["Llama-3-70B"][0].shapes
    assert [slot.shape for slot in plan(layer, 256).slots if not slot.by_rows] == [(8192, 28672)]
    assert not [slot.shape for slot in plan(layer, 64).slots if not slot.by_rows]


def test_required_rows_are_kept_whatever_they_cost() -> None:
    layout = plan([(3, 1000)], 2, ROWS)
    assert [layout.owned(0, rank).local_shape for rank in range(2)] == [(2, 1000), (1, 1000)]


def test_a_whole_tensor_has_one_owner_and_others_fill_what_it_leaves() -> None:
    layout = plan([(64, 64), (32, 64), (16, 64)], 3, [WHOLE_TENSOR, PREFER_ROWS, PREFER_ROWS])
    assert layout.shard_size == 4096
    assert sorted(layout.owned(0, rank).local_shape for rank in range(3)) == [
        (0, 64),
        (0, 64),
        (64, 64),
    ]


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


def test_shapes_that_broke_others() -> None:
    layout = plan([(1, 7), (6, 3)], 2)
    assert sum(layout.owned(index, rank).numel for index in (0, 1) for rank in (0, 1)) == 25


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
    assert layout.padding <= ALIGNMENT * (4096 + 4)


def test_parameters_without_elements_lie_behind_all_others() -> None:
    """Between two others they would split a gap, or look like the end of one inside another parameter."""
    layout = plan([(0,), (5, 3), (0, 7), (12,)], 2)
    assert all(
        slot.start >= max(layout.slots[1].stop, layout.slots[3].stop)
        for slot in (layout.slots[0], layout.slots[2])
    )
    assert plan([(0,), (3, 0)], 4).numel == 4 * ALIGNMENT
    assert plan([], 4).slots == ()


def test_the_layout_does_not_depend_on_the_hash_seed() -> None:
    program = (
        "import random, layout\n"
        "draw = random.Random(9)\n"
        "for _ in range(100):\n"
        "    shapes = [(draw.randint(1, 99), draw.randint(1, 99)) for _ in range(9)]\n"
        "    print(layout.plan(shapes, draw.randint(1, 99)))\n"
    )
    folder = Path(layout_module.__file__).parent
    printed = [
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=folder,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1] and printed[0].count(b"Layout") == 100


def test_equal_layers_are_planned_once() -> None:
    assert plan([[8, 8], torch.Size((3,))], 2) is plan(
        ((8, 8), (3,)), 2, [PREFER_ROWS, PREFER_ROWS]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([(2, 2)], 0), "world size of at least 1 but got 0"),
        (([(2, 2)], 2, [ROWS, ROWS]), "each of 1 parameters but got 2"),
        (([(2, 2), (3, -1)], 2), r"dims of at least 0 but got \[\(3, -1\)\]"),
    ],
    ids=["world_size", "granularities", "dims"],
)
def test_bad_arguments_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(*arguments)


def test_a_granularity_that_means_nothing_is_refused() -> None:
    for unit, count in (("rows", 0), ("columns", 1)):
        with pytest.raises(ValueError, match="expects elements, rows or tensor"):
            Granularity(unit, count)
