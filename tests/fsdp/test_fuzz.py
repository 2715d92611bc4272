# SPDX-License-Identifier: Apache-2.0
"""Random combinations keep the gradient contract.

`python -m benchmarks.soak.fuzz` runs any number. A draw that fails becomes a test elsewhere.
"""

from itertools import chain
from random import Random

import pytest

from benchmarks.soak.fuzz import draw_case, run_draws
from tests.support.fsdp.reference import Ranks


@pytest.mark.always("1-4")
@pytest.mark.parametrize("world_size, draws", [(1, 4), (3, 6), (4, 8)])
def test_random_combinations_match_the_unsharded_model(
    ranks: Ranks, world_size: int, draws: int
) -> None:
    ranks(world_size, run_draws, 0, 0, draws, world_size, timeout=300)


def test_draws_reach_every_choice() -> None:
    """The generator's choices: a draw that can no longer happen would test nothing."""
    cases = [draw_case(Random(number), 4) for number in range(600)]
    assert {case.mesh for case in cases} == {
        *("flat", "default", "gather_group"),
        *("outer1", "outer2", "outer4", "cp1", "cp2", "cp4"),
        *("ep2", "ep4"),
    }
    assert {case.settings["zero_dp_strategy"] for case in cases} == {0, 1, 2, 3}
    assert {case.settings.get("outer_dp_sharding_strategy", 0) for case in cases} == {0, 1}
    assert {case.sync for case in cases} == {"auto", "no_sync", "manual", "step"}
    assert len({case.dtype for case in cases}) == 3
    drawn = [case.model for case in cases if not isinstance(case.model, str)]
    layers = list(chain.from_iterable(model.layers for model in drawn))
    for name in ("bias", "norm", "scale", "recompute", "unused", "frozen", "num_experts"):
        assert len({bool(getattr(layer, name)) for layer in layers}) == 2, name
