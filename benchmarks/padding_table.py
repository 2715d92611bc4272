# SPDX-License-Identifier: Apache-2.0
"""Padding in the layouts of known models, and parameters that are cut between rows only.

    python benchmarks/padding_table.py [--expert-parallel 1] [--quantized] [--dp 8 --dp 64 ...]

Plans every unit of every model with the engine's planner, megatron.fsdp.engine.layout.plan, and
prints three markdown tables: the padding with preferred rows, the padding that whole rows always
cost (granularity="rows"), and seconds. The exit status is 1 if a unit has more than 1 % padding
with preferred rows. Shapes are
those of the models' published configurations, with one matrix for each projection of each expert.
A fused projection has the same rows, only more of them. With --quantized, units have the matrices
alone that Transformer Engine stores in FP8 or FP4: these are groups of their own, whose codes have
the layout of the values, with one byte an element, or a half.
"""

from __future__ import annotations

import platform
import sys
import time
from dataclasses import dataclass, replace
from math import prod

import click

from megatron.fsdp.engine.layout import PREFER_ROWS, ROWS, Granularity, Layout, _plan, plan

LIMIT = 0.01

Shapes = list[tuple[int, ...]]


@dataclass(frozen=True)
class PlannedUnit:
    """Parameters that are all-gathered together.

    Attributes:
        name: for the table.
        copies: how many equal units the model has.
        shapes: of the parameters; in a unit of experts those of one expert.
        experts: how many experts of one layer are in the unit; 0 in other units.
    """

    name: str
    copies: int
    shapes: Shapes
    experts: int = 0


def grouped_query_attention(hidden: int, query: int, key_value: int) -> Shapes:
    return [(query, hidden), (key_value, hidden), (key_value, hidden), (hidden, query)]


def gated_mlp(hidden: int, intermediate: int) -> Shapes:
    return [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]


def embedding_and_output(vocabulary: int, hidden: int) -> PlannedUnit:
    return PlannedUnit(
        "embedding, final norm, output", 1, [(vocabulary, hidden), (hidden,), (vocabulary, hidden)]
    )


def llama(hidden: int, intermediate: int, layers: int) -> list[PlannedUnit]:
    layer = [
        *grouped_query_attention(hidden, hidden, 1024),
        *gated_mlp(hidden, intermediate),
        (hidden,),
        (hidden,),
    ]
    return [PlannedUnit("layer", layers, layer), embedding_and_output(128256, hidden)]


def qwen2_5_7b() -> list[PlannedUnit]:
    biases = [(3584,), (512,), (512,)]
    layer = [
        *grouped_query_attention(3584, 3584, 512),
        *biases,
        *gated_mlp(3584, 18944),
        (3584,),
        (3584,),
    ]
    return [PlannedUnit("layer", 28, layer), embedding_and_output(152064, 3584)]


def qwen3_30b_a3b() -> list[PlannedUnit]:
    norms = [(128,), (128,), (2048,), (2048,)]
    dense = [*grouped_query_attention(2048, 4096, 512), (128, 2048), *norms]
    return [
        PlannedUnit("dense", 48, dense),
        PlannedUnit("experts", 48, gated_mlp(2048, 768), 128),
        embedding_and_output(151936, 2048),
    ]


def gpt_oss_120b() -> list[PlannedUnit]:
    biases = [(4096,), (512,), (512,), (2880,), (64,)]
    dense = [
        *grouped_query_attention(2880, 4096, 512),
        *biases,
        (128, 2880),
        (128,),
        (2880,),
        (2880,),
    ]
    expert = [(5760, 2880), (5760,), (2880, 2880), (2880,)]
    return [
        PlannedUnit("dense", 36, dense),
        PlannedUnit("experts", 36, expert, 128),
        embedding_and_output(201088, 2880),
    ]


def deepseek_v3() -> list[PlannedUnit]:
    latent = [
        (1536, 7168),
        (1536,),
        (24576, 1536),
        (576, 7168),
        (512,),
        (32768, 512),
        (7168, 16384),
        (7168,),
        (7168,),
    ]
    return [
        PlannedUnit("dense layer", 3, [*latent, *gated_mlp(7168, 18432)]),
        PlannedUnit("dense", 58, [*latent, (256, 7168), *gated_mlp(7168, 2048)]),
        PlannedUnit("experts", 58, gated_mlp(7168, 2048), 256),
        embedding_and_output(129280, 7168),
    ]


def mixtral_8x22b() -> list[PlannedUnit]:
    dense = [*grouped_query_attention(6144, 6144, 1024), (8, 6144), (6144,), (6144,)]
    return [
        PlannedUnit("dense", 56, dense),
        PlannedUnit("experts", 56, gated_mlp(6144, 16384), 8),
        embedding_and_output(32000, 6144),
    ]


