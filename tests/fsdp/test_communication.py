# SPDX-License-Identifier: Apache-2.0
"""The collectives of one step: the same on all ranks, in a fixed order, at a fixed cost.

A change of the schedule changes the two tables here, and shows in them what it gains.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import pytest

from megatron.fsdp.engine.observe import GATHER, REDUCE
from megatron.fsdp.trace.recorder import STORAGE, TraceEntry
from tests.support.fsdp.recorded_steps import record_step
from tests.support.fsdp.reference import LEVELS, Ranks
from tests.support.rank_pool import run_ranks


@dataclass(frozen=True)
class StepCost:
    """Number of gathers and reductions of a step, and the bytes of their whole operands."""

    gathers: int
    gathered_bytes: int
    reductions: int
    reduced_bytes: int


ALL_BYTES = 1600
"""Of all units on two ranks, with padding: the root, with embed and head, 256; a block 448."""

GATHERED_BYTES = ALL_BYTES + 2 * 448
"""Of level 3: every unit once, and for backward the blocks that the forward has freed."""

COSTS = {
    # level, microbatches
    (0, 1): StepCost(0, 0, 4, 1504),  # nothing is padded
    (1, 1): StepCost(4, ALL_BYTES, 4, ALL_BYTES),
    (2, 1): StepCost(4, ALL_BYTES, 4, ALL_BYTES),
    (3, 1): StepCost(6, GATHERED_BYTES, 4, ALL_BYTES),
    (0, 4): StepCost(0, 0, 4, 1504),
    (1, 4): StepCost(4, ALL_BYTES, 4, ALL_BYTES),
    (2, 4): StepCost(4, ALL_BYTES, 16, 4 * ALL_BYTES),
    (3, 4): StepCost(24, 4 * GATHERED_BYTES, 16, 4 * ALL_BYTES),
}

ORDER = {
    0: """
        backward all_reduce blocks.2 blocks.1 blocks.0 root
    """,
    1: """
        forward all_gather root blocks.0 blocks.1 blocks.2
        backward reduce_scatter blocks.2 blocks.1 blocks.0 root
    """,
    2: """
        forward all_gather root blocks.0 blocks.1 blocks.2
        backward reduce_scatter blocks.2 blocks.1 blocks.0 root
    """,
    3: """
        forward all_gather root blocks.0 blocks.1 blocks.2
        backward all_gather blocks.1
        backward reduce_scatter blocks.2
        backward all_gather blocks.0
        backward reduce_scatter blocks.1 blocks.0 root
    """,
}
"""The collectives of a step of one microbatch: phase, operation, units."""


def collectives(entries: list[TraceEntry]) -> list[TraceEntry]:
    return [entry for entry in entries if entry.is_collective]


def cost_of(entries: list[TraceEntry]) -> StepCost:
    gathers = [entry.num_bytes for entry in entries if entry.track == GATHER]
    reductions = [entry.num_bytes for entry in entries if entry.track == REDUCE]
    return StepCost(len(gathers), sum(gathers), len(reductions), sum(reductions))


def order_of(entries: list[TraceEntry]) -> list[str]:
    """Return a line for each run of collectives of one operation in one phase."""
    return [
        " ".join((phase, name, *(entry.unit for entry in run)))
        for (phase, name), run in groupby(
            collectives(entries), key=lambda entry: (entry.phase, entry.name)
        )
    ]


@cache
def recorded(level: int, microbatches: int) -> list[TraceEntry]:
    """Return a step that the tests of levels look at."""
    entries: list[TraceEntry] = run_ranks(2, record_step, level, "flat", microbatches)[0]
    return entries


@pytest.mark.parametrize("microbatches", [1, 4], ids=["one_microbatch", "four_microbatches"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_step_costs_what_the_table_says(level: int, microbatches: int) -> None:
    entries = recorded(level, microbatches)
    assert cost_of(entries) == COSTS[level, microbatches]
    assert {entry.dtype for entry in collectives(entries)} == {"float32"}
    in_step = {entry.microbatch for entry in entries if entry.phase == "backward"}
    assert in_step == set(range(microbatches))


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_issues_its_collectives_in_this_order(level: int) -> None:
    found = order_of(recorded(level, 1))
    assert found == [line.strip() for line in ORDER[level].strip().splitlines()]


@pytest.mark.always("hsdp_optim", "no_overlap")
@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ("flat", {}),
        ("outer2", {}),
        ("outer2", {"outer_dp_sharding_strategy": 1}),
        ("gather_group", {"overlap_param_gather": False, "overlap_grad_reduce": False}),
    ],
    ids=["flat", "hsdp", "hsdp_optim", "no_overlap"],
)
def test_all_ranks_of_a_group_issue_the_same_collectives(
    ranks: Ranks, mesh: str, settings: dict[str, Any]
) -> None:
    issued = defaultdict(dict)
    for rank, entries in enumerate(ranks(4, record_step, 3, mesh, 2, **settings)):
        for entry in collectives(entries):
            what = (entry.number, entry.name, entry.num_bytes, entry.dtype, entry.unit, entry.phase)
            issued[entry.ranks].setdefault(rank, []).append((*what, entry.microbatch))
    assert sorted({len(group) for group in issued}) == ([4] if mesh != "outer2" else [2])
    for group, by_rank in issued.items():
        assert sorted(by_rank) == sorted(group)
        assert all(each == by_rank[group[0]] for each in by_rank.values())


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_releases_the_storage_that_it_allocates(level: int) -> None:
    changes = defaultdict(int)
    for entry in recorded(level, 4):
        if entry.track == STORAGE:
            changes[entry.unit] += entry.num_bytes * (1 if entry.name == "allocate" else -1)
    assert set(changes) == {"root", "blocks.0", "blocks.1", "blocks.2"}
    assert not any(changes.values())
