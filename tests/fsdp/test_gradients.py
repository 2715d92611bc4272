# SPDX-License-Identifier: Apache-2.0
"""Gradients, weights and outputs are those of the unsharded model, in any combination."""

from dataclasses import replace
from itertools import cycle
from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.dtensor.tensor_part import full_tensor
from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model
from tests.support.fsdp import models
from tests.support.fsdp.meshes import shard_mesh
from tests.support.fsdp.models import MODELS, ResidualBlock
from tests.support.fsdp.random_models import Drawn, DrawnLayer
from tests.support.fsdp.reference import LEVELS, Case, Ranks, batch, compare_all, loss_of, on_ranks

EVERYWHERE = ("several_units", "nested_units")
BESIDE_LEVEL_3 = dict(zip(MODELS, cycle((0, 1, 2))))
"""The other level of each model, but for those that train everywhere."""


def at_levels(case: Case, levels: tuple[int, ...] = LEVELS) -> list[Case]:
    return [
        replace(case, settings={"zero_dp_strategy": level, **case.settings}) for level in levels
    ]


IN_ONE_CALL = 4
"""Models, of which one call of the ranks shares the meshes."""


@pytest.mark.parametrize("first", range(0, len(MODELS), IN_ONE_CALL))
def test_training_matches_the_unsharded_model(ranks: Ranks, first: int) -> None:
    cases = []
    for model in list(MODELS)[first : first + IN_ONE_CALL]:
        levels = LEVELS if model in EVERYWHERE else (3, BESIDE_LEVEL_3[model])
        cases += at_levels(Case(model=model), levels)
    ranks(2, compare_all, cases)


OTHER_WORLDS: dict[int, dict[int, tuple[str, ...]]] = {
    1: {
        0: ("scalars", "several_units"),
        1: ("nested_units", "tied_across_units"),
        2: ("frozen_in_part", "unit_unused_in_some_steps"),
        3: ("several_units", "checkpoint_reentrant", "view_edited_in_place"),
    },
    3: {
        0: ("tied_weight_as_argument", "unused_parameters"),
        1: ("nested_units", "everything_is_a_unit"),
        2: ("checkpoint_inside_reentrant", "scalars"),
        3: ("several_units", "called_under_no_grad", "parallel_branches"),
    },
    4: {
        1: ("view_edited_in_place", "several_units"),
        3: ("nested_units", "scalars", "leaf_input"),
    },
}
"""By number of ranks and level: models, which one call trains."""


@pytest.mark.always("1", "4")
@pytest.mark.parametrize("world_size", OTHER_WORLDS)
def test_training_on_other_numbers_of_ranks_matches(ranks: Ranks, world_size: int) -> None:
    cases = []
    for level, names in OTHER_WORLDS[world_size].items():
        for name in names:
            cases += at_levels(Case(model=name), (level,))
    ranks(world_size, compare_all, cases)


