# SPDX-License-Identifier: Apache-2.0
"""Random combinations of everything keep the gradient contract; `python -m tests.fsdp.fuzz` runs as many as wanted."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from tests.fsdp.fuzz import WORLD_SIZES, draw_case, run_draws

DRAWS = 12
"""For each world size, to keep the way in alive; what a draw has found is a named test elsewhere."""


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_random_combinations_match_the_unsharded_model(
    ranks: Callable[..., list[Any]], world_size: int
) -> None:
    ranks(world_size, run_draws, 0, 0, DRAWS, world_size)


def test_draws_reach_everything() -> None:
    """The generator's choices: a draw that can no longer happen would test nothing."""
    cases = [draw_case(Random(number), 4) for number in range(600)]
    assert {case.mesh for case in cases} == {"flat", "default", "gather_group"} | {
        f"{kind}{size}" for kind in ("outer", "cp") for size in (1, 2, 4)
    } | {"ep2", "ep4"}
    assert {case.settings["zero_dp_strategy"] for case in cases} == {0, 1, 2, 3}
    assert {case.settings.get("outer_dp_sharding_strategy", 0) for case in cases} == {0, 1}
    assert {case.sync for case in cases} == {"auto", "no_sync", "manual", "step"}
    assert len({case.dtype for case in cases}) == 3
    layers = [
        layer for case in cases if not isinstance(case.model, str) for layer in case.model.layers
    ]
    for name in ("bias", "norm", "scale", "recompute", "unused", "frozen", "num_experts"):
        assert len({bool(getattr(layer, name)) for layer in layers}) == 2, name
