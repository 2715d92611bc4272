# SPDX-License-Identifier: Apache-2.0
"""Settings check themselves, and their function does what the published keywords do."""

import dataclasses
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch import nn

from megatron.fsdp import (
    Gradients,
    Memory,
    Mesh,
    MetaInitialisation,
    Overlap,
    ShardedModule,
    Strategy,
    fully_shard,
)
from megatron.fsdp.config.settings import Settings
from megatron_fsdp import fully_shard as published_fully_shard
from megatron_fsdp.translation import KEYWORDS
from megatron_fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor
from tests.support.fsdp.meshes import mesh_of
from tests.support.fsdp.models import WIDTH, ResidualBlock, build_stack
from tests.support.fsdp.reference import batch, loss_of, on_ranks
from tests.support.fsdp.wrong_calls import message_of

WRONG: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "everything of a strategy": (
        Strategy,
        {"level": 7, "outer": "optim_grads", "boundaries": "columns", "one_unit": "no"},
        (
            "Strategy.level expects one of no_shard/0",
            "Strategy.outer expects no_shard/0 or optim/1 but got 'optim_grads'",
            "Strategy.boundaries expects 'prefer_rows', 'rows', 'prefer_tensors' or the number",
            "Strategy.one_unit expects True or False but got 'no'",
        ),
    ),
    "a block without elements": (Strategy, {"boundaries": 0}, ("of a block but got 0",)),
    "outer sharding at level 2": (
        Strategy,
        {"level": "optim_grads", "outer": "optim"},
        ("Strategy.outer='optim' needs Strategy.level", "'optim_grads'"),
    ),
    "a sum that is averaged": (
        Gradients,
        {"sum_only": True, "average_in_collective": True},
        ("Gradients.sum_only", "Gradients.average_in_collective"),
    ),
    "bytes": (Overlap, {"prefetch_bytes": 0}, ("Overlap.prefetch_bytes expects", "got 0")),
    "units": (Overlap, {"prefetch_units": "2"}, ("Overlap.prefetch_units expects", "got '2'")),
    "fewer than no units": (Overlap, {"prefetch_units": -1}, ("Overlap.prefetch_units", "got -1")),
    "device": (Memory, {"device": "abacus"}, ("Memory.device expects", "'abacus'")),
    "registration": (
        Memory,
        {"registers_manually": True},
        ("Memory.registers_manually needs Memory.registers",),
    ),
    "function": (MetaInitialisation, {"function": 3}, ("MetaInitialisation.function expects",)),
    "mesh": (Mesh, {"device_mesh": "cpu"}, ("Mesh.device_mesh expects a torch DeviceMesh",)),
}


def test_a_setting_refuses_wrong_values_by_their_names() -> None:
    for setting, values, parts in WRONG.values():
        message = message_of(ValueError, partial(setting, **values))
        assert all(part in message for part in parts), message


def test_settings_are_frozen_and_every_field_has_one_keyword() -> None:
    for setting, keywords in KEYWORDS.items():
        assert setting.__dataclass_params__.frozen
        names = {field.name for field in dataclasses.fields(setting)}
        assert set(keywords) <= names
        # Prefetching by a number of units is not published, the divisor is an argument of the
        # second generation, and the others are settings themselves.
        if setting.__name__ != "Settings":
            assert names - set(keywords) <= {"prefetch_units", "divisor"}
    keywords = list(chain.from_iterable(names.values() for names in KEYWORDS.values()))
    assert len(set(keywords)) == len(keywords)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[torch.Tensor]:
    for step in range(2):
        loss_of(model(batch(step, rank, 0))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [uneven_dtensor_to_full_tensor(parameter) for parameter in model.parameters()]


@on_ranks(2)
def test_both_doors_lead_to_the_same_weights() -> None:
    device_mesh = mesh_of("dp")
    first, second = build_stack(), build_stack()
    model, optimizer = fully_shard(
        first,
        torch.optim.AdamW(first.parameters(), lr=0.1),
        mesh=Mesh(device_mesh=device_mesh),
        units=[ResidualBlock],
        strategy=Strategy(level="optim_grads"),
        gradients=Gradients(sync_each_microbatch=False),
        memory=Memory(uses_slots=True),
    )
    assert type(model) is ShardedModule and model.strategy == 2
    published, published_optimizer = published_fully_shard(
        second,
        torch.optim.AdamW(second.parameters(), lr=0.1),
        device_mesh,
        fsdp_unit_modules=[ResidualBlock],
        zero_dp_strategy=2,
        sync_model_each_microbatch=False,
        fsdp_double_buffer=True,
    )
    rank = device_mesh.get_local_rank()
    pairs = zip(
        train(model, optimizer, rank), train(published, published_optimizer, rank), strict=True
    )
    assert all(torch.equal(one, two) for one, two in pairs)


@on_ranks(2)
def test_the_door_needs_a_module_alone_and_lists_all_problems() -> None:
    model = fully_shard(nn.Linear(WIDTH, 3))
    model(torch.ones(2, WIDTH)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    message = message_of(
        ValueError, fully_shard, nn.ReLU(), units=[int], strategy=Strategy(outer="optim")
    )
    for part in ("no parameters", "Settings.units", "Strategy.outer='optim' needs Mesh.outer"):
        assert part in message


@on_ranks(1)
def test_a_device_without_a_number_is_the_one_of_the_rank() -> None:
    """Let this rank's GPU be the second one."""
    mesh = Mesh(device_mesh=mesh_of("dp"))
    with mock.patch.object(Mesh, "device", torch.device("cuda", 1)):
        given = [Memory(device=name) for name in (None, "cuda", "cuda:0", "cpu")]
        devices = [str(Settings(mesh=mesh, memory=memory).device) for memory in given]
    assert devices == ["cuda:1", "cuda:1", "cuda:0", "cpu"]