SETTINGS: dict[str, Case] = {
    "no_sync": Case(model="unused_parameters", microbatches=3, sync="no_sync"),
    "finish_grad_sync": Case(model="unit_unused_in_some_steps", microbatches=2, sync="manual"),
    "reduced_by_the_step": Case(model="frozen_in_part", microbatches=2, sync="step"),
    "without_overlap": Case(
        model="nested_units",
        microbatches=2,
        settings={"overlap_grad_reduce": False, "overlap_param_gather": False},
    ),
    "gather_overlap_only": Case(
        model="frozen_in_part",
        sync="no_sync",
        microbatches=2,
        settings={"overlap_grad_reduce": False},
    ),
    "reduce_overlap_only": Case(
        model="parallel_branches", settings={"overlap_param_gather": False}
    ),
    "per_token_loss": Case(
        model="tied_across_units", microbatches=2, settings={"calculate_per_token_loss": True}
    ),
    "average_in_collective": Case(
        model="scalars", microbatches=2, settings={"average_in_collective": True}
    ),
    "disable_bucketing": Case(
        model="unit_called_twice", microbatches=2, settings={"disable_bucketing": True}
    ),
    "two_forwards_before_backward": Case(
        model="tied_weight_as_argument", forwards=2, microbatches=2
    ),
    "two_checkpointed_forwards": Case(
        model="checkpoint_reentrant", forwards=2, sync="no_sync", microbatches=2
    ),
    "without_evaluation": Case(model="unit_unused_in_some_steps", evaluate=False, steps=4),
    "explicit_dtypes": Case(
        model="several_units",
        settings={
            "mixed_precision_policy": MixedPrecisionPolicy(None, torch.float64, torch.float64)
        },
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_do_not_change_the_numbers(ranks: Ranks, settings: str) -> None:
    levels = (3, list(SETTINGS).index(settings) % 3)
    ranks(2, compare_all, at_levels(SETTINGS[settings], levels))


def test_settings_of_divisors_count_on_one_rank_too(ranks: Ranks) -> None:
    cases = [*at_levels(SETTINGS["finish_grad_sync"], (1, 3))]
    cases += at_levels(SETTINGS["average_in_collective"], (0, 2))
    cases += at_levels(SETTINGS["per_token_loss"], (0, 3))
    ranks(1, compare_all, cases)


WITHOUT_OVERLAP = {"overlap_grad_reduce": False, "overlap_param_gather": False}


def gradients_of(model: str | Drawn, **options: Any) -> Case:
    """Return a case of one step: its gradients are what matters."""
    return Case(model=model, steps=1, evaluate=False, **options)


def with_settings(case: Case, *settings: dict[str, Any]) -> list[Case]:
    return [replace(case, settings={**case.settings, **each}) for each in settings]


def test_hybrid_sharding_with_sharded_optimizer_state_gives_the_mean(ranks: Ranks) -> None:
    case = gradients_of(
        "several_units",
        mesh="outer2",
        clip=2.0,
        optimizer="sgd",
        settings={"outer_dp_sharding_strategy": 1},
    )
    ranks(
        4,
        compare_all,
        with_settings(
            case, {}, {"average_in_collective": True}, {"calculate_per_token_loss": True}
        ),
    )


def test_hybrid_sharding_at_level_1_without_overlap_reduces_over_the_outer_axis(
    ranks: Ranks,
) -> None:
    case = gradients_of(
        "several_units",
        mesh="outer2",
        microbatches=2,
        settings={"zero_dp_strategy": 1, **WITHOUT_OVERLAP},
    )
    ranks(4, compare_all, [replace(case, sync=sync) for sync in ("auto", "no_sync", "step")])


def test_a_shard_axis_of_one_rank_does_not_double_gradients_at_every_microbatch(
    ranks: Ranks,
) -> None:
    case = gradients_of("several_units", microbatches=3)
    by_hand = replace(case, sync="manual", settings=WITHOUT_OVERLAP)
    ranks(1, compare_all, [*at_levels(case), *at_levels(by_hand, (1, 2))])
    cases = [*at_levels(case, (1, 3)), *at_levels(by_hand, (0, 2))]
    ranks(2, compare_all, [replace(each, mesh="outer2") for each in cases])


def test_only_the_new_contribution_is_divided_at_each_microbatch(ranks: Ranks) -> None:
    case = gradients_of("several_units", microbatches=3)
    cases = [*at_levels(case), *at_levels(replace(case, sync="manual"), (1, 2))]
    ranks(2, compare_all, cases)


@pytest.mark.exhaustive
def test_hybrid_sharding_keeps_the_gradients_of_every_microbatch(ranks: Ranks) -> None:
    case = gradients_of("several_units", mesh="outer2", microbatches=3)
    settings = [{"zero_dp_strategy": 1}, {"zero_dp_strategy": 2}, {"outer_dp_sharding_strategy": 1}]
    cases = []
    for sync in ("auto", "no_sync", "manual"):
        cases += with_settings(replace(case, sync=sync), *settings)
    ranks(4, compare_all, cases)


def test_a_reduction_that_is_still_under_way_goes_on_over_the_outer_axis(ranks: Ranks) -> None:
    case = gradients_of("several_units", mesh="outer2")
    ranks(2, compare_all, [replace(case, sync=sync) for sync in ("manual", "step")])


def test_averaging_in_the_collective_remembers_the_expert_factor(ranks: Ranks) -> None:
    model = Drawn(layers=(DrawnLayer(hidden=7, num_experts=4), DrawnLayer(hidden=3)))
    case = gradients_of(
        model, mesh="ep2", microbatches=2, clip=2.0, settings={"average_in_collective": True}
    )
    ranks(4, compare_all, with_settings(case, {"zero_dp_strategy": 1}, {"zero_dp_strategy": 3}))


def test_level_1_with_frozen_parameters_and_without_overlap_trains(ranks: Ranks) -> None:
    case = Case(
        model="frozen_in_part", microbatches=2, settings={"zero_dp_strategy": 1, **WITHOUT_OVERLAP}
    )
    ranks(
        2,
        compare_all,
        [
            case,
            replace(case, sync="manual"),
            replace(case, model="frozen_at_the_bottom", sync="no_sync"),
        ],
    )


def gradients_of_nothing(level: int) -> list[int]:
    """Return how many elements this rank has of each gradient, all of which exist."""
    model = fully_shard_model(models.build("scalars"), shard_mesh(), zero_dp_strategy=level)
    loss_of(model(batch(0, dist.get_rank(), 0))).backward()
    return [parameter.grad.to_local().numel() for parameter in model.parameters()]


@pytest.mark.exhaustive
def test_ranks_that_own_nothing_of_a_parameter_take_part_in_its_norm(ranks: Ranks) -> None:
    for level in (1, 3):
        sizes = ranks(4, gradients_of_nothing, level)
        assert any(0 in each for each in sizes)
        assert len({len(each) for each in sizes}) == 1
    cases = [
        gradients_of("scalars", clip=order, settings={"zero_dp_strategy": level})
        for order, level in ((2.0, 1), (inf, 3))
    ]
    ranks(4, compare_all, cases)


def attributes_of_the_output_layer() -> None:
    module = models.build("tied_across_units")
    module.blocks[0].up.weight.shared = True
    model = fully_shard_model(module, shard_mesh(), fsdp_unit_modules=[ResidualBlock])
    assert [
        name for name, parameter in model.named_parameters() if hasattr(parameter, "shared")
    ] == ["module.blocks.0.up.weight"]


def test_a_tied_weight_counts_once_in_the_norm_and_marks_of_copies_reach_the_optimizer(
    ranks: Ranks,
) -> None:
    """Megatron-Core's attribute `shared` marks copies on other stages; the adapter counts one."""
    ranks(2, attributes_of_the_output_layer)
    case = Case(model="tied_across_units", clip=2.0)
    ranks(
        2,
        compare_all,
        [
            *with_settings(case, {"zero_dp_strategy": 0}, {}),
            replace(case, model="tied_weight_as_argument", clip=1.0),
        ],
    )


def test_layers_may_be_tied_with_one_another_and_with_the_embedding(ranks: Ranks) -> None:
    drawn = Drawn(
        layers=(DrawnLayer(hidden=3, scale="scalar"), DrawnLayer(hidden=3)),
        tied_layers=(0, 1),
        head="tied",
    )
    ranks(2, compare_all, [Case(model=drawn, clip=2.0)])


def test_a_block_called_plainly_and_then_recomputed_keeps_its_weights_to_the_end(
    ranks: Ranks,
) -> None:
    """The recomputed call brings all gradients before the plain call's backward runs."""
    first = DrawnLayer(3, norm=True, recompute="reentrant", calls=2, frozen=("up", "down"))
    drawn = Drawn((first, DrawnLayer(2)), frozen_embedding=True)
    settings = {"disable_bucketing": True, "overlap_grad_reduce": False}
    ranks(2, compare_all, at_levels(Case(model=drawn, settings=settings), (2, 3)))


@on_ranks(2)
def test_sparse_gradients_become_dense() -> None:
    torch.manual_seed(0)
    module = nn.Embedding(16, 4, sparse=True)
    reference = nn.Embedding.from_pretrained(module.weight.detach().clone(), freeze=False)
    model = fully_shard_model(module, preserve_fp32_weights=False)
    tokens = torch.tensor([1, 2, 2, 15])
    for each in (model, reference):
        each(tokens).pow(2).sum().backward()
    torch.testing.assert_close(full_tensor(next(model.parameters()).grad), reference.weight.grad)