MODELS = {
    "Llama-3-8B": llama(4096, 14336, 32),
    "Llama-3-70B": llama(8192, 28672, 80),
    "Qwen2.5-7B": qwen2_5_7b(),
    "Qwen3-30B-A3B": qwen3_30b_a3b(),
    "GPT-OSS-120B": gpt_oss_120b(),
    "DeepSeek-V3": deepseek_v3(),
    "Mixtral-8x22B": mixtral_8x22b(),
}


def shapes_on_one_rank(unit: PlannedUnit, expert_parallel: int) -> Shapes:
    """Return the parameters that a rank shards with its group: all, or those of its experts."""
    if not unit.experts:
        return unit.shapes
    if unit.experts % expert_parallel:
        raise click.BadParameter(
            f"{unit.experts} experts do not divide by {expert_parallel}",
            param_hint="--expert-parallel",
        )
    return unit.shapes * (unit.experts // expert_parallel)


def quantized(units: list[PlannedUnit]) -> list[PlannedUnit]:
    """Return units with the matrices alone that may be quantized: no embedding and no router."""
    layers = [unit for unit in units if not unit.name.startswith("embedding")]
    return [
        replace(
            unit, shapes=[shape for shape in unit.shapes if len(shape) == 2 and min(shape) > 256]
        )
        for unit in layers
    ]


def padding(layout: Layout) -> float:
    """Return the padding as a share of the elements."""
    return layout.numel / sum(position.numel for position in layout.positions) - 1


def seconds_to_plan(units: list[PlannedUnit], world_size: int, expert_parallel: int) -> float:
    """Time the planning of every layer of a model, beginning with an empty cache."""
    _plan.cache_clear()
    begin = time.perf_counter()
    for unit in units:
        for _ in range(unit.copies):
            plan(shapes_on_one_rank(unit, expert_parallel), world_size)
    return time.perf_counter() - begin


def unit_row(
    name: str,
    unit: PlannedUnit,
    world_sizes: list[int],
    expert_parallel: int,
    granularity: Granularity = PREFER_ROWS,
) -> tuple[str, float]:
    """Return the markdown row of a unit, and its largest padding."""
    shapes = shapes_on_one_rank(unit, expert_parallel)
    layouts = [plan(shapes, world_size, granularity) for world_size in world_sizes]
    cells = [
        f"{padding(layout):.3%}, {sum(position.by_rows for position in layout.positions)}"
        for layout in layouts
    ]
    elements = sum(prod(shape) for shape in shapes) / 1e6
    row = f"| {name} | {unit.name} | {elements:,.1f} | {len(shapes)} | {' | '.join(cells)} |"
    return row, max(map(padding, layouts))


def time_row(
    name: str, units: list[PlannedUnit], world_sizes: list[int], expert_parallel: int
) -> str:
    cells = [
        f"{seconds_to_plan(units, world_size, expert_parallel):.3f}" for world_size in world_sizes
    ]
    return f"| {name} | {sum(unit.copies for unit in units)} | {' | '.join(cells)} |"


def print_padding(
    models: dict[str, list[PlannedUnit]],
    world_sizes: list[int],
    expert_parallel: int,
    granularity: Granularity,
) -> float:
    """Print the table of padding, and return the largest."""
    print_head(["model", "unit", "M elements", "parameters"], world_sizes)
    worst = 0.0
    for name, units in models.items():
        for unit in units:
            row, largest = unit_row(name, unit, world_sizes, expert_parallel, granularity)
            print(row)
            worst = max(worst, largest)
    print(f"\nThe largest padding is {worst:.3%}.\n")
    return worst


def print_head(columns: list[str], world_sizes: list[int]) -> None:
    columns = columns + [f"DP {world_size}" for world_size in world_sizes]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")


@click.command()
@click.option(
    "--expert-parallel",
    default=1,
    show_default=True,
    help="a rank has one of this many shares of the experts",
)
@click.option(
    "--dp",
    "world_sizes",
    multiple=True,
    type=int,
    default=(8, 64, 256, 1024, 4096),
    show_default=True,
)
@click.option("--quantized", "is_quantized", is_flag=True, help="plan quantized matrices alone")
def main(expert_parallel: int, world_sizes: tuple[int, ...], is_quantized: bool) -> None:
    """Print the tables."""
    sizes = list(world_sizes)
    models = MODELS
    if is_quantized:
        models = {name: quantized(units) for name, units in MODELS.items()}
    print(
        "Padding, and parameters that are cut between rows only, of each unit (expert parallel"
        f" {expert_parallel}):\n"
    )
    worst = print_padding(models, sizes, expert_parallel, PREFER_ROWS)
    print('The same with granularity="rows", which never cuts inside a row:\n')
    print_padding(models, sizes, expert_parallel, ROWS)
    print(
        f"Seconds to plan all units of all layers ({platform.machine()}, one core, Python"
        f" {platform.python_version()}):\n"
    )
    print_head(["model", "units"], sizes)
    for name, units in models.items():
        print(time_row(name, units, sizes, expert_parallel))
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
