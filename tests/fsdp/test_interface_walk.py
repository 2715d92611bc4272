# SPDX-License-Identifier: Apache-2.0
"""A walk through the published interface.

Every argument, field, keyword and member does what its page says, which is seen from outside, or is
refused by name. A new one without an entry in the table fails.
"""

import inspect
from dataclasses import fields

import pytest
import torch

from megatron_fsdp import (
    DistributedDataParallelConfig,
    MegatronFSDP,
    fully_shard,
    fully_shard_model,
)
from tests.support.fsdp.interface import config_fields, members, mesh_arguments, model_arguments
from tests.support.fsdp.interface.members import with_optimizer
from tests.support.fsdp.interface.walk import OWNERS, WALK, wrapped
from tests.support.fsdp.meshes import mesh_of
from tests.support.fsdp.models import ResidualBlock, build_stack
from tests.support.fsdp.reference import Ranks

ENTRIES = (mesh_arguments, model_arguments, config_fields, members)
"""The modules whose functions enter themselves in the table when they are imported."""


def walk(owner: str, name: str) -> None:
    _, function = WALK[owner][name]
    function(wrapped if owner == "MegatronFSDP" else fully_shard_model)


STEPS: list[tuple[str, str]] = []
for _owner, _names in WALK.items():
    STEPS += [(_owner, name) for name in _names]


def _shared(owner: str, name: str) -> bool:
    """Return True if an earlier step runs the same function the same way."""
    _, function = WALK[owner][name]
    makes_wrapped = owner == "MegatronFSDP"
    earlier = STEPS[: STEPS.index((owner, name))]
    return any(
        WALK[one][two][1] is function and (one == "MegatronFSDP") == makes_wrapped
        for one, two in earlier
    )


RUNS = [step for step in STEPS if not _shared(*step)]


@pytest.mark.parametrize(("owner", "name"), RUNS, ids=[".".join(step) for step in RUNS])
def test_every_entry_has_its_documented_effect(ranks: Ranks, owner: str, name: str) -> None:
    world_size, _ = WALK[owner][name]
    ranks(world_size, walk, owner, name)


def names_of(owner: str) -> set[str]:
    if owner == "DistributedDataParallelConfig":
        return {field.name for field in fields(DistributedDataParallelConfig)}
    return set(inspect.signature(OWNERS[owner]).parameters)


@pytest.mark.parametrize("owner", [owner for owner, value in OWNERS.items() if value is not None])
def test_the_walk_leaves_no_argument_out(owner: str) -> None:
    assert set(WALK[owner]) == names_of(owner)


def test_the_walk_leaves_no_member_out() -> None:
    own: set[str] = set()
    for owner in MegatronFSDP.__mro__:
        if owner.__module__.startswith(("megatron.fsdp", "megatron_fsdp")):
            own |= {name for name in vars(owner) if not name.startswith("_")}
    assert set(WALK["members"]) == own | {"module", "ddp_config"}


def keywords_of_a_sharded_optimizer() -> dict[str, list[str]]:
    _, optimizer = with_optimizer()
    return {
        name: list(inspect.signature(getattr(optimizer, name)).parameters)
        for name in ("step", "zero_grad")
    }


def test_the_walk_leaves_no_keyword_of_the_optimizer_out(ranks: Ranks) -> None:
    (keywords,) = ranks(1, keywords_of_a_sharded_optimizer)
    assert {name: set(WALK[name]) for name in keywords} == {
        name: set(each) for name, each in keywords.items()
    }


def by_position() -> None:
    mesh = mesh_of("dp", "other", sizes=(2, 1))
    module = build_stack()
    model, optimizer = fully_shard(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        mesh,
        "dp",
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        [ResidualBlock],
        "optim",
    )
    assert (
        isinstance(model, MegatronFSDP)
        and model.strategy == 1
        and isinstance(optimizer, torch.optim.SGD)
    )


def test_fully_shard_takes_the_arguments_of_fully_shard_model_in_their_order(ranks: Ranks) -> None:
    first, second, *others = inspect.signature(fully_shard).parameters
    assert [first, *others] == list(inspect.signature(fully_shard_model).parameters)
    assert second == "optimizer"
    ranks(2, by_position)
