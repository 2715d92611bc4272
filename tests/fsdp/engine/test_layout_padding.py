# SPDX-License-Identifier: Apache-2.0
"""Padding is small, for random modules and for known models."""

from itertools import permutations
from math import lcm, prod
from random import Random

import pytest
from click.testing import CliRunner

from benchmarks.padding_table import MODELS, PlannedUnit, main, quantized, shapes_on_one_rank
from megatron.fsdp.engine.layout import PREFER_ROWS, ROWS, plan, row_size
from megatron.fsdp.engine.planner import MIN_ALIGNMENT
from tests.support.fsdp.engine.layouts import (
    ELEMENTS,
    Shape,
    bound,
    padding_of,
    plan_module,
    preferences_only,
    random_modules,
)


def test_padding_is_bounded_in_random_modules() -> None:
    for module, world_size in random_modules(seed=4, count=1000, requirement_share=0.0):
        layout = plan_module(module, world_size)
        assert layout.shard_size % MIN_ALIGNMENT == 0
        assert 0 <= padding_of(layout) <= bound(module, world_size)


def test_element_runs_cost_alignment_only() -> None:
    for module, world_size in random_modules(seed=5, count=1000, requirement_share=0.0):
        layout = plan([shape for shape, _ in module], world_size, ELEMENTS)
        assert padding_of(layout) <= max(
            (MIN_ALIGNMENT - 1) * len(module) + MIN_ALIGNMENT * (world_size - 1),
            MIN_ALIGNMENT * world_size,
        )


def test_preferences_add_no_padding_to_that_of_requirements() -> None:
    mixed = 0
    for module, world_size in random_modules(seed=6, count=500, requirement_share=0.4):
        required = [
            (shape, granularity if granularity.is_required else ELEMENTS)
            for shape, granularity in module
        ]
        layout, without_preferences = (
            plan_module(module, world_size),
            plan_module(required, world_size),
        )
        assert padding_of(layout) <= max(bound(module, world_size), padding_of(without_preferences))
        mixed += not preferences_only(module) and any(
            not granularity.is_required for _, granularity in module
        )
    assert mixed > 125


def test_required_rows_cost_no_more_than_the_usual_rule() -> None:
    """The usual rule pads to the world size times the common multiple of all row sizes."""
    random = Random(7)
    for _ in range(2000):
        world_size = random.choice([2, 3, 8, 64, 1000])
        shapes = [
            (random.randint(1, 60), random.choice([1, 3, 8, 20, 48]))
            for _ in range(random.randint(1, 5))
        ]
        rows = [lcm(row_size(shape), MIN_ALIGNMENT) for shape in shapes]
        usual = world_size * lcm(*rows)
        assert padding_of(plan(shapes, world_size, ROWS)) <= usual + sum(rows)


def best_of_all_orders(shapes: list[Shape], world_size: int, largest_shard: int) -> tuple[int, int]:
    """Try all orders and shard sizes: fewest parameters cut in a row, then the smallest shard."""
    found = [(len(shapes), largest_shard)]
    for shard in range(MIN_ALIGNMENT, largest_shard + 1, MIN_ALIGNMENT):
        found += [
            (0, shard) for order in permutations(shapes) if fits_by_rows(order, world_size, shard)
        ]
    return min(found)


def fits_by_rows(order: tuple[Shape, ...], world_size: int, shard: int) -> bool:
    cursor = 0
    for shape in order:
        starts = range(
            -(-cursor // MIN_ALIGNMENT) * MIN_ALIGNMENT,
            world_size * shard - prod(shape) + 1,
            MIN_ALIGNMENT,
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
    """The planner is greedy: the share of these modules that it misses must not grow."""
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
            reached += all(position.by_rows for position in layout.positions)
            smallest += (
                all(position.by_rows for position in layout.positions)
                and layout.shard_size == shard
            )
    assert possible > 300
    assert reached >= 0.98 * possible and smallest >= 0.97 * possible


UNITS = []
for _model, _units in MODELS.items():
    UNITS += [pytest.param(unit, id=f"{_model}-{unit.name}".replace(" ", "_")) for unit in _units]


@pytest.mark.parametrize("unit", UNITS)
def test_padding_of_known_models_is_at_most_one_percent(unit: PlannedUnit) -> None:
    for world_size in (1, 3, 8, 64, 256, 1024, 4096):
        # Quantized matrices are a group of their own.
        for stored in [unit, *quantized([unit])]:
            layout = plan(shapes_on_one_rank(stored, 1), world_size)
            assert padding_of(layout) <= 0.01 * sum(position.numel for position in layout.positions)


def test_the_padding_table_is_a_command_that_judges_its_figures() -> None:
    result = CliRunner().invoke(main, ["--dp", "64", "--expert-parallel", "8"])
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if line.startswith("| DeepSeek-V3")]
    # Of preferred rows and of rows always, and one of seconds.
    assert len(rows) == 2 * len(MODELS["DeepSeek-V3"]) + 1
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


def test_only_the_parameter_whose_rows_cost_too_much_falls_back() -> None:
    """Whole rows of 8192 and 28672 elements need shards of a multiple of 57344: 1.2 % here."""
    layer = MODELS["Llama-3-70B"][0].shapes
    assert [position.shape for position in plan(layer, 256).positions if not position.by_rows] == [
        (8192, 28672)
    ]
    assert not [position.shape for position in plan(layer, 64).positions if not position.by_rows]
