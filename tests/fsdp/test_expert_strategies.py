# SPDX-License-Identifier: Apache-2.0
"""Expert parameters with another strategy than dense ones."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.fsdp.random_models import Drawn, DrawnLayer
from tests.support.fsdp.reference import Case, Ranks, compare_all

EXPERTS = Drawn(layers=(DrawnLayer(hidden=7, num_experts=4), DrawnLayer(hidden=3)))
"""A model whose first unit has dense parameters and experts."""


def strategies(
    dense: int, experts: int | None, outer: int = 0, expert_outer: int | None = None
) -> dict[str, Any]:
    """Return the keywords of levels, and of what the outer axis does."""
    return {
        "zero_dp_strategy": dense,
        "outer_dp_sharding_strategy": outer,
        "expert_zero_dp_strategy": experts,
        "expert_outer_dp_sharding_strategy": expert_outer,
    }


def case_of(mesh: str, **more: Any) -> Case:
    return Case(model=EXPERTS, mesh=mesh, sync="no_sync", microbatches=2, clip=2.0, **more)


FLAT = {
    "3 and 0": (3, 0),
    "0 and 3": (0, 3),
    "1 and 3": (1, 3),
    "3 and 1": (3, 1),
    "2 and 1": (2, 1),
}
HYBRID = {
    "3 optim and 1": (3, 1, 1),
    "3 optim and 3 no_shard": (3, 3, 1, 0),
    "2 and 3 optim": (2, 3, 0, 1),
    "3 optim and 0": (3, 0, 1),
}


@pytest.mark.parametrize("pair", FLAT)
def test_experts_of_another_level_train_as_the_unsharded_model(ranks: Ranks, pair: str) -> None:
    case = case_of("ep2", settings=strategies(*FLAT[pair]))
    other = replace(case, sync="step", clip=None)
    ranks(4, compare_all, [case, other])


@pytest.mark.parametrize("pair", HYBRID)
def test_experts_of_another_hybrid_strategy_train_as_the_unsharded_model(
    ranks: Ranks, pair: str
) -> None:
    cases = [case_of(mesh, settings=strategies(*HYBRID[pair])) for mesh in ("hybrid1", "hybrid2")]
    ranks(4, compare_all, [*cases, replace(cases[0], clip=torch.inf)])
