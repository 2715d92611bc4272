# SPDX-License-Identifier: Apache-2.0
"""Expert parameters with another strategy than dense ones."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.fsdp import Mesh, Strategy, trace
from megatron.fsdp import fully_shard as by_settings
from megatron.fsdp.engine.policy import ParameterKind
from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model
from tests.fsdp.test_collectives_of_axes import ExpertStack
from tests.fsdp.test_communication import order_of
from tests.support.fsdp.meshes import Meshes
from tests.support.fsdp.random_models import Drawn, DrawnLayer
from tests.support.fsdp.reference import (
    Case,
    Ranks,
    batch,
    build,
    compare_all,
    loss_of,
    on_ranks,
    optimizer_over,
)
from tests.support.fsdp.state_dicts import assert_equal, load_checkpoint, save_checkpoint, whole
from tests.support.fsdp.wrong_calls import message_of

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


def compare_pairs(pairs: dict[Sequence[int], str]) -> None:
    """Compare pairs of strategies, each on a mesh of its own."""
    cases = []
    for number, (pair, mesh) in enumerate(pairs.items()):
        case = case_of(mesh, settings=strategies(*pair))
        by_step = replace(case, sync="step", clip=None)
        cases.append(by_step if number % 2 else case)
    compare_all(cases)


FLAT: dict[Sequence[int], str] = dict.fromkeys([(3, 0), (1, 3), (0, 3), (3, 1), (2, 1)], "ep2")
HYBRID: dict[Sequence[int], str] = {
    (3, 1, 1): "hybrid1",
    (2, 3, 0, 1): "hybrid2",
    (3, 3, 1, 0): "hybrid1",
    (3, 0, 1): "hybrid2",
}
"""Levels of dense parameters and of experts, and what the outer axis does to either."""


def part(pairs: dict[Sequence[int], str], first: int, last: int) -> dict[Sequence[int], str]:
    return dict(list(pairs.items())[first:last])


@pytest.mark.always("some")
@pytest.mark.parametrize("pairs", [part(FLAT, 0, 2), part(FLAT, 2, 5)], ids=["some", "others"])
def test_experts_of_another_level_train_as_the_unsharded_model(
    ranks: Ranks, pairs: dict[Sequence[int], str]
) -> None:
    ranks(4, compare_pairs, pairs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("pairs", [part(HYBRID, 0, 2), part(HYBRID, 2, 4)], ids=["some", "others"])
def test_experts_of_another_hybrid_strategy_train_as_the_unsharded_model(
    ranks: Ranks, pairs: dict[Sequence[int], str]
) -> None:
    ranks(4, compare_pairs, pairs)


def sharded(
    mesh: str, pair: Sequence[int], **settings: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    meshes = Meshes()
    module = build(EXPERTS, meshes.expert_places(mesh))
    arguments = {**meshes.arguments(mesh), **strategies(*pair), **settings}
    optimizer = optimizer_over(module)
    return fully_shard(module, optimizer, fsdp_unit_modules=type(module).units, **arguments)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> None:
    for step in steps:
        for microbatch in range(2):
            with nullcontext() if microbatch else model.no_sync():
                loss_of(model(batch(step, dist.get_rank(), microbatch))).backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- communication

LEVELS = [(3, 1), (0, 2)]


def collectives(pair: Sequence[int], num_ranks: int) -> list[str]:
    """Return the collectives of the third step over so many ranks: four share dense parameters."""
    model, optimizer = sharded("ep2", pair)
    train(model, optimizer, range(2))
    with trace.record() as recorder:
        train(model, optimizer, [2])
    return order_of([entry for entry in recorder.entries if len(entry.ranks) == num_ranks])


def compare_collectives(dense: int, experts: int) -> None:
    assert collectives((dense, experts), 4) == collectives((dense, dense), 4)
    assert collectives((dense, experts), 2) == collectives((experts, experts), 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("pair", LEVELS, ids=str)
def test_each_kind_has_the_collectives_of_its_level(ranks: Ranks, pair: tuple[int, int]) -> None:
    ranks(4, compare_collectives, *pair)


@on_ranks(4)
def test_gathers_of_the_next_forward_are_started_by_level() -> None:
    """Start the gathers of the next forward, of which those below level 3 are then complete."""
    for pair, own, other in (((3, 1), 2, 4), ((1, 3), 4, 2)):
        model, optimizer = sharded("ep2", pair)
        train(model, optimizer, range(2))
        with trace.record() as started:
            model.start_param_sync()
        with trace.record() as later:
            train(model, optimizer, [2])
        assert {entry.name for entry in started.collectives} == {"all_gather"}
        forward = [len(each.ranks) for each in later.collectives if each.name == "all_gather"]
        assert own not in forward and other in forward


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings",
    [
        {"fsdp_double_buffer": True},
        {"overlap_param_gather": False, "overlap_grad_reduce": False},
        {"suggested_communication_unit_size": 2000, "find_unused_parameters": True},
    ],
    ids=str,
)
def test_settings_do_not_change_the_numbers(ranks: Ranks, settings: dict[str, Any]) -> None:
    cases = [
        Case(model=EXPERTS, mesh="ep2", steps=3, settings={**strategies(*pair), **settings})
        for pair in ((3, 1), (1, 3))
    ]
    ranks(4, compare_all, cases)


# ---- checkpoints


@pytest.mark.exhaustive
@pytest.mark.always("(3, 1, 1)-*")
@pytest.mark.parametrize(("saved", "loaded"), pairwise([(3, 1, 1), (2, 3, 0, 1), (0, 3)]), ids=str)
@on_ranks(4)
def test_a_checkpoint_loads_under_another_pair(
    tmp_path: Path, saved: Sequence[int], loaded: Sequence[int]
) -> None:
    model, optimizer = sharded("hybrid1", saved)
    train(model, optimizer, range(2))
    other, other_optimizer = sharded("hybrid1", loaded)
    save_checkpoint(tmp_path, model, optimizer)
    load_checkpoint(tmp_path, other, other_optimizer)
    assert_equal(whole(other.state_dict()), whole(model.state_dict()), 0.0)
    train(model, optimizer, [2])
    train(other, other_optimizer, [2])
    assert_equal(whole(other.state_dict()), whole(model.state_dict()), 1e-11)


# ---- settings


@on_ranks(2)
def test_experts_that_are_not_sharded_can_be_on_the_meta_device() -> None:
    """Initialise experts that nothing shards beside dense parameters that are sharded."""
    with torch.device("meta"):
        module = ExpertStack()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_shard", "ep"))
    model = fully_shard_model(
        module,
        Meshes().arguments("flat")["device_mesh"],
        expt_device_mesh=mesh,
        init_model_with_meta_device=True,
        expert_zero_dp_strategy=0,
    )
    is_whole: dict[bool, list[bool]] = {False: [], True: []}
    for name, parameter in model.named_parameters():
        local = parameter.to_local()
        assert local.isfinite().all()
        is_whole["experts" in name].append(local.numel() == parameter.numel())
    assert all(is_whole[True]) and not all(is_whole[False])


@on_ranks(2)
def test_a_strategy_without_experts_or_axis_is_refused() -> None:
    mesh = Meshes().arguments("flat")["device_mesh"]
    own = {"device_mesh": mesh, "inner": "dp_shard"}
    messages = []
    for strategy, places, module in (
        ({"expert_level": 1}, own, ExpertStack()),
        ({"expert_outer": 0}, {**own, "expert_mesh": mesh}, nn.Linear(2, 2)),
        ({"expert_outer": 1}, {**own, "expert_mesh": mesh}, ExpertStack()),
    ):
        settings = {"mesh": Mesh(**places), "strategy": Strategy(**strategy)}
        messages.append(message_of(ValueError, by_settings, module, None, **settings))
    without_mesh, without_experts, without_outer = messages
    assert "Strategy.expert_level" in without_mesh and "Mesh.expert_mesh" in without_mesh
    assert "Strategy.expert_outer" in without_experts and "allreduce=False" in without_experts
    assert "Strategy.expert_outer='optim' needs Mesh.outer" in without_outer


def test_strategies_of_experts_check_themselves() -> None:
    with pytest.raises(ValueError) as error:
        Strategy(level=3, outer=1, expert_level=7, expert_outer=2)
    for name in ("expert_level expects one of", "expert_outer expects no_shard/0 or optim/1"):
        assert name in str(error.value)
    with pytest.raises(ValueError, match=r"expert_outer='optim' needs Strategy\.expert_level="):
        Strategy(level=3, outer=1, expert_level=1, expert_outer=1)
    assert Strategy(level=3, outer=1, expert_level=1).of(ParameterKind.EXPERT) == (1, False)
    for kind in ParameterKind:
        assert Strategy(level=3, outer=1).of(kind) == (3, True)
