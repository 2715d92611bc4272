# SPDX-License-Identifier: Apache-2.0
"""Steps of a growing batch are those of Megatron-Core's linear growth."""

import pytest
from megatron.core import num_microbatches_calculator
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    get_current_global_batch_size,
    update_num_microbatches,
)

from megatron.mcore_adapter.releases.batch_size_schedule import (
    batch_size_at,
    init_num_microbatches,
    ramp_steps,
)

RAMPS = [((8, 8, 100), 24), ((2, 2, 10), 8), ((4, 4, 49), 4 * 50), ((2, 2, 3), 20), ((2, 6, 1), 8)]


def linear_growth(ramp: tuple[int, int, int], last: int, consumed: int) -> int:
    """Compute the rule of the releases that have it, in floating point as they do."""
    start, increment, samples = ramp
    if consumed > samples:
        return last
    return start + int(consumed / (samples / ((last - start) // increment))) * increment


def test_an_example() -> None:
    assert ramp_steps((8, 8, 100), 24) == [(0, 8), (50, 16), (100, 24)]


@pytest.mark.parametrize(("ramp", "last"), RAMPS)
def test_the_steps_are_those_of_the_linear_growth(ramp: tuple[int, int, int], last: int) -> None:
    steps = ramp_steps(ramp, last)
    assert [first for first, _ in steps] == sorted({first for first, _ in steps})
    for consumed in range(ramp[2] + 5):
        assert batch_size_at(steps, consumed) == linear_growth(ramp, last, consumed)


@pytest.mark.parametrize(("ramp", "last"), RAMPS)
def test_the_schedules_of_the_installed_release_follow(
    ramp: tuple[int, int, int], last: int
) -> None:
    destroy_num_microbatches_calculator()
    try:
        init_num_microbatches(1, list(ramp), last, 1, 2)
        for consumed in range(ramp[2] + 5):
            update_num_microbatches(consumed, consistency_check=False)
            assert get_current_global_batch_size() == linear_growth(ramp, last, consumed)
    finally:
        destroy_num_microbatches_calculator()


def test_a_release_with_schedules_of_steps_gets_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def init(
        rank: int,
        rampup_batch_size: list[int] | None = None,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        data_parallel_size: int | None = None,
        step_batch_size_schedule: str | None = None,
    ) -> None:
        calls.append((rampup_batch_size, step_batch_size_schedule))

    monkeypatch.setattr(num_microbatches_calculator, "init_num_microbatches_calculator", init)
    init_num_microbatches(0, [8, 8, 100], 24, 1, 2)
    init_num_microbatches(0, None, 24, 1, 2)
    assert calls == [(None, "0:8 50:16 100:24"), (None, None)]
