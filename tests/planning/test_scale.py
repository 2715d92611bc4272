# SPDX-License-Identifier: Apache-2.0
"""Rows of the page on scale have the properties that strategies are known for."""

from dataclasses import replace

import pytest

from benchmarks.scaling.confirmed import MEASURED_RUNS, planned_teraflops
from benchmarks.scaling.failures import LLAMA, failure_cost, goodput
from benchmarks.scaling.models import MODELS, active_parameters, num_parameters
from benchmarks.scaling.pictures import MARKERS
from benchmarks.scaling.strategies import (
    FSDP_ALONE,
    FSDP_CONTEXT,
    FSDP_EXPERT,
    HYBRID,
    ScaleRow,
    best_row,
    layouts,
    row_of,
    strategies_of,
    with_rings,
)
from benchmarks.scaling.tables import cell_of, place_of_stop
from megatron.planning.costs.layer_memory import FULL
from megatron.planning.machine import MACHINES

H100 = MACHINES["h100"]
LLAMA_70B, _, DEEPSEEK, OF_2T = MODELS


def plain_and_hybrid(num_gpus: int, inner: int, has_rings: bool) -> tuple[ScaleRow, ScaleRow]:
    """Return rows of Llama 3 70B that differ in the copies of the shards alone."""
    machine = with_rings(H100) if has_rings else H100
    best = best_row(LLAMA_70B, FSDP_ALONE, num_gpus, machine)
    assert best is not None
    meshes = (best.mesh, replace(best.mesh, copies=num_gpus // inner))
    plain, hybrid = (row_of(LLAMA_70B, "", mesh, machine, FULL) for mesh in meshes)
    return plain, hybrid


@pytest.mark.parametrize("num_gpus", [256, 1024, 16384])
def test_hybrid_needs_more_memory_and_waits_less_in_rings(num_gpus: int) -> None:
    plain, hybrid = plain_and_hybrid(num_gpus, 128, has_rings=True)
    assert hybrid.gib > plain.gib
    assert hybrid.exposed < plain.exposed
    assert hybrid.step.seconds < plain.step.seconds


def test_hybrid_wins_nothing_with_trees() -> None:
    plain, hybrid = plain_and_hybrid(1024, 64, has_rings=False)
    assert hybrid.step.seconds == pytest.approx(plain.step.seconds, rel=0.01)


def test_rings_are_slower_the_more_ranks_there_are() -> None:
    rings = with_rings(H100)
    for name in ("all_gather", "reduce_scatter"):
        added = []
        for ranks in (range(64), range(1024)):
            of_tree = H100.collective_seconds(name, 1e9, ranks)
            added.append(rings.collective_seconds(name, 1e9, ranks) - of_tree)
        assert 0 < added[0] < added[1]
    of_trees = H100.collective_seconds("all_reduce", 1e9, range(64))
    assert rings.collective_seconds("all_reduce", 1e9, range(64)) == of_trees


def test_hybrid_has_no_row_where_one_copy_fills_all_gpus() -> None:
    assert best_row(LLAMA_70B, HYBRID, 64, H100) is None


def test_a_batch_with_fewer_sequences_than_ranks_stops_a_strategy() -> None:
    row = best_row(LLAMA_70B, FSDP_ALONE, 4096, H100)
    assert row is not None
    assert row.stops == ["batch"]
    assert row.mesh.global_batch == 4096
    assert "\\*" in cell_of(row)


def test_context_parallelism_needs_fewer_sequences_and_long_ones() -> None:
    row = best_row(LLAMA_70B, FSDP_CONTEXT, 4096, H100)
    assert row is not None and row.mesh.context == 2
    assert "batch" not in row.stops and row.mesh.data == 2048
    assert cell_of(row).endswith(", CP 2")
    for strategy in strategies_of(DEEPSEEK.sizes):  # its sequences have 4,096 tokens
        assert {mesh.context for mesh in layouts(DEEPSEEK, strategy, 1024)} == {1}


def test_pictures_have_a_marker_for_each_strategy() -> None:
    for model in MODELS:
        assert len(strategies_of(model.sizes)) <= len(set(MARKERS))


def test_experts_without_ranks_of_their_own_do_not_fit() -> None:
    alone = best_row(DEEPSEEK, FSDP_ALONE, 1024, H100)
    divided = best_row(DEEPSEEK, FSDP_EXPERT, 1024, H100)
    assert alone is not None and divided is not None
    assert not alone.fits and divided.fits
    assert divided.all_exposed > divided.exposed


def test_parameters_are_those_of_the_reports() -> None:
    numbers = [num_parameters(model.sizes) / 1e9 for model in MODELS]
    assert numbers == pytest.approx([70.6, 405.9, 671, 1985], rel=0.002)
    assert active_parameters(DEEPSEEK.sizes) / 1e9 == pytest.approx(37.6, rel=0.01)


def test_the_largest_published_runs_are_planned_within_a_tenth() -> None:
    for run in MEASURED_RUNS:
        assert planned_teraflops(run, 4) == pytest.approx(run.teraflops, rel=0.1)


def test_goodput_falls_with_the_number_of_gpus_and_rises_with_saves_in_the_background() -> None:
    parameters = num_parameters(OF_2T.sizes)
    small = failure_cost(parameters, 1024, H100)
    large = failure_cost(parameters, 65536, H100)
    assert 0 < large.blocking_goodput < small.blocking_goodput < 1
    assert large.blocking_goodput < large.background_goodput
    assert small.blocking_goodput < small.background_goodput
    assert LLAMA.seconds_on(16384) / 3600 == pytest.approx(2.78, rel=0.01)


def test_goodput_is_what_is_lost_in_the_mean_where_failures_are_rare() -> None:
    between, interval, save, restart = 1e6, 1e4, 100.0, 600.0
    lost = (interval / 2 + restart) / between + save / interval
    assert goodput(between, interval, save, restart) == pytest.approx(1 - lost, abs=1e-3)
    assert goodput(1.0, 1e4, 0.0, 0.0) == 0.0


def test_places_of_stops_are_ranges_or_lists() -> None:
    assert place_of_stop([4096, 16384], [64, 4096, 16384]) == "from 4,096"
    assert place_of_stop([64, 16384], [64, 4096, 16384]) == "at 64, 16,384"
